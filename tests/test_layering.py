"""The walls between the packages: who may import whom, read from the source with ``ast``.

The table is the one of ``docs/architecture.md``; what it does not list fails. Three laws hold beside it: OR-Tools and
PuLP are named only in the files of ``solver/backends`` (a file names one of them), modules form no import cycle, and no
first-party import hides inside a function (where a cycle would go unseen), but for the doors listed in ``DEFERRED``.
"""

from __future__ import annotations

import ast
import graphlib
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ARCHITECTURE = ROOT / "docs" / "architecture.md"
PACKAGES = ("autoshard", "solver", "cost_models")

# What cost_models has for everybody: it needs no numpy, and knows no machine.
SHARED = frozenset(
    {"cost_models.collective_kinds", "cost_models.kernel_kinds", "cost_models.safe_yaml", "cost_models.spelling"}
)
VOCABULARY = (
    frozenset(
        {
            "autoshard.errors",
            "autoshard.garbage",
            "autoshard.layout",
            "autoshard.mesh",
            "autoshard.micro_batches",
            "autoshard.precision",
            "autoshard.progress",
            "autoshard.recomputation",
        }
    )
    | SHARED
)
PLANS = frozenset({"autoshard.plans", "autoshard.plans.text", "autoshard.plans.views"})
CAPTURE = frozenset(
    f"autoshard.capture.{room}" for room in ("by_numbers", "checks", "dynamo", "operators", "stacks", "taken_apart")
)
GRAPH = frozenset({"autoshard.capture", "autoshard.ops"})
FILES = frozenset({"pydantic", "yaml"})  # what validates the files on disk


@dataclass(frozen=True)
class Row:
    """What the modules of one group may import, besides themselves and the standard library."""

    first_party: frozenset[str]
    third_party: frozenset[str] = frozenset()


