"""The local program as one differentiable operation on what a module holds and what it is called with."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from ..capture import CapturedGraph, SameTensor
from ..errors import BackwardError, InputError
from ..plans import ShardingPlan
from .accumulation import Accumulation
from .adapter import (
    DTensorSpec,
    dtensor_of,
    hooks_of,
    is_backward_running,
    is_batched,
    is_transforming,
    keeps_graph,
    local_of,
)
from .backwards import Backward, Backwards
from .failure import Failures
from .flow import gradient_flow
from .kept import Kept, count_optimizer_steps
from .late_part import Parted
from .local_program import LocalProgram
from .placements import placements_of, readable, spec_of
from .unread import Pending
from .upstream import Linked, upstream

_TRANSFORMED = (
    "torch.func, vmap, forward-mode derivatives, torch.jit.trace and torch.export cannot see into a parallel module; "
    "take gradients with backward() or torch.autograd.grad, one at a time, or transform the original model"
)


class Step:
    """Calls the local program of one rank so that autograd sees one operation on DTensors."""

    def __init__(
        self, graph: CapturedGraph, plan: ShardingPlan, mesh: DeviceMesh, program: LocalProgram, failures: Failures
    ) -> None:
        self.program, self.mesh, self.replaced, self.failures = program, mesh, graph.replaced, failures
        self._graph, self._constants = graph, graph.constants
        self._differentiable: dict[frozenset[str], frozenset[int]] = {}
        self.backwards = Backwards(graph, plan, mesh, program)
        self._upstream = upstream(graph, program.tangents)
        self._is_captured_with_gradients = torch.is_grad_enabled()
        count_optimizer_steps()
        self._entries = {e.name: e for e in (*plan.parameters, *plan.buffers, *plan.inputs, *plan.outputs)}
        self._specs: dict[tuple[str, torch.dtype], DTensorSpec] = {}
        self._titles = {
            entry.name: f"{kind} {entry.name}"
            for kind, entries in (("parameter", plan.parameters), ("buffer", plan.buffers), ("input", plan.inputs))
            for entry in entries
        }
        # of every call, these are the same: the host's time counts where a step is short
        self._untrained = [k for k, name in enumerate(program.arguments) if name not in program.trained]
        self._exposed = [k for k, name in enumerate(program.arguments) if name in program.exposed_arguments]
        self._exposed_titles = [self._titles[program.arguments[k]] for k in self._exposed]

    def check_caller(self) -> None:
        """Checks who calls the module.

        Raises:
            InputError: a transform or a trace, or a second forward that would not draw the numbers of the first.
        """
        if is_transforming():
            raise InputError(_TRANSFORMED)
        if is_backward_running() and self.program.is_random:
            raise InputError(
                "the module draws random numbers (dropout) and is called again within a backward, as checkpointing "
                "does; it would draw others. Leave it out of the checkpoint"
            )

    def __call__(
        self,
        arguments: Sequence[torch.Tensor],
        replace: Callable[[str, torch.Tensor], None],
        accumulation: Accumulation,
    ) -> tuple[tuple[Any, ...], Kept | None]:
        """Runs the forward.

        Args:
            arguments: DTensors, or this rank's shards, in the order of the program's ``arguments``.
            replace: puts a new tensor in the place of a buffer that the model replaces; called with its name.
            accumulation: what the module holds over the step.

        Returns:
            The results that the program makes (None for others): DTensors, and plain tensors where they are scalars;
            and what is kept for the backward, if one can follow.

        Raises:
            InputError: the program has no backward, and one could follow.
        """
        kept = Kept() if self.can_go_back(arguments) else None
        reached = arguments if kept is None else self._reached(arguments)
        results = _Operation.apply(self, kept, replace, accumulation, *reached)
        if kept is not None:
            results = Linked(self._upstream).link(results)
            if kept.pending is not None:
                kept.pending.show(results[k] for k in self.program.late)
        return results, kept

    def can_go_back(self, arguments: Iterable[torch.Tensor]) -> bool:
        """Whether a backward can follow a forward on these arguments.

        Raises:
            InputError: it can, and the program has none.
        """
        found = torch.is_grad_enabled() and any(argument.requires_grad for argument in arguments)
        if found and not self._is_captured_with_gradients:
            raise InputError(
                "the model was captured under torch.no_grad, as evaluation=True has it, so its plan has no backward; "
                "call it under torch.no_grad, or plan and parallelize it outside"
            )
        return found

    def _reached(self, arguments: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The arguments, cut off where no gradient can reach them: torch would call a hook there with None."""
        reached = list(arguments)
        for k in self._untrained:
            if reached[k].requires_grad:
                reached[k] = reached[k].detach()
        return reached

    def differentiable(self, wanting: Collection[str]) -> frozenset[int]:
        """The results through which a gradient gets to one of the arguments that want one: where some parameters were
        frozen after planning, not all.
        """
        tangents, trained = self.program.tangents, frozenset(wanting)
        if trained.issuperset(self.program.trained):
            return frozenset(tangents)
        if trained not in self._differentiable:
            reached = (k for k in tangents if not trained.isdisjoint(gradient_flow(self._graph, (k,)).trained))
            self._differentiable[trained] = frozenset(reached)
        return self._differentiable[trained]

    def title(self, name: str) -> str:
        """What errors call an argument of the step, for example ``parameter layers.0.wq.weight``."""
        return self._titles[name]

    def placed(self, name: str, shard: torch.Tensor) -> torch.Tensor:
        """This rank's shard of a tensor of the plan as the DTensor it is part of, in the same memory."""
        key = name, shard.dtype
        if key not in self._specs:
            self._specs[key] = spec_of(shard.dtype, self._entries[name].shape, self._entries[name].layout, self.mesh)
        return dtensor_of(shard, self._specs[key])

    def place(self, name: str) -> tuple[tuple[int, ...], tuple[Placement, ...]]:
        """The whole shape of a tensor of the plan, and its placements; none where it has no dims."""
        entry = self._entries[name]
        return entry.shape, placements_of(entry.layout) if entry.shape else ()

    def result(self, index: int, value: torch.Tensor | None) -> torch.Tensor | None:
        """A result as the caller gets it: a DTensor placed as planned, or a plain tensor where it has no dims."""
        if value is None or value.dim() == 0:
            # what is kept holds the value; a result that held the step that made it would keep both alive
            return None if value is None else value.detach()
        return self.placed(f"output.{index}", value)

    def pending(self, parts: Parted, made: Sequence[Any]) -> tuple[Pending, list[Any]]:
        """What makes the results that are late, and all that the forward returns, with places for these."""
        count = len(made) - parts.passed
        found, values = Pending(parts.later, list(made[count:]), self.failures), list(made[:count])
        for k, place in zip(parts.late, found.places):
            values[k] = place.detach()
        return found, values

    def given_back(self, name: str, argument: torch.Tensor, kept: Kept | None) -> torch.Tensor:
        """A result that is an argument, as the caller gets it: in the same memory."""
        if isinstance(argument, DTensor) or argument.dim() == 0:
            return argument
        placed = self.placed(name, argument)
        if kept is not None and name in self.program.exposed_arguments:
            kept.watch((self.title(name),), (placed,))
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
        for own in (arguments, shards):
            kept.watch(self._exposed_titles, [own[k] for k in self._exposed])
        for k in sorted(self.program.exposed_results):
            result = results[k]
            assert result is not None
            kept.watch((f"result {k}",) * 2, (result.detach(), values[k]))
        named = dict(zip(self.program.arguments, arguments))
        for k, same in enumerate(self._constants):
            copy = results[k]
            if not isinstance(same, SameTensor) or copy is None:
                continue
            owner = results[int(same.name)] if same.kind == "output" else named[same.name]
            assert owner is not None
            if same.kind == "output":
                kept.watch_copy(k, f"result {same.name}", owner.detach())
                kept.watch_copy(int(same.name), f"result {k}", copy.detach())
            elif same.kind == "parameter":
                kept.watch_copy(k, self.title(same.name), owner)

    def gradients(self, backward: Backward, values: list[torch.Tensor | None]) -> dict[str, torch.Tensor]:
        """Runs a backward on what was kept, the tangents and sums, which it lets go of; what it gives by parameter."""
        with torch.autocast(self.mesh.device_type, enabled=False):
            found = zip(self.program.trained, backward.graph(values))
        return {name: value for name, value in found if value is not None}


