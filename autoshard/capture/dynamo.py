"""The private APIs of torch's dynamo that capture needs, all in this file (torch 2.11 to 2.13).

Dynamo runs a model's Python symbolically. Besides the graph it knows what else the forward does to Python objects
(*side effects*) and which Python values it read on the way (*guards*). Both would be lost with the graph alone: a side
effect would never happen, and a value that changes later would be ignored.
"""

from __future__ import annotations

import ast
import dis
import logging
import operator
import random
import re
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, is_dataclass
from functools import partial
from itertools import takewhile
from types import CodeType
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch import nn
from torch._dynamo import functional_export, trace_rules
from torch._dynamo.convert_frame import get_traced_fn
from torch._dynamo.exc import ObservedException, TorchRuntimeError, Unsupported
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.source import RandomValueSource
from torch._dynamo.symbolic_convert import InstructionTranslatorBase, tls
from torch._dynamo.variables import (
    ConstantVariable,
    ConstDictVariable,
    GetAttrVariable,
    SetVariable,
    SkipFunctionVariable,
    TensorVariable,
    builtin,
    user_defined,
)
from torch._dynamo.variables.base import AttributeMutationExisting, ValueMutationExisting
from torch._dynamo.variables.ctx_manager import CatchWarningsCtxManagerVariable
from torch._dynamo.variables.lazy import LazyCache, LazyVariableTracker
from torch._dynamo.variables.torch_function import TorchFunctionModeStackVariable
from torch._functorch.autograd_function import autograd_function_apply as autograd_function_apply
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.export._trace import _restore_state_dict
from torch.fx import Node as FxNode
from torch.utils._pytree import SUPPORTED_NODES, TreeSpec, tree_structure

from ..errors import CaptureError
from .arguments import same_constant
from .autocast import check_autocast_within
from .constant import LARGEST
from .examples import example, name_of, place_of
from .guards import MODEL_SOURCE, Guards, guards_of, readable, written_as_they_are
from .lines import at, is_models_file, line_in, line_of, lines_in
from .python_draws import compared, is_from_zero_to_one
from .representative import is_of_arguments

_BUFFERS = re.compile(re.escape(MODEL_SOURCE) + r"(?P<path>.*?)\.(_buffers|__dict__\['_buffers'\])")
_WORD = re.compile(r"\w+")
# What dynamo has for ``setattr``: a class of its own, or that of all functions of Python's.
_SETATTR: Any = getattr(builtin, "SetAttrBuiltinVariable", builtin.BuiltinVariable)
# How dynamo prints the argument of an exception, and a name that Python would not find either.
_CONSTANT = re.compile(r"ConstantVariable\(str: (.*)\)", re.DOTALL)
_CLASS_ALONE = re.compile(r"ExceptionVariable\(<class '(?:builtins\.)?(.*)'>\)")  # torch 2.11, of the model's own
_WITH_CLASS = re.compile(r"\w+(\(|:|$)")
_NO_NAME = re.compile(r"Failed to find name `(\w+)` in frame's builtins")
# What the first line of an error says where numbers in a tensor would decide.
_ON_NUMBERS = re.compile(
    r"data[- ]dependent (expression|branching|operator|output)|Tensor\.tolist\(\) with|Pending unbacked symbols",
    re.IGNORECASE,
)
_AS_INDEX = "valid indices (got SymInt)"  # of ``x[:, k]`` by a number out of a tensor
# What Python asks of the numbers of a tensor, and what it is told where all of them are finite.
_FINITE = {("all", "isfinite"): True, ("any", "isinf"): False, ("any", "isnan"): False}
_JUMPS = frozenset(code for name, code in dis.opmap.items() if re.search(r"JUMP\w*_IF_(TRUE|FALSE)", name))
# Functions that say something, or set what is said, and compute nothing. Methods of loggers dynamo leaves out itself.
_SAYING = (print, warnings.warn, warnings.simplefilter, warnings.filterwarnings, warnings.resetwarnings) + (
    logging.debug, logging.info, logging.warning, logging.error, logging.exception, logging.critical, logging.log,
)  # fmt: skip


