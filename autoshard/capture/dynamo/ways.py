"""Ways through a forward: by which conditions on tensors Python goes, and where it is told so."""

from __future__ import annotations

import dis
import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import Any
from unittest.mock import patch

import torch
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.symbolic_convert import InstructionTranslatorBase
from torch._dynamo.variables import ConstantVariable, TensorVariable, TupleVariable
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.builder import wrap_fx_proxy
from torch._dynamo.variables.iter import IteratorVariable
from torch.fx import Node as FxNode

from ...errors import CaptureError
from ..ancestors import ancestors
from ..by_numbers.choices import choices_found, number_of_experts
from ..by_numbers.masks import RANDOM
from ..by_numbers.representative import is_of_arguments
from ..examples import example, is_unknown, name_of, numbers_of_example
from ..lines import at, lines_in
from .only_raises import without_error
from .variables import dispatch_tables, stack_here
from .what_decides import note_decided_by

# What Python asks of the numbers of a tensor, and what it is told where all of them are finite.
_FINITE = {("all", "isfinite"): True, ("any", "isinf"): False, ("any", "isnan"): False}
_JUMPS = frozenset(code for name, code in dis.opmap.items() if re.search(r"JUMP\w*_IF_(TRUE|FALSE)", name))
_GET_ITER, _FOR_ITER = dis.opmap["GET_ITER"], dis.opmap["FOR_ITER"]
_YIELDS = ("YIELD_VALUE", "YIELD_FROM", "SEND")
_LEAVING = (
    "RETURN_VALUE",
    "RETURN_CONST",
    "RAISE_VARARGS",
    "RERAISE",
    "JUMP_FORWARD",
    "JUMP_BACKWARD",
    "JUMP_BACKWARD_NO_INTERRUPT",
)

_MOST_AT_ONE = 1024
"""So many ways begin at one instruction at most, as many as there are experts."""


@contextmanager
def conditions_known() -> Iterator[None]:
    """Has Python go by conditions on numbers that stand in the forward; and as if all numbers of a tensor were finite
    where it asks that, as models do that limit them where they are not (DETR). Not in half precision, where sums do
    become infinite. Where an error is raised or not, none is. Loops over the experts that have tokens go over all of
    them.
    """
    kept = [(table, list(table)) for table in dispatch_tables(InstructionTranslatorBase)]
    ways = Ways()
    try:
        for table, before in kept:
            for code in _JUMPS:
                table[code] = partial(_jump_if_known, before[code], ways)
            table[_GET_ITER] = partial(_all_in_turn, before[_GET_ITER], ways)
            table[_FOR_ITER] = partial(_next_in_turn, before[_FOR_ITER], ways)
        with ways.followed():
            yield
    finally:
        for table, before in kept:
            table[:] = before


def _jump_if_known(jump: Any, ways: Ways, translator: Any, instruction: Any) -> None:
    condition = translator.stack[-1]
    known = _numbers_of(condition)
    if known is None:
        known = _as_if_finite(condition)
    if known is None:
        known = _as_if_no_error(condition, translator, instruction)
    if known is None and _is_by_numbers(condition) and _is_drawn(condition.as_proxy().node):
        raise CaptureError(
            f"a number that is drawn in the forward decides which way Python goes{at(lines_in(stack_here()))}, as "
            "where layers are left out at random, and a captured step goes one way. Have it leave none out (in models "
            "of transformers: config.layerdrop = 0.0), compute both and choose (torch.where(torch.rand(()) < p, x, "
            "y)), or draw outside and pass what decides to the forward as a Python value"
        )
    if known is None and (some := _as_if_some(condition)) is not None and ways.may_begin(translator, instruction):
        known = some
        is_taken = known == ("IF_TRUE" in instruction.opname)
        target, behind = translator.indexof[instruction.target], translator.instruction_pointer
        ways.begin(condition.as_proxy().node, translator, behind if is_taken else target)
    if known is not None:
        translator.stack[-1] = ConstantVariable.create(known)
    jump(translator, instruction)


def is_among(found: Any, number: int) -> None:
    """Stands in a graph of dynamo's for the condition that a number is among those that were found, over which a loop
    goes: as a node that :func:`begins` asks.
    """


