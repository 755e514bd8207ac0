"""The module a job trains: DTensor parameters under their FQNs around a local program."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..capture import CapturedGraph, SameTensor, input_names
from ..errors import InputError
from ..layout import format_layout, local_shape
from ..plans import ShardingPlan, TensorEntry
from .adapter import device_of
from .held import HeldTensors
from .placements import placements_of
from .program import LocalProgram
from .settings import Settings
from .shards import agree_on_replicas
from .step import Step

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
        graph: CapturedGraph,
        seed: int | None,
    ) -> None:
        super().__init__()
        self._parameters, self._buffers, self._modules = model._parameters, model._buffers, model._modules
        self.training = model.training
        self.plan = plan
        self._mesh = mesh
        self._program = program
        self._constants = constants
        self._graph = graph
        self._step = Step(graph, plan, mesh, program)
        self._settings = Settings.of_capture(mesh.device_type)
        self._generator = None if seed is None else torch.Generator().manual_seed(seed)
        self._signature = [model]  # in a list, so that it is not registered as a submodule
        self._inputs = {entry.name: entry for entry in plan.inputs}
        self._was_meta = any(p.is_meta for p in model.parameters())
        self._captured_training = model.training
        self._depends_on_mode = program.is_random or any(isinstance(m, _MODAL) for m in model.modules())
        self._held = HeldTensors(model, plan, mesh)
        self._coordinate = tuple(mesh.get_coordinate() or ())

    @torch.compiler.disable(reason="a parallel module runs the graphs of its plan")  # type: ignore[untyped-decorator]
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """One step's forward on this rank.

        Raises:
            InputError: arguments of another number, shape or dtype than the plan declares, or another mode (training or
                evaluation) than the model was captured in, where that makes a difference.
        """
        self._step.check_caller()
        if self.training != self._captured_training and self._depends_on_mode:
            raise InputError(
                f"the model was captured in {_mode(self._captured_training)} mode, runs in {_mode(self.training)} mode "
                "and has dropout or batch norm; make another plan for that mode"
            )
        self._settings.check(Settings.now(self._mesh.device_type))
        names = self._program.arguments
        held = {name: self._held[name] for name in names if name not in self._inputs}
        if self._was_meta:
            agree_on_replicas(self, self._mesh)
            self._was_meta = False
        given = held | self._inputs_of(args, kwargs)
        arguments = {name: given[name] for name in names}
        with self._same_draws():
            made, kept = self._step(list(arguments.values()))
        leaves: list[Any] = []
        for result, constant in zip(made, self._graph.constants):
            if result is not None or not isinstance(constant, SameTensor):
                leaves.append(constant if result is None else result)
            elif constant.kind == "output":
                leaves.append(leaves[int(constant.name)])
            else:
                leaves.append(self._step.given_back(constant.name, arguments[constant.name], kept))
        return tree_unflatten(leaves, self._graph.out_spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> ParallelModule:
        """A module with tensors of its own that runs the same program on the same mesh."""
        shared = (self.plan, self._mesh, self._program, self._graph, self._step)
        memo |= {id(value): value for value in shared}
        copied = self.__class__.__new__(self.__class__)
        memo[id(self)] = copied
        copied.__dict__.update({key: deepcopy(value, memo) for key, value in self.__dict__.items()})
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise InputError(
            "a parallel module cannot be pickled: it belongs to the processes of this job. Save its state_dict() with "
            "torch.distributed.checkpoint, and the plan with autoshard.write_plan"
        )

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

    def _inputs_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, torch.Tensor]:
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
        for name, tensor in tensors.items():
            self._check_input(self._inputs[name], tensor)
        return tensors

    def _check_input(self, entry: TensorEntry, tensor: torch.Tensor) -> None:
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


def _mode(training: bool) -> str:
    return "training" if training else "evaluation"
