"""The two jobs of ``autoshard calibrate``: a profile written, a profile checked.

Both run on every rank of a torchrun job; the first one prints. A run measures what its samples file lacks, fits all of
it, and writes the profile and the report.
"""

from __future__ import annotations

import math
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import torch
from rich.console import Console
from rich.progress import Progress as Bar
from rich.table import Table

from cost_models import MeasuredMesh, Profile, ProfileError, load_profile
from cost_models.fit import grouped, honest, residual, series_of
from cost_models.samples import KernelPoint, RowPoint

from ..errors import CalibrationError
from ..mesh import Mesh
from ..plans.views.show import console_for
from .calibrate import Calibration, calibrate
from .job import start_job
from .measure import Progress
from .output import check_writable
from .profile_check import Series, check
from .sampling import QUICK, THOROUGH


def write_profile(
    mesh: Mesh,
    output: Path,
    samples: Path,
    report: Path | None = None,
    quick: bool = False,
    max_bytes: int | None = None,
    budget_s: float | None = None,
    device: str = "auto",
    timeout_s: float = 120.0,
) -> None:
    """Calibrates a mesh and writes its profile and, where one is wanted, a report: a page, or a folder with pictures.

    Raises:
        CalibrationError: the job does not fit the mesh, a rank died, or a file cannot be written. A profile that was
            there stays, and so do the samples.
    """
    effort = QUICK if quick else THOROUGH
    effort = replace(
        effort,
        max_bytes=effort.max_bytes if max_bytes is None else max_bytes,
        budget_s=effort.budget_s if budget_s is None else budget_s,
    )
    page = report if report is None or report.suffix == ".html" else report / "report.html"
    with _ended_in_words(), start_job(mesh, _device(device), timeout_s) as job:
        job.on_first(lambda: _check_outputs(output, page, is_folder=report != page))
        with _progress(job.is_first) as progress:
            found = calibrate(job, effort, samples, output, progress)
        job.on_first(lambda: _report(found, output, samples, page, with_pictures=report != page))


def check_profile(path: Path, mesh: str | None, device: str, tolerance: float, timeout_s: float) -> bool:
    """Measures a few points of a profile again and prints which are off; on every rank whether none is.

    Raises:
        CalibrationError: the profile cannot be read, the job does not fit the mesh, or a rank died.
    """
    if not (math.isfinite(tolerance) and tolerance > 0):
        raise CalibrationError(f"the tolerance {tolerance} is no share; give a number above 0")
    profile = _load(path)
    with _ended_in_words(), start_job(_mesh_of(profile, path, mesh), _device(device), timeout_s) as job:
        with _progress(job.is_first) as progress:
            found = check(job, profile, progress)
        fits = job.on_first(lambda: _verdict(found or (), path, tolerance))
        return not job.highest(float(fits is False))[0]


def _check_outputs(output: Path, page: Path | None, is_folder: bool) -> None:
    check_writable(output)
    if page is not None:
        if is_folder and page.parent.parent.is_dir() and not page.parent.exists():
            page.parent.mkdir()
        check_writable(page)


def _load(path: Path) -> Profile:
    try:
        return load_profile(str(path))
    except ProfileError as error:
        raise CalibrationError(str(error)) from None


def _mesh_of(profile: Profile, path: Path, mesh: str | None) -> Mesh:
    if mesh is not None:
        return Mesh.parse(mesh)
    if not isinstance(profile.network, MeasuredMesh):
        raise CalibrationError(f"{path} is of no particular mesh; say with --mesh which one to check")
    return Mesh(profile.network.axes, profile.network.shape)


def _device(name: str) -> str:
    if name not in ("cpu", "cuda", "auto"):
        raise CalibrationError(f"{name!r} is no device; choose cpu, cuda or auto")
    if name == "cuda" and not torch.cuda.is_available():
        raise CalibrationError("there is no CUDA device here; use --device cpu")
    return name if name != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


@contextmanager
def _ended_in_words() -> Iterator[None]:
    """The signals with which torchrun ends all ranks, when one fails or a person stops it, become an error."""

    def end(number: int, frame: object) -> NoReturn:
        raise CalibrationError("torchrun ended this run: another rank failed, or somebody stopped it")

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _progress(is_first: bool) -> Iterator[Progress]:
    """A bar on stderr, where a person watches the first rank."""
    console = Console(stderr=True)
    if not (is_first and console.is_terminal):
        yield lambda done, total, what: None
        return
    with Bar(console=console, transient=True) as bar:
        task = bar.add_task("")
        yield lambda done, total, what: bar.update(task, completed=done, total=total, description=what)


def _report(found: Calibration | None, output: Path, samples: Path, page: Path | None, with_pictures: bool) -> None:
    assert found is not None
    out = console_for(sys.stdout)
    _say(out, f"wrote {output}: {len(found.samples.samples)} samples of {len(found.samples.by_point())} points")
    table = Table("", "error of the fit", "median", "largest", "points", box=None)
    for row in _errors(found):
        table.add_row(*row)
    out.print(table)
    _say(out, f"a collective beside kernels still costs {found.profile.contention:.0%} of its time (contention)")
    _say(out, f"the samples are in {samples}; remove it to measure anew")
    if page is not None:
        from .calibration_report import write_report  # needs jinja2, which is an extra

        for path in write_report(found, page, with_pictures):
            _say(out, f"wrote {path}")


def _errors(found: Calibration) -> Iterator[tuple[str, ...]]:
    """A row of the table for each series but those of operators in a row."""
    for group in grouped(found.compared):
        if isinstance(point := group[0].point, RowPoint):
            continue
        one, series = residual(honest(group)), series_of(point)
        named = ("", "/".join(series)) if isinstance(point, KernelPoint) else series
        cells = (f"{one.median:.0%}", f"{one.largest:.0%}", str(one.points)) if one else ("-", "-", "none held out")
        yield (*named, *cells)


def _verdict(found: tuple[Series, ...], path: Path, tolerance: float) -> bool:
    out, factor = console_for(sys.stdout), 1 + tolerance
    off = [series for series in found if not series.fits(tolerance)]
    if not off:
        points = sum(len(series.compared) for series in found)
        _say(out, f"{path} fits: {len(found)} series of {points} points are within a factor of {factor:g}")
        return True
    _say(out, f"{path} does not fit: {len(off)} of {len(found)} series are off by more than a factor of {factor:g}")
    table = Table("", "predicted ms", "measured ms", "measured / predicted", box=None)
    for series in off:
        for point, predicted_s, measured_s in series.rows():
            seconds = f"{predicted_s * 1e3:.4g}", f"{measured_s * 1e3:.4g}"
            table.add_row(point, *seconds, f"{measured_s / predicted_s:.2f}")
    out.print(table)
    return False


def _say(out: Console, text: str) -> None:
    out.print(text, soft_wrap=True, markup=False, highlight=False)