# A group is a module or a package with all that is inside it; the longest name that fits decides. A row for a single
# module stands below its package's where the module needs what the package does without, torch above all.
TABLE = {
    # solver's modules may name its backends: they are one package
    "solver": Row(frozenset({"solver.backends"}), frozenset({"numpy"})),
    # pybind11_abseil has the errors of OR-Tools, and comes in its wheel
    "solver.backends": Row(
        frozenset({"solver"}), frozenset({"numpy", "ortools", "pybind11_abseil", "highspy", "pulp"})
    ),
    "cost_models": Row(SHARED, frozenset({"numpy"}) | FILES),
    "cost_models.collective_kinds": Row(frozenset()),
    "cost_models.kernel_kinds": Row(frozenset()),
    "cost_models.safe_yaml": Row(frozenset(), frozenset({"yaml"})),
    "cost_models.spelling": Row(frozenset()),
    "autoshard.errors": Row(VOCABULARY),
    "autoshard.mesh": Row(VOCABULARY),
    "autoshard.layout": Row(VOCABULARY),
    "autoshard.atomic_write": Row(frozenset()),
    "autoshard.disk_cache": Row(frozenset({"autoshard.atomic_write"})),
    "autoshard.garbage": Row(frozenset()),
    "autoshard.micro_batches": Row(frozenset()),
    "autoshard.precision": Row(frozenset()),
    "autoshard.progress": Row(frozenset()),
    "autoshard.recomputation": Row(frozenset()),
    "autoshard.plans": Row(VOCABULARY | PLANS),
    "autoshard.plans.text": Row(
        VOCABULARY | {"autoshard.atomic_write", "autoshard.plans", "autoshard.redistribution"}, frozenset({"pydantic"})
    ),
    "autoshard.plans.views": Row(
        VOCABULARY | {"autoshard.plans", "autoshard.plans.text"},
        frozenset({"rich", "jinja2", "markupsafe"}),  # the last comes with jinja2
    ),
    "autoshard.capture": Row(VOCABULARY | CAPTURE, frozenset({"torch"})),
    "autoshard.capture.operators": Row(VOCABULARY | {"autoshard.capture"}, frozenset({"torch"})),
    "autoshard.capture.by_numbers": Row(
        VOCABULARY | {"autoshard.capture", "autoshard.capture.dynamo", "autoshard.capture.operators"},
        frozenset({"torch"}),
    ),
    "autoshard.capture.checks": Row(
        VOCABULARY | {"autoshard.capture", "autoshard.capture.dynamo"}, frozenset({"torch"})
    ),
    "autoshard.capture.dynamo": Row(
        VOCABULARY
        | {"autoshard.capture", "autoshard.capture.by_numbers", "autoshard.capture.checks"}
        | {"autoshard.capture.operators"},
        frozenset({"torch"}),
    ),
    "autoshard.capture.stacks": Row(
        VOCABULARY | {"autoshard.capture", "autoshard.capture.dynamo"}, frozenset({"torch"})
    ),
    "autoshard.capture.taken_apart": Row(
        VOCABULARY | {"autoshard.capture", "autoshard.capture.by_numbers", "autoshard.capture.operators"},
        frozenset({"torch"}),
    ),
    "autoshard.ops": Row(VOCABULARY | {"autoshard.capture", "autoshard.capture.operators"}, frozenset({"torch"})),
    "autoshard.redistribution": Row(VOCABULARY),
    "autoshard.redistribution.paths": Row(VOCABULARY | {"autoshard.redistribution"}, frozenset({"numpy"})),
    "autoshard.redistribution.execution": Row(VOCABULARY | {"autoshard.redistribution"}, frozenset({"torch"})),
    "autoshard.strategies": Row(VOCABULARY | GRAPH, frozenset({"torch"})),
    "autoshard.constraints": Row(VOCABULARY | {"autoshard.plans.text"}, frozenset({"pydantic"})),
    "autoshard.constraints.layers": Row(GRAPH),
    "autoshard.constraints.low_rank": Row(GRAPH),
    "autoshard.constraints.roles": Row(
        VOCABULARY | GRAPH | {"autoshard.constraints", "autoshard.constraints.layers", "autoshard.constraints.low_rank"}
    ),
    "autoshard.constraints.limits": Row(
        VOCABULARY
        | {"autoshard.capture", "autoshard.constraints", "autoshard.redistribution"}
        | {"autoshard.constraints.names", "autoshard.constraints.roles"}
    ),
    "autoshard.constraints.schemes": Row(
        VOCABULARY
        | {"autoshard.capture", "autoshard.constraints", "autoshard.constraints.limits", "autoshard.redistribution"}
    ),
    "autoshard.constraints.names": Row(GRAPH),
    "autoshard.constraints.gradient_dtype": Row(
        VOCABULARY | GRAPH | {"autoshard.constraints.limits", "autoshard.plans", "autoshard.redistribution"}
    ),
    "autoshard.constraints.compile": Row(
        VOCABULARY
        | {"autoshard.capture", "autoshard.constraints", "autoshard.constraints.limits", "autoshard.constraints.names"}
        | {"autoshard.constraints.gradient_dtype", "autoshard.constraints.schemes"}
    ),
    "autoshard.constraints.recomputations": Row(
        VOCABULARY | GRAPH | {"autoshard.constraints", "autoshard.constraints.roles"}
    ),
    "autoshard.constraints.computed_again": Row(
        VOCABULARY | {"autoshard.capture", "autoshard.constraints", "autoshard.constraints.recomputations"},
    ),
    "autoshard.lowering": Row(
        VOCABULARY | GRAPH | {"autoshard.plans", "autoshard.redistribution", "autoshard.redistribution.execution"},
        frozenset({"torch"}),
    ),
    "autoshard.planning": Row(
        VOCABULARY
        | GRAPH
        | {"autoshard.constraints", "autoshard.constraints.compile", "autoshard.constraints.layers"}
        | {"autoshard.constraints.computed_again"}
        | {"autoshard.constraints.limits", "autoshard.constraints.names", "autoshard.constraints.roles"}
        | {"autoshard.lowering", "autoshard.plans"}
        | {"autoshard.redistribution", "autoshard.redistribution.paths", "autoshard.strategies"}
        | {"cost_models", "solver"},
        frozenset({"numpy", "torch"}),
    ),
    "autoshard.apply": Row(
        VOCABULARY
        | {
            "autoshard.capture",
            "autoshard.disk_cache",
            "autoshard.lowering",
            "autoshard.ops",
            "autoshard.plans",
            "autoshard.plans.text",
            "autoshard.strategies",
        },
        frozenset({"torch"}),
    ),
    "autoshard.measure": Row(
        SHARED | {"autoshard.atomic_write", "autoshard.errors", "autoshard.mesh", "autoshard.lowering", "cost_models"},
        frozenset({"torch"}),
    ),
    "autoshard.measure.calibration_report": Row(frozenset({"autoshard.measure", "cost_models"}), frozenset({"jinja2"})),
    "autoshard.measure.calibrate_command": Row(
        frozenset({"autoshard.errors", "autoshard.mesh", "autoshard.plans.views", "cost_models"})
        | {"autoshard.measure", "autoshard.measure.calibration_report"},
        frozenset({"rich", "torch"}),
    ),
    "autoshard.review": Row(
        VOCABULARY
        | PLANS
        | {
            "autoshard.capture",
            "autoshard.constraints",
            "autoshard.constraints.names",
            "autoshard.lowering",
            "autoshard.planning",
            "autoshard.strategies",
        }
        | {"cost_models", "solver"},
        frozenset({"numpy", "torch"}),
    ),
    "autoshard.mesh_search": Row(
        VOCABULARY
        | {"autoshard.capture", "autoshard.constraints", "autoshard.planning", "autoshard.plans"}
        | {"cost_models", "solver"},
        frozenset({"numpy", "torch"}),
    ),
    "autoshard.mesh_search.rows": Row(
        frozenset({"autoshard.mesh_search", "autoshard.plans", "autoshard.plans.views"}),
    ),
    "autoshard.mesh_search.tables": Row(
        frozenset({"autoshard.mesh_search", "autoshard.mesh_search.rows", "autoshard.plans"}), frozenset({"rich"})
    ),
    "autoshard.mesh_search.charts": Row(
        frozenset({"autoshard.measure", "autoshard.mesh_search", "autoshard.mesh_search.rows"})
    ),
    "autoshard.plan_cache": Row(VOCABULARY | {"autoshard.disk_cache", "autoshard.plans"}),
    "autoshard.api": Row(
        VOCABULARY
        | {"autoshard.apply", "autoshard.capture", "autoshard.constraints", "autoshard.lowering", "autoshard.planning"}
        | {"autoshard.disk_cache", "autoshard.mesh_search", "autoshard.ops", "autoshard.plan_cache", "autoshard.plans"}
        | {"cost_models", "solver.backends"},
        frozenset({"torch"}),
    ),
    "autoshard.cli": Row(
        VOCABULARY
        | PLANS
        | {"autoshard.api", "autoshard.constraints", "autoshard.planning", "autoshard.review"}
        | {"autoshard.measure.calibrate_command", "autoshard.measure.calibration_report", "autoshard.mesh_search"}
        | {"autoshard.mesh_search.charts", "autoshard.mesh_search.rows", "autoshard.mesh_search.tables"}
        | {"cost_models", "solver", "solver.backends"},
        frozenset({"rich", "torch", "typer"}),
    ),
    "autoshard.__main__": Row(frozenset({"autoshard.cli", "autoshard.garbage"})),
    "autoshard": Row(  # the package's own __init__: the public names
        VOCABULARY
        | {"autoshard.api", "autoshard.apply", "autoshard.capture", "autoshard.lowering", "autoshard.planning"}
        | {"autoshard.ops", "autoshard.plans"}
    ),
}

