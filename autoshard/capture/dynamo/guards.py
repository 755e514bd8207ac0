"""The conditions on Python state under which a captured graph is what its model does: dynamo's guards, torch 2.11 on.

Dynamo notes every Python value that a forward reads, and says at every call whether it is as it was. What it notes are
names of values (*sources*) and what is to hold of each. Both are data: they can be kept with a graph, and the guards
made of them again for the same model in another process, where dynamo has not traced it.
"""

from __future__ import annotations

import builtins
import json
import re
import sys
import traceback
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy, deepcopy
from types import CodeType, FunctionType, MappingProxyType, ModuleType
from typing import Any, TypeAlias
from unittest.mock import patch

import torch
from torch import nn
from torch._dynamo import guards, output_graph, source
from torch._dynamo.guards import CheckFunctionManager
from torch._guards import Guard, GuardsSet, Source, TracingContext, tracing
from torch.utils._ordered_set import OrderedSet

from ..lines import line_in
from .families import asked_in_turn, has_one_owner
from .observed import Observed
from .readable import MODEL_SOURCE, readable
from .seen import KEYS, Seen, aspect_of, is_dict_of_object, is_on_dict_of_object, nested, seen
from .sources import NotDataError, Read, Written

# Guards on modes of torch, and on tensors.
_OF_A_CALL = frozenset(
    {
        "AUTOGRAD_SAVED_TENSORS_HOOKS",
        "DEFAULT_DEVICE",
        "DETERMINISTIC_ALGORITHMS",
        "GLOBAL_STATE",
        "GRAD_MODE",
        "SHAPE_ENV",
        "TENSOR_MATCH",
        "TORCH_FUNCTION_STATE",
    }
)
# The arguments of the capture, what its own code reads, and what it changes itself for plain tensors (which buffers
# checkpoints leave out, which a module asks when an attribute is set); and what it switches off of distributions.
_OF_CAPTURE = ("L['flat_args']", "pytree", "ExportTracerOutput", "_non_persistent_buffers_set")
_SWITCHED_OFF = "._validate_args"
_IDENTITY = re.compile(r"(___check_(?:obj|type)_id\(.*), \d+\)")
_UNNAMED = re.compile(r"G\['(___unnamed_scope_\w+)'\]")
Document: TypeAlias = "dict[str, Any] | None"


class Guards:
    """The conditions on Python state under which the captured graph is what the model does.

    ``document`` is what :func:`guards_again` makes them of, as JSON has it; None where they name what only this process
    has. ``numbered`` are the containers of constants, and ``families`` the names of other things, of which a deeper
    model may read more (:mod:`.families`), with whether one module alone has them.
    """

    def __init__(
        self,
        manager: Any,
        scope: dict[str, Any],
        seen: Sequence[Seen],
        lines: dict[str, str],
        document: Document,
        numbered: Sequence[Seen] = (),
        families: Mapping[str, bool] = MappingProxyType({}),
    ) -> None:
        self._manager = manager
        self._scope = scope
        self._seen = tuple(seen)
        self._lines = lines
        self.document = document
        self._numbered = tuple(numbered)
        self.families = families

    def for_all_numbers(self) -> Guards:
        """The same conditions, and that ``numbered`` containers are what they are: other items may be read of them."""
        return Guards(self._manager, self._scope, [*self._seen, *self._numbered], self._lines, self.document)

    def without(self, names: Collection[str]) -> Guards:
        """The same conditions, but for those on parameters and buffers of these FQNs, which are checked elsewhere."""
        left_out = {f"model.{name}" for name in names}
        seen = [each for each in self._seen if each.name not in left_out]
        return Guards(self._manager, self._scope, seen, self._lines, self.document)

    def broken(self) -> tuple[str, str] | None:
        """The first condition that no longer holds, such as ``model.k == 3.0``, and the line that relies on it; None if
        all hold.
        """
        if not self._manager.check(self._scope["L"]):
            parts = self._manager.check_verbose(self._scope["L"]).verbose_code_parts
            codes = [str(part).partition("  # ")[0].strip() for part in parts] or ["the state of the model"]
            code = next(filter(self._is_false, codes), codes[0])
            return readable(code), self._lines.get(code, "")
        for each in self._seen:
            if each.has_changed(self._scope):
                return each.condition, self._lines.get(each.condition, "")
        return None

    def _is_false(self, code: str) -> bool:
        """Whether a condition is known not to hold. Where one fails on which objects are the same, dynamo names all."""
        try:
            return not FunctionType(compile(code, "<guard>", "eval"), self._scope)()
        except Exception:  # some of its names are no Python
            return False

    def on(self, model: nn.Module) -> Guards:
        """The same conditions on another model that was made like the captured one."""
        traced = copy(self._scope["L"]["self"])
        traced._modules = {"_export_root": Observed(model)}
        scope = _scope(traced, self._scope["G"])
        return Guards(self._manager, scope, self._seen, self._lines, self.document)

    def __deepcopy__(self, memo: dict[int, Any]) -> Guards:
        return self.on(deepcopy(self._scope["L"]["self"]._export_root.model, memo))


