"""Ways through a forward: by which conditions on tensors Python goes, and where it is told so."""

from __future__ import annotations

import dis
import operator
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import takewhile
from typing import Any
from unittest.mock import patch

import torch
from torch._dynamo.symbolic_convert import InstructionTranslatorBase
from torch._dynamo.variables import ConstantVariable, TensorVariable
from torch.fx import Node as FxNode

from ..by_numbers.representative import is_of_arguments
from ..examples import example, name_of
from .variables import dispatch_tables, stack_here
from .what_decides import note_decided_by

# What Python asks of the numbers of a tensor, and what it is told where all of them are finite.
_FINITE = {("all", "isfinite"): True, ("any", "isinf"): False, ("any", "isnan"): False}
_JUMPS = frozenset(code for name, code in dis.opmap.items() if re.search(r"JUMP\w*_IF_(TRUE|FALSE)", name))


@contextmanager
def conditions_known() -> Iterator[None]:
    """Has Python go by conditions on numbers that stand in the forward; and as if all numbers of a tensor were finite
    where it asks that, as models do that limit them where they are not (DETR). Not in half precision, where sums do
    become infinite.
    """
    kept = [(table, list(table)) for table in dispatch_tables(InstructionTranslatorBase)]
    ways = _Ways()
    try:
        for table, jumps in kept:
            for code in _JUMPS:
                table[code] = partial(_jump_if_known, jumps[code], ways)
        with patch.object(InstructionTranslatorBase, "step", ways.stepping()):
            yield
    finally:
        for table, jumps in kept:
            table[:] = jumps


def _jump_if_known(jump: Any, ways: _Ways, translator: Any, instruction: Any) -> None:
    condition = translator.stack[-1]
    known = _numbers_of(condition)
    if known is None:
        known = _as_if_finite(condition)
    if known is None and (known := _as_if_some(condition)) is not None:
        ways.begin(condition.as_proxy().node, known, translator, instruction)
    if known is not None:
        translator.stack[-1] = ConstantVariable.create(known)
    jump(translator, instruction)


def begins(condition: Any, number: int) -> None:
    """Stands in a graph of dynamo's where Python goes on as if some elements were not zero. What follows, up to
    :func:`ends` of the same number, one process leaves out where none is.
    """


def ends(number: int, is_clean: bool) -> None:
    """Stands where both ways meet; ``is_clean`` says that Python has no other values there than where they parted, but
    for tensors that were made between.
    """


class _Ways:
    """Ways that Python goes as if a condition held, until it is where the other way leads."""

    def __init__(self) -> None:
        self._open: list[tuple[Any, int, FxNode, Any, Any]] = []
        self._count = 0

    def begin(self, condition: FxNode, known: bool, translator: Any, instruction: Any) -> None:
        """Notes that a way begins, in the graph."""
        noted = condition.graph.call_function(begins, (condition, self._count))
        noted.meta |= {"stack_trace": stack_here()}
        target, behind = translator.indexof[instruction.target], translator.instruction_pointer
        is_taken = known == ("IF_TRUE" in instruction.opname)
        other = behind if is_taken else target
        while (jump := translator.instructions[other]).opname.startswith("JUMP_") and "_IF_" not in jump.opname:
            other = translator.indexof[jump.target]
        self._open.append((translator, other, noted, _python_values(translator), _tensors(translator)))
        self._count += 1

    def stepping(self) -> Any:
        """A step of dynamo's that notes in the graph where ways end."""
        step = InstructionTranslatorBase.step

        def and_note(translator: Any) -> bool:
            for way in [way for way in self._open if way[0] is translator and way[1] == translator.instruction_pointer]:
                self._open.remove(way)
                _, _, begun, values, tensors = way
                graph = translator.output.current_tracer.graph
                made = set(takewhile(partial(operator.is_not, begun), reversed(graph.nodes)))
                others = {node for name, node in _tensors(translator).items() if tensors.get(name) is not node}
                graph.call_function(ends, (begun.args[1], _python_values(translator) == values and others <= made))
            return step(translator)

        return and_note


def _tensors(translator: Any) -> dict[str, FxNode]:
    """The tensors that local variables stand for."""
    locals_ = translator.symbolic_locals.items()
    return {name: value.proxy.node for name, value in locals_ if isinstance(value, TensorVariable)}


def _python_values(translator: Any) -> dict[Any, Any]:
    """What local variables stand for, but for tensors; what containers among them have; what else is written into."""
    found: dict[Any, Any] = {
        name: (id(value), _items(value))
        for name, value in translator.symbolic_locals.items()
        if not isinstance(value, TensorVariable)
    }
    for variable, attributes in translator.output.side_effects.store_attr_mutations.items():
        found[id(variable)] = {name: id(value) for name, value in attributes.items()}
    return found


def _items(value: Any) -> tuple[int, ...]:
    items = vars(value).get("items", ())
    return tuple(map(id, items.values() if isinstance(items, dict) else items))


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
    none, *some = [bool(number.node.expr.subs(symbol, count)) for count in (0, 1, 2, 3, 1000)]
    return some[0] if set(some) == {not none} else None


def _numbers_of(condition: Any) -> bool | None:
    """What a condition is that a tensor of one number gives which is known; None of any other."""
    value = example(condition.proxy.node) if isinstance(condition, TensorVariable) else None
    numbers = getattr(value, "constant", None)
    if numbers is None or numbers.numel() != 1:
        return None
    if is_of_arguments(value):
        note_decided_by(condition.proxy.node, "number", (float(numbers),))
    return bool(numbers)


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
