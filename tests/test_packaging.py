"""What each door loads, proved in fresh interpreters, and what the wheel holds."""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("autoshard", "solver", "cost_models")

PRELUDE = """
import importlib, pkgutil, sys

class Absent:
    '''Makes packages look as if they were not installed.'''

    def __init__(self, *names):
        self.names = names

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

def absent(*names):
    sys.meta_path.insert(0, Absent(*names))

def loaded(*names):
    return sorted({module.partition(".")[0] for module in sys.modules} & set(names))

def import_all(package):
    importlib.import_module(package)
    for module in pkgutil.walk_packages(sys.modules[package].__path__, package + "."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
"""


def run(program: str) -> None:
    """Runs a program in a fresh interpreter, with the working tree importable."""
    done = subprocess.run(
        [sys.executable, "-W", "error::ImportWarning", "-c", PRELUDE + program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def needs(*files: str) -> pytest.MarkDecorator:
    """Skips a test until the files that it checks are written."""
    missing = [file for file in files if not (ROOT / file).exists()]
    return pytest.mark.skipif(bool(missing), reason=f"not written yet: {', '.join(missing)}")


def test_a_blocked_package_looks_absent() -> None:
    run(
        "absent('numpy')\n"
        "try:\n    import numpy.linalg\n"
        "except ModuleNotFoundError:\n    pass\n"
        "else:\n    raise AssertionError('numpy was imported')"
    )


@needs("autoshard/__init__.py")
def test_autoshard_imports_without_the_solvers() -> None:
    run("absent('ortools', 'pulp')\nimport autoshard, autoshard.plans")


@needs("autoshard/__init__.py", "autoshard/api.py")
def test_every_public_name_loads_without_the_solvers() -> None:
    run(
        "absent('ortools', 'pulp')\nimport autoshard\n"
        "assert autoshard.__all__\n"
        "for name in autoshard.__all__:\n    getattr(autoshard, name)"
    )


def test_reviewing_a_plan_loads_neither_torch_nor_a_solver() -> None:
    run(
        "absent('torch', 'ortools', 'pulp')\nimport_all('autoshard.plans')\n"
        "assert loaded('torch', 'ortools', 'pulp', 'solver') == [], loaded('torch', 'ortools', 'pulp', 'solver')"
    )


@needs("autoshard/cli.py")
def test_the_command_line_starts_without_torch_or_a_solver() -> None:
    run("absent('torch', 'ortools', 'pulp')\nfrom autoshard.cli import main\nassert callable(main)")


@pytest.mark.parametrize("package", ["solver", "cost_models"])
def test_torch_free_packages_never_load_torch(package: str) -> None:
    run(f"absent('torch')\nimport_all('{package}')\nassert loaded('torch', 'autoshard') == []")


def test_the_command_is_declared_as_the_function_main() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"autoshard": "autoshard.cli:main"}


def test_every_dependency_is_pinned_and_explained() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [line for extra in project["optional-dependencies"].values() for line in extra]
    names = [_name(line) for line in project["dependencies"] + extras]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = {_name(line): line for line in lines if line and not line.startswith("#")}
    assert [line for line in pins.values() if "==" not in line] == []
    assert sorted(set(names) - pins.keys()) == []
    assert pins["torch"] == "torch==2.13.0"
    decision = (ROOT / "docs" / "decisions" / "0001-dependencies.md").read_text().lower()
    assert [name for name in names if f"`{name}`" not in decision] == []


def _name(requirement: str) -> str:
    return requirement.partition("=")[0].partition(">")[0].partition("<")[0].strip().lower()


def _setuptools() -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in importlib.metadata.version("setuptools").split(".")[:1])
    except importlib.metadata.PackageNotFoundError:
        return (0,)


@pytest.mark.skipif(_setuptools() < (77,), reason="building a wheel needs setuptools 77 (make setup installs it)")
def test_the_wheel_holds_the_three_packages_and_their_data(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, tree)
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tree / package, ignore=shutil.ignore_patterns("__pycache__"))
        (tree / package / "__init__.py").touch()
    (tree / "cost_models" / "profiles").mkdir(exist_ok=True)
    (tree / "cost_models" / "profiles" / "planted.yaml").write_text("name: planted\n")
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run([*build, "-w", str(tmp_path), str(tree)], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("autoshard-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = {str(path.relative_to(tree)) for package in PACKAGES for path in (tree / package).rglob("*.py")}
    assert modules - names == set()
    assert {f"{package}/py.typed" for package in PACKAGES} <= names
    assert "cost_models/profiles/planted.yaml" in names
    templates = {f"autoshard/plans/templates/report.{suffix}" for suffix in ("html", "css", "js")}
    assert templates <= names
    assert {name.partition("/")[0] for name in names} == {*PACKAGES, "autoshard-0.1.0.dist-info"}
