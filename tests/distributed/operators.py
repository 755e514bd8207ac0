"""Which operators a rank runs in a step, and which a plan says it does."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import autoshard
from autoshard.plans import ShardingPlan

from . import cases
from .parity import device_mesh_of

COUNTED = {"mm": "mm", "addmm": "mm", "bmm": "bmm", "silu": "silu", "gelu": "gelu"}
"""Operators that a rank runs once for each in the plan; of an addmm whose terms are partial sums the mm alone."""


class _Calls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        role = func._schema.name.partition("::")[2]
        self.counts.update([COUNTED[role]] if role in COUNTED else [])
        return func(*args, **(kwargs or {}))


def planned_operators(plan: ShardingPlan) -> Counter[str]:
    """How often the plan runs each of the operators that are counted, the first time or again."""
    roles = (entry.name.rpartition("/")[2] for entry in plan.execution)
    bare = (role.removeprefix("bwd.").removeprefix("again.").partition(".")[0] for role in roles)
    return Counter(COUNTED[role] for role in bare if role in COUNTED)


def executed_operators(case: str, plan: ShardingPlan, parallel: nn.Module) -> Counter[str]:
    """The same of one step of this rank."""
    shards = autoshard.shard_inputs(plan, device_mesh_of(plan), *cases.batch(case, 0))
    with _Calls() as calls:
        parallel(*shards).backward()
    return calls.counts
