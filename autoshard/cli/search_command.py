"""The command that looks for a mesh: ``search``. It needs the model and a solver."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .model_factory import load_factory
from .option_names import completing
from .terminal import EXIT_MISTAKE, fail, mistakes_explained, progress_shown, warnings_explained
from .written_files import make_folder

if TYPE_CHECKING:
    from ..mesh_search import Asked, MeshSearch


class Format(StrEnum):
    """How a search is printed."""

    text = "text"
    json = "json"


def search(
    model: Annotated[str, typer.Argument(metavar="FILE.py:FACTORY", help="The model, as for plan.")],
    devices: Annotated[str, typer.Option(metavar="N[,N...]", help="How many; several give the scaling curve.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FOLDER", help="For plans and pictures; made where it is missing.")
    ],
    hardware: Annotated[
        str,
        typer.Option(
            metavar="NAME|FILE", help="A preset, see below, or a profile file.", autocompletion=completing("--hardware")
        ),
    ] = "dgx-h100",
    memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="What a rank may hold, for example 80GiB; or profile.")
    ] = None,
    batch: Annotated[
        str | None,
        typer.Option(metavar="N[,N...]", help="The factory is called with batch=N; the best for a sample is chosen."),
    ] = None,
    axes: Annotated[
        int, typer.Option(metavar="N", min=1, max=4, help="Meshes of up to so many axes; fewer take less long.")
    ] = 4,
    constraint: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="As for plan; meshes without the axes that it names are left out."),
    ] = None,
    optimizer: Annotated[
        str,
        typer.Option(
            metavar="POLICY", help="Whose state and step count, see below.", autocompletion=completing("--optimizer")
        ),
    ] = "adamw",
    micro_batches: Annotated[
        int, typer.Option(metavar="N", min=1, help="Forwards and backwards of a step, as for plan.")
    ] = 1,
    backend: Annotated[
        str, typer.Option(metavar="NAME", help="The solver, see below.", autocompletion=completing("--backend"))
    ] = "auto",
    time_limit: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Stop each solve after this long.")
    ] = None,
    experts: Annotated[
        bool | None,
        typer.Option(
            "--experts/--no-experts",
            help="Plan the schemes that people use by hand too: what the best takes on a mesh that is planned. By "
            "default where the memory does not bind.",
        ),
    ] = None,
    price: Annotated[
        float | None, typer.Option(metavar="MONEY", help="Of a device for an hour: what a billion tokens cost.")
    ] = None,
    processes: Annotated[
        int, typer.Option(metavar="N", min=1, max=16, help="How many work on it, each with up to 2 GB (on Linux).")
    ] = 2,
    format: Annotated[Format, typer.Option("--format", help="Tables for people, or JSON for scripts.")] = Format.text,
) -> None:
    """Search the mesh: plan on every shape that the devices can have and that can still win, and keep the best plan.

    Exit code: 0 done, 2 a mistake, 3 no shape has a plan.
    """
    from ..errors import BudgetError, InfeasibleError, MeshError
    from ..plans.views.show import console_for

    counts, batches = _numbers(devices, "--devices"), _numbers(batch, "--batch") if batch else ()
    if time_limit is not None and not 0 < time_limit < float("inf"):
        raise typer.BadParameter(f"{time_limit} is not a time; give seconds above 0", param_hint="--time-limit")
    if price is not None and not 0 <= price < float("inf"):
        raise typer.BadParameter(f"{price} is no price; give 0 or more", param_hint="--price")
    with mistakes_explained(), warnings_explained():
        _check_names(hardware, backend, optimizer)
        make_folder(output)
        with progress_shown() as progress:
            from ..constraints import gather_constraints  # with what else needs torch and a solver
            from ..mesh_search import search_meshes, shapes_of

            options = (hardware, memory, optimizer, micro_batches, backend, time_limit)
            asked = _asked(
                model,
                batches,
                counts[0],
                options,
                progress,
                lambda profile: [shapes_of(count, profile, axes) for count in counts],
            )
            found: list[MeshSearch] = []
            failed: list[tuple[int, str]] = []
            kinds: set[type[Exception]] = set()
            for count in counts:
                try:
                    found.append(
                        search_meshes(
                            asked,
                            count,
                            lambda mesh: gather_constraints(tuple(constraint or ()), mesh),
                            most_axes=axes,
                            processes=processes,
                            experts=experts,
                            report=_prefixed(progress, f"{count} devices: " * (len(counts) > 1)),
                        )
                    )
                except (BudgetError, InfeasibleError, MeshError) as error:
                    if len(counts) == 1:
                        raise
                    failed.append((count, str(error)))
                    kinds.add(type(error))
            if not found:
                raise (MeshError if kinds == {MeshError} else InfeasibleError)(
                    "; ".join(reason for _, reason in failed)
                )
        from ..mesh_search.rows import searches_json
        from ..mesh_search.tables import show_searches

        written = _write(found, output)
        if format is Format.json:
            typer.echo(json.dumps(searches_json(found, failed, price), indent=2))
            return
        show_searches(found, console_for(sys.stdout), failed, price)
        for path in written:
            typer.echo(f"wrote {path}")


def _numbers(text: str, option: str) -> tuple[int, ...]:
    """``8,16`` as numbers, each once, the least first."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and 0 < len(part) < 9 and int(part) > 0 for part in parts):
        raise typer.BadParameter(f"{text!r} is no list of numbers above 0, for example 8,16", param_hint=option)
    return tuple(sorted({int(part) for part in parts}))


