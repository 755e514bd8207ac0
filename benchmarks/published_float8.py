"""Layers that multiply in float8 with one scale for a tensor, compiled, as torchao does, from a plan in bfloat16.

- Products of weights within layers take the share of their time in bfloat16 that the largest products take that were
  measured in both (``SHARE``); torchtitan leaves the head as it is.
- What a product takes is cast: its largest number is looked for (2 bytes read of an element), and it is read again and
  written in one byte; together 5 bytes of each element. An input is cast in the forward, where the forward is computed
  again, and for the gradient of the weight; a gradient once (``matmul_with_hp_or_float8_args`` in
  ``torchao/float8/float8_linear.py``; equal casts are one in a compiled block). Weights are cast before they are
  gathered, as shards.
- Under tensor parallelism what is gathered was cast before: half of the bytes, and casts of a rank's part of the
  sequence (``torchao/float8/float8_tensor_parallel.py``).

No number here is fitted. Products with a scale for each row run other kernels, of which no rate is known.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace

from autoshard.plans import ShardingPlan
from autoshard.plans.plan import Execution, Redistribution
from autoshard.precision import is_cast
from cost_models import Profile
from published_models import Sizes
from published_runs import CannotBuild, Run

SHARE = {"h100": 794.5 / 1402.6, "h200": 794.5 / 1453.4, "b200": 1745.0 / 3432.5}
"""TFLOP/s in bfloat16 over those in float8 that products reach at most: S. Bekman, ml-engineering, maximum achievable
matmul FLOPS (``compute/accelerator/README.md``), where H200 is as H100 in bfloat16.
"""

BYTES_OF_A_CAST = 5
"""Of each element: 2 read for the scale, 2 read and 1 written for the cast."""


def in_float8(plan: ShardingPlan, profile: Profile) -> ShardingPlan:
    """The plan with products of layers in float8, and gathers of activations in layers at half of their time.

    Raises:
        CannotBuild: the machine has no float8.
    """
    share = next((share for gpu, share in SHARE.items() if gpu in profile.name), None)
    if share is None:
        raise CannotBuild(f"{profile.name} has no float8")
    execution = tuple(_multiplied(entry, share) for entry in plan.execution)
    return replace(plan, execution=execution, redistributions=tuple(map(_gathered, plan.redistributions)))


def _multiplied(entry: Execution, share: float) -> Execution:
    is_of_weights = re.match(r"layers\.\d+\..*/(bwd\.|again\.)?mm(\.\d+)?$", entry.name)
    return replace(entry, predicted_ns=round(entry.predicted_ns * share)) if is_of_weights else entry


def _gathered(entry: Redistribution) -> Redistribution:
    if is_cast(entry.tensor) or not entry.tensor.startswith("layers."):
        return entry
    halved = (
        replace(each, predicted_s=each.predicted_s / 2) if (each.kind, each.axis) == ("all_gather", "tp") else each
        for each in entry.collectives
    )
    return replace(entry, collectives=tuple(halved))


def casts_s(run: Run, profile: Profile) -> float:
    """Seconds of all casts of a forward and backward of one rank, before a compiler fuses them with what is around."""
    sizes, (rows, sequence) = Sizes.of(run.row), run.batch
    of_axis = dict(zip(run.mesh.axes, run.mesh.shape))
    tokens = rows * sequence * of_axis.get("tp", 1) / math.prod(run.mesh.shape)
    width, ffn, kv = sizes.d_model, sizes.ffn, sizes.d_model // sizes.heads * sizes.kv_heads
    inputs = tokens * (3 * width + ffn)  # of q, k, v; of o; of w1, w3; of w2
    gradients = tokens * (3 * width + 2 * kv + 2 * ffn)  # of q, o, w2; of k, v; of w1, w3
    forwards = 1 if run.row.text("recompute").lower().startswith("no") else 2
    elements = sizes.layers * ((forwards + 1) * inputs + gradients) / of_axis.get("tp", 1)
    return float(profile.op_s("bfloat16", 0.0, BYTES_OF_A_CAST * elements, "pointwise"))
