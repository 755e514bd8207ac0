"""Reviewing a plan needs neither torch nor a solver; loading one in a job needs no terminal library either."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import autoshard.plans
from autoshard.plans import write_plan

from .synthetic import transformer_plan

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "ortools", "pulp")
BLOCK = f"import sys; sys.modules.update(dict.fromkeys({HEAVY}))\n"  # None makes importing them fail
SHOW = "import sys; sys.argv = ['autoshard', 'show', *sys.argv[1:]]; from autoshard.cli import main\n"


def run(code: str, *args: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *map(str, args)], cwd=ROOT, capture_output=True, text=True)


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    write_plan(transformer_plan(2), tmp_path / "plan.yaml")
    return tmp_path / "plan.yaml"


@pytest.mark.parametrize("format", ["text", "json"])
def test_show_loads_neither_torch_nor_a_solver(plan_file: Path, format: str) -> None:
    code = SHOW + f"try: main()\nfinally: print([name for name in {HEAVY} if name in sys.modules], file=sys.stderr)"
    done = run(code, plan_file, "--format", format)
    assert (done.returncode, done.stderr) == (0, "[]\n")


@pytest.mark.parametrize("format", ["text", "json"])
def test_show_works_where_torch_and_the_solvers_are_absent(plan_file: Path, format: str) -> None:
    done = run(BLOCK + SHOW + "main()", plan_file, "--format", format)
    assert (done.returncode, done.stderr) == (0, "")
    assert "transformer" in done.stdout


def test_reading_and_writing_a_plan_works_without_them_and_loads_no_terminal_library(plan_file: Path) -> None:
    code = BLOCK + (
        "from autoshard.plans import read_plan, write_plan\n"
        "write_plan(read_plan(sys.argv[1]), sys.argv[1])\n"
        "assert 'rich' not in sys.modules and 'typer' not in sys.modules"
    )
    before = plan_file.read_bytes()
    done = run(code, plan_file)
    assert (done.returncode, done.stderr) == (0, "")
    assert plan_file.read_bytes() == before


def test_the_public_names_exist_and_are_documented() -> None:
    for name in autoshard.plans.__all__:
        value = getattr(autoshard.plans, name)
        assert name in ("Phase", "CollectiveKind", "MemoryPhase", "TenantKind") or value.__doc__, name
