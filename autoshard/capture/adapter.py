"""The private torch APIs that capture needs, but for dynamo's, which are in ``dynamo/`` (torch 2.11 to 2.13).

``trace`` turns a model on fake tensors into one joint forward and backward FX graph. Source of the recipe: torch's own
``aot_export_joint_with_descriptors`` (torch/_functorch/aot_autograd.py).
"""

from __future__ import annotations

import logging
import random
import warnings
import weakref
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass
from functools import partial
from io import StringIO
from typing import Any, ClassVar, NamedTuple
from unittest.mock import patch

import torch
import torch._functorch.config as functorch_config
import torch.nn.functional as F
from torch import fx, nn
from torch._decomp import decompositions as torchs_decompositions
from torch._decomp import get_decompositions
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._library import simple_registry
from torch._library.effects import EffectType
from torch._subclasses import fake_impls, fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.modules import transformer
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map
from torch.utils.checkpoint import CheckpointPolicy

from ..errors import CaptureError
from .addends import add_products_first
from .annotation import marking
from .by_numbers.adaptive_softmax import adaptive_log_softmax
from .by_numbers.known_numbers import (
    MADE_OF_NOTHING,
    decided_by_numbers,
    refuse_what_numbers_size,
    write_down_what_is_known,
)
from .by_numbers.representative import (
    MOST,
    any_representative,
    is_of_arguments,
    is_representative,
    numbers_of,
    of_arguments,
)
from .by_numbers.sorted_rows import in_their_own_order
from .by_numbers.unvalidated import check_tensor_all_with, gaussian_nll_loss, is_said_to_be_causal
from .contained import exchange, exchange_keys
from .dynamo.asked_of_tensors import real_objects
from .dynamo.compiling import Asked, as_in_one_process
from .dynamo.dynamo_errors import BACKWARD_OF
from .dynamo.guards import Guards
from .dynamo.observed import MODEL
from .dynamo.tracing import look_functions_up
from .dynamo.what_decides import note_decided
from .examples import is_number
from .forward import forward_of
from .graph import Mark, SameTensor
from .joined_pieces import take_pieces_themselves
from .operators.constant import LARGEST
from .operators.ctc import fake_ctc_loss
from .operators.grouped_products import fake_grouped_mm
from .operators.margins import multilabel_margin_loss
from .operators.picked import of_rows
from .taken_apart.recurrent import one_direction

aten = torch.ops.aten

# Losses divide by the number of targets. As sums and counts of the whole batch they add up exactly when it is cut.
_DECOMPOSED = [
    aten.nll_loss_forward,
    aten.nll_loss_backward,
    aten.nll_loss2d_forward,
    aten.nll_loss2d_backward,
    aten.mse_loss,
    aten.mse_loss_backward,
    aten.smooth_l1_loss,
    aten.smooth_l1_loss_backward,
    aten.huber_loss,
    aten.huber_loss_backward,
    aten.soft_margin_loss,
    aten.soft_margin_loss_backward,
    aten.binary_cross_entropy,
    aten.binary_cross_entropy_backward,
    aten.binary_cross_entropy_with_logits,
    aten.affine_grid_generator,
    aten.aminmax,
    aten.addr,
]


@dataclass(frozen=True, eq=False)
class Trace:
    """The joint graph, with a descriptor ``(kind, detail)`` for each placeholder and each output.

    Kinds of placeholder: parameter (FQN), buffer (FQN), input (position), tangent (position), state tangent (FQN),
    token.
    Kinds of output: output (position), gradient (FQN), mutation (FQN of a buffer, which is written in place),
    replacement (FQN of a buffer, which stands for another tensor afterwards), parameter mutation (FQN), input mutation
    (position), effect (of an operator that does more than compute), none.

    ``same`` are the results that are no new tensors, by position; an input among them is named by its own position.
    ``guards`` are the conditions on Python state under which the model does what the graph does, if they were asked
    for; ``names`` are those of functions and attributes that the model's own code uses, ``reads`` those of attributes
    that the forward has read. Where it ``has_custom_backward``, a ``torch.autograd.Function`` is in it.
    ``batch_dim`` is the dim of the batch in the arguments. ``left`` are the attributes in which the model leaves
    tensors, and the result is then a pair (:class:`~.forward.Forward`).
    """

    graph: torch.fx.Graph
    placeholders: tuple[tuple[str, Any], ...]
    outputs: tuple[tuple[str, Any], ...]
    same: dict[int, SameTensor]
    out_spec: TreeSpec
    guards: Guards | None
    names: frozenset[str]
    reads: frozenset[str]
    has_custom_backward: bool
    batch_dim: int
    left: tuple[str, ...]


