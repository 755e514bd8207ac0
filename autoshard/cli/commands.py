"""The command line: reads arguments, calls the library, prints.

Exit codes: 0 done, 1 the plans differ (``diff``) or a plan is no longer good (``check``), 2 a mistake, 3 infeasible,
4 a profile does not fit its machine.
"""

from __future__ import annotations

import json
import math
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import PlanMismatchError
from .audit_command import audit
from .command_help import Command
from .model_factory import load_factory
from .option_names import completing
from .review_commands import check, explain, replan
from .search_command import search
from .terminal import EXIT_DIFFERENT, EXIT_DISAGREES, EXIT_MISTAKE, Commands
from .terminal import fail as _fail
from .terminal import mistakes_explained as _mistakes_explained
from .terminal import progress_shown as _progress
from .terminal import warnings_explained as _warnings_explained
from .written_files import make_folder

if TYPE_CHECKING:
    from ..mesh import Mesh
    from ..plans import Contest, ShardingPlan

app = typer.Typer(
    cls=Commands,
    help="Automatic sharding of PyTorch models.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


class Objective(StrEnum):
    """What ``plan`` minimises."""

    step_time = "step-time"
    overlapped_step_time = "overlapped-step-time"
    communication_time = "communication-time"


class Checkpointing(StrEnum):
    """What a plan computes again in the backward, beside what constraints say."""

    free = "free"
    as_marked = "as-marked"
    none = "none"


class Against(StrEnum):
    """What a plan is held against."""

    experts = "experts"


class Dtype(StrEnum):
    """What parameters are cast to, and what gradients are reduced in."""

    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"
    float64 = "float64"


class Format(StrEnum):
    """How ``show`` prints."""

    text = "text"
    json = "json"


class DiffFormat(StrEnum):
    """How ``diff`` prints."""

    text = "text"
    json = "json"
    markdown = "markdown"


class Target(StrEnum):
    """What ``export`` writes."""

    parallelize_module = "parallelize-module"
    partition_spec = "partition-spec"


LEAST_BUFFER_BYTES = 4096
"""What a calibration sends at least."""

# Options that several commands have. typer reads them off the signature of a command, so that commands with the same
# options share those lines.
_MODEL = typer.Argument(metavar="FILE.py:FACTORY", help="A function giving (module, args[, kwargs]).")
_MESH = typer.Option(help="Axes and sizes, slowest first, for example dp=2,tp=2.")
_HARDWARE = typer.Option(
    help="A preset, see below, or a profile file.", metavar="NAME|FILE", autocompletion=completing("--hardware")
)
_CONSTRAINT = typer.Option(
    metavar="TEXT", help="What is decided, for example 'forbid all_gather over tp of activations'. Repeatable."
)
_OBJECTIVE = typer.Option(help="What to minimise: all added up, the same with what overlaps, or communication alone.")
_BACKEND = typer.Option(metavar="NAME", help="The solver, see below.", autocompletion=completing("--backend"))
_TIME_LIMIT = typer.Option(metavar="SECONDS", help="Stop the solver after this long.")
_MEMORY = typer.Option(
    metavar="SIZE", help="What a rank may hold, for example 80GiB; or profile: what the profile says."
)
_MICRO_BATCHES = typer.Option(
    metavar="N", min=1, help="Forwards and backwards of a step; the model's arguments are those of one."
)
_BUCKET = typer.Option(
    metavar="SIZE",
    help="How much is gathered or reduced together at most for parameters, 25MiB by default; 0: each tensor by itself.",
)
_PARAM_DTYPE = typer.Option(
    help="What parameters are cast to for the step, before they are gathered; by default they stay as they are."
)
_REDUCE_DTYPE = typer.Option(help="What gradients are reduced in; by default as --param-dtype.")
_AGAINST = typer.Option(
    help="Plan the schemes that people use by hand too: the plan says how far it is from the best, and what earns that."
)
_OPTIMIZER = typer.Option(
    metavar="POLICY", help="Whose state and step count, see below.", autocompletion=completing("--optimizer")
)


def main() -> None:
    """The console script ``autoshard``."""
    try:
        app(prog_name="autoshard")
    except SystemExit as end:
        if threading.active_count() > 1 and isinstance(end.code, int):
            # A solver's thread is still in native code that knows no interruption: nobody wants to wait for it.
            with suppress(BrokenPipeError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(end.code)
        raise


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import PackageNotFoundError, version

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


@app.command(cls=Command)
def plan(
    model: Annotated[str, _MODEL],
    mesh: Annotated[str, _MESH],
    output: Annotated[Path, typer.Option("--output", "-o", help="The plan file to write.")],
    hardware: Annotated[str, _HARDWARE] = "dgx-h100",
    objective: Annotated[Objective, _OBJECTIVE] = Objective.step_time,
    pin: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=LAYOUT", help="A placement to hold, for example '*.wq.weight=tp:S(0)'. Repeatable."),
    ] = None,
    constraint: Annotated[list[str] | None, _CONSTRAINT] = None,
    constraints: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="A constraints file (docs/constraints.md). Repeatable.")
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="A scheme people use by hand, see below: fsdp+tp, fsdp+tp/full, ...",
            autocompletion=completing("--baseline"),
        ),
    ] = None,
    held_as: Annotated[
        Path | None,
        typer.Option(metavar="PLAN", help="Hold parameters as this plan does, so that one module serves both plans."),
    ] = None,
    memory: Annotated[str | None, _MEMORY] = None,
    memory_soft: Annotated[
        float | None,
        typer.Option(metavar="PRICE", help="Trade: a GiB above --memory costs this many ms of step time."),
    ] = None,
    optimizer: Annotated[
        str | None,
        typer.Option(
            metavar="POLICY",
            help="Whose state and step count, see below; adamw by default.",
            autocompletion=completing("--optimizer"),
        ),
    ] = None,
    backend: Annotated[str, _BACKEND] = "auto",
    time_limit: Annotated[float | None, _TIME_LIMIT] = None,
    no_tie: Annotated[
        bool, typer.Option("--no-tie", help="Decide every layer for itself; else identical layers are decided alike.")
    ] = False,
    micro_batches: Annotated[int, _MICRO_BATCHES] = 1,
    bucket: Annotated[str | None, _BUCKET] = None,
    param_dtype: Annotated[Dtype | None, _PARAM_DTYPE] = None,
    reduce_dtype: Annotated[Dtype | None, _REDUCE_DTYPE] = None,
    evaluation: Annotated[
        bool, typer.Option("--evaluation", help="Plan a forward without a backward, of the model in eval() mode.")
    ] = False,
    checkpointing: Annotated[
        Checkpointing,
        typer.Option(
            help="What the backward computes again: what is best under the budget, what the model marks, or nothing."
        ),
    ] = Checkpointing.free,
    against: Annotated[Against | None, _AGAINST] = None,
    no_cache: Annotated[
        bool, typer.Option("--no-cache", help="Make the plan anew, even where one made of the same was kept on disk.")
    ] = False,
) -> None:
    """Plan the sharding of a model and write the plan file."""
    from ..constraints.baselines import baseline as baseline_of
    from ..mesh import Mesh
    from ..plans import check_writable, read_plan, write_plan
    from ..plans.schedule import BUCKET, bucket_size
    from ..plans.views.show import plan_lines

    with _mistakes_explained():
        parsed_mesh = Mesh.parse(mesh)
        given: list[str | Path] = [*(constraints or ()), *(constraint or ())]
        if baseline is not None:
            given.extend(baseline_of(baseline, parsed_mesh).constraints(parsed_mesh))
        bucket_bytes = bucket_size(bucket or BUCKET)
        _check_time_limit(time_limit)
        other = None if held_as is None else read_plan(held_as)
        check_writable(output)  # now, not after an hour of solving
        _check_names(parsed_mesh, hardware, backend, optimizer or "none")
        with _loaded(model) as (module, args, kwargs, progress), _naming(held_as):
            from ..api import plan as make_plan  # needs torch and a solver, which the other commands do without

            made = make_plan(
                module,
                args,
                kwargs,
                mesh=parsed_mesh,
                hardware=hardware,
                objective=objective.value,
                constraints=tuple(given),
                pins=tuple(pin or ()),
                held_as=other,
                backend=backend,
                time_limit_s=time_limit,
                tie_layers=not no_tie,
                evaluation=evaluation,
                checkpointing=checkpointing.value,
                micro_batches=micro_batches,
                bucket=bucket_bytes,
                param_dtype=param_dtype,
                reduce_dtype=reduce_dtype,
                memory=memory,
                memory_soft=memory_soft,
                optimizer=optimizer,
                against="experts" if against is Against.experts else None,
                name=model,
                cache=not no_cache,
                progress=progress,
            )
        write_plan(made, output)
        for line in (f"wrote {output}", *plan_lines(made)):
            typer.echo(line)