# Groups that stand for one file: a module that is new below them has no row of its own, and fails.
EXACT = frozenset({"autoshard"})

# Modules that may import first-party modules inside a function, and why.
DEFERRED = {
    "autoshard": "the public names are loaded when asked for: reading a plan loads no torch",
    "cost_models": "the public names are loaded when asked for: reading a plan loads no numpy",
    "autoshard.__main__": "the command line needs libraries of an extra: where they are missing, it says which",
    "autoshard.cli.audit_command": "as for the other commands",
    "autoshard.cli.commands": "each command loads what it needs: help, and plans that are shown, wait for nothing else",
    "autoshard.cli.network_text": "plans say it; only an older one is looked up in its profile, which needs numpy",
    "autoshard.cli.option_names": "only --help, and a shell that completes, need the tables of names",
    "autoshard.cli.review_commands": "as for the other commands",
    "autoshard.cli.search_command": "as for the other commands",
    "autoshard.cli.written_files": "only a command that makes plans asks whether their folder can be written into",
    "autoshard.measure.calibrate_command": "only a report needs jinja2",
    "solver.backends": "the registry loads the one backend that was asked for",
}
# File names that several modules have, because their job is the same in each of their packages: private names of torch
# are in the adapter of a stage and nowhere else, and each package that stands alone has its errors.
SHARED_NAMES = frozenset({"__init__", "__main__", "adapter", "errors"})
# Third-party packages that a module may import inside a function only.
DEFERRED_THIRD_PARTY = {"autoshard.cli.commands": frozenset({"torch"})}


