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
OF_EXTRAS = (
    "ortools",
    "highspy",
    "pulp",
    "typer",
    "rich",
)  # what planning and the command line need, and a rank of a job does not

PRELUDE = """
import importlib, pkgutil, sys

def absent(*names):
    '''Makes packages look as if they were not installed, to imports and to find_spec.'''
    sys.modules.update(dict.fromkeys(names))

def loaded(*names):
    return sorted({name.partition(".")[0] for name, module in sys.modules.items() if module} & set(names))

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


def test_a_blocked_package_looks_absent() -> None:
    run(
        "absent('numpy')\n"
        "try:\n    import numpy.linalg\n"
        "except ModuleNotFoundError:\n    pass\n"
        "else:\n    raise AssertionError('numpy was imported')"
    )


def test_every_public_name_loads_without_the_packages_of_the_extras() -> None:
    run(
        f"absent{OF_EXTRAS}\nimport autoshard\n"
        "assert autoshard.__all__\n"
        "for name in autoshard.__all__:\n    getattr(autoshard, name)"
    )


MODEL = """
import torch, autoshard

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 4)

    def forward(self, x, y):
        return torch.nn.functional.mse_loss(self.linear(x), y)

torch.manual_seed(0)
model, arguments = Model(), (torch.randn(4, 8), torch.randn(4, 4))
"""

APPLIED = """
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

expected = model(*arguments).item()
dist.init_process_group("gloo", init_method="file://" + FOLDER + "/store", rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
module = autoshard.parallelize(model, autoshard.read_plan(FOLDER + "/plan.yaml"), mesh)
loss = module(*arguments)
loss.backward()
assert loss.item() == expected and all(p.grad is not None for p in module.parameters())
dist.destroy_process_group()
"""


def test_a_rank_applies_a_plan_and_trains_without_the_packages_of_the_extras(tmp_path: Path) -> None:
    folder = f"FOLDER = {str(tmp_path)!r}\n"
    made = "plan = autoshard.plan(model, arguments, mesh='dp=1', hardware='cpu-gloo')\n"
    run(folder + MODEL + made + "autoshard.write_plan(plan, FOLDER + '/plan.yaml')")
    run(f"absent{OF_EXTRAS}\n" + folder + MODEL + APPLIED + f"assert loaded{OF_EXTRAS} == []")


@pytest.mark.parametrize(
    ("backend", "missing"),
    [
        ("auto", "ortools"),
        pytest.param("auto", "highspy", marks=pytest.mark.thorough),
        pytest.param("cp-sat", "ortools", marks=pytest.mark.thorough),
        pytest.param("cbc", "pulp", marks=pytest.mark.thorough),
    ],
)
def test_planning_without_its_solver_names_the_extra_before_the_model_is_captured(backend: str, missing: str) -> None:
    run(
        f"absent({missing!r})\n{MODEL}\nmodel.forward = None\n"
        f"try:\n    autoshard.plan(model, arguments, mesh='dp=2', backend={backend!r})\n"
        f"except ImportError as error:\n    said = str(error)\n"
        f"assert {missing!r} in said and \"pip install 'autoshard[plan]'\" in said, said"
    )


def command(missing: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs ``python -m autoshard`` where a package is not installed."""
    program = f"import runpy\nabsent({missing!r})\nrunpy.run_module('autoshard', run_name='__main__')"
    return subprocess.run(
        [sys.executable, "-c", PRELUDE + program, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize(("missing", "arguments"), [("typer", ["--version"]), ("rich", ["show", "plan.yaml"])])
def test_the_command_without_its_libraries_names_the_extra(missing: str, arguments: list[str]) -> None:
    done = command(missing, *arguments)
    said = f"error: the command needs {missing}, which is not installed; pip install 'autoshard[cli]'\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", said)


def test_the_command_plan_without_a_solver_names_the_extra(tmp_path: Path) -> None:
    options = ["--mesh", "dp=2,tp=2", "--output", str(tmp_path / "plan.yaml")]
    done = command("ortools", "plan", "examples/llama.py:demo", *options)
    assert done.returncode == 2
    assert "needs ortools, not installed here: pip install 'autoshard[plan]'" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_reviewing_a_plan_loads_neither_torch_nor_a_solver() -> None:
    absent = ("torch", "ortools", "highspy", "pulp")
    run(
        f"absent{absent}\nimport_all('autoshard.plans')\n"
        f"assert loaded{(*absent, 'solver')} == [], loaded{(*absent, 'solver')}"
    )


def test_the_command_line_starts_with_typer_alone() -> None:
    absent = ("torch", "numpy", "ortools", "highspy", "pulp", "pydantic", "yaml", "rich", "jinja2")
    run(f"absent{absent}\nfrom autoshard.cli import main\nassert callable(main)")


def test_the_steps_of_redistributions_and_constraints_need_no_torch() -> None:
    run("absent('torch', 'numpy')\nimport autoshard.redistribution")
    run("absent('torch')\nimport autoshard.constraints.baselines")


@pytest.mark.parametrize("package", ["solver", "cost_models"])
def test_torch_free_packages_never_load_torch(package: str) -> None:
    run(f"absent('torch')\nimport_all('{package}')\nassert loaded('torch', 'autoshard') == []")


def test_the_command_is_declared_as_the_function_main() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"autoshard": "autoshard.__main__:main"}


def test_a_rank_of_a_job_installs_no_package_of_the_extras_and_make_setup_installs_all_but_loops_and_zoo() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert {_name(line) for line in project["dependencies"]} == {"torch", "numpy", "pydantic", "pyyaml"}
    assert {_name(line) for extra in ("plan", "cli") for line in extras[extra]} == set(OF_EXTRAS)
    assert (
        f"'.[{','.join(name for name in extras if name not in ('loops', 'zoo'))}]'" in (ROOT / "Makefile").read_text()
    )
    assert all(f"'.[{name}]'" in (ROOT / "Makefile").read_text() for name in ("loops", "zoo"))


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
    pages = ("comparison.html", "report.css", "report.html", "report.js", "report_page.html", "report_parts.html")
    templates = {f"autoshard/plans/views/templates/{name}" for name in pages}
    templates |= {f"autoshard/measure/templates/{name}" for name in ("calibration.html", "chart.svg")}
    assert templates <= names
    assert {name.partition("/")[0] for name in names} == {*PACKAGES, "autoshard-0.1.0.dist-info"}