@contextmanager
def _naming(held_as: Path | None) -> Iterator[None]:
    """Ends the command with the name of the file whose plan is of another model."""
    try:
        yield
    except PlanMismatchError as error:
        _fail(f"--held-as {held_as}: {error}", EXIT_MISTAKE)


@app.command(cls=Command)
def show(
    path: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file.")],
    format: Annotated[Format, typer.Option("--format", help="Tables for people, or JSON for scripts.")] = Format.text,
) -> None:
    """Show a plan file."""
    from ..plans import read_plan, summary_json
    from ..plans.views.show import console_for, show_text

    with _mistakes_explained():
        shown = read_plan(path)
        if format is Format.json:
            typer.echo(json.dumps(summary_json(shown), indent=2))
        else:
            show_text(shown, console_for(sys.stdout))


@app.command(cls=Command)
def calibrate(
    mesh: Annotated[str | None, typer.Option(help="Axes and sizes, slowest first, for example dp=2,tp=2.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="The profile file to write.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Under a minute: fewer sizes and repetitions.")] = False,
    samples: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Where samples are appended as they come; a run continues what it finds."),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(metavar="FILE|FOLDER", help="An HTML page (FILE.html), or a folder for it and its pictures."),
    ] = None,
    max_bytes: Annotated[
        str | None, typer.Option(metavar="SIZE", help="The largest buffer of a collective, for example 16MiB.")
    ] = None,
    budget: Annotated[
        float | None, typer.Option(metavar="SECONDS", min=0.0, help="Stop after this long, once all was measured once.")
    ] = None,
    device: Annotated[
        str, typer.Option(metavar="cpu|cuda|auto", help="What is calibrated: cpu with gloo, cuda with NCCL.")
    ] = "auto",
    check: Annotated[
        Path | None, typer.Option(metavar="PROFILE", help="Measure a little, and say whether this profile still fits.")
    ] = None,
    tolerance: Annotated[
        float, typer.Option(metavar="SHARE", help="With --check: how far off is still fitting.")
    ] = 0.5,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="How long a rank waits for the others.")] = 120.0,
) -> None:
    """Measure this machine and write its hardware profile. Run it under torchrun, one rank for each of the mesh."""
    from ..mesh import Mesh

    with _ends_job(), _mistakes_explained():
        if report is not None and find_spec("jinja2") is None:
            _fail("a report needs jinja2, which is not installed; pip install 'autoshard[report]'", EXIT_MISTAKE)
        if check is None and (mesh is None or output is None):
            _fail("calibrate needs --mesh and --output (or --check PROFILE)", EXIT_MISTAKE)
        most = None if max_bytes is None else _buffer_bytes(max_bytes)
        from ..measure.calibrate_command import check_profile, write_profile  # needs torch

        if check is not None:
            if not check_profile(check, mesh, device, tolerance, timeout):
                raise typer.Exit(EXIT_DISAGREES)
        elif mesh is not None and output is not None:
            samples = samples or output.with_suffix(".samples.jsonl")
            write_profile(Mesh.parse(mesh), output, samples, report, quick, most, budget, device, timeout)