def trace(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], guarded: bool, dtype: torch.dtype | None = None
) -> Trace:
    """Captures one joint graph of a model. Its parameters, and the tensors in args and kwargs, may be on any device.

    The model is left as it was; no memory is allocated for its tensors. A forward that asks whether it is compiled is
    told that it is not, as in one process; where it cannot be traced so, it is traced once more and told that it is.

    Args:
        dtype: what floating parameters and arguments are cast to before the model is called; None for as they are.

    Raises:
        CaptureError: the forward does something that no graph can hold.
    """
    asked = Asked()
    try:
        with as_in_one_process(asked):
            return _traced_by_numbers(model, args, kwargs, guarded, dtype, asked)
    except Exception:
        if not asked.is_so:
            raise
    return _traced_by_numbers(model, args, kwargs, guarded, dtype, Asked())


def _traced_by_numbers(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    guarded: bool,
    dtype: torch.dtype | None,
    asked: Asked,
) -> Trace:
    """Where numbers in tensors decide what the forward does, it is traced once more with those known that are made of
    no argument, or of representative ones, unless it has asked: told the truth, it may look at none. Where any are
    representative, that is tried whatever torch says: a list of unknown numbers fails in many ways (``sorted``).
    """
    try:
        return _traced(_Faker(FakeTensorMode(), dtype), model, args, kwargs, guarded)
    except Exception as error:
        is_torchs = not isinstance(error, CaptureError) and any_representative(model, args, kwargs)
        if asked.is_so or not (is_torchs or decided_by_numbers(error)):
            raise
    large: list[int] = []
    try:
        return _traced_knowing(type("_Knowing", (_KnowingMode,), {"large": large}), model, args, kwargs, guarded, dtype)
    except Exception as error:
        if not large or not decided_by_numbers(error):
            raise
    return _traced_knowing(_KnowingMost, model, args, kwargs, guarded, dtype)


def _traced_knowing(
    kind: type[_KnowingMode],
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    guarded: bool,
    dtype: torch.dtype | None,
) -> Trace:
    with patch.object(torch._subclasses, "FakeTensorMode", kind):  # of which dynamo makes one of its own
        return _traced(_Faker(kind(), dtype), model, args, kwargs, guarded)


def _traced(faker: _Faker, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], guarded: bool) -> Trace:
    is_knowing = isinstance(faker.mode, _KnowingMode)
    is_told = any_representative(model, args, kwargs)
    knows_most = isinstance(faker.mode, _KnowingMost) or (is_knowing and is_told)
    with _traceable(model, faker, MOST if knows_most else LARGEST), ExitStack() as stack:
        fake_args, fake_kwargs = tree_map(faker.argument, (args, kwargs))
        with real_objects(faker.numbers()):
            forward = forward_of(model, fake_args, fake_kwargs)
        fake_args, fake_kwargs = tree_map(_known_to_aot, (fake_args, fake_kwargs))
        ours = {aten.index_put.default: _put_where, aten.bincount.default: _counts, **_FILLED, **_PICKED}
        decompositions: Any = {**get_decompositions(_DECOMPOSED), **ours}
        stack.enter_context(_errors_kept())
        # the backward is called outside of autocast
        stack.enter_context(functorch_config.patch({"backward_pass_autocast": "off"}))
        stack.enter_context(_line_in_backward())
        joint = aot_export_joint_with_descriptors(
            stack, forward.module, fake_args, fake_kwargs or None, decompositions=decompositions
        )
    graph = joint.graph_module.graph
    given = dict(enumerate(tree_leaves((args, kwargs)))) | dict(model.named_buffers(remove_duplicate=False))
    write_down_what_is_known(graph, dict(_told(graph, given)) if knows_most else {})
    if knows_most:
        refuse_what_numbers_size(graph)
    in_their_own_order(graph)
    take_pieces_themselves(graph)
    add_products_first(graph)
    _let_parameters_go(graph, {name for name, _ in model.named_parameters(remove_duplicate=False)})
    placeholders = tuple(_placeholder(node.meta["desc"]) for node in graph.nodes if node.op == "placeholder")
    kinds: dict[int, tuple[str, Any]] = {k: ("output", k) for k in range(forward.results)}
    kinds |= {forward.results + k: ("replacement", name) for k, name in enumerate(forward.replaced)}
    outputs = tuple(_output(desc, kinds) for desc in tree_flatten(graph.output_node().meta["desc"])[0])
    found = forward.found
    guards = found.guards() if guarded else None
    return Trace(
        graph=graph,
        placeholders=placeholders,
        outputs=outputs,
        same=forward.same,
        out_spec=forward.out_spec,
        guards=guards,
        names=found.names,
        reads=found.reads(),
        has_custom_backward=forward.has_custom_backward,
        batch_dim=forward.batch_dim,
        left=forward.left,
    )