def _all_in_turn(get_iter: Any, ways: Ways, translator: Any, instruction: Any) -> None:
    """Has a loop over the numbers of elements that are not zero go over all numbers that there could be."""
    found = translator.stack[-1].realize()
    count = _most(found) if isinstance(found, TensorVariable) else 0
    is_loop = translator.instructions[translator.instruction_pointer].opname == "FOR_ITER"
    if not count or not is_loop:
        get_iter(translator, instruction)
        return
    node = _found(found)
    numbers = translator.output.create_proxy("call_function", torch.arange, (count,), {"device": example(node).device})
    every = wrap_fx_proxy(translator, numbers).unpack_var_sequence(translator)
    if example(found.as_proxy().node).dim() == 2:
        every = [each.call_method(translator, "unsqueeze", [ConstantVariable.create(0)], {}) for each in every]
    translator.stack[-1] = TupleVariable(every)
    get_iter(translator, instruction)
    ways.turns.append((translator.stack[-1], node))


def _most(found: TensorVariable) -> int:
    """How many rows there could be of the numbers of experts that have tokens; 0 of anything else."""
    node = _found(found)
    given = choices_found(node) if is_unknown(example(node)) else None
    return 0 if given is None else number_of_experts(given)


def _found(variable: TensorVariable) -> FxNode:
    """What found the numbers that a tensor has as they are."""
    node: Any = variable.as_proxy().node
    while name_of(node) in ("flatten", "view", "reshape", "squeeze"):
        node = node.args[0]
    return node  # type: ignore[no-any-return]


def _next_in_turn(for_iter: Any, ways: Ways, translator: Any, instruction: Any) -> None:
    before, depth = translator.stack[-1], len(translator.stack)
    node = next((node for turns, node in ways.turns if turns is before), None)
    here = translator.instruction_pointer - 1
    for_iter(translator, instruction)
    if len(translator.stack) > depth:
        ways.note_step(translator.stack[-2])
    if node is not None and len(translator.stack) > depth and translator.stack[-2] is before:
        among = node.graph.call_function(is_among, (node, before.index - 1))
        ways.begin(among, translator, here)


def begins(condition: Any, number: int) -> None:
    """Stands in a graph of dynamo's where Python goes on as if some elements were not zero. What follows, up to
    :func:`ends` of the same number, one process leaves out where none is.
    """


def ends(number: int, is_clean: bool) -> None:
    """Stands where both ways meet; ``is_clean`` says that Python has no other values there than where they parted, but
    for tensors that were made between, and that what nothing reads any more.
    """


@dataclass(eq=False)
class _Way:
    """A way from where it begins in the graph to the instruction where the other one leads."""

    translator: Any
    end: int
    begun: FxNode
    state: Any
    tensors: dict[str, FxNode]
    is_clean: bool = True


