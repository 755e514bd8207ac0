"""The module a job trains: DTensor parameters under their FQNs around a local program."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from ..capture import input_names
from ..errors import InputError
from ..layout import format_layout, local_shape
from ..plans import ShardingPlan, TensorEntry
from .adapter import device_of, keeps_graph
from .failure import Failures
from .placements import as_dtensor, placements_of
from .program import LocalProgram
from .shards import agree_on_replicas

# modules that do something else in training than in evaluation
_MODAL = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class ParallelModule(nn.Module):
    """Runs the local program of one rank; made by :func:`autoshard.parallelize`.

    Its submodules, parameters and buffers are those of the model it was made from, under the same FQNs; parameters are
    DTensors placed as planned, and so are their gradients. ``plan`` is the plan it runs.

    Call it with plain tensors, which are this rank's shards (:func:`autoshard.shard_inputs` cuts a full batch), or with
    DTensors. A scalar result comes back as a plain tensor, equal on all ranks; any other as a DTensor.

    A model that was on the meta device is filled after it was made; its first forward then gives all copies of a shard
    the values of the first copy, as random initialisation may have filled them differently.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: ShardingPlan,
        mesh: DeviceMesh,
        program: LocalProgram,
        constants: dict[str, Any],
        out_spec: TreeSpec,
        seed: int | None,
        failures: Failures,
    ) -> None:
        super().__init__()
        self._parameters, self._buffers, self._modules = model._parameters, model._buffers, model._modules
        self.training = model.training
        self.plan = plan
        self._mesh = mesh
        self._program = program
        self._failures = failures
        self._constants = constants
        self._out_spec = out_spec
        self._generator = None if seed is None else torch.Generator().manual_seed(seed)
        self._signature = [model]  # in a list, so that it is not registered as a submodule
        self._inputs = {entry.name: entry for entry in plan.inputs}
        self._was_meta = any(p.is_meta for p in model.parameters())
        self._captured_training = model.training
        self._depends_on_mode = program.is_random or any(isinstance(m, _MODAL) for m in model.modules())
        self._tables = dict(_tables(model))
        self._coordinate = tuple(mesh.get_coordinate() or ())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """One step's forward on this rank.

        Raises:
            InputError: arguments of another number, shape or dtype than the plan declares, or another mode (training or
                evaluation) than the model was captured in, where that makes a difference.
            JobError: another rank failed or ended.
        """
        with self._failures.telling("the forward"):
            return self._forward(args, kwargs)

    def _forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.training != self._captured_training and self._depends_on_mode:
            raise InputError(
                f"the model was captured in {_mode(self._captured_training)} mode, runs in {_mode(self.training)} mode "
                "and has dropout or batch norm; make another plan for that mode"
            )
        if self._was_meta:
            self._was_meta = False
            agree_on_replicas(self, self._mesh)
        given = self._local_inputs(args, kwargs)
        flat = [given[name] if name in given else self._held(name) for name in self._program.arguments]
        with self._same_draws():
            results = _Step.apply(self._program, self._failures, *flat)
        count = self._program.results
        results, updates = results[:count], results[count:]
        with torch.no_grad():
            for name, value in zip(self._program.mutated, updates):
                self._held(name).copy_(value)
        return tree_unflatten([self._wrap(k, value) for k, value in enumerate(results)], self._out_spec)

    def _held(self, name: str) -> torch.Tensor:
        """This rank's tensor of a parameter or buffer."""
        table, key = self._tables[name]
        tensor = table[key]
        return tensor.to_local(grad_placements=tensor.placements) if isinstance(tensor, DTensor) else tensor

    @contextmanager
    def _same_draws(self) -> Iterator[None]:
        """Makes all ranks draw the same random numbers in this step, and leaves the job's own generators alone."""
        if self._generator is None:
            yield
            return
        devices = [] if self._mesh.device_type == "cpu" else [device_of(self._mesh)]
        with torch.random.fork_rng(devices, device_type=self._mesh.device_type):
            torch.manual_seed(int(torch.randint(1 << 62, (), generator=self._generator)))
            yield

    def _local_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, torch.Tensor]:
        leaves, _ = tree_flatten((args, kwargs))
        named = dict(zip(input_names(self._signature[0], args, kwargs), leaves))
        tensors = {name: leaf for name, leaf in named.items() if isinstance(leaf, torch.Tensor)}
        if tensors.keys() != self._inputs.keys():
            raise InputError(
                f"the plan was made for the tensors {', '.join(self._inputs)}; this call has {', '.join(tensors)}"
            )
        changed = [n for n, leaf in named.items() if n in self._constants and leaf != self._constants[n]]
        if changed:
            raise InputError(
                f"{changed[0]} was {self._constants[changed[0]]!r} when the model was captured and is "
                f"{named[changed[0]]!r} now; make another plan for it"
            )
        return {name: self._local_input(self._inputs[name], tensor) for name, tensor in tensors.items()}

    def _local_input(self, entry: TensorEntry, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.requires_grad:
            raise InputError(f"{entry.name} requires a gradient, but the plan has none for inputs; detach it")
        if isinstance(tensor, DTensor):
            placements = placements_of(entry.layout)
            if tensor.shape != entry.shape or tuple(tensor.placements) != placements:
                raise InputError(
                    f"{entry.name} is a DTensor of shape {list(tensor.shape)} placed {tuple(tensor.placements)}; the "
                    f"plan wants {list(entry.shape)} placed {placements}: redistribute it first"
                )
            tensor = tensor.to_local()
        wanted = local_shape(entry.shape, entry.layout, self.plan.mesh, self._coordinate)
        if tuple(tensor.shape) != wanted:
            raise InputError(self._wrong_shape(entry, tensor, wanted))
        if str(tensor.dtype) != f"torch.{entry.dtype}":
            raise InputError(f"{entry.name} has dtype {tensor.dtype}; the plan was made for {entry.dtype}")
        return tensor

    def _wrong_shape(self, entry: TensorEntry, tensor: torch.Tensor, wanted: tuple[int, ...]) -> str:
        layout = format_layout(entry.layout, self.plan.mesh)
        if tuple(tensor.shape) == entry.shape:
            return (
                f"{entry.name} has the full shape {list(entry.shape)}, but each rank passes its shard {list(wanted)} "
                f"({layout}); cut it with autoshard.shard_inputs(plan, mesh, ...)"
            )
        return (
            f"{entry.name} has shape {list(tensor.shape)}; the plan was made for {list(entry.shape)} in all, which is "
            f"{list(wanted)} on this rank ({layout})"
        )

    def _wrap(self, index: int, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.dim() == 0:
            return value
        entry = next(e for e in self.plan.outputs if e.name == f"output.{index}")
        return as_dtensor(value, entry.shape, entry.layout, self._mesh)


def _mode(training: bool) -> str:
    return "training" if training else "evaluation"


def _tables(model: nn.Module) -> Iterator[tuple[str, tuple[dict[str, Any], str]]]:
    """Where each parameter and buffer is kept: FQN, then the table of its module and its key there."""
    for path, module in model.named_modules(remove_duplicate=False):
        for table in (module._parameters, module._buffers):
            for key in table:
                yield (f"{path}.{key}" if path else key), (table, key)


class _Step(torch.autograd.Function):
    """The local program as one differentiable operation on the shards.

    What only the backward needs is held by nobody else and let go of as the backward is done with it. Arguments that
    are saved belong to the caller.
    """

    @staticmethod
    def forward(ctx: Any, program: LocalProgram, failures: Failures, *flat: torch.Tensor) -> tuple[Any, ...]:
        results = program.forward(list(flat))
        count = program.results + len(program.mutated)
        kept, saved = results[:count], results[count:]
        ctx.program, ctx.failures = program, failures
        ctx.save_for_backward(*(value for k, value in enumerate(saved) if k in program.saved_arguments))
        # a result that held the step that made it would keep both alive; its alias does not
        own = {id(value) for value in kept}
        ctx.activations = [
            value.detach() if id(value) in own else value
            for k, value in enumerate(saved)
            if k not in program.saved_arguments
        ]
        plain = [v for k, v in enumerate(kept) if isinstance(v, torch.Tensor) and k not in program.tangents]
        ctx.mark_non_differentiable(*plain)
        ctx.shapes = {k: (kept[k].shape, kept[k].dtype, kept[k].device) for k in program.tangents}
        ctx.set_materialize_grads(False)  # torch would make zeros for buffers and other results without a tangent
        return tuple(kept)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        program = ctx.program
        with ctx.failures.telling("the backward"):
            values = _Step._saved(ctx)
            values += [_tangent(grads[k], *ctx.shapes[k]) for k in program.tangents]
            found = dict(zip(program.trained, program.backward(values)))
        return (None, None, *(found.get(name) for name in program.arguments))

    @staticmethod
    def _saved(ctx: Any) -> list[torch.Tensor]:
        """What the forward saved, in order; afterwards it is gone, unless the graph is retained."""
        if ctx.activations is None:
            raise RuntimeError(
                "this step went backward before, and what it had saved is gone; call the module again, or call the "
                "first backward with retain_graph=True"
            )
        positions = ctx.program.saved_arguments
        sources = {True: iter(ctx.saved_tensors), False: iter(ctx.activations)}
        values = [next(sources[k in positions]) for k in range(len(positions) + len(ctx.activations))]
        if not keeps_graph():
            ctx.activations = None
        return values


def _tangent(grad: torch.Tensor | None, shape: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The gradient of a result; nothing flows into one that the caller did not use."""
    if grad is None:
        return torch.zeros(shape, dtype=dtype, device=device)
    # a scalar result that the caller added to a DTensor gets a DTensor back
    return grad.full_tensor() if isinstance(grad, DTensor) else grad
