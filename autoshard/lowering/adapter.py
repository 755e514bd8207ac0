"""The private torch APIs that lowering needs, all in this file (torch 2.11 to 2.13)."""

from __future__ import annotations

import itertools
import re
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives  # registers torch.ops._c10d_functional
import torch.utils.checkpoint
from torch import fx
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import _state_dict_utils
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, _redistribute
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from ..capture import fake_grouped_mm
from ..mesh import TOGETHER

_c10d = torch.ops._c10d_functional

ALL_GATHER = _c10d.all_gather_into_tensor.default
REDUCE_SCATTER = _c10d.reduce_scatter_tensor.default
ALL_REDUCE = _c10d.all_reduce.default
ALL_REDUCE_IN_PLACE = _c10d.all_reduce_.default
ALL_TO_ALL = _c10d.all_to_all_single.default
WAIT = _c10d.wait_tensor.default
GROUPED_MM = torch.ops.aten._grouped_mm.default
_LOCAL = {WAIT, getattr(_c10d, "_wrap_tensor_autograd", _c10d.wait_tensor).default}  # bookkeeping: nothing is sent

# every functional collective torch has, by the name autoshard gives it; the name of the group is the last argument
COLLECTIVES = {
    ALL_GATHER: "all_gather",
    REDUCE_SCATTER: "reduce_scatter",
    ALL_REDUCE: "all_reduce",
    ALL_REDUCE_IN_PLACE: "all_reduce",
    ALL_TO_ALL: "all_to_all",
}


_Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]


def group_names(mesh: DeviceMesh, links: Iterable[str]) -> dict[str, str]:
    """The name of the process group along each mesh axis, or along several (``dp+tp``), as functional collectives take
    it. Groups along several are made where there are none yet: all ranks have to ask for the same ones.
    """
    return {link: _group_along(mesh, link).group_name for link in links}


_MADE: dict[int, dict[str, dist.ProcessGroup]] = {}
"""The groups along several axes that were made for a mesh, by its id while it is there."""


def _group_along(mesh: DeviceMesh, link: str) -> dist.ProcessGroup:
    axes = tuple(link.split(TOGETHER))
    if len(axes) == 1:
        return mesh.get_group(link)
    if id(mesh) not in _MADE:
        _MADE[id(mesh)] = {}
        weakref.finalize(mesh, _MADE.pop, id(mesh), None)
    made = _MADE[id(mesh)]
    if link not in made:
        name = f"autoshard {link}"
        made[link] = mesh[axes]._flatten(name).get_group()
        # a DTensor would take it for its own redistributions, and put blocks in wrong places where ranks do not rise
        mesh._get_root_mesh()._flatten_mapping.pop(name)
    return made[link]


def no_advice_on_flat_axes(mesh: DeviceMesh) -> None:
    """Keeps DTensor from advising, once a mesh and on every rank, to flatten axes, as it does where ``clip_grad_norm_``
    reduces over several of them. Users cannot follow it: a flat axis puts blocks in wrong places, see ``_group_along``.
    """
    dims = range(mesh.ndim)
    several = (subset for count in range(2, mesh.ndim + 1) for subset in itertools.combinations(dims, count))
    given: set[Any] = getattr(_redistribute, "_warned_flatten_issues", set())  # not all versions
    given.update((hash(mesh), subset, "no_flattened_mesh") for subset in several)


def links_of(mesh: DeviceMesh) -> dict[str, str]:
    """For the name of each process group along axes of a mesh, these axes: of those that :func:`group_names` gave."""
    links = (*(mesh.mesh_dim_names or ()), *_MADE.get(id(mesh), ()))
    return {group: link for link, group in group_names(mesh, links).items()}


@contextmanager
def without_values(device: torch.device, mode: FakeTensorMode | None = None) -> Iterator[None]:
    """Inside, tensors of a device are made, and operators run on them as they stand, without values. The device counts:
    for half types, a batch norm saves its statistics in other dtypes on a CPU than on the meta device. Tensors go
    together that were made in one ``mode``, which is a new one where none is given.
    """
    with (
        mode or FakeTensorMode(),
        torch.autocast(device.type, enabled=False),
        patch.dict(fake_impls.op_implementations_dict, {GROUPED_MM: fake_grouped_mm}),
    ):
        yield