class Ways:
    """Ways that Python goes as if a condition held, until it is where the other way leads."""

    def __init__(self) -> None:
        self.turns: list[tuple[Any, FxNode]] = []
        self._steps: dict[int, tuple[Any, int]] = {}
        self._begun: dict[tuple[Any, int], tuple[list[int] | None, int]] = {}
        self._open: list[_Way] = []
        self._count = 0
        self._live: dict[int, tuple[Any, list[frozenset[str]]]] = {}

    def note_step(self, turns: Any) -> None:
        """A loop over ``turns`` went one further."""
        self._steps[id(turns)] = turns, self._steps.get(id(turns), (turns, 0))[1] + 1

    def may_begin(self, translator: Any, instruction: Any) -> bool:
        """Whether a way may begin at an instruction: not once more without a step of a loop over something around it,
        as ``while x.any():`` would have it, which ends by numbers alone; nor ever again.
        """
        key = translator, translator.indexof[instruction]
        last, count = self._begun.get(key, (None, 0))
        now = self._steps_around(translator)
        self._begun[key] = now, count + 1
        return last != now and count < _MOST_AT_ONE

    def _steps_around(self, translator: Any) -> list[int]:
        """How far the loops are that Python is in: what they go over is on the stack."""
        stacks = (frame.stack for frame in _frames(translator))
        return [self._steps[id(value)][1] for stack in stacks for value in stack if id(value) in self._steps]

    def begin(self, condition: FxNode, translator: Any, other: int) -> None:
        """Notes in the graph that a way begins, with what Python asks on top of the stack.

        Args:
            other: the instruction at which the other way goes on.
        """
        noted = condition.graph.call_function(begins, (condition, self._count))
        noted.meta |= {"stack_trace": stack_here()}
        while (jump := translator.instructions[other]).opname.startswith("JUMP_") and "_IF_" not in jump.opname:
            other = translator.indexof[jump.target]
        state = self._state(translator, other, translator.stack[:-1])
        self._open.append(_Way(translator, other, noted, state, self._tensors(translator, other)))
        self._count += 1

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Follows dynamo step by step, to note in the graph where ways end, and what is written into on them."""
        step, mutation = InstructionTranslatorBase.step, SideEffects.mutation

        def and_note(translator: Any) -> bool:
            here = translator.instruction_pointer
            for way in [way for way in self._open if way.translator is translator and way.end == here]:
                self._open.remove(way)
                self._end(way)
            if self._open and here is not None and translator.instructions[here].opname in _YIELDS:
                self._is_unclean()
            return step(translator)

        def of_another(effects: Any, variable: Any) -> None:
            if not isinstance(variable, IteratorVariable):  # how far these are is a part of the state
                self._is_unclean()
            mutation(effects, variable)

        with (
            patch.object(InstructionTranslatorBase, "step", and_note),
            patch.object(SideEffects, "mutation", of_another),
        ):
            yield

    def _is_unclean(self) -> None:
        for way in self._open:
            way.is_clean = False

    def _end(self, way: _Way) -> None:
        translator, begun = way.translator, way.begun
        graph = translator.output.current_tracer.graph
        made = set(takewhile(partial(operator.is_not, begun), reversed(graph.nodes)))
        now = self._tensors(translator, way.end)
        changed = {name: node for name, node in now.items() if way.tensors.get(name) is not node}
        others = set(changed.values())
        looks_alike = all(_looks(node) == _looks(way.tensors.get(name)) for name, node in changed.items())
        is_same = self._state(translator, way.end, translator.stack) == way.state
        graph.call_function(ends, (begun.args[1], way.is_clean and is_same and looks_alike and others <= made))

    def _tensors(self, translator: Any, end: int) -> dict[str, FxNode]:
        """The tensors that local variables stand for which are read from an instruction on."""
        live, locals_ = self._read_from(translator, end), translator.symbolic_locals.items()
        return {k: value.proxy.node for k, value in locals_ if k in live and isinstance(value, TensorVariable)}

    def _state(self, translator: Any, end: int, stack: Sequence[Any]) -> Any:
        """What Python has besides tensors: values of local variables that are read from an instruction on, and on the
        stack; what is written into; how far iterators are.
        """
        live = self._read_from(translator, end)
        locals_ = {
            name: id(value)
            for name, value in translator.symbolic_locals.items()
            if name in live and not isinstance(value, TensorVariable)
        }
        written = {
            id(variable): {name: id(value) for name, value in attributes.items()}
            for variable, attributes in translator.output.side_effects.store_attr_mutations.items()
        }
        iterators: list[Any] = []

        def note(variable: Any) -> None:
            if isinstance(variable, IteratorVariable):
                iterators.append(_position(variable))

        seen: dict[int, Any] = {}
        for frame in _frames(translator):
            on_stack = stack if frame is translator else frame.stack
            VariableTracker.visit(note, [*frame.symbolic_locals.values(), *on_stack], seen)
        VariableTracker.visit(note, list(translator.output.side_effects.store_attr_mutations.values()), seen)
        return locals_, [id(value) for value in stack], written, iterators

    def _read_from(self, translator: Any, end: int) -> frozenset[str]:
        """The local variables that are read from an instruction on before they are written."""
        code = translator.instructions
        if id(code) not in self._live:
            self._live[id(code)] = code, read_later(code, translator.indexof)
        return self._live[id(code)][1][end]


def _frames(translator: Any) -> Iterator[Any]:
    """A function that dynamo follows, and those that called it."""
    while translator is not None:
        yield translator
        translator = getattr(translator, "parent", None)


def _looks(node: FxNode | None) -> Any:
    """What Python may ask of a tensor without its numbers; None where there is none."""
    value: Any = example(node)
    if value is None:
        return None
    sizes = [str(length) for length in (*value.shape, *value.stride())]  # a step alone may know one
    return sizes, value.dtype, value.device, value.requires_grad


def read_later(code: Sequence[Any], place: Mapping[Any, int]) -> list[frozenset[str]]:
    """For each instruction the local variables that may be read from it on before they are written. What functions
    within share may always be read. No ``with`` keeps an error from going on.

    Args:
        place: the place of each instruction.
    """
    found = [frozenset[str]()] * len(code)
    shared = frozenset(each.argval for each in code if each.opcode in dis.hasfree and isinstance(each.argval, str))
    after = [[place[to] for to in _targets(each) if not _asks_a_with(code, k)] for k, each in enumerate(code)]
    for k, each in enumerate(code[:-1]):
        if each.opname not in _LEAVING:
            after[k].append(k + 1)
    changed = True
    while changed:
        changed = False
        for k in reversed(range(len(code))):
            each = code[k]
            live = shared.union(*(found[to] for to in after[k]))
            if each.opcode in dis.haslocal:
                name = frozenset([each.argval])
                live = live - name if each.opname.startswith("STORE_") else live | name
            if live != found[k]:
                found[k], changed = live, True
    return found


def _asks_a_with(code: Sequence[Any], at: int) -> bool:
    """Whether an instruction goes by what the manager of a ``with`` says of an error: whether it goes on."""
    named = (code[k].opname for k in range(at - 1, -1, -1) if code[k].opname != "TO_BOOL")
    return next(named, None) == "WITH_EXCEPT_START"


def _targets(instruction: Any) -> Iterator[Any]:
    """Where Python may go on after an instruction, besides the next one."""
    if instruction.target is not None:
        yield instruction.target
    if instruction.exn_tab_entry is not None:
        yield instruction.exn_tab_entry.target


def _position(value: Any) -> Any:
    """How far an iterator is."""
    if isinstance(value, IteratorVariable):
        return id(value), [_position(each) for each in vars(value).values()]
    if isinstance(value, list | tuple):
        return [_position(each) for each in value]
    return value if isinstance(value, int) else id(value)


def _as_if_some(condition: Any) -> bool | None:
    """What a condition is where some elements of a tensor are not zero, if it asks that; None of any other."""
    if isinstance(condition, TensorVariable):
        asked = condition.proxy.node
        if name_of(asked) == "any" and len(asked.args) == 1 and not asked.kwargs:
            return True
        counted = asked.args[0] if name_of(asked) == "gt" and asked.args[1:] == (0,) else None
        is_count = isinstance(counted, FxNode) and name_of(counted) == "sum" and len(counted.args) == 1
        return True if is_count else None
    number = getattr(condition, "sym_num", None)
    if isinstance(number, torch.SymInt):
        return True if number.node.expr.is_symbol else None
    if not isinstance(number, torch.SymBool) or len(symbols := number.node.expr.free_symbols) != 1:
        return None
    (symbol,) = symbols
    if not all(side == symbol or side.is_number for side in number.node.expr.args):  # such as ``count % 4 == 0``
        return None
    none, *some = [bool(number.node.expr.subs(symbol, count)) for count in (0, 1, 2, 3, 1000)]
    return some[0] if set(some) == {not none} else None


def _numbers_of(condition: Any) -> bool | None:
    """What a condition is that a tensor of one number gives which is known; None of any other."""
    numbers = numbers_of_example(condition.proxy.node) if isinstance(condition, TensorVariable) else None
    if numbers is None or numbers.numel() != 1:
        return None
    if is_of_arguments(example(condition.proxy.node)):
        note_decided_by(condition.proxy.node, "number", (float(numbers),))
    return bool(numbers)


def _is_by_numbers(condition: Any) -> bool:
    """Whether a condition is a tensor, or a number that Python takes out of one."""
    number: Any = getattr(condition, "sym_num", None)
    is_number = isinstance(number, torch.SymBool | torch.SymInt | torch.SymFloat)
    return isinstance(condition, TensorVariable) or (is_number and bool(number.node.expr.free_symbols))


def _is_drawn(asked: FxNode) -> bool:
    """Whether a number is made of draws alone."""
    given = ancestors([asked])
    return all(node.op.startswith("call_") for node in given) and any(RANDOM.search(name_of(node)) for node in given)


def _as_if_no_error(condition: Any, translator: Any, jump: Any) -> bool | None:
    """What a condition on numbers is where no error is raised, if it decides that alone; None of any other."""
    if not _is_by_numbers(condition):
        return None
    code, place, behind = translator.instructions, translator.indexof, translator.instruction_pointer
    is_taken = without_error(code, place, jump, behind, list(_frames(translator)))
    return None if is_taken is None else is_taken == ("IF_TRUE" in jump.opname)


def _as_if_finite(condition: Any) -> bool | None:
    """What a condition is where all numbers are finite; None where it is about something else."""
    if not isinstance(condition, TensorVariable):
        return None
    reduction = condition.proxy.node
    given = [*reduction.args, *reduction.kwargs]
    if len(given) != 1 or not isinstance(given[0], FxNode):
        return None
    told = _FINITE.get((name_of(reduction), name_of(given[0])))
    numbers = next((node.meta.get("example_value") for node in given[0].all_input_nodes), None)
    return None if numbers is None or numbers.dtype == torch.float16 else told