@dataclass(frozen=True)
class Import:
    """One name imported by one line."""

    module: str
    target: str
    line: int
    deferred: bool


@dataclass(frozen=True)
class Source:
    """One module: its dotted name, whether it is a package's ``__init__``, and its file."""

    name: str
    is_package: bool
    path: Path


def modules(root: Path) -> dict[str, Source]:
    """Every module of the packages under ``root``, by its dotted name."""
    found = {}
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            is_package = parts[-1] == "__init__"
            name = ".".join(parts[:-1] if is_package else parts)
            found[name] = Source(name, is_package, path)
    return found


def imports(source: Source, known: frozenset[str]) -> Iterator[Import]:
    """Every import of a module, relative ones made absolute, imports by name (``import_module``) included."""

    def absolute(level: int, module: str) -> str:
        if level == 0:
            return module
        package = source.name.split(".") if source.is_package else source.name.split(".")[:-1]
        base = package[: len(package) - level + 1]
        return ".".join([*base, module] if module else base)

    def visit(node: ast.AST, deferred: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(source.name, alias.name, node.lineno, deferred)
        elif isinstance(node, ast.ImportFrom):
            base = absolute(node.level, node.module or "")
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                yield Import(source.name, inner if inner in known else base, node.lineno, deferred)
        elif isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__"):
                yield Import(source.name, _named(node, absolute), node.lineno, True)
        inside = deferred or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, inside)

    yield from visit(ast.parse(source.path.read_text(encoding="utf-8"), str(source.path)), deferred=False)


def _named(call: ast.Call, absolute) -> str:
    """The module that ``import_module(...)`` names; the importing package itself where only the run can tell."""
    first = call.args[0] if call.args else None
    if isinstance(first, ast.Constant) and isinstance(first.value, str):
        name = first.value.lstrip(".")
        return absolute(len(first.value) - len(name), name)
    return absolute(1, "")


def group_of(module: str) -> str | None:
    """The row of the table that a module belongs to."""
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        name = ".".join(parts[:length])
        if name in TABLE and (name not in EXACT or length == len(parts)):
            return name
    return None


def violations(root: Path) -> list[str]:
    """Every broken wall under ``root``, one sentence each, in the order of files and lines."""
    sources = modules(root)
    known = frozenset(sources)
    broken = []
    for name, source in sources.items():
        group = group_of(name)
        if group is None:
            broken.append(f"{name}: has no row in the import table")
            continue
        found_imports = list(imports(source, known))
        if {"ortools", "pulp"} <= {found.target.partition(".")[0] for found in found_imports}:
            broken.append(f"{name}: one backend file imports both ortools and pulp")
        for found in found_imports:
            reason = _broken_wall(found, group)
            if reason:
                broken.append(f"{source.path.relative_to(root)}:{found.line}: {reason}")
    return list(dict.fromkeys(broken))  # one line may break a wall with each of its names


