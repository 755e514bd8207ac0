"""What a calibration run measures, and how long it may take. Knows sizes, not tensors."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from cost_models.collective_kinds import COLLECTIVE_KINDS, REDISTRIBUTION_KINDS
from cost_models.samples import CollectivePoint, KernelPoint, Point, RowPoint, TogetherPoint
from cost_models.topology import axis_groups

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
    """Every kind over every axis of more than one rank, and those that plans have over several axes at once
    (``dp+tp``) over every group of these, the smaller sizes first.

    Sizes double from 1 KiB. Every second one is held out of the fit: it lies halfway between two that are fitted.
    """
    steps = max(max_bytes // SMALLEST_BYTES, 1).bit_length()
    axes = [(name, COLLECTIVE_KINDS) for name, ranks in zip(mesh.axes, mesh.shape) if ranks > 1]
    links = [*axes, *((name, GROUP_KINDS) for name in groups_of(mesh))]
    return [
        CollectivePoint(kind, name, _divisible(SMALLEST_BYTES << step, parts * ITEM_BYTES), step % 2 == 1)
        for step in range(steps)
        for name, kinds in links
        for parts in [mesh.parts(mesh.indices(name))]
        for kind in kinds
    ]


GROUP_KINDS = tuple(kind for kind in REDISTRIBUTION_KINDS if kind != "all_to_all")
"""What redistributions send over several axes at once (docs/decisions/0009)."""


def groups_of(mesh: Mesh) -> list[str]:
    """The names of all groups of two axes or more, of those that have several ranks: ``dp+tp``."""
    return [mesh.named(group) for group in axis_groups(mesh.ndim) if all(mesh.shape[axis] > 1 for axis in group)]


BESIDE = ("all_gather", "all_reduce")
"""What is measured beside kernels: parameters are gathered and gradients reduced so."""

BESIDE_BYTES, BESIDE_WIDTH, BESIDE_KERNELS = 4 << 20, 512, (1, 4, 16)
"""Up to which buffer, beside square products up to which width, and beside how many of them: for some number both
should take about as long.
"""


def together_points(collectives: Sequence[CollectivePoint], kernels: Sequence[KernelPoint]) -> list[TogetherPoint]:
    """The collectives that hide, over every axis, beside products, few of them first."""
    products = [p for p in kernels if (p.name, p.dtype) == ("mm", "float32") and p.shape[0] <= BESIDE_WIDTH]
    fitting = [p for p in collectives if _is_beside(p) and p.size_bytes <= BESIDE_BYTES]
    largest = {(p.axis, p.kind): p for p in fitting}  # the smaller sizes come first
    return [TogetherPoint(p, products[-1], count) for count in BESIDE_KERNELS for p in largest.values() if products]


ROW_WIDTH, ROW_BYTES, ROW_TURNS = 256, (1 << 14, 1 << 17, 1 << 20), 4
"""The square product with which each turn of a row begins, the bytes of the tensors of its other kernels, and how many
turns there are: a product goes through the caches, as those of a step do between two operators of one kind.
"""

BEHIND_BYTES = (1 << 12, 1 << 19)
"""Of the collectives behind rows, at least."""


def row_points(collectives: Sequence[CollectivePoint], kernels: Sequence[KernelPoint]) -> list[RowPoint]:
    """A product and every kernel that streams, an optimizer's apart, with a view before each, in turns, on tensors of
    several sizes; and the collectives that hide, over every axis, behind the smallest of these rows.
    """
    plain = [p for p in kernels if p.dtype == "float32" and p.kind != "optimizer"]
    products = [p for p in plain if p.name == "mm" and p.shape[0] <= ROW_WIDTH]
    streams = {size: tuple(p for p in plain if _streams(p) == size) for size in ROW_BYTES}
    rows = [
        RowPoint((products[-1], *row) * ROW_TURNS, len(row) * ROW_TURNS) for row in streams.values() if products and row
    ]
    behind = {
        (size, p.axis, p.kind): p  # the smallest that is so large: the larger sizes come last
        for size in BEHIND_BYTES
        for p in reversed(collectives)
        if _is_beside(p) and p.size_bytes >= size
    }
    return [*rows, *(replace(row, collective=each) for row in rows[:1] for each in behind.values())]


def _streams(point: KernelPoint) -> int:
    """Bytes of the first tensor that a kernel reads, where it streams."""
    computes = point.kind in ("matmul", "attention", "convolution")
    return 0 if computes else math.prod(point.shape) * ITEM_BYTES


def _is_beside(point: CollectivePoint) -> bool:
    return point.kind in BESIDE and len(point.axes) == 1


def shuffled(points: Sequence[Point], round: int) -> list[Point]:
    """The points in the order of a round: another one each time, so that a machine that drifts favours none; the same
    on every rank.
    """
    order = list(points)
    random.Random(round).shuffle(order)
    return order


def _divisible(size: int, by: int) -> int:
    return -(-size // by) * by