@dataclass(frozen=True)
class SideEffect:
    """A Python object that the forward changes: its name, and the line that changes it (empty where unknown)."""

    name: str
    line: str


@dataclass
class Dynamo:
    """What dynamo found in a forward besides its graph.

    ``assigned`` are the FQNs of buffers that the forward replaces; ``side_effects`` the other objects it changes;
    ``names`` are those that the model's own code uses, of functions and attributes; ``answer`` is the module that
    dynamo traced, and what it says of it.
    """

    assigned: list[str] = field(default_factory=list)
    side_effects: list[SideEffect] = field(default_factory=list)
    names: frozenset[str] = frozenset()
    answer: tuple[nn.Module, Any] | None = None

    def guards(self) -> Guards:
        """The conditions under which the model does what the graph does, with the values that are in force now: to be
        called once nothing is set that was only set for the capture.
        """
        assert self.answer is not None, "dynamo has given an answer"
        module, output = self.answer
        return guards_of(output.output_graph, module, get_traced_fn(module)[0].__code__)

    def reads(self) -> frozenset[str]:
        """The names of all attributes that the forward has read."""
        assert self.answer is not None, "dynamo has given an answer"
        names = (guard.name for guard in self.answer[1].output_graph.guards)
        return frozenset(word for name in names for word in _WORD.findall(name))


def look_functions_up() -> None:
    """Has dynamo note torch's functions as they are. It does so once, as it meets the first one, which must not be
    while another stands in the place of one.
    """
    trace_rules.lookup(torch.cat)