def _buffer_bytes(text: str) -> int:
    from ..plans.units import parse_bytes

    try:
        size = parse_bytes(text)
    except ValueError as error:
        _fail(f"--max-bytes: {error}", EXIT_MISTAKE)
    if size < LEAST_BUFFER_BYTES:
        _fail(f"--max-bytes {text} is less than the {LEAST_BUFFER_BYTES} bytes of the smallest buffer", EXIT_MISTAKE)
    return size


@contextmanager
def _ends_job() -> Iterator[None]:
    """Ends a rank of a torchrun job as soon as its work is done: gloo's threads abort about one teardown in four."""
    code = 0
    try:
        yield
    except typer.Exit as end:
        code = end.exit_code
    if "RANK" in os.environ:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    raise typer.Exit(code)


@app.command(cls=Command)
def diff(
    old: Annotated[Path, typer.Argument(metavar="OLD", help="A plan file.")],
    new: Annotated[Path, typer.Argument(metavar="NEW", help="The plan file to compare with it.")],
    format: Annotated[
        DiffFormat, typer.Option("--format", help="Tables for people, Markdown for a comment, or JSON for scripts.")
    ] = DiffFormat.text,
) -> None:
    """Say what changed between two plan files. Exit code: 0 the same, 1 different, 2 a mistake."""
    from ..plans import read_plan
    from ..plans.views.diff import diff_json, diff_plans
    from ..plans.views.diff_text import diff_markdown, print_diff
    from ..plans.views.show import console_for

    with _mistakes_explained():
        compared = diff_plans(read_plan(old), read_plan(new))
    if format is DiffFormat.json:
        typer.echo(json.dumps(diff_json(compared), indent=2))
    elif format is DiffFormat.markdown:
        typer.echo(diff_markdown(compared, str(old), str(new)), nl=False)
    else:
        print_diff(compared, console_for(sys.stdout))
    if not compared.same:
        raise typer.Exit(EXIT_DIFFERENT)


