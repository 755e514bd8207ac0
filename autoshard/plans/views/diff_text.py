"""A difference between plans as text: tables for a terminal, Markdown for a comment on a pull request."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..units import format_bytes, format_seconds
from .diff import Change, CollectiveChange, Move, Number, PlanDiff

SAME = "The plans are the same."
PAGE_LINES = 60
"""Lines of Markdown that a comment has, at most."""
TABLE_LINES = 5
"""Those of a table without its rows: title, heads, and the blank lines between."""
LEAST_ROWS, MOST_ROWS = 3, 8
"""Rows of one table; the rest is counted."""
MOST_PATTERNS = 4
MOST_WORDS = 8


@dataclass(frozen=True)
class _Table:
    """A table: ``names`` are the columns that hold names and layouts, the others hold numbers and words."""

    title: str
    columns: tuple[str, ...]
    names: frozenset[str]
    rows: tuple[tuple[str, ...], ...]

    def is_left(self, column: str) -> bool:
        """Whether a column is aligned to the left: names and layouts are, numbers and words are not."""
        return column in self.names or column == self.columns[0]


def diff_markdown(diff: PlanDiff, old: str, new: str) -> str:
    """The difference as Markdown of about a page. Names are quoted as code: they may hold anything."""
    lines = [f"### Sharding plan: {_code(old)} -> {_code(new)}", ""]
    if diff.same:
        return "\n".join([*lines, SAME]) + "\n"
    lines += [f"- {_escape(word)}" for word in _words(diff)]
    for table in _tables(diff):
        lines += ["", f"**{table.title}**", ""] if table.title else [""]
        lines.append(f"| {' | '.join(table.columns)} |")
        lines.append("|" + "|".join("---" if table.is_left(column) else "--:" for column in table.columns) + "|")
        for row in table.rows:
            cells = [_code(cell) if name in table.names else cell for name, cell in zip(table.columns, row)]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def print_diff(diff: PlanDiff, console: Console) -> None:
    """Prints the difference as tables."""
    if diff.same:
        console.print(Text(SAME))
        return
    for word in _words(diff):
        console.print(Text(f"- {word}"))
    for table in _tables(diff):
        console.print()
        if table.title:
            console.print(Text(table.title, style="bold"))
        console.print(_rich(table))


def _rich(table: _Table) -> Table:
    drawn = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for column in table.columns:
        drawn.add_column(column, overflow="fold", justify="left" if table.is_left(column) else "right")
    for row in table.rows:
        drawn.add_row(*(Text(cell) for cell in row))
    return drawn


def _words(diff: PlanDiff) -> Iterator[str]:
    yield from diff.words[:MOST_WORDS]
    if diff.words[MOST_WORDS:]:
        yield f"and {len(diff.words) - MOST_WORDS} more changes of parameters, listed below"
    for fact in diff.facts:
        yield f"{fact.name}: {_short(fact.before)} -> {_short(fact.after)}"
    if diff.other:
        yield f"also different: {'; '.join(diff.other)}"


def _tables(diff: PlanDiff) -> Iterator[_Table]:
    """The numbers, then lists of what changed, cut so that all of it is a page."""
    numbers = _Table("", ("per rank", "before", "after", "change"), frozenset(), tuple(map(_number, diff.numbers)))
    yield numbers
    lists = [table for table in _lists(diff) if table.rows]
    above = len(list(_words(diff))) + len(numbers.rows) + TABLE_LINES  # the page's own title instead of the table's
    most = (PAGE_LINES - above) // max(1, len(lists)) - TABLE_LINES
    most = min(max(most, LEAST_ROWS), MOST_ROWS)
    for table in lists:
        count = len(table.rows)
        cut = f" ({most} of {count}; --format json lists all)" if count > most else ""
        yield replace(table, title=table.title + cut, rows=table.rows[:most])


def _lists(diff: PlanDiff) -> Iterator[_Table]:
    columns: tuple[str, ...] = ("what", "count", "before", "after")
    names = frozenset(("what", "before", "after"))
    yield _Table("Placements that changed", columns, names, tuple(map(_change, diff.placements)))
    yield _Table("Operators that changed", columns, names, tuple(map(_change, diff.operators)))
    columns = ("collective", "before", "after", "bytes before", "bytes after", "time")
    collectives = sorted(diff.collectives, key=lambda change: -abs(change.after_s - change.before_s))
    title = "Collectives of one rank in a step, the most changed first"
    yield _Table(title, columns, frozenset(columns[:1]), tuple(map(_collective, collectives)))
    columns = ("change", "tensor", "path", "count", "time")
    title = "Redistributions added and removed, the dearest first"
    yield _Table(title, columns, frozenset(columns[:3]), tuple(map(_move, diff.moves)))


def _number(number: Number) -> tuple[str, ...]:
    form = format_seconds if number.unit == "s" else lambda value: format_bytes(int(value))
    before, after = (("not known" if value is None else form(value)) for value in (number.before, number.after))
    change = ""
    if number.before and number.after is not None:
        change = f"{(number.after - number.before) / number.before:+.1%}" if number.after != number.before else "same"
    return number.name, before, after, change


def _change(change: Change) -> tuple[str, ...]:
    names = ", ".join(change.patterns[:MOST_PATTERNS])
    more = len(change.patterns) - MOST_PATTERNS
    return names + (f" and {more} more" if more > 0 else ""), str(change.count), change.before, change.after


def _collective(change: CollectiveChange) -> tuple[str, ...]:
    time = change.after_s - change.before_s
    return (
        f"{change.phase} {change.kind} {change.axis}",
        str(change.before_count),
        str(change.after_count),
        format_bytes(change.before_bytes),
        format_bytes(change.after_bytes),
        ("+" if time >= 0 else "-") + format_seconds(abs(time)),
    )


def _move(move: Move) -> tuple[str, ...]:
    sign = "+" if move.change == "added" else "-"
    return f"{sign} {move.phase}", move.pattern, move.path, str(move.count), sign + format_seconds(move.predicted_s)


def _short(text: str, chars: int = 200) -> str:
    return text if len(text) <= chars else text[:chars] + "..."


def _code(text: str) -> str:
    """Inline code that holds any text, in a table too: a fence longer than any run of backticks inside."""
    plain = " ".join(text.split()).replace("|", "\\|")
    fence = "`"
    while fence in plain:
        fence += "`"
    return f"{fence} {plain} {fence}" if "`" in plain else f"{fence}{plain or ' '}{fence}"


def _escape(text: str) -> str:
    """Words with names in them, so that a name is neither markup, nor a link, nor a mention of somebody."""
    plain = " ".join(text.split())
    return "".join(f"\\{char}" if char in "\\`*_[]<|#@!&~$" else char for char in plain)