def _told(graph: torch.fx.Graph, given: Mapping[int | str, Any]) -> Iterator[tuple[torch.fx.Node, torch.Tensor]]:
    """The inputs of a graph that are representative, arguments by position and buffers by name, with their numbers."""
    for node in graph.find_nodes(op="placeholder"):
        kind, key = _placeholder(node.meta["desc"])
        if kind in ("input", "buffer") and is_representative(given[key]):
            yield node, numbers_of(given[key], node.meta["val"].dtype)


See = Callable[[torch._ops.OpOverload, tuple[Any, ...], dict[str, Any], Any], None]


def run_on_fakes(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    see: Callable[[Any], See],
    dtype: torch.dtype | None = None,
) -> Any:
    """Calls a model as its Python is, with tensors that have no memory, and returns its result. Where arguments are
    representative, it may look at the numbers of these.

    Args:
        see: is given the leaves of the arguments; what it returns is told every operator that runs, with its arguments
            and results.
        dtype: as for :func:`trace`.
    """
    is_told = any_representative(model, args, kwargs)
    kind = _KnowingMost if is_told else FakeTensorMode
    # a module of the model's may keep tensors of a call that was made before, in a cache of a function
    faker = _Faker(kind(allow_non_fake_inputs=True), dtype)
    with _traceable(model, faker, MOST if is_told else LARGEST), _silent(), _tensors_of_fakes():
        fake_args, fake_kwargs = tree_map(faker.argument, (args, kwargs))
        with faker.mode, _Watch(see(tree_flatten((fake_args, fake_kwargs))[0]), FakeResults(faker.mode)):
            return model(*fake_args, **fake_kwargs)


@contextmanager
def _tensors_of_fakes() -> Iterator[None]:
    """Has ``torch.tensor([a, b])`` make one of tensors without memory, as it does while dynamo traces."""
    make = torch.tensor

    def tensor(data: Any, **options: Any) -> torch.Tensor:
        has_none = isinstance(data, (list, tuple)) and any(isinstance(each, FakeTensor) for each in tree_leaves(data))
        return torch._refs.tensor(data, **options) if has_none else make(data, **options)

    with patch.object(torch, "tensor", tensor):
        yield


@contextmanager
def hooks_into(found: list[Any]) -> Iterator[None]:
    """Adds to a list each hook that a forward gives the gradient of a tensor."""
    register = torch.Tensor.register_hook

    def hooked(tensor: torch.Tensor, hook: Any) -> Any:
        found.append(hook)
        return register(tensor, hook)

    with patch.object(torch.Tensor, "register_hook", hooked):
        yield


class UsersBackward(NamedTuple):
    """A user's ``torch.autograd.Function``, and what its forward has set on its ``ctx``."""

    function: type[torch.autograd.Function]
    context: dict[str, Any]