def _broken_wall(found: Import, group: str) -> str | None:
    top = found.target.partition(".")[0]
    row = TABLE[group]
    if top in PACKAGES:
        target = group_of(found.target) or found.target
        if target != group and target not in row.first_party:
            return f"{group} may not import {found.target}"
        if found.deferred and found.module not in DEFERRED:
            return f"imports {found.target} inside a function, or by name"
    elif top not in sys.stdlib_module_names:
        if top not in row.third_party:
            return f"{group} may not import {found.target}"
        if not found.deferred and top in DEFERRED_THIRD_PARTY.get(found.module, ()):
            return f"imports {found.target} at module level; only the commands that need it may"
    return None


def cycle(root: Path) -> list[str] | None:
    """One import cycle among the modules under ``root`` (module level), or None."""
    sources = modules(root)
    known = frozenset(sources)
    graph = {
        name: {found.target for found in imports(source, known) if not found.deferred and found.target in known}
        for name, source in sources.items()
    }
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return None


def test_every_import_is_in_the_table() -> None:
    assert violations(ROOT) == []


def test_all_that_plans_asks_the_solver_by_the_door_at_which_ctrl_c_ends_the_search() -> None:
    sources = modules(ROOT)
    known = frozenset(sources)
    found = {each.target for name, source in sources.items() for each in imports(source, known) if name[:4] == "auto"}
    assert "solver" in found and "solver.solve" not in found


def test_modules_form_no_import_cycle() -> None:
    assert cycle(ROOT) is None


@pytest.mark.parametrize("group", sorted(TABLE.keys() - {"autoshard.__main__"}))
def test_every_row_of_the_table_checks_some_module(group: str) -> None:
    assert [name for name in modules(ROOT) if group_of(name) == group]


def test_every_package_of_autoshard_has_a_row_here_and_on_the_architecture_page() -> None:
    packages = {name for name, source in modules(ROOT).items() if source.is_package and name.startswith("autoshard.")}
    assert packages - TABLE.keys() == set()
    page = ARCHITECTURE.read_text()
    first_cells = {line.split("|")[1] for line in page.splitlines() if line.startswith("| `")}
    named = {name.rstrip("/").replace("/", ".") for cell in first_cells for name in re.findall(r"`([\w/]+)`", cell)}
    tops = {name for name in packages if name.count(".") == 1} | {"solver", "cost_models"}
    assert tops - {name if name in PACKAGES else f"autoshard.{name}" for name in named} == set()


def test_the_files_that_the_architecture_page_names_exist() -> None:
    named = set(re.findall(r"`((?:autoshard|solver|cost_models|tests|docs)/[\w/.]+)`", ARCHITECTURE.read_text()))
    assert named
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_no_two_modules_have_one_name() -> None:
    count = Counter(source.path.stem for source in modules(ROOT).values())
    assert {name for name, times in count.items() if times > 1} == SHARED_NAMES