class _AsTheyAre:
    """In place of the pass that makes variables of what several guards name."""

    def count(self, exprs: list[str]) -> None: ...

    def replace(self, expr: str) -> tuple[list[str], str]:
        return [], expr


def written_as_they_are() -> Any:
    """A context in which dynamo makes no variables of what several guards name. What these are for, a text of all
    guards, nobody reads; finding them once took 7% of the capture of Llama-3-8B.
    """
    return patch.object(guards, "PyExprCSEPass", _AsTheyAre)


def guards_of(graph: Any, module: nn.Module, frame: CodeType, codes: Iterable[CodeType]) -> Guards:
    """The guards that dynamo has noted on what stays as it is from call to call.

    Args:
        graph: dynamo's output graph.
        module: what dynamo traced, of which ``self`` is the name in the code ``frame``.
        codes: all code that dynamo followed.
    """
    state = [guard for guard in _of_state(graph.guards) if not _is_of_namedtuple(guard, graph.global_scope)]
    kept = [guard for guard in state if not is_on_dict_of_object(guard)]
    in_order = sorted(filter(is_dict_of_object, graph.guard_on_key_order), key=lambda where: where.name)
    graph.guard_on_key_order.difference_update(in_order)
    manager = _manager(graph, kept, frame)
    lines = list(map(_line, kept))
    scope = _scope(module, graph.global_scope)
    on_tensors = list(filter(_is_on_held_tensor, graph.guards))
    asked = [guard for guard in on_tensors if guard.create_fn_name() == "HASATTR"]
    looked_at = {(_source(guard), ""): _line(guard) for guard in on_tensors}
    looked_at |= dict.fromkeys([(where, KEYS) for where in in_order], "")
    looked_at |= {(_source(guard), aspect): _line(guard) for guard, aspect in _aspects([*state, *asked], scope)}
    constants = list(nested(kept, scope))
    held = [seen(where, scope, aspect) for where, aspect in looked_at]
    by_condition = _by_condition(kept, lines)
    by_condition |= {each.condition: line for each, line in zip(held, looked_at.values()) if line}
    containers, others = asked_in_turn([*kept, *asked], scope, codes)
    families = {readable(where.name): has_one_owner(where, scope, module) for where in others}
    numbered = [seen(where, scope) for where in containers]
    try:
        written = _written(graph, kept, lines, looked_at, containers)
        document: Document = written | _as_seen(constants, held, numbered)
    except NotDataError:
        document = None
    return Guards(manager, scope, [*constants, *held], by_condition, document, numbered, families)


def _aspects(guards: Iterable[Guard], scope: dict[str, Any]) -> Iterator[tuple[Guard, str]]:
    for guard in guards:
        is_of_tensor = guard.create_fn_name() != "HASATTR" or _is_on_tensor(guard)
        if is_of_tensor and (aspect := aspect_of(guard, scope)):
            yield guard, aspect


def _line(guard: Guard) -> str:
    return line_in("".join(traceback.format_list(guard.user_stack))) if guard.user_stack else ""