@app.command(cls=Command)
def report(
    paths: Annotated[list[Path], typer.Argument(metavar="PLAN [OTHER]", help="A plan file, or two to compare.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The HTML file to write; it opens offline.")],
    baseline: Annotated[
        list[Path] | None, typer.Option(metavar="PLAN", help="A plan file to set beside the step of PLAN. Repeatable.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Write the predicted timeline too, for ui.perfetto.dev or chrome://tracing.")
    ] = None,
    hardware: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            help="The profile that the mesh is described by, if no preset.",
            autocompletion=completing("--hardware"),
        ),
    ] = None,
) -> None:
    """Write a report on a plan file, or on what tells two apart: one HTML page."""
    from ..plans import check_writable, read_plan
    from ..plans.text.plan_file import write_text
    from ..plans.views.trace import trace_json

    if len(paths) > 2:
        _fail(f"a report is on one plan, or compares two, and {len(paths)} were given; use --baseline", EXIT_MISTAKE)
    if len(paths) == 2 and (baseline or trace is not None):
        _fail("--baseline and --trace are for a report on one plan, and two were given", EXIT_MISTAKE)
    with _mistakes_explained():
        for target, what in ((output, "report"), (trace, "trace")):
            if target is not None:
                check_writable(target, what)
        plans = [(str(path), read_plan(path)) for path in paths]
        baselines = [(str(other), read_plan(other)) for other in baseline or ()]
        networks = _networks([plan for _, plan in plans], hardware)
        from ..plans.views.report import report_html  # needs jinja2, which the other commands do without
        from ..plans.views.report_comparison import comparison_html

        name, reported = plans[0]
        if len(plans) == 2:
            page = comparison_html(plans[0], plans[1], (networks[0], networks[1]))
        else:
            page = report_html(reported, baselines, name, networks[0])
        texts = [(page, output, "report")]
        if trace is not None:
            texts.append((json.dumps(trace_json(reported)) + "\n", trace, "trace"))
        for text, target, what in texts:
            write_text(text, target, what)
            typer.echo(f"wrote {target}")


def _networks(plans: Sequence[ShardingPlan], hardware: str | None) -> list[tuple[str, ...]]:
    """For each plan, sentences on what its mesh runs on."""
    from cost_models.errors import ProfileError

    from .network_text import network_sentences

    try:
        return [network_sentences(plan, hardware) for plan in plans]
    except ProfileError as error:
        _fail(str(error), EXIT_MISTAKE)


@app.command(cls=Command)
def export(
    path: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file.")],
    to: Annotated[Target, typer.Option(help="DTensor's parallelize_module, or XLA's partition specs.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The Python file to write; without it, standard output.")
    ] = None,
) -> None:
    """Write a plan's placements as Python source for use without autoshard."""
    from ..plans import read_plan
    from ..plans.text.plan_file import write_text
    from ..plans.views.exports import parallelize_module_source, partition_spec_source

    with _mistakes_explained():
        source = parallelize_module_source if to is Target.parallelize_module else partition_spec_source
        text = source(read_plan(path))
        if output is None:
            typer.echo(text, nl=False)
        else:
            write_text(text, output, "export")
            typer.echo(f"wrote {output}")