def forward_graph(
    observed: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[torch.fx.GraphModule, Dynamo, TreeSpec]:
    """The torch operators that a module calls, its parameters and buffers under their FQNs; what else it does; and the
    structure of its result, whose leaves the graph returns.
    """
    found = Dynamo()
    answers: list[tuple[nn.Module, Any]] = []
    with (
        _side_effects_into(found),
        _answers_into(answers),
        _leaves_within(),
        _named_classes(),
        _conditions_known(),
        _draws_left_out(),
        _unrecorded(),
        _settings(),
    ):
        graph = _traced(observed, args, kwargs)
    (found.answer,) = answers
    found.names = frozenset().union(*(_names(code) for code in found.answer[1].traced_code))
    _check_autocast(graph.graph)
    _restore_state_dict(observed, graph)
    codegen: Any = graph.graph._codegen
    return graph, found, codegen.pytree_info.out_spec


@contextmanager
def _settings() -> Iterator[None]:
    """Recurrent modules are taken apart, step by step; what only says something is left out."""
    ignored = torch._dynamo.config.ignore_logging_functions | set(_SAYING)
    with (
        torch._dynamo.config.patch(allow_rnn=True, ignore_logging_functions=ignored),
        # torch notes its settings for statistics; torch 2.11 cannot write functions down and logs an error
        patch.object(torch._dynamo.utils, "_get_dynamo_config_for_logging", lambda: None),
    ):
        yield


def _traced(observed: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.fx.GraphModule:
    """Traces a module; dataclasses in its result become containers that torch takes apart and puts together again.

    Raises:
        CaptureError: other objects are in the result.
    """
    while True:
        try:
            return functional_export._dynamo_graph_capture_for_export(observed)(*args, **kwargs)
        except AssertionError as error:
            returned = _returned(error)
            if returned is None:
                raise
            if not is_dataclass(returned) or returned in SUPPORTED_NODES:
                raise CaptureError(
                    f"the forward returns an object of class {returned.__name__}; return tensors and numbers, in "
                    "tuples, lists, dicts and dataclasses (a cache of keys and values belongs to generation: call the "
                    "model with use_cache=False)"
                ) from None
            torch.export.register_dataclass(returned)


def _returned(error: AssertionError) -> type | None:
    """The class of a result that dynamo cannot take apart, where that is what it complains about."""
    if "Encountered unrecognized type" not in str(error):
        return None
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    variable = frames[-1].f_locals.get("vt")
    return variable.python_type() if variable is not None else None


def _check_autocast(graph: torch.fx.Graph) -> None:
    entered: list[torch.fx.Node] = []  # regions whose first line is still to come: they have none of their own
    for node in graph.nodes:
        if node.target is torch.amp.autocast_mode._enter_autocast:
            entered.append(node)
        for region in entered if line_of(node) or node.op == "output" else ():
            device_type, _, is_enabled, *_ = region.args
            check_autocast_within(str(device_type), bool(is_enabled), line_of(node))


def return_only(graph: torch.fx.GraphModule, result: Sequence[Any], others: Sequence[Any]) -> None:
    """Makes a graph of :func:`forward_graph` return a result's leaves, and others, as two lists: taken apart again, a
    dataclass would lose the leaves that left the graph.
    """
    graph.graph.output_node().args = ((*result, *others),)
    codegen: Any = graph.graph._codegen
    both = TreeSpec(tuple, None, [tree_structure(list(leaves)) for leaves in (result, others)])
    codegen.pytree_info = codegen.pytree_info._replace(out_spec=both)
    graph.recompile()


def model_stack(error: Exception) -> str:
    """The frames of the model in which dynamo met an error, as a traceback prints them; empty for other errors."""
    return "".join(traceback.format_list(getattr(error, "real_stack", None) or []))


def depends_on_numbers(error: Exception) -> bool:
    """Whether a shape, or the way that Python goes, depends on numbers in a tensor, which a traced forward has not."""
    if isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
        return True
    is_models_own = isinstance(error.__cause__, ObservedException)
    text = str(error)
    return not is_models_own and (_ON_NUMBERS.search(text.partition("\n")[0]) is not None or _AS_INDEX in text)


def is_explained(error: Exception) -> bool:
    """Whether torch's message says what is wrong with the model; the traceback of its own frames adds nothing then."""
    known = (Unsupported, TorchRuntimeError, DataDependentOutputException, DynamicOutputShapeException)
    return isinstance(error, known)


def own_error(error: Exception) -> str | None:
    """The exception that the model itself would raise without dynamo, ``ValueError: 3 heads``; None where dynamo alone
    cannot follow the model.
    """
    if isinstance(error, TorchRuntimeError):  # an operator refused its arguments
        origin: BaseException | None = error
        while isinstance(origin, TorchRuntimeError | Unsupported):
            origin = origin.__cause__ or origin.__context__
        return None if origin is None else f"{type(origin).__name__}: {origin}"
    if isinstance(error.__cause__, ObservedException):  # a raise in Python that nothing catches
        kind = type(error.__cause__).__name__.removeprefix("Observed").removesuffix("Error") + "Error"
        said = str(error.__cause__).removeprefix("raised exception ")
        if constant := _CONSTANT.fullmatch(said):
            return f"{kind.replace('ErrorError', 'Error')}: {ast.literal_eval(constant[1])}"
        if known := _CLASS_ALONE.fullmatch(said):
            return known[1]
        return said if _WITH_CLASS.match(said) else f"{kind}: {said}"
    text = str(error)
    if isinstance(error, Unsupported) and (name := _NO_NAME.search(text)):
        return f"NameError: name '{name[1]}' is not defined"
    if isinstance(error, Unsupported) and "assertion failed" in text.partition("\n")[0] and "ConstantVariable" in text:
        return "AssertionError"
    return None


@contextmanager
def _side_effects_into(found: Dynamo) -> Iterator[None]:
    """Dynamo writes code that repeats side effects after the graph has run; just before, it has them all in a list."""
    write_code = SideEffects.codegen_update_mutated

    def and_record(self: SideEffects, *args: Any, **kwargs: Any) -> Any:
        found.assigned, found.side_effects = [], []  # code is written twice
        for variable in self._get_modified_vars():
            if isinstance(variable.mutation_type, (AttributeMutationExisting, ValueMutationExisting)):
                _record(self, variable, found)
        return write_code(self, *args, **kwargs)

    with patch.object(SideEffects, "codegen_update_mutated", and_record):
        yield


def _record(effects: SideEffects, variable: Any, found: Dynamo) -> None:
    if isinstance(variable, TorchFunctionModeStackVariable) and _leaves_modes(effects, variable):
        return
    source = variable.source.name if isinstance(variable.source.name, str) else variable.source.name()
    known: dict[Any, list[traceback.StackSummary]] = effects.mutation_user_stacks
    stacks = known.get(variable) or known.get(getattr(variable, "_base_vt", None))  # of an OrderedDict, its dict
    line = line_in("".join(traceback.format_list(stacks[-1]))) if stacks else ""
    buffers = _BUFFERS.fullmatch(source)
    if buffers is not None and _keys(variable.items) == _keys(variable.original_items):
        path = readable("model" + buffers["path"]).removeprefix("model").removeprefix(".")
        found.assigned += [f"{path}.{key}".removeprefix(".") for key in _replaced(variable)]
    else:
        found.side_effects += [SideEffect(readable(source) + name, line) for name in _changed(effects, variable)]


def _leaves_modes(effects: SideEffects, variable: Any) -> bool:
    """Whether a forward leaves as many modes of ``__torch_function__`` as there were: it enters some for a while."""
    output = effects.output_graph_weakref()
    return output is not None and len(variable.symbolic_stack) == len(output.torch_function_mode_stack)


def _keys(items: dict[Any, Any]) -> set[Any]:
    """Those that are constants, and what stands for the others."""
    keys = (getattr(key, "vt", key) for key in items)
    return {key.as_python_constant() if key.is_python_constant() else key for key in keys}


def _replaced(variable: Any) -> list[str]:
    """The keys of a dict whose values are others than they were."""
    before: dict[Any, Any] = variable.original_items
    new = (key.vt for key, value in variable.items.items() if variable.is_new_item(before.get(key.vt), value))
    return [key.as_python_constant() for key in new]


def _changed(effects: SideEffects, variable: Any) -> list[str]:
    """The attributes of an object that are not as they were, each behind a dot; one empty name for other objects, but
    for a set that has what it had, and a dict that is as empty as it was: torch notes again that a buffer is not saved,
    where one takes the place of itself, and peft empties a cache before every call.
    """
    attributes = effects.store_attr_mutations.get(variable)
    if not attributes:
        items: Any = getattr(variable, "items", None)
        is_told_by_keys = isinstance(variable, SetVariable) or (isinstance(variable, ConstDictVariable) and not items)
        return [] if is_told_by_keys and _keys(items) == _keys(variable.original_items) else [""]
    before = getattr(variable, "value", None)
    return [
        f".{name}"
        for name, value in attributes.items()
        if not (
            value.is_python_constant()
            and hasattr(before, name)
            and same_constant(value.as_python_constant(), getattr(before, name))
        )
    ]


@contextmanager
def _answers_into(answers: list[tuple[nn.Module, Any]]) -> Iterator[None]:
    """Appends the module that dynamo traced, and all that it says of it."""
    capture, check = functional_export.fullgraph_capture, functional_export._suggest_or_raise_constraint_violation

    def and_record(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        answer = capture(module, *args, **kwargs)
        answers.append((module, answer.graph_capture_output))
        return answer

    def of_guards(module: Any, called: Any, mode: Any, *others: Any) -> None:
        """Without what dims that change would need: none does, and a number out of a tensor fails torch 2.12 there."""
        with written_as_they_are():
            check(module, called, None, *others)

    with (
        patch.object(functional_export, "fullgraph_capture", and_record),
        patch.object(functional_export, "_suggest_or_raise_constraint_violation", of_guards),
    ):
        yield


@contextmanager
def _leaves_within() -> Iterator[None]:
    """Has ``x.requires_grad = True`` of a tensor that the forward made, as checkpoints ask for, do nothing more: nobody
    takes the gradient of such a tensor in a captured step. Dynamo refuses it, and what is so already.
    """
    set_attribute, set_in_place = _SETATTR.call_function, TensorVariable.method_requires_grad_

    def is_done(x: Any, value: Any) -> bool:
        if not isinstance(x, TensorVariable) or not isinstance(value, bool):
            return False
        if value and x.source is None:
            x.requires_grad = True
        return bool(x.requires_grad == value)

    def attribute(self: Any, tx: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        is_call = getattr(self, "fn", setattr) is setattr and len(args) == 3
        if is_call and _constant(args[1]) == "requires_grad" and is_done(args[0].realize(), _constant(args[2])):
            return ConstantVariable.create(None)
        return set_attribute(self, tx, args, kwargs)

    def in_place(self: Any, tx: Any, requires_grad: Any = True) -> Any:
        value = requires_grad if requires_grad is True else _constant(requires_grad)
        return self if is_done(self, value) else set_in_place(self, tx, requires_grad)

    with (
        patch.object(_SETATTR, "call_function", attribute),
        patch.object(TensorVariable, "method_requires_grad_", in_place),
    ):
        yield


@contextmanager
def _named_classes() -> Iterator[None]:
    """Has ``type(parameter).__module__`` and the names of that class be strings, whose methods a forward may call
    (peft, to tell quantized weights): dynamo knows nothing of them, as it takes the class for a function of torch's.
    """
    method = GetAttrVariable.call_method

    def of_name(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        owner = getattr(self.obj, "value", None)
        if isinstance(owner, type) and self.name in ("__module__", "__name__", "__qualname__"):
            return ConstantVariable.create(getattr(owner, self.name)).call_method(tx, name, args, kwargs)
        return method(self, tx, name, args, kwargs)

    with patch.object(GetAttrVariable, "call_method", of_name):
        yield


@contextmanager
def _conditions_known() -> Iterator[None]:
    """Has Python go by conditions on numbers that stand in the forward; and as if all numbers of a tensor were finite
    where it asks that, as models do that limit them where they are not (DETR). Not in half precision, where sums do
    become infinite.
    """
    kept = [(table, list(table)) for table in _dispatch_tables(InstructionTranslatorBase)]
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


def _dispatch_tables(kind: Any) -> Iterator[list[Any]]:
    for each in kind.__subclasses__():
        if "dispatch_table" in vars(each):
            yield each.dispatch_table
        yield from _dispatch_tables(each)


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
        noted.meta |= {"stack_trace": "".join(traceback.format_list(TracingContext.extract_stack()))}
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
        _note_decided(condition.proxy.node, "number", (float(numbers),))
    return bool(numbers)


Decided = Literal["number", "count", "numbers"]
"""What of a tensor decided: its one number, how many of its elements are not zero, or all of its numbers."""


def decides(tensor: torch.Tensor, how: Decided, expected: tuple[float, ...]) -> None:
    """Stands in a graph of dynamo's where numbers of a representative argument decide shapes, or which way Python goes:
    those that are expected of a tensor that comes of it.
    """


def note_decided(tensor: torch.Tensor, how: Decided, expected: Sequence[float]) -> None:
    """Has the graph that dynamo is making, if it is, say what decides. Where torch has looked at a tensor that is in no
    graph, all numbers of those decide that it was made of.

    Raises:
        CaptureError: these are too many.
    """
    translator = getattr(tls, "current_tx", None)
    if translator is None:
        return
    nodes = reversed(translator.output.current_tracer.graph.nodes)
    last = next(nodes)
    if name_of(last) == "item" and (whole := _listed(last.args[0])) is not None:
        _note_decided(whole, "numbers", tuple(example(whole).constant.double().flatten().tolist()))
        return
    maker = next((node for node in (last, *last.all_input_nodes, *nodes) if example(node) is tensor), None)
    if maker is not None:
        _note_decided(maker, how, tuple(map(float, expected)))
        return
    marked = [node for node in last.all_input_nodes if is_of_arguments(example(node))]
    if not marked:
        raise CaptureError(f"{name_of(last)} goes by numbers of a representative argument that no step can check")
    for node in marked:
        value: Any = example(node)
        if value.constant is None or value.numel() > LARGEST:
            raise CaptureError(
                f"{name_of(last)} goes by more numbers of a representative argument than a step can check"
            )
        _note_decided(node, "numbers", tuple(value.constant.double().flatten().tolist()))


def _listed(element: Any) -> FxNode | None:
    """The tensor whose numbers are written down as a list; None where one is taken alone. Dynamo says nothing of the
    elements of a list.
    """
    if not isinstance(element, FxNode) or example(element) is not None:
        return None
    while example(element) is None:
        element = element.args[0]
    return element  # type: ignore[no-any-return]


def _note_decided(node: FxNode, how: Decided, expected: tuple[float, ...]) -> None:
    noted = node.graph.call_function(decides, (node, how, expected))
    noted.meta |= place_of(node) | {"stack_trace": "".join(traceback.format_list(TracingContext.extract_stack()))}


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


class _ToDraw(LazyCache):
    """A number from zero to one that is not drawn as long as nobody but a comparison asks for it."""

    def __init__(self, draw: Callable[[], Any]) -> None:
        super().__init__(object(), RandomValueSource(0))
        self._draw = draw
        self._drawn_at = "".join(traceback.format_list(TracingContext.extract_stack()))

    def realize(self) -> None:
        """Has dynamo draw it, which it refuses in a graph that stands for every call."""
        try:
            self.vt = self._draw()
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self._drawn_at}") from None


@contextmanager
def _draws_left_out() -> Iterator[None]:
    """Has Python draw nothing where it draws a number from zero to one and only compares it with what decides the
    comparison, whatever is drawn: the drop of a layer with a probability of nothing.
    """
    draw: Any = getattr(user_defined, "call_random_fn", None)
    call_skipped = SkipFunctionVariable.call_function

    def if_asked_for(tx: Any, fn: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if kwargs or not is_from_zero_to_one(fn, tuple(map(_constant, args))):
            return draw(tx, fn, args, kwargs)
        return LazyVariableTracker(_ToDraw(partial(draw, tx, fn, args, kwargs)))

    def skipped(self: Any, tx: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Torch 2.13 skips ``random.random``, as what is not written in Python."""
        if self.value == random.random and not args:
            return if_asked_for(tx, random.random, args, kwargs)
        return call_skipped(self, tx, list(args), kwargs)

    if draw is None:
        yield
        return
    kept = [(table, list(table)) for table in _dispatch_tables(InstructionTranslatorBase)]
    code = dis.opmap["COMPARE_OP"]
    try:
        for table, before in kept:
            table[code] = partial(_compare_if_known, before[code])
        with (
            patch.object(user_defined, "call_random_fn", if_asked_for),
            patch.object(SkipFunctionVariable, "call_function", skipped),
        ):
            yield
    finally:
        for table, before in kept:
            table[code] = before[code]


def _compare_if_known(compare: Any, translator: Any, instruction: Any) -> None:
    left, right = translator.stack[-2:]
    known = None
    if _is_to_draw(left) or _is_to_draw(right):
        other = left if _is_to_draw(right) else right
        number = None if _is_to_draw(other) else _constant(other)
        known = compared(instruction.argval, number, is_turned=other is left)
    if known is None:
        compare(translator, instruction)
    else:
        translator.popn(2)
        translator.push(ConstantVariable.create(known))


def _is_to_draw(variable: Any) -> bool:
    return type(variable) is LazyVariableTracker and isinstance(variable._cache, _ToDraw)


@contextmanager
def _unrecorded() -> Iterator[None]:
    """Refuses ``warnings.catch_warnings(record=True)``: as a traced forward warns of nothing, that list is empty."""
    create = CatchWarningsCtxManagerVariable.create

    def unless_recorded(tx: Any, given: dict[str, Any]) -> Any:
        if "record" in given and _constant(given["record"]):
            line = lines_in("".join(traceback.format_list(TracingContext.extract_stack())))
            raise CaptureError(
                f"the forward records its own warnings (warnings.catch_warnings(record=True)){at(line)}, and a "
                "captured step warns of nothing; leave record=True out, or record them around the call of the model"
            )
        return create(tx, given)

    with patch.object(CatchWarningsCtxManagerVariable, "create", staticmethod(unless_recorded)):
        yield


def _constant(variable: Any) -> Any:
    """The Python value of a constant of dynamo's; None of anything else."""
    value = variable.realize()
    return value.as_python_constant() if value.is_python_constant() else None


def _names(code: CodeType) -> frozenset[str]:
    """The names that the model's own code uses, inner functions included."""
    if not is_models_file(code.co_filename):
        return frozenset()
    inner = (_names(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return frozenset(code.co_names).union(*inner)
