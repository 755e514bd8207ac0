"""The commands that question a plan, from a model file to exit code and golden text."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from autoshard.cli.commands import app
from autoshard.plans import read_plan
from cost_models import dump_profile

from ..plans_of import profile_of

MODEL = """\
from tests.models import mlp

def small():
    return mlp(batch=8)

def wide():
    return mlp(batch=8, hidden=16)
"""
CONSTRAINTS = """\
autoshard_constraints: 1
mesh: "dp=2,tp=2"
pins:
  x: [dp, null]
"""


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, a profile, constraints and the plan made of them."""
    folder = tmp_path_factory.mktemp("review")
    (folder / "model.py").write_text(MODEL)
    (folder / "slow.yaml").write_text(dump_profile(profile_of("slow")))
    (folder / "c.yaml").write_text(CONSTRAINTS)
    result = invoke(
        "plan", f"{folder}/model.py:small", "--mesh", "dp=2,tp=2", "--hardware", folder / "slow.yaml",
        "--constraints", folder / "c.yaml", "-o", folder / "plan.yaml",
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of that folder, which is the current one."""
    for file in made.glob("*.*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def edit(name: str, layout: str, path: str = "plan.yaml") -> int:
    """Changes the layout of a tensor in a plan file, as a person does; the number of the line."""
    lines = Path(path).read_text().splitlines(keepends=True)
    (number,) = [i for i, line in enumerate(lines) if line.startswith(f"  {name}: {{layout:")]
    lines[number] = re.sub(r'layout: "[^"]*"', f'layout: "{layout}"', lines[number])
    Path(path).write_text("".join(lines))
    return number + 1


HARDWARE = ("--hardware", "slow.yaml")


def test_a_plan_remembers_the_constraints_of_the_file(folder: Path) -> None:
    assert read_plan("plan.yaml").pins == ("x=(dp, None)",)


def test_check_passes_a_plan_just_made(folder: Path) -> None:
    result = invoke("check", "plan.yaml", "model.py:small", *HARDWARE, "--mesh", "dp=2,tp=2", "--memory", "1MiB")
    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert lines[:3] == [
        "ok    model       the one that the plan was made for",
        "ok    mesh        dp=2,tp=2",
        "ok    hardware    slow, as when the plan was made",
    ]
    assert re.fullmatch(r"ok    memory      .* on the fullest rank, with adamw, within the budget of 1 MiB", lines[3])
    assert re.fullmatch(r"ok    optimality  .* ms: optimal", lines[4])
    assert lines[5:] == ["plan.yaml is good"]


def test_check_fails_for_another_model_and_says_what_changed(folder: Path) -> None:
    result = invoke("check", "plan.yaml", "model.py:wide", *HARDWARE)
    assert result.exit_code == 1
    assert result.stdout == (
        "FAIL  model       another than the plan was made for; make the plan again\n"
        "        changed parameter down.weight: float32[8, 12] -> float32[8, 16]\n"
        "        changed parameter up.bias: float32[12] -> float32[16]\n"
        "        changed parameter up.weight: float32[12, 8] -> float32[16, 8]\n"
        "ok    mesh        dp=2,tp=2\n"
        "ok    hardware    slow, as when the plan was made\n"
        "plan.yaml is not good any more\n"
    )


def test_check_fails_where_the_file_lists_what_the_model_does_not_have(folder: Path) -> None:
    """The layouts are the best ones, and the job would refuse the file."""
    text = Path("plan.yaml").read_text()
    for old, new, said in (
        ("  up.weight: {", "  up.wieght: {", "the model has no parameter up.wieght; did you mean 'up.weight'?"),
        (
            "[12, 8]",
            "[12, 8, 1]",
            "the parameter up.weight is float32[12, 8, 1] in the file, but float32[12, 8] in the",
        ),
    ):
        line = 1 + text[: text.index("  up.weight: {")].count("\n")
        Path("plan.yaml").write_text(text.replace(old, new, 1))
        result = invoke("check", "plan.yaml", "model.py:small", *HARDWARE)
        assert result.exit_code == 1 and f"        line {line}: {said}" in result.stdout
        assert result.stdout.startswith(
            "FAIL  model       the file lists what the model does not have. Names, shapes and dtypes"
        )


def test_check_as_json_carries_the_same(folder: Path) -> None:
    result = invoke("check", "plan.yaml", "model.py:small", *HARDWARE, "--memory", "100", "--format", "json")
    found = json.loads(result.stdout)
    assert result.exit_code == 1 and found["fits"] is False and found["distance"] is None
    assert [f["part"] for f in found["findings"] if not f["fits"]] == ["memory", "optimality"]


def test_explain_prints_the_answer_and_writes_the_alternative(folder: Path) -> None:
    result = invoke(
        "explain",
        "plan.yaml",
        "model.py:small",
        "--why",
        "up.weight",
        "--not",
        "(dp, None)",
        "-o",
        "whatif.yaml",
        *HARDWARE,
    )
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith("up.weight is dp:S(0) tp:S(0). What if it were (dp, None)?\n\nA step would take ")
    assert result.stdout.endswith("\nwrote whatif.yaml\n")
    whatif = read_plan("whatif.yaml")
    assert whatif.pins == ("x=(dp, None)", "up.weight=(dp, None)") and whatif.memory is not None
    assert invoke("diff", "plan.yaml", "whatif.yaml").exit_code == 1
    answer = invoke("explain", "plan.yaml", "model.py:small", "--why", "up.weight", "--format", "json", *HARDWARE)
    found = json.loads(answer.stdout)
    assert found["possible"] is True and found["alternative_cost_ns"] >= found["cost_ns"]


def test_explain_says_why_something_is_impossible_and_writes_nothing(folder: Path) -> None:
    result = invoke(
        "explain", "plan.yaml", "model.py:small", "--why", "x", "--not", "dp:R", "-o", "whatif.yaml", *HARDWARE
    )
    assert result.exit_code == 0
    assert result.stdout == (
        "x is dp:S(0) tp:R. What if it were dp:R?\n\n"
        "Not possible: the pin 'x=dp:R' contradicts the pin 'x=(dp, None)': x cannot have a layout that suits both.\n\n"
        "did not write whatif.yaml: there is no such plan\n"
    )
    assert not Path("whatif.yaml").exists()


def test_replan_keeps_the_edit_and_check_is_content(folder: Path) -> None:
    before = read_plan("plan.yaml")
    edit("up.bias", "dp:R tp:R")
    assert invoke("check", "plan.yaml", "model.py:small", *HARDWARE).exit_code == 1
    result = invoke("replan", "plan.yaml", "model.py:small", "-o", "new.yaml", *HARDWARE)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.splitlines()[:3] == [
        "kept 1 edit as pins",
        "  up.bias: dp:S(0) tp:S(0)  =>  dp:R tp:R",
        "changed 0 other decisions",
    ]
    new = read_plan("new.yaml")
    assert new.pins == (*before.pins, "up.bias=dp:R tp:R") and new.solver.cost_ns > before.solver.cost_ns
    assert invoke("check", "new.yaml", "model.py:small", *HARDWARE).exit_code == 0
    original = invoke(
        "plan", "model.py:small", "--mesh", "dp=2,tp=2", *HARDWARE, "--constraints", "c.yaml", "-o", "old.yaml"
    )
    assert original.exit_code == 0
    given = invoke("replan", "plan.yaml", "model.py:small", "-o", "again.yaml", "--original", "old.yaml", *HARDWARE)
    assert given.exit_code == 0 and Path("again.yaml").read_bytes() == Path("new.yaml").read_bytes()
    found = json.loads(
        invoke("replan", "plan.yaml", "model.py:small", "-o", "j.yaml", "--format", "json", *HARDWARE).stdout
    )
    assert [e["names"] for e in found["edits"]] == [["up.bias"]] and found["others"] == 0


def test_a_misspelt_name_is_refused_and_the_edit_beside_it_stays(folder: Path) -> None:
    """In the place of the file it was planned anew without the edit, which was gone."""
    line = edit("up.weight", "dp:R tp:R")
    text = Path("plan.yaml").read_text().replace("  up.weight: {", "  up.wieght: {")
    Path("plan.yaml").write_text(text)
    result = invoke("replan", "plan.yaml", "model.py:small", *HARDWARE)
    assert result.exit_code == 2 and f"plan.yaml, line {line}: the model has no parameter up.wieght; " in result.stderr
    assert "did you mean 'up.weight'?" in result.stderr
    assert Path("plan.yaml").read_text() == text


def test_a_replan_that_fails_says_where_and_leaves_every_file_alone(folder: Path) -> None:
    line = edit("x", "dp:S(1) tp:S(1)")
    Path("c.yaml").write_text(CONSTRAINTS)
    text = Path("plan.yaml").read_text().replace('"x=(dp, None)"', '"only x dp:S(0)"')
    Path("plan.yaml").write_text(text)
    before = {path.name: path.read_bytes() for path in folder.glob("*.yaml")}
    result = invoke("replan", "plan.yaml", "model.py:small", "-o", "plan.yaml", *HARDWARE)
    assert result.exit_code == 3 and result.stdout == ""
    assert "contradicts the constraint 'only x dp:S(0)'" in result.stderr and f"plan.yaml, line {line}" in result.stderr
    assert {path.name: path.read_bytes() for path in folder.glob("*.yaml")} == before


def test_by_default_the_model_is_the_one_that_the_plan_names_and_the_edited_file_is_rewritten(folder: Path) -> None:
    options = ("--mesh", "dp=2,tp=2", *HARDWARE, "--constraints", "c.yaml")
    made = invoke("plan", "model.py:small", *options, "-o", "plan.yaml")
    assert made.exit_code == 0 and invoke("check", "plan.yaml", *HARDWARE).exit_code == 0
    asked = ("--why", "up.bias", *HARDWARE)
    over = invoke("explain", "plan.yaml", *asked, "-o", "./model.py")
    assert over.exit_code == 2 and "write over model.py, which holds no plan; name another file" in over.stderr
    assert Path("model.py").read_text() == MODEL
    told = invoke("explain", "plan.yaml", "model.py:small", *asked).stdout
    assert told.startswith("up.bias is") and invoke("explain", "plan.yaml", *asked).stdout == told
    edit("up.bias", "dp:R tp:R")
    assert invoke("replan", "plan.yaml", "model.py:small", "-o", "new.yaml", *HARDWARE).exit_code == 0
    assert "wrote plan.yaml\n" in invoke("replan", "plan.yaml", *HARDWARE).stdout
    assert Path("plan.yaml").read_bytes() == Path("new.yaml").read_bytes()


@pytest.mark.parametrize("named", ["absolute", "relative"])
def test_check_finds_the_model_that_the_plan_names(folder: Path, named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a folder above, by a path of the whole system or by one that was relative to the plan's folder."""
    text = Path("plan.yaml").read_text()
    made = re.search(r"[^\s'\"]*model\.py:small", text)
    assert made
    name = f"{folder}/model.py:small" if named == "absolute" else "model.py:small"
    Path("plan.yaml").write_text(text.replace(made[0], name))
    monkeypatch.chdir(folder.parent)
    result = invoke("check", f"{folder.name}/plan.yaml", "--hardware", f"{folder.name}/slow.yaml")
    assert result.exit_code == 0, result.stderr
    monkeypatch.chdir(folder)  # and plan.yaml is the plan of its folder
    alone = invoke("check", *HARDWARE)
    assert alone.exit_code == 0 and alone.stdout.endswith("plan.yaml is good\n"), alone.stderr
    Path("plan.yaml").unlink()
    assert "cannot read the plan plan.yaml" in invoke("check", *HARDWARE).stderr


MISTAKES = {
    "no model": (["check", "plan.yaml", *HARDWARE], "no file below this folder; give FILE.py:FACTORY"),
    "no such plan": (["check", "none.yaml", "model.py:small"], "cannot read the plan none.yaml"),
    "profile is no preset": (["check", "plan.yaml", "model.py:small"], "'slow', which is no preset; give its file"),
    "within": (["check", "plan.yaml", "model.py:small", "--within", "x"], "cannot read 'x' for --within"),
    "within 5": (["check", "plan.yaml", "model.py:small", "--within", "5"], "is 500%; write 5% or 0.05"),
    "memory": (["check", "plan.yaml", "model.py:small", "--memory", "x"], "--memory: cannot read the size 'x'"),
    "backend": (["check", "plan.yaml", "model.py:small", *HARDWARE, "--backend", "x"], "unknown backend 'x'"),
    "time": (["check", "plan.yaml", "model.py:small", "--time-limit", "0"], "give seconds above 0"),
    "name": (["explain", "plan.yaml", "model.py:small", *HARDWARE, "--why", "up.wieght"], "nearest name is up.weight"),
    "layout": (
        ["explain", "plan.yaml", "model.py:small", *HARDWARE, "--why", "x", "--not", "pp:R"],
        "names axis 'pp'; the mesh dp=2,tp=2 has no such axis",
    ),
    "model": (["explain", "plan.yaml", "model.py:wide", *HARDWARE, "--why", "x"], "`autoshard check` says what is"),
    "folder": (["replan", "plan.yaml", "model.py:small", "-o", "none/new.yaml"], "there is no folder"),
    "constraints for another mesh": (
        ["plan", "model.py:small", "--mesh", "dp=4", "-o", "new.yaml", *HARDWARE, "--constraints", "c.yaml"],
        "c.yaml, line 2: the constraints are for the mesh dp=2,tp=2",
    ),
    "no constraints": (
        ["plan", "model.py:small", "--mesh", "dp=4", "-o", "new.yaml", *HARDWARE, "--constraints", "none.yaml"],
        "cannot read the constraints none.yaml",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_and_exit_code_2(folder: Path, mistake: str) -> None:
    arguments, said = MISTAKES[mistake]
    result = invoke(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert said in result.stderr and "Traceback" not in result.stderr and result.stderr.count("\n") == 1
    assert not Path("new.yaml").exists()
