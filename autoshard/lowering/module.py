"""The module a job trains: DTensor parameters under their FQNs around a local program."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_unflatten

from ..capture import CapturedGraph, SameTensor
from ..errors import InputError
from ..plans import ShardingPlan
from .accumulation import Accumulation
from .adapter import device_of
from .failure import Failures
from .held import HeldTensors
from .inputs import Inputs
from .local_program import LocalProgram
from .settings import Settings
from .shards import agree_on_replicas
from .state import ModelState
from .step import Step

# What the module has in common with the model it was made from: its tensors and submodules, and how they are saved.
_SHARED = (
    "_parameters",
    "_buffers",
    "_modules",
    "_non_persistent_buffers_set",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
    "_version",
)


class ParallelModule(nn.Module):
    """Runs the local program of one rank; made by :func:`autoshard.parallelize`.

    Its submodules, parameters and buffers are those of the model it was made from, under the same FQNs; parameters are
    DTensors placed as planned, and so are their gradients. ``plan`` is the plan it runs.

    Call it with plain tensors, which are this rank's shards (:func:`autoshard.shard_inputs` cuts a full batch), or with
    DTensors. A scalar result comes back as a plain tensor, equal on all ranks; any other as a DTensor.

    Where the plan has several micro-batches, a call is one of them, and so many backwards make a step: gradients are
    complete after the last one (:mod:`autoshard.lowering.accumulation`).

    A model that was on the meta device is filled after it was made; its first forward then gives all copies of a shard
    the values of the first copy, as random initialisation may have filled them differently.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: ShardingPlan,
        mesh: DeviceMesh,
        program: LocalProgram,
        inputs: Inputs,
        graph: CapturedGraph,
        seed: int | None,
        failures: Failures,
    ) -> None:
        super().__init__()
        for table in _SHARED:
            setattr(self, table, getattr(model, table))
        self.training = model.training
        self.plan = plan
        self._mesh = mesh
        self._program = program
        self._failures = failures
        self._inputs = inputs
        self._graph = graph
        self._held = HeldTensors(model, plan, mesh)
        self._step = Step(graph, plan, mesh, program, failures)
        self._accumulation = Accumulation(plan, mesh, program)
        self._state = ModelState(model, graph)
        self._written = [name for name in program.mutated if name not in graph.replaced]
        self._settings = Settings.of_capture(mesh.device_type)
        self._generator = None if seed is None else torch.Generator().manual_seed(seed)
        self._was_meta = any(p.is_meta for p in model.parameters())
        self._own = frozenset({*self.__dict__, "_own", "_model"})
        self._model = [model]  # in a list, so that it is not registered as a submodule; from here on, see __setattr__

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets an attribute of the module, and of the model it was made from: ``module.k = 2`` is meant for both."""
        super().__setattr__(name, value)
        if self._is_of_model(name):
            setattr(self._model[0], name, value)

    def __delattr__(self, name: str) -> None:
        """Deletes an attribute of the module, and of the model it was made from."""
        of_model = self._is_of_model(name)
        super().__delattr__(name)
        if of_model and name in self._model[0].__dict__:
            delattr(self._model[0], name)

    def _is_of_model(self, name: str) -> bool:
        if "_model" not in self.__dict__:
            return False
        return name == "training" or (name not in self._own and not hasattr(type(self), name))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        self._model[0]._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, *args: Any) -> None:
        self._model[0]._load_from_state_dict(*args)

    @torch.compiler.disable(reason="a parallel module runs the graphs of its plan")  # type: ignore[untyped-decorator]
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """One step's forward on this rank.

        Raises:
            InputError: the call is not one that the plan was made for.
            PlanMismatchError: the model has changed since it was captured: its tensors, or the Python values, modes
                and hooks that its forward depends on.
            JobError: another rank failed or ended.
        """
        with self._failures.telling("the forward"):
            return self._forward(args, kwargs)

    def _forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._step.check_caller()
        self._state.check()
        self._settings.check(Settings.now(self._mesh.device_type))
        held = {name: self._held[name] for name in self._program.arguments if name not in self._inputs.names}
        if self._was_meta:
            agree_on_replicas(self, self._mesh)
            self._was_meta = False
        given = self._inputs.of(args, kwargs)
        self._inputs.refuse_aliases(given, {name: held[name] for name in self._written})
        arguments = {name: held[name] if name in held else given[name] for name in self._program.arguments}
        with self._same_draws():
            made, kept = self._step(list(arguments.values()), self._held.replace, self._accumulation)
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
        """A module with tensors of its own that runs the same program on the same mesh.

        Gradients are not copied, as with any module: torch's own copy of a parameter that is a DTensor would have one.
        """
        shared = (self.plan, self._mesh, self._program, self._failures, self._inputs, self._graph, self._step)
        memo |= {id(value): value for value in shared}
        memo |= {
            id(p): nn.Parameter(p.detach().clone(), p.requires_grad) for p in self.parameters() if id(p) not in memo
        }
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
