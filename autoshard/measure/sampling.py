"""What a calibration run measures, and how long it may take. Knows sizes, not tensors."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from cost_models.collective_kinds import COLLECTIVE_KINDS
from cost_models.samples import CollectivePoint, KernelPoint, Point, TogetherPoint

from ..mesh import Mesh

SMALLEST_BYTES = 1024
ITEM_BYTES = 4  # collectives carry float32


@dataclass(frozen=True)
class Effort:
    """How thorough a run is.

    Attributes:
        rounds: how often each point is measured, at most.
        repetition_s: a repetition repeats its operation until it takes about this long.
        point_s: sizes of which one operation takes longer are left out; the time of larger ones follows from the last.
        budget_s: after this long the run stops, once every point was measured.
        max_bytes: the largest buffer of a collective.
        max_width: the largest square matrix that is multiplied.
    """

    rounds: int
    repetition_s: float
    point_s: float
    budget_s: float
    max_bytes: int
    max_width: int


QUICK = Effort(rounds=7, repetition_s=0.008, point_s=0.25, budget_s=35.0, max_bytes=16 << 20, max_width=1024)
THOROUGH = Effort(rounds=21, repetition_s=0.02, point_s=1.0, budget_s=420.0, max_bytes=256 << 20, max_width=4096)


def collective_points(mesh: Mesh, max_bytes: int) -> list[CollectivePoint]:
    """Every kind over every axis of more than one rank, the smaller sizes first.

    Sizes double from 1 KiB. Every second one is held out of the fit: it lies halfway between two that are fitted.
    """
    steps = max(max_bytes // SMALLEST_BYTES, 1).bit_length()
    return [
        CollectivePoint(kind, axis, _divisible(SMALLEST_BYTES << step, ranks * ITEM_BYTES), step % 2 == 1)
        for step in range(steps)
        for axis, ranks in zip(mesh.axes, mesh.shape)
        if ranks > 1
        for kind in COLLECTIVE_KINDS
    ]


BESIDE = ("all_gather", "all_reduce")
"""What is measured beside kernels: parameters are gathered and gradients reduced so."""

BESIDE_BYTES, BESIDE_WIDTH, BESIDE_KERNELS = 4 << 20, 512, (1, 4, 16)
"""Up to which buffer, beside square products up to which width, and beside how many of them: for some number both
should take about as long.
"""


def together_points(collectives: Sequence[CollectivePoint], kernels: Sequence[KernelPoint]) -> list[TogetherPoint]:
    """The collectives that hide, over every axis, beside products, few of them first."""
    products = [p for p in kernels if (p.name, p.dtype) == ("mm", "float32") and p.shape[0] <= BESIDE_WIDTH]
    fitting = [p for p in collectives if p.kind in BESIDE and p.size_bytes <= BESIDE_BYTES]
    largest = {(p.axis, p.kind): p for p in fitting}  # the smaller sizes come first
    return [TogetherPoint(p, products[-1], count) for count in BESIDE_KERNELS for p in largest.values() if products]


def shuffled(points: Sequence[Point], round: int) -> list[Point]:
    """The points in the order of a round: another one each time, so that a machine that drifts favours none; the same
    on every rank.
    """
    order = list(points)
    random.Random(round).shuffle(order)
    return order


def _divisible(size: int, by: int) -> int:
    return -(-size // by) * by
