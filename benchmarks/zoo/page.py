"""What was found, as lines for a terminal and as the page ``docs/coverage.md``."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from .found import NONE, OK, OPEN, Found, short
from .member import MESHES

_SHOWN = {NONE: "-", OPEN: "not found"}
_PLANS = ("plan", "optimum", "plan at 60%", "at 60%", "plan drawn", "drawn", "capture", "audit")
_HEAD = """# Coverage

Made by `make zoo` ([`benchmarks/zoo`](../benchmarks/zoo)): models that people train, tiny and with random weights, in
double precision where their kernels have it. Each is captured, planned on its meshes and run on simulated ranks; loss,
gradients and buffers are those of one process within 1e-6 (2e-4 in single precision), under the optimum, the plan for a
budget of 60% of its peak, the first two baselines that the model can have, and a plan drawn at random. Prices are those
of a machine so slow that sizes decide.

`ok`: planned, run, and equal. `-`: there is no such plan: it is proved that nothing fits, or the model cannot have a
scheme ([why](#schemes-that-a-model-cannot-have)). `not found`: no plan that fits was found in the 10 processor seconds
given, which proves nothing. `failed`: anything else. A blank was not run. Results are files in
[`benchmarks/zoo/found`](../benchmarks/zoo/found), from which this page is written. A run replaces its own rows and
leaves the others: the last column is the commit that was run, with `+` where it had changes that no commit has.
"""
_LONGEST = 260


def summary(found: Found) -> Iterator[str]:
    """A line, and one for each failure."""
    cpu_s = sum(cell["cpu_s"] for cell in found.cells)
    passed = sum(cell["outcome"] == OK for cell in found.cells)
    yield f"{found.name}: {passed} checks passed, {len(found.failed)} failed, {cpu_s:.0f} CPU s"
    for failure in found.failed:
        yield f"  {failure}"


def page(members: Iterable[Found]) -> str:
    """The page, in Markdown."""
    members = list(members)
    return "\n".join([_HEAD, _run(members), "", *_rows(members), *_schemes(members), "", *_operators(members), ""])


def _run(members: Sequence[Found]) -> str:
    """How many were run on each mesh that all members are for."""
    counts = ((short(mesh), sum(mesh in found.meshes for found in members)) for mesh in MESHES)
    return f"Of {len(members)} models there are results on: {', '.join(f'{mesh} {count}' for mesh, count in counts)}."


def _rows(members: Sequence[Found]) -> Iterator[str]:
    """The table: the rows of each member, by mesh."""
    yield "| model | mesh | captured | optimum | at 60% | baselines | at random | commit |"
    yield "|---|---|---|---|---|---|---|---|"
    for found in members:
        for mesh in sorted(found.meshes, key=lambda mesh: (len(short(mesh)), short(mesh))) or [""]:
            yield _row(found, mesh)


def _row(found: Found, mesh: str) -> str:
    names = [cell["what"] for cell in found.cells if cell["mesh"] == mesh and cell["what"] not in _PLANS]
    ran = [(name, outcome) for name in names if (outcome := _outcome(found, mesh, name)) != "-"]
    schemes = ", ".join(f"{name} {outcome}" for name, outcome in ran) or "-" * bool(names)
    plans = (("plan", "optimum"), ("plan at 60%", "at 60%"), ("plan drawn", "drawn"))
    optimum, tight, drawn = (_worse(found, mesh, *pair) for pair in plans)
    captured, commit = _outcome(found, "", "capture"), found.commits.get(mesh, "")
    cells = (found.name, mesh and short(mesh), captured, optimum, tight, schemes, drawn, commit)
    return f"| {' | '.join(cells)} |"


def _outcome(found: Found, mesh: str, what: str) -> str:
    outcomes = [cell["outcome"] for cell in found.cells if (cell["mesh"], cell["what"]) == (mesh, what)]
    return "" if not outcomes else _SHOWN.get(outcomes[0], outcomes[0])


def _schemes(members: Sequence[Found]) -> Iterator[str]:
    """Which schemes were tried that a model cannot have, and why: one line for each reason."""
    where: dict[tuple[str, str], dict[str, None]] = defaultdict(dict)
    for found in members:
        for cell in found.cells:
            if cell["outcome"] == NONE and cell["what"] not in _PLANS:
                where[found.name, _reason(cell["detail"])][f"{cell['what']} on {short(cell['mesh'])}"] = None
    if not where:
        return
    yield ""
    yield "## Schemes that a model cannot have"
    yield ""
    yield "Of the first five that were tried, until two could be had."
    yield ""
    yield "| model | scheme | why |"
    yield "|---|---|---|"
    for (name, reason), schemes in where.items():
        yield f"| {name} | {', '.join(schemes)} | {reason} |"


def _reason(detail: str) -> str:
    """What an error says beyond its kind, the constraints, and the place in the source."""
    said = re.sub(r"^\w+Error: (no plan under the constraints [^:]*: )?('family \S+' )?", "", detail)
    said = re.sub(r" \(\S*\.py:\d+: .*?\) (?=takes|mixes|has no|goes on)", " ", said).replace("|", "\\|")
    return said if len(said) <= _LONGEST else said[:_LONGEST].rsplit(" ", 1)[0] + " ..."


def _worse(found: Found, mesh: str, planned: str, ran: str) -> str:
    """That of the plan where it is not ok, else that of the run."""
    first = _outcome(found, mesh, planned)
    return first if first != OK else _outcome(found, mesh, ran)


def _operators(members: Sequence[Found]) -> Iterator[str]:
    """Distinct operators of all members by the source of their rules, and which models have them."""
    by_source: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    calls: dict[str, int] = defaultdict(int)
    audited = [found for found in members if found.operators]
    for found in audited:
        for operator in found.operators:
            said = " and ".join(operator["sources"]) or ("none" if operator["lack"] else "a single number")
            by_source[said][operator["name"]].add(found.name)
            calls[said] += operator["count"]
    yield "## Operators by source of rule"
    yield ""
    yield (
        f"By `autoshard audit` of {len(audited)} models on 2x4 ([what the sources are](operators.md#before-solving)). "
        "An operator may stand in several rows: with other shapes it has other rules."
    )
    yield ""
    yield "| rules from | operators | calls | |"
    yield "|---|---|---|---|"
    for said in sorted(by_source, key=lambda said: -calls[said]):
        names = by_source[said]
        shown = ", ".join(f"`{name.removesuffix('.default')}`" for name in sorted(names))
        yield f"| {said} | {len(names)} | {calls[said]} | {shown} |"
    lacking = sorted(
        {(o["name"], found.name, o["lack"], o["count"]) for found in audited for o in found.operators if o["lack"]}
    )
    if lacking:
        yield ""
        yield "Every rank runs all of these:"
        yield ""
        yield "| operator | model | times | why |"
        yield "|---|---|---|---|"
        yield from (f"| `{name}` | {model} | {count} | {lack} |" for name, model, lack, count in lacking)
