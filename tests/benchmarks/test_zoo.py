"""The runner of ``make zoo``, on its smallest member; transformers is not needed."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import nn

from autoshard.planning.planner import Planner
from benchmarks.zoo.checks import TIME_LIMIT_S, Checks
from benchmarks.zoo.found import FOUND, commit_of_code, file_of, keep_cells, keep_operators, read_found
from benchmarks.zoo.member import Member
from benchmarks.zoo.members import MEMBERS
from benchmarks.zoo.page import page

ROOT = Path(__file__).parents[2]


def zoo(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.zoo", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)


def test_a_member_passes_all_checks_and_has_its_rows_on_the_page(tmp_path: Path) -> None:
    done = zoo("perceptron", "--mesh", "a=3", "--folder", tmp_path, "--write", tmp_path / "page.md")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "perceptron:" in done.stdout and " 0 failed" in done.stdout
    lines = (tmp_path / "page.md").read_text().splitlines()
    (row,) = [line for line in lines if line.startswith("| perceptron |")]
    assert row.startswith("| perceptron | 3 | ok | ok | ") and row.endswith(f"| ok | {commit_of_code()} |")
    assert any(line.startswith("| torch |") and "`aten.mm`" in line for line in lines)


def test_a_member_that_there_is_none_of_is_told() -> None:
    done = zoo("perceptrons")
    assert done.returncode == 2 and "no member perceptrons; there are" in done.stderr


class Scaled(nn.Module):
    """A loss times a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).square().mean() * self.scale


def test_another_number_on_a_rank_fails_its_cell(tmp_path: Path) -> None:
    checks = Checks(Member("scaled", lambda: (Scaled(), {"x": torch.randn(4, 4)}), ("a=2",)), tight=False)
    real = checks._cell
    checks._cell = lambda mesh, what, check: (_spoil(checks, what), real(mesh, what, check))[1]  # type: ignore[method-assign]
    cells = {(cell.mesh, cell.what): cell for cell in checks.run()}
    assert cells["", "capture"].outcome == "ok" and cells["a=2", "optimum"].outcome == "failed"
    assert "differs by" in cells["a=2", "optimum"].detail


def _spoil(checks: Checks, what: str) -> None:
    if what == "optimum":
        checks._expected["loss"] *= 1.001


def test_a_process_without_an_end_is_a_failure(tmp_path: Path) -> None:
    found = read_found(tmp_path, "gone", ["a=2"], ["Killed"])
    assert found.failed == ["a=2: its process ended: Killed"]
    assert "| gone |" in page([found])


def _cell(mesh: str, what: str, outcome: str, detail: str = "") -> dict[str, object]:
    return {"mesh": mesh, "what": what, "outcome": outcome, "detail": detail, "cpu_s": 1.0}


def _keep(folder: Path, mesh: str, *cells: dict[str, object]) -> None:
    keep_cells(folder, "one", mesh, f"at {mesh}", [_cell("", "capture", "ok"), *cells])


def test_runs_on_one_mesh_after_another_are_one_row_each_of_the_page(tmp_path: Path) -> None:
    _keep(tmp_path, "a=2,b=2,c=2", _cell("a=2,b=2,c=2", "plan", "ok"), _cell("a=2,b=2,c=2", "optimum", "ok"))
    _keep(tmp_path, "a=8", _cell("a=8", "plan", "failed", "wrong"))
    rows = [line for line in page([read_found(tmp_path, "one")]).splitlines() if line.startswith("| one |")]
    assert rows == [
        "| one | 8 | ok | failed |  |  |  | at a=8 |",
        "| one | 2x2x2 | ok | ok |  |  |  | at a=2,b=2,c=2 |",
    ]
    assert read_found(tmp_path, "one").failed == ["a=8 plan: wrong"]
    assert read_found(tmp_path, "one", ["a=8", "a=3"], ["Killed"]).failed[1] == "a=3: its process ended: Killed"


def test_no_plan_is_told_from_none_that_was_found_and_why_is_said_once(tmp_path: Path) -> None:
    why = "InfeasibleError: no plan under the constraints family a=ddp: 'family a=ddp' cuts the batch, but /mm"
    source = " (/site/torch/nn.py:9: return f(g(x), (1, 2)[:1]) mixes"
    for mesh in ("a=8", "a=6"):
        _keep(
            tmp_path,
            mesh,
            _cell(mesh, "plan at 60%", "open" if mesh == "a=8" else "none"),
            _cell(mesh, "ddp", "none", why + source + " its rows"),
            _cell(mesh, "fsdp", "ok"),
        )
    lines = page([read_found(tmp_path, "one")]).splitlines()
    assert "| one | 8 | ok |  | not found | fsdp ok |  | at a=8 |" in lines
    assert "| one | 6 | ok |  | - | fsdp ok |  | at a=6 |" in lines
    assert "| one | ddp on 6, ddp on 8 | cuts the batch, but /mm mixes its rows |" in lines
    assert "Of 1 models there are results on: 8 1, 2x4 0, 2x2x2 0." in lines


def test_results_are_written_cell_by_cell_and_say_nothing_of_the_machine(tmp_path: Path) -> None:
    detail = f"in {FOUND.parents[2]}/autoshard/a.py and {torch.__file__}:9: f(x)"
    _keep(tmp_path, "a=8", _cell("a=8", "plan", "failed", detail))
    text = file_of(tmp_path, "one", "a=8").read_text()
    assert "in autoshard/a.py and torch/__init__.py:9: f(x)" in text and len(text.splitlines()) == 5
    keep_operators(tmp_path, "one", "now", [{"name": "b", "sources": [], "lack": "", "count": 1, "other": 2.0}])
    assert read_found(tmp_path, "one").operators == ({"name": "b", "sources": [], "lack": "", "count": 1},)


def test_every_committed_result_is_of_a_member_that_there_is_and_of_a_commit() -> None:
    kept = [json.loads(path.read_text()) for path in FOUND.glob("*.json")]
    assert kept and all(each["commit"] for each in kept)
    last = {each["cells"][-1]["what"] for each in kept if "cells" in each}
    assert last <= {"drawn", "plan drawn"}, "a run that has not come to its end"
    if find_spec("transformers"):
        assert {path.name.split(".")[0] for path in FOUND.glob("*.json")} <= set(MEMBERS)


def test_a_baseline_has_the_time_limit_of_a_solve_whether_or_not_the_optimum_was_planned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits_s: list[float | None] = []
    plan = Planner.plan
    monkeypatch.setattr(
        Planner, "plan", lambda self, *given: (limits_s.append(self.time_limit_s), plan(self, *given))[1]
    )
    checks = Checks(Member("scaled", lambda: (Scaled(), {"x": torch.randn(4, 4)}), ("a=2",)))
    with monkeypatch.context() as without:
        without.setattr("benchmarks.zoo.checks._free", lambda planner: 1 / 0)
        outcomes = {cell.what: cell.outcome for cell in checks.run()}
    assert outcomes["plan"] == "failed" and outcomes["ddp"] == "ok"
    assert limits_s and all(limit_s is not None and limit_s >= TIME_LIMIT_S for limit_s in limits_s)
