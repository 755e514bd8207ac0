"""Checks a profile against its machine: measures a few of its points again and compares."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from cost_models import Profile
from cost_models.fit import Compared, compare, grouped
from cost_models.samples import CollectivePoint, KernelPoint, Point, Sample, Samples

from ..errors import CalibrationError
from .calibrate import points_of
from .job import Job
from .machine import header
from .measure import Progress, describe, measure
from .sampling import Effort

CHECK = Effort(rounds=9, repetition_s=0.008, point_s=1.0, budget_s=20.0, max_bytes=4 << 20, max_width=512)
SIZES_BYTES = (1 << 14, 1 << 18, 1 << 20, 1 << 22)
WIDTHS = (128, 256, 512)


@dataclass(frozen=True)
class Series:
    """A collective on an axis, or a kind of kernel in one dtype: its points, predicted and measured again."""

    compared: tuple[Compared, ...]

    @property
    def ratio(self) -> float:
        """Measured over predicted seconds, the median over the points."""
        return median(one.measured_s / one.predicted_s for one in self.compared)

    def rows(self) -> list[tuple[str, float, float]]:
        """A row for every point: the point in words, predicted seconds, measured seconds."""
        return [(describe(one.point), one.predicted_s, one.measured_s) for one in self.compared]

    def fits(self, tolerance: float) -> bool:
        """Whether the ratio is within a factor of ``1 + tolerance``."""
        return abs(math.log(self.ratio)) <= math.log1p(tolerance)


def check(job: Job, profile: Profile, progress: Progress, effort: Effort = CHECK) -> tuple[Series, ...] | None:
    """Measures some sizes of every collective on every axis and some kernels. All ranks call it.

    Returns:
        On the first rank the series; None on the others.

    Raises:
        CalibrationError: the profile has no links for the job's mesh, or a rank died.
    """
    try:
        profile.topology(job.mesh.axes, job.mesh.shape)
    except ValueError as error:
        raise CalibrationError(str(error)) from None
    samples: list[Sample] = []
    head = header(job)
    measure(job, _some(points_of(job, effort)), effort, samples.append, progress, Counter())
    if not job.is_first:
        return None
    found = compare(profile, Samples(head, tuple(samples), True))
    return tuple(Series(tuple(group)) for group in grouped(found))


def _some(points: Sequence[Point]) -> list[Point]:
    """The points that a check measures: every kind of collective over one axis, and kernels at sizes that are common in
    training steps.

    All kernels of a kind are measured, since a profile has one curve for the kind, which lies between them.
    """
    collectives = [p for p in points if isinstance(p, CollectivePoint) and len(p.axes) == 1]
    kernels = [p for p in points if isinstance(p, KernelPoint) and p.dtype == "float32"]
    return [
        # on axes whose sizes do not divide these, or with small buffers, all of them
        *([p for p in collectives if p.size_bytes in SIZES_BYTES] or collectives),
        *(p for p in kernels if p.name == "mm" and p.shape[0] in WIDTHS),
        *(p for p in kernels if p.kind in ("pointwise", "copy") and not p.held_out),
    ]
