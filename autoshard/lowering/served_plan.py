"""One plan that a parallel module serves: its local program, and what a call under it is checked against."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import TreeSpec, tree_unflatten

from ..capture import CapturedGraph, SameTensor
from ..plans import ShardingPlan
from .accumulation import Accumulation
from .draws import Draws
from .failure import Failures
from .held import HeldTensors
from .inputs import Inputs
from .local_program import LocalProgram
from .settings import Settings
from .state import ModelState
from .step import Step


class ServedPlan:
    """Runs the local program of a plan on what a model holds.

    Args:
        model: its parameters are DTensors already; as far as its Python goes, it is still as it was captured.
        training: in which mode each of its modules was captured.
        draws: under which seed each forward draws; None where the program draws nothing.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: ShardingPlan,
        mesh: DeviceMesh,
        program: LocalProgram,
        inputs: Inputs,
        graph: CapturedGraph,
        training: Sequence[bool],
        draws: Draws | None,
        failures: Failures,
    ) -> None:
        self.plan, self.program, self.inputs = plan, program, inputs
        self._settings = Settings.of_capture(mesh.device_type)
        self.step = Step(graph, plan, mesh, program, failures)
        self._mesh, self._graph = mesh, graph
        self._held = HeldTensors(model, plan, mesh)
        self._accumulation = Accumulation(plan, mesh, program)
        self._taken = [name for name in program.arguments if name not in inputs.names]
        self.state = ModelState(model, graph, self._taken, training)
        self._written = [name for name in program.mutated if name not in graph.replaced]
        self.draws = draws

    @property
    def has_backward(self) -> bool:
        """Whether the program has one."""
        return self.program.backward is not None

    @property
    def constants(self) -> tuple[Any, ...]:
        """For each leaf of the result what it is where no operator makes it."""
        return self._graph.constants

    @property
    def structure(self) -> TreeSpec:
        """How the leaves of the result are put together."""
        return self._graph.out_spec

    @property
    def left(self) -> tuple[str, ...]:
        """The attributes in which the model leaves tensors: a second part of the result."""
        return self._graph.left

    def why_uncompiled(self) -> str:
        """Why the step cannot stand in a graph that ``torch.compile`` makes; empty where it can."""
        if self.plan.micro_batches > 1:
            return (
                f"a step of this plan is {self.plan.micro_batches} micro-batches, whose gradients the module adds up "
                "outside of any graph; call it without torch.compile, or plan one micro-batch"
            )
        if self._graph.replaced:
            return f"the forward puts another tensor in the place of {sorted(self._graph.replaced)[0]}; write into it"
        if self.left:
            return (
                f"the forward leaves a tensor in the attribute {self.left[0]}, beside its result; return it, or call "
                "the module without torch.compile"
            )
        return ""

    @property
    def shared(self) -> tuple[Any, ...]:
        """What copies of a module have in common: all that is not theirs."""
        return self.plan, self._mesh, self.program, self.inputs, self._graph, self.step

    def check_surroundings(self) -> None:
        """Checks that a call at this moment would do what was captured.

        Raises:
            InputError: it is called from where, or under settings, that a plan is not made for.
            PlanMismatchError: the Python values, modes and hooks that the forward depends on have changed.
        """
        self.check_model()
        self._settings.check(Settings.now(self._mesh.device_type))

    def check_model(self) -> None:
        """:meth:`check_surroundings` without what dynamo checks before it runs what it compiled.

        Raises:
            InputError: it is called from where a plan is not made for.
            PlanMismatchError: as there.
        """
        self.step.check_caller()
        self.state.check()

    def held(self) -> dict[str, torch.Tensor]:
        """The parameters and buffers that the program takes.

        Raises:
            PlanMismatchError: one is no longer what the plan was made for.
        """
        return {name: self._held[name] for name in self._taken}

    def run(self, given: dict[str, torch.Tensor], held: dict[str, torch.Tensor]) -> Any:
        """The forward: what the model's own would return, in a pair with what it would leave in attributes, if in any.

        Args:
            given: the tensors of the call.
            held: what :meth:`held` gave.
        """
        self.inputs.refuse_aliases(given, {name: held[name] for name in self._written})
        arguments = {name: held[name] if name in held else given[name] for name in self.program.arguments}
        with self.draws.forward() if self.draws else nullcontext():
            made, kept = self.step(list(arguments.values()), self._held.replace, self._accumulation)
        leaves: list[Any] = []
        for result, constant in zip(made, self._graph.constants):
            if result is not None or not isinstance(constant, SameTensor):
                leaves.append(constant if result is None else result)
            elif constant.kind == "output":
                leaves.append(leaves[int(constant.name)])
            else:
                leaves.append(self.step.given_back(constant.name, arguments[constant.name], kept))
        return tree_unflatten(leaves, self._graph.out_spec)
