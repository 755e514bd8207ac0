"""autoshard: the sharding of a PyTorch model, decided by optimisation, written as a plan, executed as planned.

>>> import autoshard
>>> model = autoshard.auto_parallelize(model, mesh, (tokens, targets))       # on every rank of a job  # doctest: +SKIP

or in two halves: :func:`plan` on a laptop, :func:`parallelize` in the job. Reading and showing plans needs no torch;
every name is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .errors import AutoshardError

if TYPE_CHECKING:
    from .api import auto_parallelize, plan
    from .apply import parallelize
    from .capture import constrain, representative
    from .layout import Layout, format_layout, parse_layout
    from .lowering import (
        as_one_process,
        load_weights,
        manual_seed,
        measure_collectives,
        measure_memory,
        plan_of,
        sampler,
        shard_inputs,
        shard_targets,
        weights_on_meta,
    )
    from .mesh import HybridMesh, Mesh
    from .ops import register_operator
    from .planning.audit import audit
    from .planning.comparison import compare
    from .plans import ShardingPlan, dump_plan, parse_plan, read_plan, write_plan

__version__ = "0.1.0"

_LAZY = {
    "HybridMesh": "autoshard.mesh",
    "Layout": "autoshard.layout",
    "Mesh": "autoshard.mesh",
    "ShardingPlan": "autoshard.plans",
    "as_one_process": "autoshard.lowering",
    "audit": "autoshard.planning.audit",
    "auto_parallelize": "autoshard.api",
    "compare": "autoshard.planning.comparison",
    "constrain": "autoshard.capture",
    "dump_plan": "autoshard.plans",
    "format_layout": "autoshard.layout",
    "load_weights": "autoshard.lowering",
    "manual_seed": "autoshard.lowering",
    "plan": "autoshard.api",
    "measure_collectives": "autoshard.lowering",
    "measure_memory": "autoshard.lowering",
    "parallelize": "autoshard.apply",
    "parse_layout": "autoshard.layout",
    "parse_plan": "autoshard.plans",
    "read_plan": "autoshard.plans",
    "plan_of": "autoshard.lowering",
    "register_operator": "autoshard.ops",
    "representative": "autoshard.capture",
    "sampler": "autoshard.lowering",
    "shard_inputs": "autoshard.lowering",
    "shard_targets": "autoshard.lowering",
    "weights_on_meta": "autoshard.lowering",
    "write_plan": "autoshard.plans",
}

__all__ = [
    "AutoshardError",
    "HybridMesh",
    "Layout",
    "Mesh",
    "ShardingPlan",
    "as_one_process",
    "audit",
    "auto_parallelize",
    "compare",
    "constrain",
    "dump_plan",
    "format_layout",
    "load_weights",
    "manual_seed",
    "measure_collectives",
    "measure_memory",
    "parallelize",
    "parse_layout",
    "parse_plan",
    "plan",
    "plan_of",
    "read_plan",
    "register_operator",
    "representative",
    "sampler",
    "shard_inputs",
    "shard_targets",
    "weights_on_meta",
    "write_plan",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
