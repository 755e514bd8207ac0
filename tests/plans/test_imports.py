"""Reviewing a plan needs neither torch nor a solver; loading one in a job needs no terminal library either."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

import autoshard.plans
from autoshard.plans import write_plan

from .synthetic import sharded_plan, transformer_plan

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "ortools", "pulp")
LIGHT = (
    *("pydantic", "pydantic_core", "annotated_types", "typing_extensions", "typing_inspection", "yaml", "_yaml"),
    *(
        "rich",
        "markdown_it",
        "mdurl",
        "pygments",
        "typer",
        "click",
        "shellingham",
        "annotated_doc",
        "jinja2",
        "markupsafe",
    ),
)
BLOCK = f"import sys; sys.modules.update(dict.fromkeys({HEAVY}))\n"  # None makes importing them fail
COMMAND = "import sys; sys.argv = ['autoshard', *sys.argv[1:]]; from autoshard.cli import main\n"

# The review loop: what is said on the command line, and the exit code.
REVIEW = {
    "show": (["show", "plan.yaml"], 0),
    "show json": (["show", "plan.yaml", "--format", "json"], 0),
    "diff": (["diff", "plan.yaml", "other.yaml"], 1),
    "diff markdown": (["diff", "plan.yaml", "other.yaml", "--format", "markdown"], 1),
    "diff json": (["diff", "plan.yaml", "plan.yaml", "--format", "json"], 0),
    "report": (["report", "plan.yaml", "-o", "r.html", "--baseline", "other.yaml", "--trace", "t.json"], 0),
    "export": (["export", "plan.yaml", "--to", "parallelize-module"], 0),
    "export specs": (["export", "plan.yaml", "--to", "partition-spec", "-o", "specs.py"], 0),
}


def run(code: str, folder: Path, *args: object) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, *map(str, args)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment, timeout=120)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two plans."""
    write_plan(transformer_plan(2), tmp_path / "plan.yaml")
    write_plan(sharded_plan(2), tmp_path / "other.yaml")
    return tmp_path


@pytest.mark.parametrize("command", REVIEW)
def test_reviewing_loads_neither_torch_nor_a_solver(folder: Path, command: str) -> None:
    arguments, exit_code = REVIEW[command]
    code = COMMAND + f"try: main()\nfinally: print([name for name in {HEAVY} if name in sys.modules], file=sys.stderr)"
    done = run(code, folder, *arguments)
    assert (done.returncode, done.stderr) == (exit_code, "[]\n")
    assert done.stdout


@pytest.mark.slow
def test_the_review_loop_runs_in_an_environment_that_has_only_what_it_needs(folder: Path) -> None:
    """A virtual environment without torch, numpy, OR-Tools and PuLP: the libraries of the review are linked into it."""
    environment = folder / "venv"
    venv.create(environment, symlinks=True)
    packages = next((environment / "lib").glob("python*")) / "site-packages"
    for name in LIGHT:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:  # typer of 0.29 has no click
            continue
        origin = Path(spec.origin)
        target = origin.parent if spec.submodule_search_locations else origin
        (packages / target.name).symlink_to(target)
    for package in ("autoshard", "cost_models"):
        (packages / package).symlink_to(ROOT / package)

    def within(*arguments: object) -> subprocess.CompletedProcess[str]:
        clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        command = [environment / "bin" / "python", *map(str, arguments)]
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, env=clean, timeout=120)

    for name in (*HEAVY, "numpy", "solver"):
        assert "ModuleNotFoundError" in within("-c", f"import {name}").stderr, name
    for arguments, exit_code in REVIEW.values():
        done = within("-m", "autoshard", *arguments)
        assert (done.returncode, done.stderr) == (exit_code, ""), (arguments, done.stderr)
    (packages / "solver").symlink_to(ROOT / "solver")
    done = within("-m", "autoshard", "plan", "model.py:model", "--mesh", "dp=2", "-o", "new.yaml")
    assert (done.returncode, done.stderr) == (
        2,
        "error: this needs numpy, which is not installed; pip install autoshard\n",
    )


def test_a_report_without_jinja2_says_what_to_install(folder: Path) -> None:
    code = "import sys; sys.modules['jinja2'] = None\n" + COMMAND + "main()"
    done = run(code, folder, "report", "plan.yaml", "-o", "r.html")
    assert done.returncode == 2
    assert done.stderr == "error: a report needs jinja2, which is not installed; pip install 'autoshard[report]'\n"
    assert not (folder / "r.html").exists()


def test_reading_and_writing_a_plan_works_without_them_and_loads_no_terminal_library(folder: Path) -> None:
    code = BLOCK + (
        "from autoshard.plans import read_plan, write_plan\n"
        "write_plan(read_plan(sys.argv[1]), sys.argv[1])\n"
        "assert not {'rich', 'typer', 'jinja2'} & sys.modules.keys()"
    )
    plan_file = folder / "plan.yaml"
    before = plan_file.read_bytes()
    done = run(code, folder, plan_file)
    assert (done.returncode, done.stderr) == (0, "")
    assert plan_file.read_bytes() == before


def test_the_public_names_exist_and_are_documented() -> None:
    for name in autoshard.plans.__all__:
        value = getattr(autoshard.plans, name)
        assert name in ("Phase", "CollectiveKind", "IdenticalLayers", "MemoryPhase", "TenantKind") or value.__doc__, (
            name
        )