def _source(guard: Guard) -> Source:
    return guard.originating_source


def _scope(traced: nn.Module, names: dict[str, Any]) -> dict[str, Any]:
    """What dynamo's names of objects are read in: its own names among them, as that of a dtype that is a key."""
    return {**guards._get_closure_vars(), "L": {"self": traced}, "G": names}


def _manager(graph: Any, kept: list[Guard], frame: CodeType) -> Any:
    """What checks guards; writes into each what it checks."""
    everything, graph._guards = graph._guards, GuardsSet(OrderedSet(kept))
    try:
        hooks_count = torch._dynamo.config.patch(skip_nnmodule_hook_guards=False)
        with hooks_count, written_as_they_are():
            return CheckFunctionManager(frame, graph).guard_manager
    finally:
        graph._guards = everything


def _by_condition(kept: Sequence[Guard], lines: Sequence[str]) -> dict[str, str]:
    return {code: line for guard, line in zip(kept, lines) if line for code in guard.code_list or ()}


def _as_seen(constants: Sequence[Seen], held: Sequence[Seen], numbered: Sequence[Seen]) -> dict[str, Any]:
    kinds = {"nested": constants, "held": held, "numbered": numbered}
    return {kind: [each.look for each in found] for kind, found in kinds.items()}


def _of_state(guards: Iterable[Guard]) -> list[Guard]:
    """The guards, which dynamo has evaluated, on what stays as it is from call to call: no mode, no tensor and no class
    of one, which is another where a parameter is a DTensor.
    """
    every = list(guards)
    tensors = {guard.originating_source for guard in every if _is_on_tensor(guard)}
    return [guard for guard in every if _is_state(guard) and _typed(guard.originating_source) not in tensors]


def _typed(found: Source) -> Source | None:
    """What a source is the class of; None where it is none."""
    return found.base if isinstance(found, source.TypeSource) else None


def _is_on_tensor(guard: Guard) -> bool:
    value_type = guard.guarded_class_weakref() if guard.guarded_class_weakref is not None else None
    return value_type is not None and issubclass(value_type, torch.Tensor)


def _is_of_capture(guard: Guard) -> bool:
    is_own = "L['self']" in guard.name and MODEL_SOURCE not in guard.name
    return is_own or any(name in guard.name for name in _OF_CAPTURE)


def _is_on_held_tensor(guard: Guard) -> bool:
    """Whether a guard is on a tensor that the model has, and not on one to which it has a weak reference alone, as
    recurrent modules of torch have to the weights that they were made with.
    """
    is_weak = isinstance(_source(guard), source.WeakRefCallSource)
    return _is_on_tensor(guard) and not _is_of_capture(guard) and not is_weak


def _is_state(guard: Guard) -> bool:
    is_switched_off = guard.name.endswith(_SWITCHED_OFF) and MODEL_SOURCE not in guard.name
    # how a module that is compiled in place is called: the graph has what it computes
    is_of_compile = getattr(guard.create_fn, "keywords", {}).get("attr") == "_compiled_call_impl"
    is_of_call = guard.create_fn_name() in _OF_A_CALL or _is_on_tensor(guard)
    return not (is_of_call or _is_of_capture(guard) or is_switched_off or is_of_compile)


def _is_of_namedtuple(guard: Guard, names: Mapping[str, Any]) -> bool:
    """Whether a guard is on what ``collections.namedtuple`` has written a class of; nobody else names that."""
    found = _UNNAMED.match(guard.name)
    return found is not None and str(names[found[1]].get("__name__")).startswith("namedtuple_")