def made_spec(
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    shape: torch.Size,
    stride: tuple[int, ...],
    dtype: torch.dtype,
) -> DTensorSpec:
    """What DTensors of a shape and placements have in common."""
    return DTensorSpec(mesh, placements, tensor_meta=TensorMeta(shape, stride, dtype))


def dtensor_of(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """What ``DTensor.from_local`` makes where no gradient goes through it, in a fortieth of its time: its class has
    dynamo step aside for an initialisation that does nothing.
    """
    if local.requires_grad and torch.is_grad_enabled():
        assert spec.tensor_meta is not None
        shape, stride, _ = spec.tensor_meta
        return DTensor.from_local(local, spec.mesh, spec.placements, run_check=False, shape=shape, stride=stride)
    return DTensor.__new__(DTensor, local.detach(), spec, requires_grad=False)


def in_equal_parts(dim: int, count: int) -> Placement:
    """The placement that cuts each of so many equal parts of a dim."""
    return _StridedShard(dim, split_factor=count)


def parts_of(placement: Placement) -> tuple[int, int] | None:
    """The dim and the number of its equal parts that are cut each, None of any other placement."""
    return (placement.dim, int(placement.split_factor)) if isinstance(placement, _StridedShard) else None


def cut_full_states_by(cut: Callable[[DTensor, torch.Tensor], DTensor | None]) -> None:
    """Has ``set_state_dict`` with full states cut a whole tensor like a DTensor by this function, unless it gives None.

    torch 2.13 gives a rank the block at its first index, also where it holds several.
    """
    module: Any = _state_dict_utils
    theirs = module._distribute_tensors

    def distribute(states: dict[str, Any], keys: list[str], *others: Any, **more: Any) -> None:
        for key in keys:
            state = states.get(key)
            if isinstance(state, tuple) and (made := cut(*state)) is not None:
                states[key] = made
        theirs(states, keys, *others, **more)

    module._distribute_tensors = distribute


def gather_parts() -> None:
    """Has torch 2.11 gather what is cut in parts, axis by axis, as later versions do; it raises an error."""
    module: Any = _redistribute
    if hasattr(module, "_StridedShardNotDecodableError"):
        return
    theirs = module._gen_transform_infos_non_cached

    def transforms(source: DTensorSpec, target: DTensorSpec, *options: Any, **more: Any) -> Any:
        try:
            return theirs(source, target, *options, **more)
        except ValueError:
            planner = module.get_redistribute_planner(source.device_mesh, source.tensor_meta)
            return planner.generate_greedy_transform_infos(source, target)

    module._gen_transform_infos_non_cached = transforms


def agree_on_infinities() -> None:
    """Has every rank know where ``torch.amp.GradScaler`` found an inf or NaN on another one, in its shard of gradients.
    Torch 2.13 asks the ranks along the mesh axes that cut the optimizer's first gradient, whatever cuts the others.
    """
    handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    handlers[torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default] = _unscale


def _unscale(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    gradients, found, scale = args
    op([local_of(gradient) for gradient in gradients], found, scale, **kwargs)
    specs = [spec for gradient in gradients if (spec := known_as(gradient)) is not None]
    cut = {(spec.mesh, k): None for spec in specs for k, p in enumerate(spec.placements) if not p.is_replicate()}
    for mesh, axis in cut:  # in the order of the optimizer's gradients, which all ranks have
        dist.all_reduce(found, dist.ReduceOp.MAX, mesh.get_group(axis))


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The shard of a DTensor, to which no gradient goes back; a plain tensor as it is."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def known_as(tensor: object) -> DTensorSpec | None:
    """What a DTensor says of itself: mesh, placements, shape and dtype, in an object that stays the same as long as
    they do; None for a plain tensor.
    """
    return tensor._spec if isinstance(tensor, DTensor) else None


class Remembered:
    """A parameter that is a DTensor, as it was at some time: what it says of itself, and the tensors that make it up.

    ``parameter.data = other`` replaces what torch keeps of a DTensor for its looks, and leaves its shard as it was.
    """

    def __init__(self, tensor: DTensor) -> None:
        self._spec = tensor._spec
        self._number = id(tensor)
        self._storage = tensor.untyped_storage()  # has no memory, and as long as it is here no other is at its place
        self._address = _address(tensor)
        self._local = weakref.ref(tensor._local_tensor)

    def __deepcopy__(self, memo: dict[int, Any]) -> Remembered:
        return self

    def is_as_it_was(self, tensor: DTensor) -> bool:
        """Whether a DTensor says what that one said, and has the same ``data``."""
        return tensor._spec is self._spec and _address(tensor) == self._address

    def has_other_data(self, tensor: DTensor) -> bool:
        """Whether this DTensor has been given other ``data``, which is not what a step computes with."""
        is_same = id(tensor) == self._number and tensor._local_tensor is self._local()
        return is_same and _address(tensor) != self._address


def next_to_step(optimizer: torch.optim.Optimizer, before: Callable[..., Any], after: Callable[..., Any]) -> None:
    """Has ``before`` be the last hook that is called before a step of an optimizer, and ``after`` the first behind it.
    To be called in a hook for all optimizers, which torch calls before the optimizer's own.
    """
    hooks: Any = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    ours = _NEXT.get(optimizer)
    if ours is None or any(number not in hooks[k] for k, number in enumerate(ours)):
        ours = optimizer.register_step_pre_hook(before).id, optimizer.register_step_post_hook(after).id
        _NEXT[optimizer] = ours
    hooks[0].move_to_end(ours[0])
    hooks[1].move_to_end(ours[1], last=False)


_NEXT: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[int, int]] = weakref.WeakKeyDictionary()


_address: Callable[[torch.Tensor], int] = torch._C._storage_address  # type: ignore[attr-defined]


def saved_tensors(folder: Path) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of every tensor in a folder of ``torch.distributed.checkpoint``."""
    import torch.distributed.checkpoint as dcp  # slow to load, and few need it
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    found = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    return {
        name: (tuple(entry.size), entry.properties.dtype)
        for name, entry in found.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def read_shards(folder: Path, state: dict[str, Any]) -> None:
    """Fills tensors, shards of DTensors above all, from such a folder; other ranks need not call it."""
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of being alone
        dcp.load(state, storage_reader=dcp.FileSystemReader(folder), no_dist=True)


def memory_of(tensor: torch.Tensor) -> int:
    """A number that tensors share that are in the same memory."""
    return int(tensor.untyped_storage()._cdata)


def is_collective(op: Any) -> bool:
    """Whether an operator makes ranks exchange something."""
    return getattr(op, "namespace", "") in ("_c10d_functional", "c10d", "_dtensor") and op not in _LOCAL


def broadcast(tensor: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Gives every rank of the mesh the values of its first rank: along one axis after the other, in place."""
    for axis in range(mesh.ndim):
        broadcast_along(tensor, mesh, axis)
    return tensor


def broadcast_along(tensor: torch.Tensor, mesh: DeviceMesh, axis: int) -> None:
    """Gives every rank along a mesh axis the values of the first one, in place."""
    group = mesh.get_group(axis)
    dist.broadcast(tensor, dist.get_global_rank(group, 0), group)


def maximum(tensor: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """The largest of the values of all ranks of the mesh, elementwise, on every rank: in place."""
    for axis in range(mesh.ndim):
        dist.all_reduce(tensor, dist.ReduceOp.MAX, mesh.get_group(axis))
    return tensor


@contextmanager
def unwatched() -> Iterator[None]:
    """Inside, no mode of torch's sees what runs: what ranks compare is no part of a step."""
    with _disable_current_modes():
        yield


def device_of(mesh: DeviceMesh) -> torch.device:
    """The device of this rank."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())


def default_generator(device: torch.device) -> torch.Generator:
    """What operators on a device draw from where they are given no generator."""
    if device.type == "cpu":
        return torch.default_generator
    generators: tuple[torch.Generator, ...] = torch.get_device_module(device.type).default_generators
    return generators[device.index]


Store = dist.Store


def job_store() -> tuple[Store, bool]:
    """The store of the job, and whether there are other ranks: those of torch's fake group are not there."""
    if dist.get_backend() == "fake":
        return dist.HashStore(), False
    return dist.distributed_c10d._get_default_store(), True


def timeout_s(store: Store) -> float:
    """How long the job waits for a rank that does not come: the timeout that ``init_process_group`` was given."""
    return float(store.timeout.total_seconds())  # type: ignore[attr-defined]  # torch's stubs lack it


def rank_in_job() -> int:
    """The number of this rank in the job."""
    return dist.get_rank()


ENOUGH_SAVED = torch.utils.checkpoint._StopRecomputationError
"""Ends a forward that activation checkpointing runs again, as soon as everything is saved: no failure."""


def collective_name(node: fx.Node) -> str | None:
    """The kind of the collective that a node of a local graph starts or waits for; None for any other node."""
    if node.op == "call_function" and node.target is WAIT:
        assert isinstance(node.args[0], fx.Node)
        node = node.args[0]
    return COLLECTIVES.get(node.target) if isinstance(node.target, torch._ops.OpOverload) else None


def is_connection_error(error: BaseException) -> bool:
    """Whether an exception says that other ranks cannot be reached: one of c10d, or gloo's plain ``RuntimeError``."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


_OPERATOR = re.compile(r" = torch\.ops\.(\w+)\.(\w+)\.(\w+)\(")


class BoxedCodeGen(fx.graph.CodeGen):
    """Makes a graph a function of one list, which it empties: no caller keeps alive what the graph is done with.

    Within the function, FX itself lets go of every value after its last use. Operators have names of their own: to
    look one up in ``torch.ops``, and to go through its Python, takes a good part of what a small operator takes.
    """

    def __init__(self) -> None:
        super().__init__()
        self._body_transformer = lambda lines: [_OPERATOR.sub(self._bound, line) for line in lines]
        self._operators: dict[str, Any] = {}

    def _bound(self, found: re.Match[str]) -> str:
        namespace, packet, overload = found.groups()
        name = f"_op_{namespace}_{packet}_{overload}"
        operator = getattr(getattr(getattr(torch.ops, namespace), packet), overload)._op
        self._operators[name] = partial(operator)  # FX would write out where in torch an operator itself is
        return f" = {name}("

    def additional_globals(self) -> list[tuple[str, Any]]:
        """See :class:`torch.fx.graph.CodeGen`, which asks for them once the code is written."""
        return list(self._operators.items())

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, **options: Any) -> str:
        """See :class:`torch.fx.graph.CodeGen`."""
        names = [variable.split(":")[0].strip() for variable in free_vars if variable != "self"]
        unpack = [f"    [{', '.join(names)}] = values"] if names else []
        return "\n".join((f"def forward(self, values){maybe_return_annotation}:", *unpack, "    values.clear()"))


CALL_HOOKS = (
    "_backward_pre_hooks",
    "_backward_hooks",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)
"""Where a module keeps the hooks that a call of it runs."""


def call_through(module: torch.nn.Module, function: Callable[..., Any]) -> None:
    """From here on, calling a module calls a function instead: where torch would call a module that ``compile()`` has
    compiled in place. Hooks, class and methods stay; a copy of the module is without it.
    """
    module.__dict__["_compiled_call_impl"] = function


_SAID = ("requires_grad", "grad_fn", "is_leaf", "shape", "ndim", "dtype", "device")
ASKED = tuple(vars(torch._C.TensorBase)[name].__get__ for name in _SAID)
"""What a class with a ``__torch_function__`` is told of where somebody asks for what tensors say of themselves."""


def without_torch_function() -> Any:
    """Inside, functions of torch take tensors of a class with a ``__torch_function__`` as any others."""
    return torch._C.DisableTorchFunctionSubclass()


def keeps_graph() -> bool:
    """Whether the backward that runs now was called with ``retain_graph=True``, so that another may follow."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def is_backward_running() -> bool:
    """Whether this is called from within a backward: what checkpointing does to make activations once more."""
    return bool(torch._C._current_graph_task_id() != -1)


def hooks_of(tensor: torch.Tensor) -> Mapping[int, Any]:
    """The functions that the caller wants called with the gradient of a tensor (``register_hook``); those that come
    later show in it too, once there is one.
    """
    return tensor._backward_hooks or {}


def will_run(tensor: torch.Tensor) -> bool:
    """Whether the backward that runs now comes to what made a tensor. One for some tensors' gradients only
    (``torch.autograd.grad``, or ``backward(inputs=...)``) comes to nothing that does not lead to them.
    """
    return bool(torch._C._will_engine_execute_node(cast(torch.autograd.graph.Node, tensor.grad_fn)))


def gets_gradient(parameter: torch.Tensor) -> bool:
    """Whether the backward that runs now puts a gradient into ``.grad`` of a leaf: one for some tensors' gradients only
    does for those of ``backward(inputs=...)``, and ``torch.autograd.grad`` for none.
    """
    try:
        return bool(torch._C._will_engine_execute_node(torch.autograd.graph.get_gradient_edge(parameter).node))
    except RuntimeError:  # what torch says of leaves within torch.autograd.grad
        return False


def saved_tensor_hooks() -> _Hooks | None:
    """The two hooks that the caller has set on what is saved for a backward: one that packs, one that unpacks."""
    return cast(_Hooks | None, torch._C._autograd._top_saved_tensors_default_hooks(True))


def is_transforming() -> bool:
    """Whether a transform of torch.func runs (vmap, grad, jvp and what is built of them), or a trace is made."""
    is_traced = torch.jit.is_tracing() or torch.compiler.is_exporting()
    return is_traced or bool(torch._C._are_functorch_transforms_active())


def is_batched(tensor: torch.Tensor) -> bool:
    """Whether a tensor stands for many, one for each turn of a vmap; gradients under ``is_grads_batched`` do."""
    functorch = torch._C._functorch
    return functorch.is_batchedtensor(tensor) or functorch.is_legacy_batchedtensor(tensor)


class _Watcher(TorchDispatchMode):
    def __init__(self, seen: list[tuple[Any, tuple[Any, ...], Any]]) -> None:
        super().__init__()
        self._seen = seen

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled functions run as without it."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if is_collective(func):
            self._seen.append((func, args, result))
        return result


_WATCHING: list[_Watcher] = []


@contextmanager
def watch(seen: list[tuple[Any, tuple[Any, ...], Any]]) -> Iterator[None]:
    """Appends (operator, arguments, result) of every collective that runs, forward and backward."""
    with _Watcher(seen) as watcher:
        _WATCHING.append(watcher)
        try:
            yield
        finally:
            _WATCHING.remove(watcher)


@contextmanager
def watched_inside() -> Iterator[None]:
    """Inside an operator of autoshard's: :func:`watch` sees what it runs, which torch keeps from a mode that has seen
    the operator itself.
    """
    with ExitStack() as stack:
        for watcher in _WATCHING:
            stack.enter_context(watcher)
        yield


class StorageWatch(TorchDispatchMode):
    """Counts the bytes of storages: those of some tensors, and those that operators make, until they are gone.

    The threads of gloo let go of a collective's buffers a moment after its wait has returned. A new peak is believed
    where it is one still GRACE_S after the last collective. Other backends have no such threads.
    """

    GRACE_S = 0.05
    MOMENT_S = 1e-3

    def __init__(self, held: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.used_bytes = self.peak_bytes = 0
        self.peak_operator = ""
        self._grace_s = self.GRACE_S if dist.is_initialized() and "gloo" in dist.get_backend_config() else 0.0
        self._settled_at_s = 0.0
        self._alive: dict[int, tuple[weakref.ref[Any], int]] = {}
        for tensor in held:
            self._see(tensor._local_tensor if isinstance(tensor, DTensor) else tensor)
        self.peak_bytes = self.used_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor first: what it runs on its shards comes back here
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._see(leaf)
        if is_collective(func) or func is WAIT:
            self._settled_at_s = time.monotonic() + self._grace_s
        while self.used_bytes > self.peak_bytes and time.monotonic() < self._settled_at_s:
            time.sleep(self.MOMENT_S)
        if self.used_bytes > self.peak_bytes:
            self.peak_bytes, self.peak_operator = self.used_bytes, str(func)
        return result

    def _see(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._alive:
            self._alive[key] = weakref.ref(storage, lambda _: self._forget(key)), storage.nbytes()
            self.used_bytes += storage.nbytes()

    def _forget(self, key: int) -> None:
        self.used_bytes -= self._alive.pop(key)[1]


def example_of(like: torch.Tensor) -> torch.Tensor:
    """A tensor for a compiler to look at: shape, strides and device of another one, whose values nobody reads."""
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)


def compiler_of_trace() -> Callable[..., Any]:
    """The backend of the ``torch.compile`` that dynamo traces for at this moment."""
    found: Any = torch._dynamo.symbolic_convert.InstructionTranslator.current_tx().output.compiler_fn
    while hasattr(found, "_torchdynamo_orig_backend"):  # each torch.compile wraps it anew
        found = found._torchdynamo_orig_backend
    return cast(Callable[..., Any], found)


def break_graph(why: str) -> None:
    """Ends the graph that ``torch.compile`` makes here; under ``fullgraph=True`` this is an error that says why."""
    torch._dynamo.graph_break(msg=why)
