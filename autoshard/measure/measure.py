"""The measuring itself: all ranks run the same operation at the same time, and the slowest of them counts."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence

import torch

from cost_models.samples import CollectivePoint, Point, Sample, SamplesError, SamplesFile

from ..errors import CalibrationError
from .collectives import collective
from .job import Job
from .kernels import kernel
from .schedule import Effort, shuffled

MAX_INNER = 1000
_GO, _STOP, _FAILED = 0.0, 1.0, 2.0

Progress = Callable[[int, int, str], None]
"""Called with the repetitions done, those planned, and what is measured now."""



def measure(
    job: Job, points: Sequence[Point], effort: Effort, file: SamplesFile | None, progress: Progress
) -> None:
    """Measures every point up to ``effort.rounds`` times and appends the samples to ``file`` (None on all ranks but the
    first) as they come.

    A repetition: all ranks meet, run the operation some times, wait for the device; the time of one operation on the
    slowest rank is the sample. Rounds go through all points in changing order.

    Raises:
        CalibrationError: a rank died or did not answer, or the samples cannot be written; those written are kept.
    """
    with torch.no_grad():
        run = _Run(job, effort, file, progress)
        run.warm_up(points)
        run.rounds()


class _Run:
    """The state of one run on one rank. Every method is called by all ranks, in the same order."""

    def __init__(self, job: Job, effort: Effort, file: SamplesFile | None, progress: Progress) -> None:
        self._job, self._effort, self._file, self._progress = job, effort, file, progress
        self._inner: dict[Point, int] = {}
        self._started = time.monotonic()
        self._failure: SamplesError | None = None

    def warm_up(self, points: Sequence[Point]) -> None:
        """Runs every operation twice, in the order given, and says how often a repetition repeats it."""
        slow: set[tuple[str, ...]] = set()
        for done, point in enumerate(points):
            family = _family(point)
            if family in slow:
                continue
            self._progress(done, len(points), f"warming up: {describe(point)}")
            self._repetition(point, 1)
            seconds, _ = self._repetition(point, 1)
            if seconds > self._effort.point_s:
                slow.add(family)
            self._inner[point] = min(MAX_INNER, max(1, round(self._effort.repetition_s / seconds)))

    def rounds(self) -> None:
        """Measures round after round until all are done or the time is up."""
        have = self._samples_there()
        points = list(self._inner)
        total = sum(max(self._effort.rounds - have[point], 0) for point in points)
        done = 0
        for round in range(self._effort.rounds):
            for point in shuffled(points, round):
                if have[point] > round:
                    continue
                self._progress(done, total, describe(point))
                seconds, said = self._repetition(point, self._inner[point])
                self._record(Sample(point, round, seconds))
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

    def _record(self, sample: Sample) -> None:
        """Writes on the first rank; what fails there is told to the others in the next repetition."""
        if self._file is not None:
            try:
                self._file.append([sample])
            except SamplesError as error:
                self._failure = error

    def _samples_there(self) -> Counter[Point]:
        points = list(self._inner)
        counted = Counter(sample.point for sample in self._file.before.samples) if self._file else Counter()
        agreed = self._job.highest(*(counted[point] for point in points)) if points else ()
        return Counter({point: int(count) for point, count in zip(points, agreed)})

    def _lost(self, point: Point, error: RuntimeError) -> str:
        kept = f"; {self._file.count} samples are kept in {self._file.path}" if self._file else ""
        reason = str(error).strip().splitlines()[0][:300]
        return (
            f"rank {self._job.rank} stopped while it measured {describe(point)}: {reason}{kept}. Another rank died or "
            "hung, or the memory is used up; the same command continues behind the last sample"
        )


def _operation(job: Job, point: Point) -> Callable[[], object]:
    """Made anew for each repetition: kept, the buffers of all sizes would fill the memory."""
    return collective(job, point) if isinstance(point, CollectivePoint) else kernel(job, point)


def describe(point: Point) -> str:
    """A point in words."""
    if isinstance(point, CollectivePoint):
        return f"{point.kind} over {point.axis}, {point.size_bytes} bytes"
    return f"{point.name} in {point.dtype}, {' x '.join(map(str, point.shape))}"


def _family(point: Point) -> tuple[str, ...]:
    """Points of one family differ in size alone."""
    if isinstance(point, CollectivePoint):
        return point.kind, point.axis
    return point.kind, point.name, point.dtype