def made_by(tensor: torch.Tensor) -> UsersBackward | None:
    """The user's function whose backward the gradient of a tensor goes through next."""
    step: Any = tensor.grad_fn
    if not isinstance(step, torch.autograd.function.BackwardCFunction):
        return None
    found: type[torch.autograd.Function] = type(step)._forward_cls  # type: ignore[attr-defined]
    return None if found.__module__.startswith("torch.") else UsersBackward(found, vars(step))


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor is none of those that a model is run on without memory."""
    return not isinstance(tensor, FakeTensor)


def written_down(tensor: torch.Tensor) -> tuple[object, ...] | None:
    """The numbers of a tensor that a forward has made of Python's, ``torch.tensor(3)`` or the index ``[-2]``, as far as
    one can tell: of a small one that has memory. None of any other.
    """
    if type(tensor) is not torch.Tensor or tensor.numel() > LARGEST or tensor.requires_grad or not tensor.is_cpu:
        return None
    with no_dispatch():
        return tuple(tensor.flatten().tolist())


class _Watch(TorchDispatchMode):
    def __init__(self, see: See, results: FakeResults) -> None:
        super().__init__()
        self._see, self._results = see, results

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # two of three calls: autograd asks every tensor, which runs no operator
        result = self._results.of(func, args, kwargs or {})
        self._see(func, args, kwargs or {}, result)
        return result


@dataclass(frozen=True)
class _Made:
    """A tensor without memory that an operator makes: a new one, or a view of the argument numbered ``viewed``."""

    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    viewed: int | None


_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


class FakeResults:
    """What operators make of tensors without memory. Torch is asked once for each operator on arguments that look the
    same: blocks that are alike are most of a model, and looking it up in torch's own cache takes five times as long.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._known: dict[Hashable, tuple[type, tuple[_Made, ...]]] = {}

    def of(self, op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of an operator."""
        given: list[FakeTensor] = []
        modes = torch.get_default_dtype(), torch.is_inference_mode_enabled()
        looks = self._look((args, tuple(kwargs.items())), given)
        if looks is None:
            return op(*args, **kwargs)
        key = op, looks, modes
        if key not in self._known:
            result = op(*args, **kwargs)
            made = self._described(op, result, given)
            if made is not None:
                self._known[key] = type(result), made
            return result
        kind, made = self._known[key]
        if kind is FakeTensor:
            return self._again(made[0], given)
        return kind(self._again(each, given) for each in made)

    def _look(self, value: Any, given: list[FakeTensor]) -> Hashable:
        """How an argument looks, None where that does not say what is made of it; its tensors are added to given."""
        kind = type(value)
        if kind is FakeTensor:
            if not _is_ordinary(value, self._mode):
                return None
            given.append(value)
            # beyond the memory of its argument no view may reach
            memory = value.untyped_storage().nbytes()
            return value.shape, value.stride(), value.storage_offset(), value.dtype, value.fake_device, memory
        if kind is tuple or kind is list:
            looks = tuple([self._look(each, given) for each in value])
            return None if None in looks else (kind, looks)
        return (kind, value) if kind in _PLAIN else None

    def _described(
        self, op: torch._ops.OpOverload, result: Any, given: Sequence[FakeTensor]
    ) -> tuple[_Made, ...] | None:
        """What an operator made, None where it does more or may make another thing next time."""
        made = result if type(result) in (tuple, list) else (result,)
        if op.namespace != "aten" or op._schema.is_mutable:
            return None
        if not all(type(tensor) is FakeTensor and _is_ordinary(tensor, self._mode) for tensor in made):
            return None
        if any(tensor is argument for tensor in made for argument in given):
            return None
        places = {storage_of(tensor): number for number, tensor in enumerate(given)}
        new = [tensor for tensor in made if storage_of(tensor) not in places]
        if len(set(map(storage_of, new))) < len(new) or any(tensor.storage_offset() for tensor in new):
            return None
        return tuple(
            _Made(
                *(tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.fake_device),
                places.get(storage_of(tensor)),
            )
            for tensor in made
        )

    def _again(self, made: _Made, given: Sequence[FakeTensor]) -> FakeTensor:
        if made.viewed is None:
            return _fake(self._mode, made.shape, made.stride, made.dtype, made.device)
        storage = given[made.viewed].untyped_storage()
        with torch._C._DisableTorchDispatch():
            view = torch.empty(0, dtype=made.dtype, device="meta").set_(storage, made.offset, made.shape, made.stride)
        return FakeTensor(self._mode, view, made.device)


class _KnowingMode(FakeTensorMode):
    """Knows the numbers of tensors that are made of no other, as by ``arange``, too, and what is computed of them; and
    of the arguments that have some. Dynamo's graph says where Python took one of them. ``large`` are the sizes of the
    tensors that only one that knows ``MOST`` would know, or would not write down.
    """

    knows_numbers = True
    most = LARGEST
    large: ClassVar[list[int]] = []
    _has_arguments = False

    def know(self, made: Any, numbers: torch.Tensor) -> None:
        """Notes the numbers of an argument."""
        made.constant, self._has_arguments = numbers, True
        self.fake_tensor_converter.add_constant_storage_mapping(made)
        of_arguments(made)

    def from_tensor(self, tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        made: Any = super().from_tensor(tensor, *args, **options)
        if is_of_arguments(tensor) and tensor.constant is not None:  # type: ignore[attr-defined]
            with no_dispatch():  # a trace may write into a buffer
                self.know(made, tensor.constant.clone())  # type: ignore[attr-defined]
        return made

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.masked_select.default and is_of_arguments(args[1]) and args[0].shape == args[1].shape:
            func, args = aten.index.Tensor, (args[0], [args[1]])  # of which the size is known
        are_known = _are_known(args, kwargs)  # of which torch forgets some where it makes one that is too large
        made: Any = super().dispatch(func, types, args, kwargs)
        if self._has_arguments and (given := list(filter(is_of_arguments, tree_leaves((args, kwargs))))):
            _note_what_decides(func, args, given, made)
            for each in tree_leaves(made):
                if type(each) is FakeTensor and each.constant is not None:
                    of_arguments(each)
        if type(made) is not FakeTensor or any(type(length) is not int for length in made.shape):
            return made
        is_new = func in MADE_OF_NOTHING and not any(map(is_number, tree_leaves(args)))
        if is_new and made.numel() <= self.most:
            with no_dispatch():
                made.constant = func(*args, **{**(kwargs or {}), "device": torch.device("cpu")})
            self.fake_tensor_converter.add_constant_storage_mapping(made)
        if made.numel() >= LARGEST and (is_new or are_known):
            self._note_large(made)
        return made

    def _note_large(self, made: FakeTensor) -> None:
        if self.most == LARGEST:
            self.large.append(made.numel())
        elif made.constant is not None:  # too large to be written down: each step looks at what it decides
            self._has_arguments = True
            of_arguments(made)


class _KnowingMost(_KnowingMode):
    """Knows numbers of larger tensors, too."""

    most = MOST


def _are_known(args: Any, kwargs: Any) -> bool:
    """Whether the numbers of all tensors among arguments are known, and there are any."""
    tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
    return bool(tensors) and all(getattr(each, "constant", None) is not None for each in tensors)


def _note_what_decides(func: Any, args: tuple[Any, ...], given: Sequence[Any], made: Any) -> None:
    """Notes which numbers of representative arguments an operator turns into a Python number, or a shape."""
    if func is aten._local_scalar_dense.default and type(made) in (bool, int, float):
        note_decided(args[0], "number", [made])
        return
    if func is aten.nonzero.default:
        masks = [args[0]]
    elif func is aten.index.Tensor:
        masks = [index for index in args[1] if index is not None and index.dtype in (torch.bool, torch.uint8)]
    else:
        for each in given if torch.Tag.dynamic_output_shape in func.tags else ():
            note_decided(each, "numbers", each.constant.double().flatten().tolist())
        return
    for mask in filter(is_of_arguments, masks):
        with no_dispatch():
            note_decided(mask, "count", [int(mask.constant.count_nonzero())])


def _is_ordinary(tensor: FakeTensor, mode: FakeTensorMode) -> bool:
    """Whether shape, strides and dtype tell all of a tensor: it has no value, and is no conjugate or negative view."""
    if tensor.fake_mode is not mode or tensor.constant is not None or tensor.layout is not torch.strided:
        return False
    return not tensor.is_conj() and not tensor.is_neg()


def _fake(
    mode: FakeTensorMode, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device
) -> FakeTensor:
    """A tensor without memory; asking the mode for one takes five times as long."""
    with torch._C._DisableTorchDispatch():
        return FakeTensor(mode, torch.empty_strided(size, stride, dtype=dtype, device="meta"), device)


def _put_where(x: torch.Tensor, indices: list[Any], values: torch.Tensor, accumulate: bool = False) -> Any:
    """``x[mask] = 0.0`` as a choice between two tensors, which can be cut as they are; other writes stay."""
    mask = indices[0]
    if len(indices) > 1 or accumulate or values.numel() != 1 or mask is None or mask.dtype is not torch.bool:
        return NotImplemented
    mask = mask.reshape(*mask.shape, *(1 for _ in range(x.dim() - mask.dim())))
    return torch.where(mask, values.reshape(()), x)


def _counts(x: torch.Tensor, weights: torch.Tensor | None = None, minlength: int = 0) -> Any:
    """``torch.bincount`` of numbers below ``minlength``: as many counts. Of larger ones there would be more, and a step
    raises an error.
    """
    if not minlength:
        return NotImplemented
    added = x.new_ones(x.shape, dtype=torch.int64) if weights is None else weights.to(_counted_in(weights))
    return added.new_zeros(minlength).scatter_add(0, x.long(), added)


def _counts_alone(mode: FakeTensorMode, func: Any, x: Any, weights: Any = None, minlength: int = 0) -> Any:
    """What that gives of tensors without memory; torch does not know how many counts there are."""
    if not minlength:
        return _COUNTED(mode, func, x, weights, minlength)
    return x.new_empty(minlength, dtype=torch.int64 if weights is None else _counted_in(weights))


def _counted_in(weights: torch.Tensor) -> torch.dtype:
    return torch.float32 if weights.dtype == torch.float32 else torch.float64


_COUNTED = fake_impls.op_implementations_dict[aten.bincount.default]


def _zeros(x: torch.Tensor, size: Any, **options: Any) -> Any:
    """A tensor of zeros is of the dtype of another, and needs nothing else of it: any rank can make any block."""
    return _filled(x, size, 0, **options)


def _ones(x: torch.Tensor, size: Any, **options: Any) -> Any:
    return _filled(x, size, 1, **options)


def _filled(x: torch.Tensor, size: Any, value: Any, **options: Any) -> Any:
    given = {key: option for key, option in options.items() if option is not None}
    return aten.full.default(size, value, **{"dtype": x.dtype, "device": x.device, **given})


_PICKED = {op: of_rows(op) for op in (aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)}
_FILLED = {aten.new_zeros.default: _zeros, aten.new_ones.default: _ones, aten.new_full.default: _filled}


def mark_of(node: torch.fx.Node) -> Mark | None:
    """What ``torch.utils.checkpoint`` around an operator says of it (torch's partitioner reads the same)."""
    policy = node.meta.get("recompute")
    if policy is None:
        return None
    return Mark(node.meta["ac_graph_id"], policy in (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE))


def _known_to_aot(leaf: Any) -> Any:
    """An argument of the model as torch's ahead-of-time capture takes it. Values of other types (a dtype, a complex
    number) are constants of the graph already.
    """
    return leaf if isinstance(leaf, torch.Tensor | int | float | str | None) else None


@contextmanager
def _traceable(model: nn.Module, faker: _Faker, most: int = LARGEST) -> Iterator[None]:
    """Has a model run on tensors without memory, and look at no numbers that it need not look at; ``most`` elements are
    computed with where numbers are known. What it draws in Python is drawn again afterwards.
    """
    drawn = random.getstate()
    try:
        with (
            faker.fake_module(model),
            marking(),
            _same_modes(),
            _unvalidated(),
            _operator_by_operator(),
            _said_once(),
            _recurrent_at_once(),
            _constants_known(most),
        ):
            yield
    finally:
        random.setstate(drawn)


@contextmanager
def _same_modes() -> Iterator[None]:
    """Keeps the modes of torch that a traced forward may set.

    Raises:
        CaptureError: it sets the default dtype.
    """
    dtype = torch.get_default_dtype()
    with torch.set_grad_enabled(torch.is_grad_enabled()):
        yield
    if torch.get_default_dtype() != dtype:
        torch.set_default_dtype(dtype)
        raise CaptureError("the forward sets torch's default dtype; set it outside, or give each tensor its dtype")


@contextmanager
def _left_as_it_is(*args: Any, **kwargs: Any) -> Iterator[None]:
    yield


@contextmanager
def _unvalidated() -> Iterator[None]:
    """Has ``torch.distributions`` and ``F.gaussian_nll_loss`` take their arguments as they are, and ``nn.Transformer``
    its masks: to validate them, or to find a mask causal, they look at their numbers. And has
    ``F.multilabel_margin_loss`` be what it is, and ``nn.AdaptiveLogSoftmaxWithLoss`` compute all rows. What is set of
    cuDNN for a part of a forward, which decides between kernels of one operator, is left out.
    """
    look_functions_up()
    distribution: Any = torch.distributions.Distribution
    before = distribution._validate_args
    distribution.set_default_validate_args(False)
    try:
        with (
            patch.object(F, "gaussian_nll_loss", gaussian_nll_loss),
            patch.object(F, "multilabel_margin_loss", multilabel_margin_loss),
            patch.object(nn.AdaptiveLogSoftmaxWithLoss, "forward", adaptive_log_softmax),
            patch.object(transformer, "_detect_is_causal_mask", is_said_to_be_causal),
            patch.object(torch, "_check_tensor_all_with", check_tensor_all_with),
            patch.object(torch.backends.cudnn, "flags", _left_as_it_is),
        ):
            yield
    finally:
        distribution.set_default_validate_args(before)


@contextmanager
def _operator_by_operator() -> Iterator[None]:
    """Has torch's encoder layers and attention call their operators in evaluation, too, and not one that is a whole
    layer, which could only run whole on every rank.
    """
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@contextmanager
def _constants_known(most: int) -> Iterator[None]:
    """Has torch know what is computed of tensors whose numbers are known, of up to so many elements: by itself it does
    of one element alone; and how many numbers there are at least which it counts.
    """
    with (
        patch.object(fake_tensor, "CONSTANT_NUMEL_LIMIT", most),
        patch.dict(
            fake_impls.op_implementations_dict,
            {
                aten.bincount.default: _counts_alone,
                aten._grouped_mm.default: fake_grouped_mm,
                aten._ctc_loss.Tensor: fake_ctc_loss,
                aten._ctc_loss.default: fake_ctc_loss,
            },
        ),
    ):
        yield


@contextmanager
def _errors_kept() -> Iterator[None]:
    """Has torch keep the operator that raises an error for some matrices; torch 2.11 and 2.12 left it out, silently."""
    held: Any = simple_registry.singleton.find("aten::_linalg_check_errors").effect
    before = held.effect
    held.register(EffectType.ORDERED)
    try:
        yield
    finally:
        held.register(before)


@contextmanager
def _line_in_backward() -> Iterator[None]:
    """Adds to an error in the backward of an operator where the forward calls that one: torch knows and only warns."""
    show, found = warnings.showwarning, list[str]()

    def unless_where(message: Warning | str, *args: Any, **kwargs: Any) -> None:
        if str(message).startswith(BACKWARD_OF):
            found.append(str(message))
        else:
            show(message, *args, **kwargs)

    with warnings.catch_warnings(), patch.object(warnings, "showwarning", unless_where):
        warnings.filterwarnings("always", message=BACKWARD_OF)
        try:
            yield
        except Exception as error:
            for each in found:
                error.add_note(each)
            raise


@contextmanager
def _recurrent_at_once() -> Iterator[None]:
    """Has torch ask for the shapes of a recurrent layer at once: it would run every step of it on tensors without
    memory, and torch 2.11 and 2.12 think that the last states of an LSTM have a dim more.
    """
    torchs: Any = torchs_decompositions
    modes = {torchs.gru_cell: "GRU", torch.tanh: "RNN_TANH", torch.relu: "RNN_RELU"}

    def lstm(x: Any, state: Any, weights: Any, has_biases: bool, reverse: bool = False) -> Any:
        outputs, last = one_direction("LSTM", x.transpose(0, 1), state, weights, has_biases, None, reverse)
        return outputs.transpose(0, 1), last

    def other(x: Any, state: Any, weights: Any, has_biases: bool, hidden_fn: Any, reverse: bool = False) -> Any:
        mode = modes[hidden_fn]
        outputs, last = one_direction(mode, x.transpose(0, 1), (state,), weights, has_biases, None, reverse)
        return outputs.transpose(0, 1), last[0]

    with (
        patch.object(torchs, "one_layer_lstm", lstm),
        patch.object(torchs, "one_layer_rnn", other),
        patch.object(torchs, "rnn_cell", lambda activation: activation),
    ):
        yield


@contextmanager
def _said_once() -> Iterator[None]:
    """Leaves out of torch's log the traceback of an operator that refuses its arguments: it is raised, too."""

    def is_news(record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith("failed while attempting to run meta")

    fake_tensor.log.addFilter(is_news)
    try:
        yield
    finally:
        fake_tensor.log.removeFilter(is_news)


@contextmanager
def _silent() -> Iterator[None]:
    """Has a forward that runs as its Python is print and warn of nothing: it would show tensors without memory."""
    with redirect_stdout(StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def global_hooks() -> list[Any]:
    """The hooks that torch calls for every module."""
    kinds = ("forward_pre", "forward", "backward_pre", "backward")
    return [hook for kind in kinds for hook in getattr(torch.nn.modules.module, f"_global_{kind}_hooks").values()]


def module_backward_hooks(module: nn.Module) -> list[Any]:
    """The hooks that the backward of a module calls."""
    return [*module._backward_hooks.values(), *module._backward_pre_hooks.values()]


def gradient_hooks(tensor: torch.Tensor) -> list[Any]:
    """The hooks that the gradient of a tensor goes through, or that are called once it has arrived."""
    return [*(tensor._backward_hooks or {}).values(), *(tensor._post_accumulate_grad_hooks or {}).values()]


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a dense block of numbers, and no class of its own with another meaning."""
    known = type(tensor) in (torch.Tensor, nn.Parameter) or isinstance(tensor, FakeTensor)
    return known and tensor.layout == torch.strided and not tensor.is_quantized and not tensor.is_nested


def storage_of(tensor: torch.Tensor) -> int:
    """A number for the memory that a tensor lies in, the same for all that share it."""
    return int(tensor.untyped_storage()._cdata)


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one storage have an element in common."""
    if a.element_size() != b.element_size():
        return bool(a.numel() and b.numel())
    with _disable_current_modes():
        taken = torch.zeros(a.untyped_storage().nbytes() // a.element_size(), dtype=torch.bool, device="cpu")
        taken.as_strided(a.size(), a.stride(), a.storage_offset()).fill_(True)
        return bool(taken.as_strided(b.size(), b.stride(), b.storage_offset()).any())


class _Faker:
    """Turns tensors into fake CPU tensors of the same shape: one for each distinct parameter or buffer, so that ties
    stay ties, and one for each argument, even where two arguments are one tensor: they need not be in another call.
    Arguments are contiguous, however the example lies in memory (``tokens[:, :-1]``): so are the shards of a call.
    Parameters and arguments that are floating are of ``dtype``, where there is one.
    """

    def __init__(self, mode: FakeTensorMode, dtype: torch.dtype | None) -> None:
        self.mode = mode
        self._dtype = dtype
        self._memo: dict[int, torch.Tensor] = {}

    def argument(self, value: Any) -> Any:
        """A fake for a tensor, which has the numbers of a representative one if the mode knows numbers; any other leaf
        as it is.
        """
        if not isinstance(value, torch.Tensor):
            return value
        made: Any = self._fake(value, self._cast(value), torch.empty(value.size(), device="meta").stride())
        self._tell(value, made)
        return made

    def _tell(self, value: torch.Tensor, made: torch.Tensor) -> None:
        if isinstance(self.mode, _KnowingMode) and is_representative(value):
            self.mode.know(made, numbers_of(value, made.dtype).contiguous())

    def _fake(self, value: torch.Tensor, dtype: torch.dtype, strides: tuple[int, ...]) -> torch.Tensor:
        """A tensor without memory, with what else somebody has noted on it, which a forward may ask for."""
        made = _fake(self.mode, value.size(), strides, dtype, torch.device("cpu"))
        if not is_representative(value):
            vars(made).update({key: noted for key, noted in vars(value).items() if not hasattr(made, key)})
        return made

    def _cast(self, value: torch.Tensor) -> torch.dtype:
        return self._dtype if self._dtype is not None and value.is_floating_point() else value.dtype

    def _held(self, value: torch.Tensor) -> torch.Tensor:
        if id(value) not in self._memo:
            is_parameter = isinstance(value, nn.Parameter)
            fake = self._fake(value, self._cast(value) if is_parameter else value.dtype, value.stride())
            if is_parameter:  # as ``nn.Parameter`` makes one, which calls an operator first
                fake.requires_grad_(value.requires_grad)._is_param = True
            else:
                self._tell(value, fake)
            self._memo[id(value)] = fake
        return self._memo[id(value)]

    def numbers(self) -> dict[int, int]:
        """``id`` of each tensor that has a fake, by that of the fake."""
        return {id(fake): number for number, fake in self._memo.items()}

    @contextmanager
    def fake_module(self, model: nn.Module) -> Iterator[None]:
        """Replaces parameters and buffers of a model by fake ones, in containers too, and puts the real ones back."""
        tables: list[dict[str, Any]] = [table for m in model.modules() for table in (m._parameters, m._buffers)]
        kept = [dict(table) for table in tables]
        held = [*model.parameters(), *model.buffers()]
        try:
            for table in tables:
                table.update({key: self._held(tensor) for key, tensor in table.items() if tensor is not None})
            with ExitStack() as stack:
                pairs = [(real, self._held(real)) for real in held]
                stack.callback(exchange_keys, model, [(fake, real) for real, fake in pairs])
                exchange_keys(model, pairs)
                stack.callback(exchange, model, exchange(model, pairs))
                for module in model.modules():
                    if isinstance(module, nn.RNNBase):
                        stack.enter_context(_flat_weights(module))
                yield
        finally:
            for table, real in zip(tables, kept):
                table.update(real)


@contextmanager
def _flat_weights(module: nn.RNNBase) -> Iterator[None]:
    """A recurrent module keeps a list of its weights, which its forward makes anew where they are others."""
    flat, refs = module._flat_weights, module._flat_weight_refs
    module._flat_weights = [getattr(module, name) for name in module._flat_weights_names]
    module._flat_weight_refs = [weakref.ref(weight) for weight in module._flat_weights if weight is not None]
    try:
        yield
    finally:
        module._flat_weights, module._flat_weight_refs = flat, refs


def _let_parameters_go(graph: torch.fx.Graph, names: Collection[str]) -> None:
    """Leaves out what torch adds to the gradient of a parameter that is written into: a gradient that its new value
    would get from elsewhere. A parameter is written into where no gradient flows, and gets its own.
    """
    for node in graph.find_nodes(op="placeholder"):
        kind, name = _placeholder(node.meta["desc"])
        if kind != "state tangent" or name not in names:
            continue
        for user in list(node.users):
            others = [given for given in user.all_input_nodes if given is not node]
            if user.target is aten.add.Tensor and len(others) == 1 and not user.kwargs:
                user.replace_all_uses_with(others[0])
                graph.erase_node(user)
            elif user.op == "output":
                user.args = tree_map(partial(_unless, node), user.args)


def _unless(node: fx.Node, value: Any) -> Any:
    return None if value is node else value


def _placeholder(desc: Any) -> tuple[str, Any]:
    match type(desc).__name__:
        case "ParamAOTInput":
            return "parameter", desc.target.removeprefix(MODEL)
        case "BufferAOTInput":
            return "buffer", desc.target.removeprefix(MODEL)
        case "PlainAOTInput":
            return "input", desc.idx
        case "TangentAOTInput":
            if type(desc.output).__name__ == "PlainAOTOutput":
                return "tangent", desc.output.idx
            return "state tangent", _output(desc.output, {})[1]
        case "ForwardTokenAOTInput" | "BackwardTokenAOTInput":
            return "token", desc.idx
    raise CaptureError(f"the captured graph has an input of a kind autoshard does not know: {desc}")


def _output(desc: Any, kinds: dict[int, tuple[str, Any]]) -> tuple[str, Any]:
    match type(desc).__name__:
        case "PlainAOTOutput":
            return kinds[desc.idx]
        case "GradAOTOutput":
            kind, detail = _placeholder(desc.grad_of)
            return ("gradient", detail) if kind == "parameter" else ("none", None)
        case "InputMutationAOTOutput":
            kind, detail = _placeholder(desc.mutated_input)
            return ("mutation" if kind == "buffer" else f"{kind} mutation"), detail
        case "ForwardTokenAOTOutput" | "BackwardTokenAOTOutput":
            return "effect", desc.idx
        case "NoneType":
            return "none", None
    raise CaptureError(f"the captured graph has a result of a kind autoshard does not know: {desc}")
