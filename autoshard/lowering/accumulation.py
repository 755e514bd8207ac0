"""What a module holds over a step of several micro-batches: copies of parameters, and sums of gradients.

A step is as many backwards as the plan has micro-batches. Copies are made in its first forward, and let go of in its
last backward. Until that one, ``.grad`` is the sum of the gradients so far, a DTensor in the layout in which the plan
adds them up, which may be one of addends; the last backward brings each sum to the layout of its parameter, and gives
it to autograd. Whoever sets the gradients to None begins a new step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any
from weakref import WeakSet

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..errors import BackwardError
from ..layout import Layout, local_shape
from ..micro_batches import summed_name
from ..plans import ShardingPlan
from .adapter import gets_gradient, hooks_of
from .kept import Kept
from .local_program import LocalProgram
from .placements import as_dtensor, placements_of, readable


class Accumulation:
    """The copies and sums of one module. ``done`` counts the backwards of the step that is going on."""

    def __init__(self, plan: ShardingPlan, mesh: DeviceMesh, program: LocalProgram) -> None:
        self.micro_batches = plan.micro_batches
        self.done = 0
        self._mesh, self._planned_mesh, self._once = mesh, plan.mesh, program.once
        self._order = program.trained
        self._parameters = {entry.name: entry for entry in plan.parameters}
        self._layouts = _layouts_of_sums(plan, program)
        self._copies: dict[str, tuple[torch.Tensor, tuple[int, int], torch.Tensor]] = {}
        self._trained: dict[str, torch.Tensor] = {}
        if self.micro_batches > 1:
            _refuse_unfinished_steps()
            _ALL.add(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Accumulation:
        """That of a copy of the module, which holds nothing yet."""
        other = Accumulation.__new__(Accumulation)
        other.__dict__.update(self.__dict__, done=0, _copies={}, _trained={})
        _ALL.add(other)
        return other

    def held(self, name: str, argument: torch.Tensor, shard: torch.Tensor, kept: Kept | None) -> torch.Tensor:
        """What the forward takes for an argument: its shard, or the copy that is held of it.

        A copy is made again once torch counts a change of the argument or of its shard, and where no step is going on:
        torch counts no changes by operators on lists (``torch._foreach_lerp_``, averages of weights) of DTensors.

        Args:
            kept: what the forward keeps for its backward, as long as which the copy is held; None where there is none.
        """
        gather = self._once.gathers.get(name)
        if gather is None:
            return shard
        counted = not (argument.is_inference() or shard.is_inference())
        version = (argument._version, shard._version) if counted else (-1, -1)
        known = self._copies.get(name)
        if self._is_going_on() and counted and known is not None and known[0] is argument and known[1] == version:
            return known[2]
        (made,) = gather([readable(shard)])
        if kept is not None and counted:
            self._copies[name] = argument, version, made
        return made  # type: ignore[no-any-return]

    def _is_going_on(self) -> bool:
        """Whether some backwards of a step have run, and not all of them; one whose gradients are None is given up."""
        has_begun = 0 < self.done < self.micro_batches
        return has_begun and any(parameter.grad is not None for parameter in self._trained.values())

    def begin(self, trained: Mapping[str, torch.Tensor]) -> bool:
        """Begins a backward; says whether it is to add to sums.

        Args:
            trained: the parameters that want gradients, by name.

        Raises:
            BackwardError: gradients are there that this step did not make; the backward is not one for the gradients
                of all parameters; or a parameter has a hook, which autograd would call without a gradient.
        """
        has_sums = any(parameter.grad is not None for parameter in trained.values())
        if not has_sums:
            self.done = 0
        elif not 0 < self.done < self.micro_batches:
            raise BackwardError(
                f"a step of this plan is {self.micro_batches} backwards, and before the first one there are gradients, "
                "of the last step or of another backward: set all to None before it, with zero_grad() after the "
                "optimizer's step and not with set_to_none=False"
            )
        for name, parameter in trained.items():
            if not parameter.is_leaf:
                raise BackwardError(
                    f"{name} was computed from other tensors (torch.func.functional_call), but under a plan of "
                    f"{self.micro_batches} micro-batches gradients are added up in .grad of parameters; call the "
                    "module itself, or make a plan of one micro-batch"
                )
            if not gets_gradient(parameter):
                raise BackwardError(
                    f"this backward leaves out {name} (torch.autograd.grad, or backward(inputs=...)), but under a plan "
                    f"of {self.micro_batches} micro-batches each backward of a step adds to the gradients of all "
                    "parameters; call backward() alone, or make a plan of one micro-batch"
                )
            if hooks_of(parameter):
                raise BackwardError(
                    f"parameter {name} has a hook, but under a plan of {self.micro_batches} micro-batches its gradient "
                    "is there in the last backward of a step alone: take the hook off, and do to the gradients what it "
                    "does behind that backward"
                )
        self._trained = dict(trained)
        return has_sums

    def sums(self, names: Sequence[str]) -> list[torch.Tensor]:
        """This rank's shards of the sums so far of gradients, by parameter; zeros where nothing has flowed yet."""
        return [self._sum(name) for name in names]

    def _sum(self, name: str) -> torch.Tensor:
        if name in self._trained and (found := self._trained[name].grad) is not None:
            return self._shard_of_sum(name, found)
        entry, mesh = self._parameters[name], self._planned_mesh
        shape = local_shape(entry.shape, self._layouts[name], mesh, tuple(self._mesh.get_coordinate() or ()))
        return torch.zeros(shape, dtype=getattr(torch, entry.dtype), device=self._mesh.device_type)

    def _shard_of_sum(self, name: str, found: torch.Tensor) -> torch.Tensor:
        """This rank's shard of a sum so far.

        Raises:
            BackwardError: it is another tensor, which need not be placed as the sum is.
        """
        wanted = placements_of(self._layouts[name])
        if not isinstance(found, DTensor) or tuple(found.placements) != wanted:
            what = f"a DTensor placed {tuple(found.placements)}" if isinstance(found, DTensor) else "a plain tensor"
            raise BackwardError(
                f"the gradient of {name} is {what} between two backwards of a step of {self.micro_batches} "
                f"micro-batches, where it is the sum so far, a DTensor placed {wanted}: change gradients behind the "
                "last backward of the step"
            )
        return found.to_local()

    def end(self, found: dict[str, torch.Tensor]) -> dict[str, DTensor]:
        """Ends a backward with the sums that it made, which it lets go of: in the last one of a step the gradients by
        parameter, in others nothing.
        """
        self.done += 1
        if self.done < self.micro_batches:
            for name, parameter in self._trained.items():
                if name in found and parameter.grad is None:
                    parameter.grad = self._placed(name, found[name], self._layouts[name])
            return {}
        self._copies.clear()
        gradients = {name: self._reduced(name, found) for name in self._order if name in self._trained}
        self._trained = {}
        return {name: gradient for name, gradient in gradients.items() if gradient is not None}

    def _reduced(self, name: str, found: dict[str, torch.Tensor]) -> DTensor | None:
        """The gradient of a parameter of the sum that was just made, or was there before; None where there is none."""
        parameter = self._trained[name]
        if name not in found and parameter.grad is not None:
            found[name] = self._shard_of_sum(name, parameter.grad)
        parameter.grad = None
        if name not in found:
            return None
        values = [found.pop(name)]
        reduction = self._once.reductions.get(name)
        (value,) = values if reduction is None else reduction(values)
        return self._placed(name, value, self._parameters[name].layout)

    def _placed(self, name: str, shard: torch.Tensor, layout: Layout) -> DTensor:
        return as_dtensor(shard, self._parameters[name].shape, layout, self._mesh)

    def check_finished(self, optimizer: torch.optim.Optimizer) -> None:
        """Checks that no gradient of a step that is going on is taken for whole.

        Raises:
            BackwardError: the optimizer would step with it.
        """
        if not 0 < self.done < self.micro_batches:
            return
        pending = {id(p) for p in self._trained.values() if p.grad is not None}
        if any(id(p) in pending for group in optimizer.param_groups for p in group["params"]):
            raise BackwardError(
                f"the optimizer is to step after {self.done} of the {self.micro_batches} backwards that make a step of "
                "this plan: gradients are not complete before the last one. Run the backwards that are left, or make a "
                "plan of fewer micro-batches"
            )


_ALL: WeakSet[Accumulation] = WeakSet()


@cache
def _refuse_unfinished_steps() -> None:
    """From here on, optimizers refuse to step in the middle of a step of a plan."""

    def check(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for accumulation in list(_ALL):
            accumulation.check_finished(optimizer)

    register_optimizer_step_pre_hook(check)


def _layouts_of_sums(plan: ShardingPlan, program: LocalProgram) -> dict[str, Layout]:
    """The layout in which the gradients of each trained parameter are added up."""
    made = {entry.name: entry.outputs[0] for entry in plan.operators}
    found = ((name, made.get(summed_name(name))) for name in program.trained)
    return {name: layout for name, layout in found if layout is not None}