class _Operation(torch.autograd.Function):
    """See :class:`Step`. What only the backward needs, nobody else holds; it goes as the backward is done with it."""

    @staticmethod
    def forward(
        ctx: Any,
        step: Step,
        kept: Kept | None,
        replace: Callable[[str, torch.Tensor], None],
        accumulation: Accumulation,
        *arguments: torch.Tensor,
    ) -> tuple[Any, ...]:
        program = step.program
        shards = [local_of(argument) for argument in arguments]
        named = zip(program.arguments, arguments, shards)
        with torch.autocast(step.mesh.device_type, enabled=False):
            taken = (accumulation.held(name, a, shard, kept) for name, a, shard in named)
            parts = program.parted if kept is not None else None
            graph = program.forward_alone if kept is None else program.forward if parts is None else parts.now
            made = graph([readable(value) for value in taken])
        if kept is not None and parts is not None:
            kept.pending, made = step.pending(parts, made)
        count = program.results
        results = tuple(step.result(k, value) for k, value in enumerate(made[:count]))
        updates, saved = made[count : count + len(program.mutated)], made[count + len(program.mutated) :]
        ctx.step, ctx.kept, ctx.accumulation = step, kept, accumulation
        ctx.sources = {name: a for name, a in zip(program.arguments, arguments) if a.requires_grad}
        try:
            if kept is not None:
                kept.save(saved)
                step.watch(kept, arguments, shards, results, made)
        finally:  # checkpointing ends its second forward with an exception, as soon as everything is saved
            held = dict(zip(program.arguments, shards))
            for name, value in zip(program.mutated, updates):
                if name in step.replaced:
                    replace(name, value.clone(memory_format=torch.contiguous_format))
                else:
                    held[name].copy_(value)
        wanted = step.differentiable([name for name, a in zip(program.arguments, arguments) if a.requires_grad])
        ctx.mark_non_differentiable(*(r for k, r in enumerate(results) if r is not None and k not in wanted))
        ctx.set_materialize_grads(False)  # torch would make zeros for results that the caller does not use
        return results

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        with ctx.step.failures.telling("the backward"):
            return _Operation._backward(ctx, grads)

    @staticmethod
    def _backward(ctx: Any, grads: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor | None, ...]:
        step: Step = ctx.step
        arguments = step.program.arguments
        if any(grad is not None and is_batched(grad) for grad in grads):
            raise BackwardError(_TRANSFORMED)
        if torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled():
            raise BackwardError(
                "torch.autograd.detect_anomaly cannot look for NaN in DTensors, which the gradients are; give it "
                "check_nan=False"
            )
        used = frozenset(k for k in step.program.tangents if grads[k] is not None)
        if not used:
            return (None,) * (4 + len(arguments))
        with torch.no_grad():
            several = ctx.accumulation.micro_batches > 1
            backward = step.backwards.of(used, several and ctx.accumulation.begin(ctx.sources))
            tangents = [step.tangent(k, grad) for k, grad in enumerate(grads) if k in used and grad is not None]
            values = [*ctx.kept.take(used, backward.needed, () if keeps_graph() else backward.spent), *tangents]
            values += ctx.accumulation.sums(backward.summed)
            del tangents
            found = step.gradients(backward, values)
            if ctx.kept.pending is not None:
                ctx.kept.pending.finish()
            if several:
                found = ctx.accumulation.end(found)
            else:
                found = {name: step.placed(name, value) for name, value in found.items()}
        for name, source in ctx.sources.items():
            if hooks_of(source) and name not in found:
                raise BackwardError(
                    f"{step.title(name)} has a hook, and this backward does not reach it: of the results of the module "
                    f"it goes through {', '.join(map(str, sorted(used)))} alone. Torch would call the hook with None; "
                    "take the hook off for this backward, or let the loss depend on the other results"
                )
        if torch.is_grad_enabled():
            sources = [*ctx.sources.values(), *(grad for grad in grads if grad is not None)]
            found = dict(zip(found, _Once.apply(len(sources), *sources, *found.values())))
        return (None, None, None, None, *(found.get(name) for name in arguments))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise InputError(_TRANSFORMED)


class _Once(torch.autograd.Function):
    """Gradients made under ``create_graph=True``: they can be used, but not differentiated again.

    Takes the number of tensors that they may depend on, these tensors, and the gradients.
    """

    @staticmethod
    def forward(ctx: Any, sources: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(gradient.detach() for gradient in tensors[sources:])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise BackwardError(
            "a gradient through a parallel module was differentiated again (a gradient penalty, a Hessian); a plan has "
            "first derivatives only: compute what needs second ones with the original model, or leave it out"
        )
