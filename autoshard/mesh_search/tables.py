"""A search over meshes as tables on a console; needs rich and is not exported by the package."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..plans.units import format_bytes, format_seconds
from .rows import Row, ScalingRow, rows_of, scaling_of
from .search import MeshSearch


def show_searches(
    searches: Sequence[MeshSearch],
    console: Console,
    failed: Sequence[tuple[int, str]] = (),
    price: float | None = None,
) -> None:
    """Prints a table of meshes for each number of devices, and one of the best of each where there are several or a
    device hour has a ``price``.
    """
    for search in searches:
        console.print(Text(f"{search.devices} devices: {search.winner.shape.text}"))
        _print(console, _MESH_COLUMNS, [_mesh_cells(row) for row in rows_of(search)])
    if len(searches) + len(failed) > 1 or price is not None:
        console.print(Text("The best mesh of each"))
        _print(console, _SCALING_COLUMNS, [_scaling_cells(row) for row in scaling_of(searches, failed, price)])


_MESH_COLUMNS = "mesh,across hosts,batch,step,tokens/s,MFU,memory,gap,best expert,at least,why not".split(",")
_SCALING_COLUMNS = "devices,mesh,batch,step,a second,MFU,efficiency,device hours per 1e9,cost per 1e9,why not".split(
    ","
)
_WORDS = frozenset({"mesh", "across hosts", "why not"})


def _print(console: Console, columns: Sequence[str], cells: Sequence[Sequence[str]]) -> None:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    shown = [k for k in range(len(columns)) if any(row[k] not in ("", "-") for row in cells)]
    for k in shown:
        table.add_column(columns[k], overflow="fold", justify="left" if columns[k] in _WORDS else "right")
    for row in cells:
        table.add_row(*(Text(row[k]) for k in shown))
    console.print(table)
    console.print()


def _mesh_cells(row: Row) -> list[str]:
    return [
        row.mesh,
        row.crossing,
        _number(row.batch),
        _seconds(row.step_s),
        _number(row.tokens_per_s),
        _share(row.mfu),
        "-" if row.memory_bytes is None else format_bytes(row.memory_bytes),
        _share(row.gap, 2),
        "-" if row.expert_s is None else f"{format_seconds(row.expert_s)}, {row.expert}",
        _seconds(row.bound_s or None),
        row.reason,
    ]


def _scaling_cells(row: ScalingRow) -> list[str]:
    return [
        str(row.devices),
        row.mesh or "-",
        _number(row.batch),
        _seconds(row.step_s),
        "-" if row.per_s is None else f"{row.per_s:,.0f} {row.unit}",
        _share(row.mfu),
        _share(row.efficiency),
        _number(row.device_hours),
        "-" if row.cost is None else f"{row.cost:,.2f}",
        row.reason,
    ]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _seconds(value: float | None) -> str:
    return "-" if value is None else format_seconds(value)


def _share(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:.{digits}%}"