def _plant(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("autoshard/lowering/graph.py", "import solver"),
        ("autoshard/lowering/graph.py", "from solver.problem import Problem"),
        ("autoshard/lowering/graph.py", "from ..strategies import rules"),
        ("autoshard/lowering/graph.py", "from ..planning.pricing import price"),
        ("autoshard/lowering/graph.py", "from autoshard import api"),
        ("autoshard/plans/plan.py", "import torch"),
        ("autoshard/plans/plan.py", "import yaml"),
        ("autoshard/plans/text/plan_file.py", "from torch import nn"),
        ("autoshard/plans/text/plan_file.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch"),
        ("autoshard/plans/text/plan_file.py", "from ... import api"),
        ("autoshard/plans/text/plan_file.py", "from ..views import show"),
        ("autoshard/plans/text/plan_file.py", "import rich"),
        ("autoshard/errors.py", "import numpy"),
        ("autoshard/capture/graph.py", "from ..plans.plan import Phase"),
        ("autoshard/redistribution/steps.py", "import torch"),
        ("autoshard/redistribution/steps.py", "import numpy"),
        ("autoshard/redistribution/steps.py", "from .execution import run_step"),
        ("autoshard/constraints/values.py", "import torch"),
        ("autoshard/constraints/values.py", "from ..capture import Ref"),
        ("autoshard/constraints/values.py", "from .limits import Limits"),
        ("autoshard/constraints/limits.py", "from ..planning.pricing import Prices"),
        ("autoshard/planning/planner.py", "from ..api import plan"),
        ("autoshard/review/session.py", "from ..api import plan"),
        ("autoshard/apply.py", "from .planning import Planner"),
        ("autoshard/measure/job.py", "from ..layout import Layout"),
        ("autoshard/measure/job.py", "from ..plans import ShardingPlan"),
        ("autoshard/cli/commands.py", "import torch"),
        ("autoshard/unknown.py", "import json"),
        ("autoshard/__init__.py", "import torch"),
        ("solver/solve.py", "import ortools"),
        ("solver/solve.py", "from ortools.math_opt.python import mathopt"),
        ("solver/solve.py", "def solve():\n    import pulp"),
        ("solver/backends/both.py", "import ortools, pulp"),
        ("solver/reductions/fold.py", "import torch"),
        ("solver/backends/mathopt.py", "from autoshard.mesh import Mesh"),
        ("cost_models/optimizers.py", "import torch"),
        ("cost_models/optimizers.py", "import autoshard.mesh"),
        ("cost_models/optimizers.py", "import scipy"),
        ("autoshard/api.py", "def plan():\n    from .planning.pricing import price"),
        ("autoshard/api.py", "def plan():\n    from .planning import pricing"),
        ("autoshard/api.py", "import importlib\nimportlib.import_module('autoshard.planning.pricing')"),
        ("autoshard/api.py", "import importlib\nimportlib.import_module('.planning.pricing', __package__)"),
        ("autoshard/api.py", "plan = lambda name: __import__(name)"),
    ],
)
def test_a_planted_violation_is_found(tmp_path: Path, file: str, line: str) -> None:
    root = _plant(tmp_path, {"autoshard/planning/pricing.py": "", "autoshard/__init__.py": "", file: line})
    assert len(violations(root)) == 1


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("autoshard/lowering/graph.py", "from ..plans.plan import ShardingPlan\nfrom . import verify\nimport torch"),
        (
            "autoshard/planning/pricing.py",
            "from cost_models import Topology\nfrom ..layout import Layout\nimport numpy",
        ),
        ("autoshard/redistribution/execution.py", "import torch\nfrom .steps import Step"),
        ("autoshard/cli/commands.py", "def plan():\n    import torch\n    from ..api import plan"),
        ("autoshard/__init__.py", "def __getattr__(name):\n    from . import api"),
        ("solver/backends/mathopt.py", "from ortools.math_opt.python import mathopt\nfrom ..problem import Problem"),
        ("solver/solve.py", "from .backends import backend\nfrom .reductions.fold import fold"),
        ("solver/backends/__init__.py", "def backend(name):\n    from .mathopt import MathOpt"),
        ("cost_models/profile.py", "import pydantic, yaml, json"),
    ],
)
def test_an_import_of_the_table_passes(tmp_path: Path, file: str, line: str) -> None:
    assert violations(_plant(tmp_path, {file: line})) == []


@pytest.mark.parametrize(
    "files",
    [
        {"solver/a.py": "from .b import x", "solver/b.py": "from .a import y"},
        {"solver/a.py": "from . import b", "solver/b.py": "import solver.a"},
        {"solver/__init__.py": "from .a import x", "solver/a.py": "from . import x"},
        {
            "autoshard/mesh.py": "from .errors import E",
            "autoshard/errors.py": "from .layout import L",
            "autoshard/layout.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .mesh import Mesh",
        },
    ],
)
def test_a_planted_cycle_is_found(tmp_path: Path, files: dict[str, str]) -> None:
    root = _plant(tmp_path, files)
    assert violations(root) == []
    assert cycle(root) is not None
