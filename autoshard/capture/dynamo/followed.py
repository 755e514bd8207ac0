"""Python in models that dynamo does not follow by itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

from torch import nn
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.symbolic_convert import InstructionTranslatorBase
from torch._dynamo.variables import (
    ConstantVariable,
    GetAttrVariable,
    NumpyNdarrayVariable,
    TensorVariable,
    builtin,
    dicts,
    lists,
)
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.ctx_manager import CatchWarningsCtxManagerVariable
from torch._dynamo.variables.higher_order_ops import CheckpointHigherOrderVariable
from torch._dynamo.variables.misc import AutogradFunctionContextVariable

from ...errors import CaptureError
from ..by_numbers.representative import is_of_arguments
from ..examples import example, numbers_of_example
from ..lines import at, lines_in
from .readable import MODEL_SOURCE
from .variables import constant_of, stack_here

# What dynamo has for ``setattr``: a class of its own, or that of all functions of Python's.
_SETATTR: Any = getattr(builtin, "SetAttrBuiltinVariable", builtin.BuiltinVariable)

_CONVERTED = 3
"""The flags of ``{x!s}``, ``{x!r}`` and ``{x!a}``, which say of a tensor that it is one."""


@contextmanager
def leaves_within() -> Iterator[None]:
    """Has ``x.requires_grad = True`` of a tensor that the forward made, as checkpoints ask for, or of a buffer, as a
    loss of zero is one, do nothing more: nobody takes the gradient of such a tensor in a captured step. Dynamo refuses
    it, and what is so already.
    """
    set_attribute, set_in_place = _SETATTR.call_function, TensorVariable.method_requires_grad_

    def is_buffer(x: Any) -> bool:
        source = x.source.name if isinstance(x.source.name, str) else x.source.name()
        return MODEL_SOURCE in source and not isinstance(example(x.as_proxy().node), nn.Parameter)

    def is_done(x: Any, value: Any) -> bool:
        if not isinstance(x, TensorVariable) or not isinstance(value, bool):
            return False
        if value and (x.source is None or is_buffer(x)):
            x.requires_grad = True
            given = example(x.as_proxy().node)
            if given is not None and not given.requires_grad:  # what is made of it asks as in one process
                given.requires_grad_()
        return bool(x.requires_grad == value)

    def attribute(self: Any, tx: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        is_call = getattr(self, "fn", setattr) is setattr and len(args) == 3
        if is_call and constant_of(args[1]) == "requires_grad" and is_done(args[0].realize(), constant_of(args[2])):
            return ConstantVariable.create(None)
        return set_attribute(self, tx, args, kwargs)

    def in_place(self: Any, tx: Any, requires_grad: Any = True) -> Any:
        value = requires_grad if requires_grad is True else constant_of(requires_grad)
        return self if is_done(self, value) else set_in_place(self, tx, requires_grad)

    with (
        patch.object(_SETATTR, "call_function", attribute),
        patch.object(TensorVariable, "method_requires_grad_", in_place),
    ):
        yield


@contextmanager
def named_classes() -> Iterator[None]:
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
def older_names() -> Iterator[None]:
    """Has ``ctx.saved_variables`` be ``ctx.saved_tensors``, as it is in torch."""
    attribute = AutogradFunctionContextVariable.var_getattr

    def of_context(self: Any, tx: Any, name: str) -> Any:
        return attribute(self, tx, "saved_tensors" if name == "saved_variables" else name)

    with patch.object(AutogradFunctionContextVariable, "var_getattr", of_context):
        yield


@contextmanager
def indexed_by_tensors() -> Iterator[None]:
    """Has ``modules[k]`` and ``items[k]`` go by the number that a tensor holds: torch 2.11 refuses any tensor there."""
    index = builtin.BuiltinVariable.call_index

    def of_number(self: Any, tx: Any, given: Any) -> Any:
        return index(self, tx, given.call_method(tx, "item", [], {}) if given.is_tensor() else given)

    if hasattr(VariableTracker, "nb_index_impl"):
        yield
        return
    with patch.object(builtin.BuiltinVariable, "call_index", of_number):
        yield


@contextmanager
def numbers_in_text() -> Iterator[None]:
    """Has ``f"expert_{k}"`` say the number that a tensor holds, where that stands in the forward."""
    format_value = InstructionTranslatorBase._format_value

    def of_number(self: Any, spec: Any, flags: int) -> None:
        given = self.stack[-1].realize()
        node = given.as_proxy().node if isinstance(given, TensorVariable) and not flags & _CONVERTED else None
        numbers = numbers_of_example(node)
        if numbers is not None and not numbers.dim() and not is_of_arguments(example(node)):
            self.stack[-1] = ConstantVariable.create(numbers.item())
        format_value(self, spec, flags)

    with patch.object(InstructionTranslatorBase, "_format_value", of_number):
        yield


@contextmanager
def items_of_arrays() -> Iterator[None]:
    """Has ``int(np.sum(sizes))``, ``array.item()`` and ``range(array[0])`` take numbers out of tensors: those are
    numpy's arrays to dynamo.
    """
    method, function = NumpyNdarrayVariable.call_method, builtin.BuiltinVariable.call_function

    def of_array(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        call = TensorVariable.call_method if name == "item" else method
        return call(self, tx, name, args, kwargs)

    def number(tx: Any, given: Any) -> Any:
        given = given.realize()
        return given.call_method(tx, "item", [], {}) if isinstance(given, NumpyNdarrayVariable) else given

    def of_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        return function(self, tx, [number(tx, each) for each in args] if self.fn is range else args, kwargs)

    with (
        patch.object(NumpyNdarrayVariable, "call_method", of_array),
        patch.object(builtin.BuiltinVariable, "call_function", of_function),
    ):
        yield


@contextmanager
def unrecorded() -> Iterator[None]:
    """Refuses ``warnings.catch_warnings(record=True)``: as a traced forward warns of nothing, that list is empty."""
    create = CatchWarningsCtxManagerVariable.create

    def unless_recorded(tx: Any, given: dict[str, Any]) -> Any:
        if "record" in given and constant_of(given["record"]):
            line = lines_in(stack_here())
            raise CaptureError(
                f"the forward records its own warnings (warnings.catch_warnings(record=True)){at(line)}, and a "
                "captured step warns of nothing; leave record=True out, or record them around the call of the model"
            )
        return create(tx, given)

    with patch.object(CatchWarningsCtxManagerVariable, "create", staticmethod(unless_recorded)):
        yield


@contextmanager
def attributes_asked_for() -> Iterator[None]:
    """Has ``"name" in vars(module)``, and which names there are (``len(vars(config))``, ``f(**vars(config))``), hold
    for the capture alone that found it so: dynamo guards on what it finds in the dict of an object, and not on what it
    does not find there.
    """
    of_objects = getattr(dicts, "DunderDictVariable", None)
    if of_objects is None:
        with _absent_in_2_11():
            yield
        return
    method, kind = of_objects.call_method, dicts.ConstDictVariable

    def and_keys(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        if name == "copy":
            kind.install_dict_keys_match_guard(self)
        return method(self, tx, name, args, kwargs)

    with (
        patch.object(of_objects, "install_dict_contains_guard", kind.install_dict_contains_guard),
        patch.object(of_objects, "install_dict_keys_match_guard", kind.install_dict_keys_match_guard),
        patch.object(of_objects, "call_method", and_keys),
    ):
        yield


@contextmanager
def reentrant_cut_off() -> Iterator[None]:
    """Refuses a reentrant checkpoint of parameters none of whose tensors wants a gradient: torch gives these parameters
    none then, and dynamo knows no difference.
    """
    name = "_call_function" if hasattr(CheckpointHigherOrderVariable, "_call_function") else "call_function"
    call = getattr(CheckpointHigherOrderVariable, name)

    def and_looked_at(self: Any, tx: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        is_reentrant = "use_reentrant" in kwargs and constant_of(kwargs["use_reentrant"]) is True
        wanted = any(isinstance(each, TensorVariable) and each.requires_grad for each in args[1:])
        made = call(self, tx, args, kwargs)
        if is_reentrant and not wanted:
            VariableTracker.visit(refuse, made)
        return made

    def refuse(made: VariableTracker) -> None:
        if isinstance(made, TensorVariable) and made.requires_grad:
            line = lines_in(stack_here())
            raise CaptureError(
                f"a reentrant checkpoint{at(line)} is given no tensor that wants a gradient, so that torch would train "
                "nothing in it; call torch.utils.checkpoint with use_reentrant=False, or give it a tensor that does"
            )

    with patch.object(CheckpointHigherOrderVariable, name, and_looked_at):
        yield


@contextmanager
def keys_listed() -> Iterator[None]:
    """Has ``[*table]`` hold for the keys that a dict has, in their order: dynamo does not guard on them there."""
    method = lists.CommonListMethodsVariable.call_method

    def and_guarded(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        given = args[0].realize() if name == "extend" and args else None
        if isinstance(given, dicts.ConstDictVariable) and given.source is not None:
            given.install_dict_keys_match_guard()
            tx.output.guard_on_key_order.add(given.source)
        return method(self, tx, name, args, kwargs)

    with patch.object(lists.CommonListMethodsVariable, "call_method", and_guarded):
        yield


@contextmanager
def _absent_in_2_11() -> Iterator[None]:
    """The same for torch 2.11, which asks the object itself."""
    method = GetAttrVariable.call_method

    def and_guarded(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        found, owner = method(self, tx, name, args, kwargs), getattr(self.obj, "value", None)
        key = constant_of(args[0]) if self.name == "__dict__" and name in ("__contains__", "get") and args else None
        if isinstance(key, str) and self.obj.source is not None and key not in getattr(owner, "__dict__", (key,)):
            install_guard(self.obj.source.make_guard(partial(GuardBuilder.NOT_PRESENT_IN_GENERIC_DICT, attr=key)))
        return found

    with patch.object(GetAttrVariable, "call_method", and_guarded):
        yield
