"""The measuring itself: all ranks run the same operation at the same time, and the slowest of them counts."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence

import torch

from cost_models.fit import series_of
from cost_models.samples import CollectivePoint, KernelPoint, Point, RowPoint, Sample, SamplesError, TogetherPoint

from ..errors import CalibrationError
from .job import Job
from .kernels import kernel
from .sampling import Effort, shuffled
from .timed_collectives import collective, row, together

MAX_INNER = 1000
_HOPELESS = 4.0
_GO, _STOP, _FAILED = 0.0, 1.0, 2.0

Progress = Callable[[int, int, str], None]
"""Called with the repetitions done, those planned, and what is measured now."""


Record = Callable[[Sample], None]
"""Keeps a sample; called on the first rank alone."""


def measure(
    job: Job, points: Sequence[Point], effort: Effort, record: Record, progress: Progress, have: Counter[Point]
) -> None:
    """Measures every point up to ``effort.rounds`` times. All ranks call it with the same points and effort.

    A repetition: all ranks meet, run the operation some times, wait for the device; the time of one operation on the
    slowest rank is the sample. Rounds go through all points in changing order. ``have`` says, on the first rank, how
    many samples of a point there are already.

    Raises:
        CalibrationError: a rank died or did not answer, or ``record`` raised SamplesError.
    """
    with torch.no_grad():
        run = _Run(job, effort, record, progress)
        run.warm_up(points)
        run.rounds(have)


class _Run:
    """The state of one run on one rank. Every method is called by all ranks, in the same order."""

    def __init__(self, job: Job, effort: Effort, record: Record, progress: Progress) -> None:
        self._job, self._effort, self._record, self._progress = job, effort, record, progress
        self._inner: dict[Point, int] = {}
        self._started = time.monotonic()
        self._failure: SamplesError | None = None

    def warm_up(self, points: Sequence[Point]) -> None:
        """Runs every operation twice, in the order given, and says how often a repetition repeats it.

        Of points that differ in size alone, those beyond the first that takes too long are left out, and so is that one
        unless it is the smallest.
        """
        slow: set[tuple[str, ...]] = set()
        known: set[tuple[str, ...]] = set()
        for done, point in enumerate(points):
            family = _family(point)
            if family in slow:
                continue
            self._progress(done, len(points), f"warming up: {describe(point)}")
            seconds, _ = self._repetition(point, 1)
            if seconds < _HOPELESS * self._effort.point_s:  # the first time takes longer
                seconds, _ = self._repetition(point, 1)
            if seconds > self._effort.point_s:
                slow.add(family)
            if family not in slow or family not in known:
                self._inner[point] = min(MAX_INNER, max(1, round(self._effort.repetition_s / seconds)))
            known.add(family)

    def rounds(self, known: Counter[Point]) -> None:
        """Measures round after round until all are done or the time is up."""
        points = list(self._inner)
        agreed = self._job.highest(*(known[point] if self._job.is_first else 0 for point in points))
        have = {point: int(count) for point, count in zip(points, agreed)}
        total = sum(max(self._effort.rounds - have[point], 0) for point in points)
        done = 0
        for round in range(self._effort.rounds):
            for point in shuffled(points, round):
                if have[point] > round:
                    continue
                self._progress(done, total, describe(point))
                seconds, said = self._repetition(point, self._inner[point])
                self._keep(Sample(point, round, seconds))
                done += 1
                if said == _STOP and round > 0:
                    return

    def _repetition(self, point: Point, inner: int) -> tuple[float, float]:
        """Seconds of one operation on the slowest rank, and what the first rank says to do next.

        Raises:
            CalibrationError: a rank is gone, or the first one cannot write.
        """
        try:
            operation = _operation(self._job, point)
            self._job.highest(0.0)
            start = time.perf_counter()
            for _ in range(inner):
                operation()
            self._job.synchronize()
            own = (time.perf_counter() - start) / inner
            seconds, said = self._job.highest(own, self._state())
        except RuntimeError as error:
            raise CalibrationError(self._lost(point, error)) from error
        if self._failure is not None:
            raise CalibrationError(str(self._failure))
        if said == _FAILED:
            raise CalibrationError("the first rank could not write the samples")
        return seconds, said

    def _state(self) -> float:
        if self._failure is not None:
            return _FAILED
        over = self._job.is_first and time.monotonic() - self._started > self._effort.budget_s
        return _STOP if over else _GO

    def _keep(self, sample: Sample) -> None:
        """Records a sample on the first rank; the others learn of a failure there in the next repetition."""
        if self._job.is_first:
            try:
                self._record(sample)
            except SamplesError as error:
                self._failure = error

    def _lost(self, point: Point, error: RuntimeError) -> str:
        reason = str(error).strip().splitlines()[0][:300]
        return (
            f"rank {self._job.rank} stopped while it measured {describe(point)}, because another rank died or hung, or "
            f"the memory is used up: {reason}"
        )


def _operation(job: Job, point: Point) -> Callable[[], object]:
    """The function that runs a point once. It is made for each repetition, since the buffers of all sizes together
    would fill the memory.
    """
    if isinstance(point, TogetherPoint):
        return together(job, point)
    if isinstance(point, RowPoint):
        return row(job, point)
    return collective(job, point) if isinstance(point, CollectivePoint) else kernel(job, point)


def describe(point: Point) -> str:
    """A point in words, for example ``all_reduce over dp, 65536 bytes``."""
    if isinstance(point, CollectivePoint):
        return f"{point.kind} over {point.axis}, {point.size_bytes} bytes"
    if isinstance(point, TogetherPoint):
        return f"{describe(point.collective)}, beside {point.kernels} of {describe(point.kernel)}"
    if isinstance(point, RowPoint):
        names = ", ".join(dict.fromkeys(kernel.name for kernel in point.kernels))
        behind = f", and {describe(point.collective)}, behind them" if point.collective else ""
        return f"{len(point.kernels)} kernels ({names}) and {point.views} views in a row{behind}"
    return f"{point.name} in {point.dtype}, {' x '.join(map(str, point.shape))}"


def _family(point: Point) -> tuple[str, ...]:
    """A key that is equal for points that differ in size alone."""
    return (point.name, *series_of(point)) if isinstance(point, KernelPoint) else series_of(point)
