"""A calibration run from its points to its profile: measure, fit, write."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from cost_models import Profile, ProfileError, dump_profile
from cost_models.fit import Compared, compare, fit
from cost_models.samples import Point, Samples, SamplesError, SamplesFile, read_samples

from ..errors import CalibrationError
from .job import Job
from .kernels import kernel_points
from .machine import free_bytes, header, memory_bytes
from .measure import Progress, Record, measure
from .output import write
from .sampling import Effort, collective_points, row_points, together_points

SHARE_OF_FREE = 32  # a collective of B bytes holds a few times B, and others use the machine too


@dataclass(frozen=True)
class Calibration:
    """The result of a run: the profile, the samples it was fitted to, and both side by side, point by point."""

    profile: Profile
    samples: Samples
    compared: tuple[Compared, ...]


def calibrate(job: Job, effort: Effort, samples: Path, output: Path, progress: Progress) -> Calibration | None:
    """Measures what is not in the samples file yet, fits all of it and writes the profile. All ranks call it.

    Returns:
        On the first rank what was found; None on the others.

    Raises:
        CalibrationError: a rank died, a file cannot be written, or the samples are of another run or damaged. A profile
            that was there stays; so do the samples.
    """
    head = header(job)
    points = points_of(job, effort)
    file = job.on_first(lambda: _open(samples, head))
    try:
        if not job.highest(float(file is not None and file.before.complete))[0]:
            measure(job, points, effort, _recorder(file), progress, _there(file))
            job.on_first(lambda: _finish(file))
    except CalibrationError as error:
        if file is None or file.path in str(error):
            raise
        kept = f"{file.count} samples are kept in {file.path}, and the same command continues behind them"
        raise CalibrationError(f"{error}; {kept}") from error
    finally:
        if file is not None:
            file.close()
    memory = memory_bytes(job)
    return job.on_first(lambda: _fit(samples, output, memory))


def points_of(job: Job, effort: Effort) -> list[Point]:
    """The points that a run measures: as many sizes as the effort asks for and the free memory of every rank allows.

    Operators in a row say what the host adds to each, and to a collective behind them. They are measured where the host
    is the device: of any other it runs ahead in a step, and not in a row of small kernels (docs/decisions/0015).
    """
    most = min(effort.max_bytes, free_bytes(job) // SHARE_OF_FREE)
    collectives, kernels = collective_points(job.mesh, most), kernel_points(effort.max_width, most)
    rows = row_points(collectives, kernels) if job.device.type == "cpu" else []
    return [*collectives, *kernels, *together_points(collectives, kernels), *rows]


def _open(path: Path, head: object) -> SamplesFile:
    try:
        return SamplesFile(path, head)  # type: ignore[arg-type]
    except SamplesError as error:
        raise CalibrationError(str(error)) from None


def _recorder(file: SamplesFile | None) -> Record:
    return lambda sample: file.append([sample]) if file is not None else None


def _there(file: SamplesFile | None) -> Counter[Point]:
    return Counter(sample.point for sample in file.before.samples) if file is not None else Counter()


def _finish(file: SamplesFile | None) -> None:
    assert file is not None
    try:
        file.finish()
    except SamplesError as error:
        raise CalibrationError(str(error)) from None


def _fit(path: Path, output: Path, memory: int) -> Calibration:
    try:
        samples = read_samples(path)
        profile = fit(samples, name=output.stem, memory_bytes=memory)
        write(output, dump_profile(profile).encode())
        return Calibration(profile, samples, tuple(compare(profile, samples)))
    except (SamplesError, ProfileError) as error:
        raise CalibrationError(f"{error}; the samples are kept in {path}, and {output} is as it was") from None
