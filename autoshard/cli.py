"""The command line: reads arguments, calls the library, prints. Exit codes: 0 done, 2 a mistake, 3 infeasible."""

from __future__ import annotations

import json
import math
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from .baselines import baseline as baseline_of
from .errors import AutoshardError, InfeasibleError
from .factory import load_factory
from .mesh import Mesh
from .plans import Contest, check_writable, contest_json, read_plan, summarize, summary_json, write_plan
from .plans.show import console_for, headline, show_text
from .plans.show_contest import show_contest

EXIT_MISTAKE = 2
EXIT_INFEASIBLE = 3

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


# Options that several commands have.
_MODEL = typer.Argument(metavar="FILE.py:FACTORY", help="A function giving (module, args[, kwargs]).")
_MESH = typer.Option(help="Axes and sizes, slowest first, for example dp=2,tp=2.")
_HARDWARE = typer.Option(help="A preset or a profile file.", metavar="NAME|FILE")
_CONSTRAINT = typer.Option(
    metavar="TEXT", help="What is decided, for example 'forbid all_gather over tp of activations'. Repeatable."
)
_BACKEND = typer.Option(metavar="NAME", help="The solver: auto, highs, scip, cp-sat, cbc, pulp-highs.")
_TIME_LIMIT = typer.Option(metavar="SECONDS", help="Stop the solver after this long.")
_MEMORY = typer.Option(
    metavar="SIZE", help="What a rank may hold, for example 80GiB; or profile: what the profile says."
)
_OPTIMIZER = typer.Option(metavar="POLICY", help="Whose state counts: adamw, sgd, sgd-momentum, adamw-8bit, ...")


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
    model: Annotated[str, _MODEL],
    mesh: Annotated[str, _MESH],
    output: Annotated[Path, typer.Option("--output", "-o", help="The plan file to write.")],
    hardware: Annotated[str, _HARDWARE] = "dgx-h100",
    objective: Annotated[
        Objective, typer.Option(help="What to minimise: compute plus communication, or communication alone.")
    ] = Objective.step_time,
    pin: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=LAYOUT", help="A placement to hold, for example '*.wq.weight=tp:S(0)'. Repeatable."),
    ] = None,
    constraint: Annotated[list[str] | None, _CONSTRAINT] = None,
    baseline: Annotated[
        str | None, typer.Option(metavar="NAME", help="A scheme people use by hand: ddp, fsdp, hsdp, ddp+tp, ...")
    ] = None,
    backend: Annotated[str, _BACKEND] = "auto",
    time_limit: Annotated[float | None, _TIME_LIMIT] = None,
    memory: Annotated[str | None, _MEMORY] = None,
    memory_soft: Annotated[
        float | None,
        typer.Option(metavar="PRICE", help="Trade: a GiB above --memory costs this many ms of step time."),
    ] = None,
    optimizer: Annotated[str, _OPTIMIZER] = "adamw",
) -> None:
    """Plan the sharding of a model and write the plan file."""
    with _mistakes_explained():
        parsed_mesh = Mesh.parse(mesh)
        constraints = list(constraint or ())
        if baseline is not None:
            constraints.extend(baseline_of(baseline, parsed_mesh).constraints(parsed_mesh))
        _check_time_limit(time_limit)
        check_writable(output)  # now, not after an hour of solving
        _check_names(parsed_mesh, hardware, backend, optimizer)
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
                constraints=tuple(constraints),
                pins=tuple(pin or ()),
                backend=backend,
                time_limit_s=time_limit,
                memory=memory,
                memory_soft=memory_soft,
                optimizer=optimizer,
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
def compare(
    model: Annotated[str, _MODEL],
    mesh: Annotated[str, _MESH],
    hardware: Annotated[str, _HARDWARE] = "dgx-h100",
    constraint: Annotated[list[str] | None, _CONSTRAINT] = None,
    backend: Annotated[str, _BACKEND] = "auto",
    time_limit: Annotated[float | None, _TIME_LIMIT] = None,
    memory: Annotated[str | None, _MEMORY] = None,
    optimizer: Annotated[str, _OPTIMIZER] = "adamw",
    plans: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Write every plan there, as NAME.yaml; made where it is missing."),
    ] = None,
    format: Annotated[Format, typer.Option("--format", help="A table for people, or JSON for scripts.")] = Format.text,
) -> None:
    """Compare the optimum with the schemes people use by hand: time, communication, memory, where they differ."""
    with _mistakes_explained():
        parsed_mesh = Mesh.parse(mesh)
        _check_time_limit(time_limit)
        _check_names(parsed_mesh, hardware, backend, optimizer)
        with _warnings_explained(), _progress() as progress:
            progress("loading the model")
            module, args, kwargs = load_factory(model)
            from .comparison import compare as make_contest  # as above

            contest = make_contest(
                module,
                args,
                kwargs,
                mesh=parsed_mesh,
                hardware=hardware,
                constraints=tuple(constraint or ()),
                backend=backend,
                time_limit_s=time_limit,
                memory=memory,
                optimizer=optimizer,
                name=model,
                progress=progress,
            )
        if plans is not None:
            _write_plans(contest, plans)
        if format is Format.json:
            typer.echo(json.dumps(contest_json(contest), indent=2))
        else:
            show_contest(contest, console_for(sys.stdout))


def _write_plans(contest: Contest, folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        _fail(f"cannot make the folder {folder}: {error.strerror}", EXIT_MISTAKE)
    for contender in (contest.optimum, *contest.baselines):
        if contender.plan is not None:
            write_plan(contender.plan, folder / f"{contender.name}.yaml")


def _check_time_limit(time_limit: float | None) -> None:
    if time_limit is not None and not (math.isfinite(time_limit) and time_limit > 0):
        raise typer.BadParameter(f"{time_limit} is not a time; give seconds above 0", param_hint="--time-limit")


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


def _check_names(mesh: Mesh, hardware: str, backend: str, optimizer: str) -> None:
    """Refuses unknown names, and a profile that does not fit the mesh, before the long work starts."""
    from cost_models import load_profile, optimizer_policy
    from solver import BackendUnavailable
    from solver.backends import load_backend

    try:
        load_profile(hardware).topology(mesh.axes, mesh.shape)
        load_backend(backend)
        optimizer_policy(optimizer)
    except (ValueError, BackendUnavailable) as error:
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