def _asked(
    model: str,
    batches: tuple[int, ...],
    devices: int,
    options: tuple[Any, ...],
    progress: Callable[[str], None],
    check: Callable[[Any], object],
) -> list[Asked]:
    """A planner for each batch, which is captured; what the machine cannot have is refused first."""
    from ..mesh_search import Asked
    from ..planning import Planner, memory_limit, profile_of

    hardware, memory, optimizer, micro_batches, backend, time_limit = options
    profile = profile_of(hardware)
    limit = memory_limit(optimizer, memory, None, profile)
    check(profile)
    asked = []
    for batch in batches or (None,):
        progress("loading the model")
        module, args, kwargs = load_factory(model, **({} if batch is None else {"batch": batch}))
        planner = Planner.of_model(
            module,
            args,
            kwargs,
            {"dp": devices},
            profile,
            name=model,
            micro_batches=micro_batches,
            report=_prefixed(progress, "" if batch is None else f"batch {batch}: "),
            backend=backend,
            time_limit_s=time_limit,
            limit=limit,
        )
        asked.append(Asked(planner, 1 if batch is None else batch))
    return asked


def _prefixed(progress: Callable[[str], None], prefix: str) -> Callable[[str], None]:
    return lambda said: progress(prefix + said)


def _check_names(hardware: str, backend: str, optimizer: str) -> None:
    """Refuses unknown names before the long work starts."""
    from cost_models import load_profile, optimizer_policy
    from solver import BackendUnavailable
    from solver.backends import load_backend

    try:
        load_profile(hardware)
        load_backend(backend)
        optimizer_policy(optimizer)
    except (ValueError, BackendUnavailable) as error:
        fail(str(error), EXIT_MISTAKE)


def _write(searches: list[MeshSearch], folder: Path) -> list[Path]:
    """The winners' plans and the pictures, as files; all texts are made before the first is written."""
    from ..measure.calibration_report import svg
    from ..mesh_search.charts import mesh_picture, scaling_picture
    from ..plans import dump_plan
    from ..plans.text.plan_file import write_text

    texts = [(f"plan-{search.devices}.yaml", dump_plan(search.plan), "plan") for search in searches]
    scaling = scaling_picture(searches)
    pictures = [*map(mesh_picture, searches), *([] if scaling is None else [scaling])]
    texts += [(f"{picture.name}.svg", svg(picture), "picture") for picture in pictures]
    for name, text, what in texts:
        write_text(text, folder / name, what)
    return [folder / name for name, _, _ in texts]
