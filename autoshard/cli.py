"""The command line: reads arguments, calls the library, prints.

Exit codes: 0 done, 2 a mistake, 3 infeasible, 4 a profile does not fit its machine.
"""

from __future__ import annotations

import json
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from .errors import AutoshardError, InfeasibleError
from .factory import load_factory
from .mesh import Mesh
from .plans import check_writable, read_plan, summarize, summary_json, write_plan
from .plans.show import console_for, headline, show_text

if TYPE_CHECKING:
    from .measure import Calibration, Series

EXIT_MISTAKE = 2
EXIT_INFEASIBLE = 3
EXIT_DISAGREES = 4

app = typer.Typer(
    help="Automatic sharding of PyTorch models.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


class Objective(StrEnum):
    """What ``plan`` minimises."""

    step_time = "step-time"
    communication_time = "communication-time"


class Format(StrEnum):
    """How ``show`` prints."""

    text = "text"
    json = "json"


def main() -> None:
    """The console script ``autoshard``."""
    app(prog_name="autoshard")


def _print_version(wanted: bool) -> None:
    if wanted:
        try:
            typer.echo(f"autoshard {version('autoshard')}")
        except PackageNotFoundError:
            typer.echo("autoshard, not installed: run from its source folder")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options of every command."""


@app.command()
def plan(
    model: Annotated[
        str, typer.Argument(metavar="FILE.py:FACTORY", help="A function giving (module, args[, kwargs]).")
    ],
    mesh: Annotated[str, typer.Option(help="Axes and sizes, slowest first, for example dp=2,tp=2.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The plan file to write.")],
    hardware: Annotated[str, typer.Option(help="A preset or a profile file.", metavar="NAME|FILE")] = "dgx-h100",
    objective: Annotated[
        Objective, typer.Option(help="What to minimise: compute plus communication, or communication alone.")
    ] = Objective.step_time,
    pin: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=LAYOUT", help="A placement to hold, for example '*.wq.weight=tp:S(0)'. Repeatable."),
    ] = None,
    backend: Annotated[
        str, typer.Option(metavar="NAME", help="The solver: auto, highs, scip, cp-sat, cbc, pulp-highs.")
    ] = "auto",
    time_limit: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Stop the solver after this long.")
    ] = None,
) -> None:
    """Plan the sharding of a model and write the plan file."""
    with _mistakes_explained():
        parsed_mesh = Mesh.parse(mesh)
        if time_limit is not None and not (math.isfinite(time_limit) and time_limit > 0):
            raise typer.BadParameter(f"{time_limit} is not a time; give seconds above 0", param_hint="--time-limit")
        check_writable(output)  # now, not after an hour of solving
        _check_names(parsed_mesh, hardware, backend)
        with _warnings_explained(), _progress() as progress:
            progress("loading the model")
            module, args, kwargs = load_factory(model)
            from .api import plan as make_plan  # needs torch and a solver, which the other commands do without

            made = make_plan(
                module,
                args,
                kwargs,
                mesh=parsed_mesh,
                hardware=hardware,
                objective=objective.value,
                pins=tuple(pin or ()),
                backend=backend,
                time_limit_s=time_limit,
                name=model,
                progress=progress,
            )
        write_plan(made, output)
        for line in (f"wrote {output}", *headline(summarize(made))):
            typer.echo(line)


@app.command()
def show(
    path: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file.")],
    format: Annotated[Format, typer.Option("--format", help="Tables for people, or JSON for scripts.")] = Format.text,
) -> None:
    """Show a plan file."""
    with _mistakes_explained():
        shown = read_plan(path)
        if format is Format.json:
            typer.echo(json.dumps(summary_json(shown), indent=2))
        else:
            show_text(shown, console_for(sys.stdout))


@app.command()
def calibrate(
    mesh: Annotated[str | None, typer.Option(help="Axes and sizes, slowest first, for example dp=2,tp=2.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="The profile file to write.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Under a minute: fewer sizes and repetitions.")] = False,
    samples: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Where samples are appended as they come; a run continues what it finds."),
    ] = None,
    report: Annotated[
        Path | None, typer.Option(metavar="FILE|FOLDER", help="An HTML report; in a folder, its pictures too.")
    ] = None,
    max_bytes: Annotated[
        int | None, typer.Option(metavar="BYTES", min=4096, help="The largest buffer of a collective.")
    ] = None,
    device: Annotated[
        str, typer.Option(metavar="cpu|cuda|auto", help="What is calibrated: cpu with gloo, cuda with NCCL.")
    ] = "auto",
    check: Annotated[
        Path | None, typer.Option(metavar="PROFILE", help="Measure a little, and say whether this profile still fits.")
    ] = None,
    tolerance: Annotated[float, typer.Option(metavar="SHARE", help="With --check: how far off is still fitting.")] = 0.5,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="How long a rank waits for the others.")] = 120.0,
) -> None:
    """Measure this machine and write its hardware profile. Run it under torchrun, with one rank for each of the mesh.

    torchrun --nproc-per-node 4 -m autoshard calibrate --mesh dp=2,tp=2 -o profile.yaml
    """
    if os.environ.get("RANK", "0") != "0":
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (the first rank speaks for all)
    with _mistakes_explained():
        if report is not None and find_spec("matplotlib") is None:
            _fail("the report needs matplotlib; pip install 'autoshard[report]'", EXIT_MISTAKE)
        if check is not None:
            code = _check_profile(check, mesh, device, tolerance, timeout)
        elif mesh is None or output is None:
            _fail("calibrate needs --mesh and --output (or --check PROFILE)", EXIT_MISTAKE)
        else:
            samples = samples or output.with_suffix(".samples.jsonl")
            code = _write_profile(Mesh.parse(mesh), output, samples, report, quick, max_bytes, device, timeout)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)  # gloo's threads abort about one teardown in four; the results are on disk


def _write_profile(
    mesh: Mesh,
    output: Path,
    samples: Path,
    report: Path | None,
    quick: bool,
    max_bytes: int | None,
    device: str,
    timeout_s: float,
) -> int:
    from .measure import QUICK, THOROUGH, calibrate, check_writable, start_job

    effort = QUICK if quick else THOROUGH
    effort = effort if max_bytes is None else effort.up_to(max_bytes)
    page = report / "report.html" if report is not None and report.is_dir() else report
    with start_job(mesh, _device(device), timeout_s) as job:
        for path in (output, page):
            if path is not None:
                job.on_first(lambda path=path: check_writable(path))
        with _bar() as progress:
            found = calibrate(job, effort, samples, output, progress)
        job.on_first(lambda: _say_calibrated(found, output, samples, page, report))
    return 0


def _say_calibrated(
    found: Calibration | None, output: Path, samples: Path, page: Path | None, report: Path | None
) -> None:
    assert found is not None
    typer.echo(f"wrote {output}: {len(found.samples.samples)} samples of {len(found.samples.by_point())} points")
    table = Table("", "", "error, median", "largest", "points", box=None)
    for axis, kinds in found.profile.provenance.collectives.items():
        for kind, one in kinds.items():
            table.add_row(axis, kind, f"{one.median:.0%}", f"{one.largest:.0%}", str(one.points))
    for kind, one in found.profile.provenance.kernels.items():
        table.add_row("", kind, f"{one.median:.0%}", f"{one.largest:.0%}", str(one.points))
    console_for(sys.stdout).print(table)
    typer.echo(f"the samples are in {samples}; remove it to measure anew")
    if page is not None:
        from .measure.report import write_report

        for path in write_report(found, page, with_pictures=report != page):
            typer.echo(f"wrote {path}")


def _check_profile(path: Path, mesh: str | None, device: str, tolerance: float, timeout_s: float) -> int:
    from cost_models import MeasuredMesh, ProfileError, load_profile

    from .measure import check, start_job

    if not (math.isfinite(tolerance) and tolerance > 0):
        raise typer.BadParameter(f"{tolerance} is no share; give a number above 0", param_hint="--tolerance")
    try:
        profile = load_profile(str(path))
    except ProfileError as error:
        _fail(str(error), EXIT_MISTAKE)
    if mesh is None:
        if not isinstance(profile.network, MeasuredMesh):
            _fail(f"{path} is of no particular mesh; say with --mesh which one to check", EXIT_MISTAKE)
        parsed = Mesh(profile.network.axes, profile.network.shape)
    else:
        parsed = Mesh.parse(mesh)
    with start_job(parsed, _device(device), timeout_s) as job:
        with _bar() as progress:
            found = check(job, profile, progress)
        agrees = job.on_first(lambda: _say_checked(found or (), path, tolerance))
    return 0 if agrees or agrees is None else EXIT_DISAGREES


def _say_checked(found: tuple[Series, ...], path: Path, tolerance: float) -> bool:
    """Prints what is off; whether nothing is."""
    off = [series for series in found if not series.fits(tolerance)]
    points = sum(len(series.compared) for series in found)
    if not off:
        typer.echo(f"{path} fits: {len(found)} series of {points} points within a factor of {1 + tolerance:g}")
        return True
    typer.echo(f"{path} does not fit this machine: {len(off)} of {len(found)} series are off; calibrate again")
    table = Table("", "predicted ms", "measured ms", "measured / predicted", box=None)
    for series in off:
        for point, predicted_s, measured_s in series.rows():
            ratio = f"{measured_s / predicted_s:.2f}"
            table.add_row(point, f"{predicted_s * 1e3:.4g}", f"{measured_s * 1e3:.4g}", ratio)
    console_for(sys.stdout).print(table)
    return False


def _device(name: str) -> str:
    import torch

    if name not in ("cpu", "cuda", "auto"):
        raise typer.BadParameter(f"{name!r} is no device; choose cpu, cuda or auto", param_hint="--device")
    if name == "cuda" and not torch.cuda.is_available():
        _fail("there is no CUDA device here; use --device cpu", EXIT_MISTAKE)
    return name if name != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


@contextmanager
def _bar() -> Iterator[Callable[[int, int, str], None]]:
    """A progress bar on stderr, where a person watches the first rank."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda done, total, what: None
        return
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("")
        yield lambda done, total, what: bar.update(task, completed=done, total=total, description=what)


@contextmanager
def _mistakes_explained() -> Iterator[None]:
    """Ends the command with one line on stderr where the library refuses what it was given."""
    try:
        yield
    except InfeasibleError as error:
        _fail(str(error), EXIT_INFEASIBLE)
    except AutoshardError as error:
        _fail(str(error), EXIT_MISTAKE)
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "ortools", "pulp"):
            raise
        _fail(f"planning needs {error.name}, which is not installed; pip install autoshard", EXIT_MISTAKE)


def _fail(message: str, code: int) -> NoReturn:
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(code)


def _check_names(mesh: Mesh, hardware: str, backend: str) -> None:
    """Refuses an unknown profile or backend, or a profile that does not fit the mesh, before the long work starts."""
    from cost_models import ProfileError, load_profile
    from solver import BackendUnavailable, ProblemError
    from solver.backends import load_backend

    try:
        load_profile(hardware).topology(mesh.axes, mesh.shape)
        load_backend(backend)
    except (ProfileError, ProblemError, BackendUnavailable) as error:
        _fail(str(error), EXIT_MISTAKE)


@contextmanager
def _warnings_explained() -> Iterator[None]:
    """Prints a warning as one line on stderr, without the place in our source that raised it."""

    def show(message: Warning | str, category: object, file: object, line: object, *rest: object) -> None:
        typer.echo(f"warning: {message}", err=True)

    with warnings.catch_warnings():
        warnings.showwarning = show  # type: ignore[assignment]
        yield


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Says on stderr which stage runs, where a person watches."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda stage: None
        return
    with console.status("planning") as status:
        yield lambda stage: status.update(stage)