def guards_again(document: Mapping[str, Any], model: nn.Module) -> Guards | None:
    """Guards on a model that is as it was when they were written down.

    Args:
        document: that of the guards of a capture of the same model, by the same torch.

    Returns:
        None where they cannot be made of it, or say something else than they did.
    """
    traced = nn.Module()
    traced._modules = {"_export_root": Observed(model)}
    try:
        scope = _scope(traced, _globals(document))
        with tracing(TracingContext(None)):  # a source that imports a module guards on it
            read = Read(document["sources"])
        kept = [Guard(read.source(where), read.condition(*what)) for where, *what in document["guards"]]
        graph = output_graph.OutputGraphCommon(
            output_graph.OutputGraphGuardsState(
                local_scope=scope["L"],
                global_scope=scope["G"],
                torch_function_mode_stack=[],
                guard_on_key_order=set(map(read.source, document["ordered"])),
                input_source_to_sizes_strides={},
                dual_level=0,
                functorch_layers=[],
                current_device=None,
                global_state_guard=torch._C._dynamo.guards.GlobalStateGuard(),
                _guards=GuardsSet(OrderedSet([])),
                _aotautograd_guards=[],
                skip_guards_check=True,
                name_of_builtins_dict_key_in_fglobals=document["builtins"],
            )
        )
        manager = _manager(graph, kept, _traced_frame.__code__)
    except Exception:  # sources are followed by code of the model's, and read by torch: whatever fails, dynamo traces
        return None
    if list(map(_conditions, kept)) != document["conditions"]:
        return None
    try:
        constants = list(nested(kept, scope))
        held = [seen(read.source(where), scope, aspect) for where, aspect in document["looked at"]]
        numbered = [seen(read.source(where), scope) for where in document["containers"]]
    except (LookupError, AttributeError, TypeError):  # what it had it has no longer
        return None
    if any(document[key] != looks for key, looks in _as_seen(constants, held, numbered).items()):
        return None
    by_condition = _by_condition(kept, document["lines"])
    by_condition |= {each.condition: line for each, line in zip(held, document["lines of these"]) if line}
    found = Guards(manager, scope, [*constants, *held], by_condition, dict(document), numbered)
    return None if found.broken() else found


def _traced_frame(self: nn.Module) -> None:
    """Code that has the local variable that sources begin with."""


def _written(
    graph: Any,
    kept: Sequence[Guard],
    lines: Sequence[str],
    looked_at: Mapping[tuple[Source, str], str],
    containers: Iterable[Source],
) -> dict[str, Any]:
    """Guards as data.

    Raises:
        NotDataError: they have to do with what only this process has.
    """
    written, scope = Written(), graph.global_scope
    known: dict[tuple[int, str], int] = {}  # what several lines read is guarded once; the last of them is named
    for number, guard in enumerate(kept):
        condition = json.dumps(written.condition(guard.create_fn))
        known[written.source(guard.originating_source), condition] = number
    found = [(where, *json.loads(condition)) for where, condition in known]
    ordered = sorted(map(written.source, graph.guard_on_key_order))
    held = [(written.source(where), aspect) for where, aspect in looked_at]
    of_numbers = list(map(written.source, containers))
    modules, of_builtins = {}, graph.name_of_builtins_dict_key_in_fglobals
    for name in sorted(written.globals - {of_builtins}):
        module = scope.get(name)
        if not isinstance(module, ModuleType) or sys.modules.get(module.__name__) is not module:
            raise NotDataError
        modules[name] = module.__name__
    return {
        "sources": written.sources,
        "guards": found,
        "ordered": ordered,
        "modules": modules,
        "builtins": of_builtins,
        "conditions": [_conditions(kept[number]) for number in known.values()],
        "lines": [lines[number] for number in known.values()],
        "looked at": held,
        "containers": of_numbers,
        "lines of these": list(looked_at.values()),
    }


def _globals(document: Mapping[str, Any]) -> dict[str, Any]:
    """What global names of guards stand for. Modules are never imported for it: a model that is built has its own."""
    found: dict[str, Any] = {name: sys.modules[module] for name, module in document["modules"].items()}
    return found | ({document["builtins"]: vars(builtins)} if document["builtins"] else {})


def _conditions(guard: Guard) -> list[str]:
    """What a guard checks, without the identities of objects, which are others in every process."""
    texts = (_IDENTITY.sub(r"\1)", code) for code in guard.code_list or ())
    return list(dict.fromkeys(texts))  # dynamo writes them down anew whenever it makes what checks them
