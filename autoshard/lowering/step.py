"""The local program as one differentiable operation on what a module holds and what it is called with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..capture import CapturedGraph
from ..errors import BackwardError, InputError
from ..plans import ShardingPlan
from .adapter import has_saved_tensor_hooks, is_backward_running, is_transforming, keeps_graph
from .backwards import Backwards
from .kept import Kept
from .placements import as_dtensor, placements_of
from .program import LocalProgram

_TRANSFORMED = (
    "torch.func, vmap and forward-mode derivatives cannot see into a parallel module; take gradients with backward() or "
    "torch.autograd.grad, one at a time, or transform the original model"
)


class Step:
    """Calls the local program of one rank so that autograd sees one operation on DTensors.

    Args:
        replace: puts a new tensor in the place of a buffer that the model replaces; called with its name.
    """

    def __init__(
        self,
        graph: CapturedGraph,
        plan: ShardingPlan,
        mesh: DeviceMesh,
        program: LocalProgram,
        replace: Callable[[str, torch.Tensor], None],
    ) -> None:
        self.program, self.mesh, self.replaced, self.replace = program, mesh, graph.replaced, replace
        self.backwards = Backwards(graph, plan, mesh, program)
        self._entries = {e.name: e for e in (*plan.parameters, *plan.buffers, *plan.inputs, *plan.outputs)}
        self._titles = {
            entry.name: f"{kind} {entry.name}"
            for kind, entries in (("parameter", plan.parameters), ("buffer", plan.buffers), ("input", plan.inputs))
            for entry in entries
        }

    def __call__(self, arguments: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], Kept | None]:
        """Runs the forward.

        Args:
            arguments: DTensors, or this rank's shards, in the order of the program's ``arguments``.

        Returns:
            The results that the program makes (None for others): DTensors, and plain tensors where they are scalars;
            and what is kept for the backward, if one can follow.

        Raises:
            InputError: the call is one that the step cannot be part of.
        """
        if is_transforming():
            raise InputError(_TRANSFORMED)
        if is_backward_running() and self.program.is_random:
            raise InputError(
                "the module draws random numbers (dropout) and is called again within a backward, as checkpointing "
                "does; it would draw others. Leave it out of the checkpoint"
            )
        can_go_back = torch.is_grad_enabled() and any(argument.requires_grad for argument in arguments)
        kept = Kept() if can_go_back else None
        return _Operation.apply(self, kept, *arguments), kept

    def title(self, name: str) -> str:
        """What errors call an argument."""
        return self._titles[name]

    def placed(self, name: str, shard: torch.Tensor) -> torch.Tensor:
        """This rank's shard of a tensor of the plan as the DTensor it is part of, in the same memory."""
        entry = self._entries[name]
        return as_dtensor(shard, entry.shape, entry.layout, self.mesh)

    def result(self, index: int, value: torch.Tensor | None) -> torch.Tensor | None:
        """A result as the caller gets it."""
        if value is None or value.dim() == 0:
            # what is kept holds the value; a result that held the step that made it would keep both alive
            return None if value is None else value.detach()
        return self.placed(f"output.{index}", value)

    def given_back(self, name: str, argument: torch.Tensor, kept: Kept | None) -> torch.Tensor:
        """A result that is an argument, as the caller gets it: in the same memory."""
        if isinstance(argument, DTensor) or argument.dim() == 0:
            return argument
        placed = self.placed(name, argument)
        if kept is not None and name in self.program.exposed_arguments:
            kept.watch(self.title(name), placed)
        return placed

    def tangent(self, index: int, gradient: torch.Tensor) -> torch.Tensor:
        """This rank's shard of the gradient of a result.

        Raises:
            BackwardError: a plain tensor for the gradient of a DTensor.
        """
        entry = self._entries[f"output.{index}"]
        if isinstance(gradient, DTensor):
            if not entry.shape:  # a scalar, for example a loss that the caller added to a DTensor
                return gradient.full_tensor()
            return gradient.redistribute(self.mesh, placements_of(entry.layout)).to_local().contiguous()
        if entry.shape:
            raise BackwardError(
                f"the gradient of result {index} is a plain tensor, but the result is a DTensor placed "
                f"{placements_of(entry.layout)}; distribute the gradient first (torch.distributed.tensor)"
            )
        return gradient.contiguous()

    def watch(
        self,
        kept: Kept,
        arguments: Sequence[torch.Tensor],
        shards: Sequence[torch.Tensor],
        results: Sequence[torch.Tensor | None],
        values: Sequence[torch.Tensor],
    ) -> None:
        """Watches what the caller can reach of what the backward reads: a DTensor and its shard, each by itself."""
        for name, argument, shard in zip(self.program.arguments, arguments, shards):
            if name in self.program.exposed_arguments:
                kept.watch(self.title(name), argument, *(() if shard is argument else (shard,)))
        for k in sorted(self.program.exposed_results):
            result = results[k]
            assert result is not None
            kept.watch(f"result {k}", result.detach(), values[k])

    def refuse_changed_arguments(self) -> None:
        """Raises InputError where the backward reads a buffer as it was before the forward changed it: too late for
        hooks, which see what is saved when the forward is done.
        """
        for name in self.program.mutated:
            if name in self.program.exposed_arguments and name not in self.replaced:
                raise InputError(
                    f"the {self.title(name)} is changed by the forward, and the backward needs its value from before: "
                    "leave the module out of the checkpoint (or of other hooks on saved tensors), or clone the buffer "
                    "in the model"
                )

    def gradients(self, used: frozenset[int], values: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Runs the backward on what was kept and the tangents of the results used, which it lets go of."""
        graph = self.backwards.of(used)
        with torch.autocast(self.mesh.device_type, enabled=False):
            found = zip(self.program.trained, graph(values))
        return {name: self.placed(name, value) for name, value in found if value is not None}


class _Operation(torch.autograd.Function):
    """See :class:`Step`. What only the backward needs is held by nobody else, and goes as the backward is done with it."""

    @staticmethod
    def forward(ctx: Any, step: Step, kept: Kept | None, *arguments: torch.Tensor) -> tuple[Any, ...]:
        program = step.program
        shards = [a.to_local() if isinstance(a, DTensor) else a for a in arguments]
        with torch.autocast(step.mesh.device_type, enabled=False):
            made = program.forward([shard.resolve_conj().resolve_neg().contiguous() for shard in shards])
        count = program.results
        results = tuple(step.result(k, value) for k, value in enumerate(made[:count]))
        updates, saved = made[count : count + len(program.mutated)], made[count + len(program.mutated) :]
        ctx.step, ctx.kept = step, kept
        if kept is not None and has_saved_tensor_hooks():
            step.refuse_changed_arguments()
            ctx.save_for_backward(*saved)  # the hooks see what is saved, and torch lets go of it all at once
        elif kept is not None:
            kept.values = list(saved)
            step.watch(kept, arguments, shards, results, made)
        held = dict(zip(program.arguments, shards))
        for name, value in zip(program.mutated, updates):
            if name in step.replaced:
                step.replace(name, value.clone(memory_format=torch.contiguous_format))
            else:
                held[name].copy_(value)
        ctx.mark_non_differentiable(*(r for k, r in enumerate(results) if r is not None and k not in program.tangents))
        ctx.set_materialize_grads(False)  # torch would make zeros for results that the caller does not use
        return results

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        step: Step = ctx.step
        arguments = step.program.arguments
        if is_transforming():
            raise BackwardError(_TRANSFORMED)
        used = frozenset(k for k in step.program.tangents if grads[k] is not None)
        if not used:
            return (None,) * (2 + len(arguments))
        with torch.no_grad():
            ctx.kept.check()
            step.backwards.of(used)
            tangents = [step.tangent(k, grads[k]) for k in sorted(used)]
            values = [*ctx.saved_tensors, *ctx.kept.take(keeps_graph()), *tangents]
            del tangents
            found = step.gradients(used, values)
        if torch.is_grad_enabled():
            found = dict(zip(found, _Once.apply(torch.empty(0, requires_grad=True), *found.values())))
        return (None, None, *(found.get(name) for name in arguments))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise InputError(_TRANSFORMED)


class _Once(torch.autograd.Function):
    """Gradients that can be used, but not differentiated again: made under ``create_graph=True``."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(gradient.detach() for gradient in gradients)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise BackwardError(
            "a gradient through a parallel module was differentiated again (a gradient penalty, a Hessian); a plan has "
            "first derivatives only: compute what needs second ones with the original model, or leave it out"
        )
