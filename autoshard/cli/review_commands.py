"""The commands that question a plan: ``check``, ``explain``, ``replan``. They need the model and a solver.

typer reads the options of a command off its signature, so those that all three have stand in each.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .model_factory import load_factory
from .option_names import completing
from .terminal import EXIT_DIFFERENT, EXIT_MISTAKE, fail, mistakes_explained, progress_shown, warnings_explained

if TYPE_CHECKING:
    from ..plans import ShardingPlan


class Format(StrEnum):
    """How an answer is printed."""

    text = "text"
    json = "json"


# Options that several commands have: see commands.py.
_Plan = Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file.")]
_Model = Annotated[
    str | None,
    typer.Argument(metavar="FILE.py:FACTORY", help="The model, as for plan; by default as the plan names it."),
]
_Hardware = Annotated[
    str | None,
    typer.Option(
        metavar="NAME|FILE",
        help="The profile to price with, see below; by default the plan's.",
        autocompletion=completing("--hardware"),
    ),
]
_Backend = Annotated[
    str, typer.Option(metavar="NAME", help="The solver, see below.", autocompletion=completing("--backend"))
]
_TimeLimit = Annotated[float | None, typer.Option(metavar="SECONDS", help="Stop each solve after this long.")]
_Format = Annotated[Format, typer.Option("--format", help="Text for people, or JSON for scripts.")]


def check(
    path: _Plan = Path("plan.yaml"),
    model: _Model = None,
    mesh: Annotated[str | None, typer.Option(help="The mesh of the job, to be compared with the plan's.")] = None,
    hardware: _Hardware = None,
    memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="The budget of one rank, for example 60GiB.")
    ] = None,
    within: Annotated[
        str, typer.Option(metavar="SHARE", help="How much longer than the best plan the step may take.")
    ] = "1%",
    backend: _Backend = "auto",
    time_limit: _TimeLimit = None,
    format: _Format = Format.text,
) -> None:
    """Check that a plan still fits its model, mesh, profile and budget, and is still the best.

    Exit code: 0 it is, 1 it is not, 2 a mistake, 3 its constraints leave no plan any more.
    """
    from ..plans import parse_plan
    from ..plans.text.plan_file import read_bytes

    with mistakes_explained(), _profiles_explained(), warnings_explained(), progress_shown() as progress:
        share, budget = _share(within), None if memory is None else _bytes(memory)
        text = read_bytes(path)
        plan = parse_plan(text, str(path), edited=True)
        loaded = _loaded(plan, path, model, progress)
        from ..review.check import check as review  # needs torch and a solver
        from ..review.review_text import review_json, review_text

        found = review(
            plan,
            *loaded,
            mesh=mesh,
            memory_bytes=budget,
            within=share,
            text=text.decode(),
            **_options(hardware, backend, time_limit, progress),
        )
    typer.echo(
        json.dumps(review_json(found), indent=2) + "\n" if format is Format.json else review_text(found, str(path)),
        nl=False,
    )
    if not found.fits:
        raise typer.Exit(EXIT_DIFFERENT)


def explain(
    path: _Plan,
    why: Annotated[
        str, typer.Option(metavar="NAME", help="A parameter, input, operator or output; a glob for several.")
    ],
    model: _Model = None,
    instead: Annotated[
        str | None, typer.Option("--not", metavar="LAYOUT", help="Why not this? By default any other layout.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the alternative as a plan file, for diff and report.")
    ] = None,
    hardware: _Hardware = None,
    backend: _Backend = "auto",
    time_limit: _TimeLimit = None,
    format: _Format = Format.text,
) -> None:
    """Say why a placement is as it is: what another one would change, and what it would cost.

    Exit code: 0 there is an answer, also where the answer is that it is not possible, 2 a mistake.
    """
    from ..plans import check_writable, read_plan, write_plan

    with mistakes_explained(), _profiles_explained(), warnings_explained(), progress_shown() as progress:
        if output is not None:
            check_writable(output)
        plan = read_plan(path)
        loaded = _loaded(plan, path, model, progress)
        from ..review.explain import explain as ask  # as above
        from ..review.explain_text import explanation_json, explanation_text

        options = _options(hardware, backend, time_limit, progress)
        found = ask(plan, *loaded, why=why, instead=instead, **options)
        if output is not None and found.alternative is not None:
            write_plan(found.alternative, output)
    text = json.dumps(explanation_json(found), indent=2) + "\n" if format is Format.json else explanation_text(found)
    typer.echo(text, nl=False)
    if output is not None and format is Format.text:
        typer.echo(f"\nwrote {output}" if found.alternative else f"\ndid not write {output}: there is no such plan")


def replan(
    path: _Plan,
    model: _Model = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The plan file to write; by default the edited one.")
    ] = None,
    original: Annotated[
        Path | None, typer.Option(metavar="PLAN", help="The file before it was edited, where it cannot be told.")
    ] = None,
    hardware: _Hardware = None,
    backend: _Backend = "auto",
    time_limit: _TimeLimit = None,
    format: _Format = Format.text,
) -> None:
    """Keep what was edited by hand in a plan file, and decide the rest again with the fewest other changes.

    Exit code: 0 done, 2 a mistake, 3 no plan keeps the edits; the output is then left as it was.
    """
    from ..plans import check_writable, parse_plan, read_plan, summarize, write_plan
    from ..plans.text.plan_file import read_bytes
    from ..plans.views.show import headline

    output = output or path
    with mistakes_explained(), _profiles_explained():
        check_writable(output)
        with warnings_explained(), progress_shown() as progress:
            text = read_bytes(path)
            plan, before = parse_plan(text, str(path), edited=True), None if original is None else read_plan(original)
            loaded = _loaded(plan, path, model, progress)
            from ..review.replan import replan as make  # as above
            from ..review.review_text import replanned_json, replanned_text

            made = make(
                plan,
                *loaded,
                text=text.decode(),
                source=str(path),
                original=before,
                **_options(hardware, backend, time_limit, progress),
            )
        write_plan(made.plan, output)
    if format is Format.json:
        typer.echo(json.dumps(replanned_json(made, plan), indent=2))
        return
    typer.echo(replanned_text(made, plan), nl=False)
    for line in (f"wrote {output}", *headline(summarize(made.plan))):
        typer.echo(line)


def _loaded(
    plan: ShardingPlan,
    source: Path,
    model: str | None,
    progress: Callable[[str], None],
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    progress("loading the model")
    return load_factory(_named_by(plan, source) if model is None else model)


def _named_by(plan: ShardingPlan, source: Path) -> str:
    """The model that a plan names, as seen from the current folder or from the plan's. What it runs is code, so a plan
    may only name what lies below the current folder.
    """
    name, _, factory = plan.model.rpartition(":")
    here = Path.cwd().resolve()
    for folder in (here, source.resolve().parent):
        path = (folder / name).resolve()
        if path.suffix == ".py" and path.is_relative_to(here) and path.is_file():
            return f"{path.relative_to(here)}:{factory}"
    fail(f"the plan names its model {plan.model!r}, no file below this folder; give FILE.py:FACTORY", EXIT_MISTAKE)


def _options(
    hardware: str | None, backend: str, time_limit: float | None, progress: Callable[[str], None]
) -> dict[str, Any]:
    if time_limit is not None and not (math.isfinite(time_limit) and time_limit > 0):
        fail(f"{time_limit} is not a time for --time-limit; give seconds above 0", EXIT_MISTAKE)
    return {"hardware": hardware, "backend": backend, "time_limit_s": time_limit, "progress": progress}


def _share(text: str) -> float:
    """``1%`` or ``0.01``."""
    number = text.strip()
    try:
        share = float(number.removesuffix("%")) / (100 if number.endswith("%") else 1)
    except ValueError:
        share = math.nan
    if not 0 <= share < math.inf:
        fail(f"cannot read {text!r} for --within; write a share, for example 1%", EXIT_MISTAKE)
    if share > 1 and not number.endswith("%"):
        fail(f"--within {number} is {share:.0%}; write {number}% or {share / 100:g}", EXIT_MISTAKE)
    return share


def _bytes(text: str) -> int:
    from ..plans.units import parse_bytes

    try:
        return parse_bytes(text)
    except ValueError as error:
        fail(f"--memory: {error}", EXIT_MISTAKE)


@contextmanager
def _profiles_explained() -> Iterator[None]:
    """As :func:`mistakes_explained`, for the errors of cost models and solvers."""
    from cost_models import ProfileError
    from solver import BackendUnavailable, ProblemError

    try:
        yield
    except (ProfileError, ProblemError, BackendUnavailable) as error:
        fail(str(error), EXIT_MISTAKE)