for _command in (check, explain, replan, search, audit):
    app.command(cls=Command)(_command)


@app.command(cls=Command)
def compare(
    model: Annotated[str, _MODEL],
    mesh: Annotated[str, _MESH],
    hardware: Annotated[str, _HARDWARE] = "dgx-h100",
    objective: Annotated[Objective, _OBJECTIVE] = Objective.step_time,
    constraint: Annotated[list[str] | None, _CONSTRAINT] = None,
    backend: Annotated[str, _BACKEND] = "auto",
    time_limit: Annotated[float | None, _TIME_LIMIT] = None,
    memory: Annotated[str | None, _MEMORY] = None,
    optimizer: Annotated[str, _OPTIMIZER] = "adamw",
    micro_batches: Annotated[int, _MICRO_BATCHES] = 1,
    bucket: Annotated[str | None, _BUCKET] = None,
    param_dtype: Annotated[Dtype | None, _PARAM_DTYPE] = None,
    reduce_dtype: Annotated[Dtype | None, _REDUCE_DTYPE] = None,
    checkpointing: Annotated[
        Checkpointing,
        typer.Option(help="For the optimum, as for plan; baselines compute again what their names say."),
    ] = Checkpointing.free,
    plans: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Write every plan there, as NAME.yaml; made where it is missing."),
    ] = None,
    format: Annotated[Format, typer.Option("--format", help="A table for people, or JSON for scripts.")] = Format.text,
) -> None:
    """Compare the optimum with the schemes people use by hand: time, communication, memory, where they differ."""
    from ..mesh import Mesh
    from ..plans import contest_json
    from ..plans.schedule import BUCKET, bucket_size
    from ..plans.views.show import console_for
    from ..plans.views.show_contest import show_contest

    with _mistakes_explained():
        parsed_mesh = Mesh.parse(mesh)
        bucket_bytes = bucket_size(bucket or BUCKET)
        _check_time_limit(time_limit)
        _check_names(parsed_mesh, hardware, backend, optimizer)
        if plans is not None:
            make_folder(plans)
        with _loaded(model) as (module, args, kwargs, progress):
            from ..planning.comparison import compare as make_contest  # as above

            contest = make_contest(
                module,
                args,
                kwargs,
                mesh=parsed_mesh,
                hardware=hardware,
                objective=objective.value,
                constraints=tuple(constraint or ()),
                backend=backend,
                time_limit_s=time_limit,
                memory=memory,
                optimizer=optimizer,
                checkpointing=checkpointing.value,
                micro_batches=micro_batches,
                bucket=bucket_bytes,
                param_dtype=param_dtype,
                reduce_dtype=reduce_dtype,
                name=model,
                progress=progress,
            )
        if plans is not None:
            _write_plans(contest, plans)
        if format is Format.json:
            typer.echo(json.dumps(contest_json(contest), indent=2))
        else:
            show_contest(contest, console_for(sys.stdout))


@contextmanager
def _loaded(model: str) -> Iterator[tuple[Any, tuple[Any, ...], dict[str, Any], Callable[[str], None]]]:
    """The module of ``FILE.py:FACTORY``, its arguments, and what to call with the name of each stage of the work."""
    with _warnings_explained(), _progress() as progress:
        progress("loading the model")
        module, args, kwargs = load_factory(model)
        yield module, args, kwargs, progress


def _write_plans(contest: Contest, folder: Path) -> None:
    from ..plans import write_plan

    for contender in (contest.optimum, *contest.baselines):
        if contender.plan is not None:
            write_plan(contender.plan, folder / contender.file_name)


def _check_time_limit(time_limit: float | None) -> None:
    if time_limit is not None and not (math.isfinite(time_limit) and time_limit > 0):
        raise typer.BadParameter(f"{time_limit} is not a time; give seconds above 0", param_hint="--time-limit")


def _check_names(mesh: Mesh, hardware: str, backend: str, optimizer: str = "none") -> None:
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
