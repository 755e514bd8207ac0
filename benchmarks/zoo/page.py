"""What was found, as lines for a terminal and as the page ``docs/coverage.md``."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OK, NONE, FAILED = "ok", "none", "failed"
_PLANS = ("plan", "optimum", "plan at 60%", "at 60%", "plan drawn", "drawn", "capture", "audit")
_HEAD = """# Coverage

Made by `make zoo` ([`benchmarks/zoo`](../benchmarks/zoo)): models that people train, tiny and with random weights, in
double precision where their kernels have it. Each is captured, planned on its meshes and run on simulated ranks; loss,
gradients and buffers are those of one process within 1e-6 (2e-4 in single precision), under the optimum, the plan for a
budget of 60% of its peak, the first two baselines that the model can have, and a plan drawn at random. Prices are those
of a machine so slow that sizes decide.

`ok`: planned, run, and equal. `-`: there is no such plan, for a reason that the error gives (a budget that nothing
fits, a scheme that the model cannot have). `failed`: anything else. A blank was not run.
"""


@dataclass(frozen=True)
class Found:
    """The cells of a member, and its operators by the audit; ``last`` is what its process said last."""

    name: str
    cells: tuple[dict[str, Any], ...]
    operators: tuple[dict[str, Any], ...]
    last: str = ""

    @property
    def failed(self) -> list[str]:
        """What failed, in words."""
        words = [f"{c['mesh']} {c['what']}: {c['detail']}".strip() for c in self.cells if c["outcome"] == FAILED]
        return words if self.cells else [f"its process ended: {self.last}"]

    @property
    def meshes(self) -> list[str]:
        """On which it was planned."""
        return list(dict.fromkeys(cell["mesh"] for cell in self.cells if cell["mesh"]))


def read_found(folder: Path, name: str, last: Sequence[str] = ()) -> Found:
    """What a member's process wrote; no cells where it wrote nothing."""
    path = folder / f"{name}.json"
    if not path.exists():
        return Found(name, (), (), "".join(last))
    read = json.loads(path.read_text())
    return Found(name, tuple(read["cells"]), tuple(read["operators"]), "".join(last))


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
    return "\n".join([_HEAD, *_cells(members), "", *_operators(members), ""])


def _cells(members: Sequence[Found]) -> Iterator[str]:
    yield "| model | mesh | captured | optimum | at 60% | baselines | at random |"
    yield "|---|---|---|---|---|---|---|"
    for found in members:
        captured = _outcome(found, "", "capture")
        for mesh in found.meshes or [""]:
            names = [cell["what"] for cell in found.cells if cell["mesh"] == mesh and cell["what"] not in _PLANS]
            ran = [(name, outcome) for name in names if (outcome := _outcome(found, mesh, name)) != "-"]
            schemes = ", ".join(f"{name} {outcome}" for name, outcome in ran) or "-" * bool(names)
            short = mesh and "x".join(part.split("=")[1] for part in mesh.split(","))
            optimum, tight, drawn = (
                _worse(found, mesh, *pair)
                for pair in (("plan", "optimum"), ("plan at 60%", "at 60%"), ("plan drawn", "drawn"))
            )
            yield f"| {found.name} | {short} | {captured} | {optimum} | {tight} | {schemes} | {drawn} |"


def _outcome(found: Found, mesh: str, what: str) -> str:
    outcomes = [cell["outcome"] for cell in found.cells if (cell["mesh"], cell["what"]) == (mesh, what)]
    return "" if not outcomes else "-" if outcomes[0] == NONE else outcomes[0]


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
