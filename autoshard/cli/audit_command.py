"""The command that asks before solving: ``audit``. It needs the model, and no solver."""

from __future__ import annotations

import json
import sys
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from .model_factory import load_factory
from .option_names import completing
from .terminal import EXIT_MISTAKE, fail, mistakes_explained, progress_shown, warnings_explained

if TYPE_CHECKING:
    from rich.console import Console

    from ..mesh import Mesh
    from ..planning.audit import Audit


class Format(StrEnum):
    """How an audit is printed."""

    text = "text"
    json = "json"


def audit(
    model: Annotated[str, typer.Argument(metavar="FILE.py:FACTORY", help="The model, as for plan.")],
    mesh: Annotated[str, typer.Option(help="Axes and sizes, slowest first, for example dp=2,tp=2.")],
    hardware: Annotated[
        str,
        typer.Option(
            metavar="NAME|FILE", help="A preset, see below, or a profile file.", autocompletion=completing("--hardware")
        ),
    ] = "dgx-h100",
    format: Annotated[Format, typer.Option("--format", help="A table for people, or JSON for scripts.")] = Format.text,
) -> None:
    """Say of each operator whose rules cut it, and what it costs where every rank runs all of it. Nothing is solved."""
    from ..mesh import Mesh
    from ..plans.views.show import console_for

    with mistakes_explained(), warnings_explained():
        axes = Mesh.parse(mesh)
        _check_hardware(hardware, axes)
        with progress_shown() as progress:
            progress("loading the model")
            module, args, kwargs = load_factory(model)
            from ..planning.audit import audit as make_audit  # needs torch

            made = make_audit(module, args, kwargs, mesh=axes, hardware=hardware, progress=progress)
    if format is Format.json:
        typer.echo(json.dumps(audit_json(made), indent=2))
    else:
        show_audit(made, console_for(sys.stdout))


def audit_json(audit: Audit) -> dict[str, object]:
    """An audit as JSON-ready values. The keys are stable: later versions add some and change none."""
    return {
        "autoshard_audit": 1,
        "mesh": str(audit.mesh),
        "hardware": audit.hardware,
        "operators": [vars(operator) for operator in audit.operators],
    }


def show_audit(audit: Audit, console: Console) -> None:
    """Prints the table, then what every rank runs whole in one line."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for title in ("operator", "rules from", "times", "whole costs, ms", "first in"):
        table.add_column(title, overflow="fold", justify="right" if title in ("times", "whole costs, ms") else "left")
    for operator in audit.operators:
        sources = " and ".join(operator.sources) or (f"none: {operator.lack}" if operator.lack else "a single number")
        cells = (operator.name, sources, str(operator.count), _milliseconds(operator.replicated_s))
        table.add_row(*map(Text, (*cells, operator.source or operator.first)))
    console.print(table)
    console.print()
    console.print(Text(verdict(audit)))


def verdict(audit: Audit) -> str:
    """How many operators every rank runs whole, and what that costs, in a sentence."""
    whole, count = audit.whole, sum(operator.count for operator in audit.operators)
    if not whole:
        return f"Nothing that could be cut runs whole on {audit.mesh}: {len(audit.operators)} operators, {count} calls."
    cost_s = sum(operator.replicated_s for operator in whole)
    return (
        f"{len(whole)} of {len(audit.operators)} operators ({sum(o.count for o in whole)} of {count} calls) run whole "
        f"on every rank of {audit.mesh}, which costs {_milliseconds(cost_s)} ms of a step on {audit.hardware}."
    )


def _milliseconds(seconds: float) -> str:
    """As tables of a report have it: what is too small to be seen is ``<0.01``."""
    return "<0.01" if 0 < seconds < 5e-6 else f"{1e3 * seconds:.4g}"


def _check_hardware(hardware: str, mesh: Mesh) -> None:
    """Refuses an unknown name, and a profile that does not fit the mesh, before the long work starts."""
    from cost_models import load_profile

    try:
        load_profile(hardware).topology(mesh.axes, mesh.shape)
    except ValueError as error:
        fail(str(error), EXIT_MISTAKE)
