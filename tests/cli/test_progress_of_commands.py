"""Every command that takes long says what it does, and how far a solver is."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from autoshard.cli import terminal
from autoshard.cli.commands import app
from autoshard.progress import progress_line
from cost_models import dump_profile

from ..plans_of import profile_of

MODEL = "from tests.models import mlp\n\ndef small(batch=8):\n    return mlp(batch=batch)\n"
ON = "--hardware slow.yaml --backend highs"
COMMANDS = {
    "plan": f"plan model.py:small --mesh dp=2,tp=2 {ON} --no-cache -o other.yaml",
    "against": f"plan model.py:small --mesh dp=2,tp=2 {ON} --no-cache --against experts -o other.yaml",
    "explain": f"explain plan.yaml --why up.weight {ON}",
    "replan": f"replan plan.yaml {ON} -o other.yaml",
    "check": f"check plan.yaml {ON}",
    "compare": f"compare model.py:small --mesh dp=2,tp=2 {ON}",
    "search": f"search model.py:small --devices 4 {ON} --processes 1 -o meshes",
    "batches": f"search model.py:small --devices 2,4 --batch 8,16 {ON} --processes 1 -o meshes",
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, a profile and a plan."""
    folder = tmp_path_factory.mktemp("progress")
    (folder / "model.py").write_text(MODEL)
    (folder / "slow.yaml").write_text(dump_profile(profile_of("slow")))
    given = f"plan {folder}/model.py:small --mesh dp=2,tp=2 --hardware {folder}/slow.yaml -o {folder}/plan.yaml"
    result = CliRunner().invoke(app, given.split())
    assert result.exit_code == 0, result.stderr
    return folder


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_says_what_it_does_and_what_is_known(
    command: str, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []

    @contextmanager
    def heard(stage: str) -> Iterator[Callable[[str], None]]:
        said.append(stage)
        yield said.append

    monkeypatch.setattr(terminal, "progress_line", heard)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(made)
    result = CliRunner().invoke(app, COMMANDS[command].split())
    assert result.exit_code == 0, result.stderr
    stages = "\n".join(said)
    assert "capturing" in stages and "solving" in stages
    assert re.search(r"\d (us|ms|s), (at least \d.*)?(optimal|gap \d)", stages), stages


def test_in_a_pipe_that_is_short_nothing_is_said(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(made)
    stream = io.StringIO()
    monkeypatch.setattr(terminal, "progress_line", lambda stage: progress_line(stage, stream))
    assert CliRunner().invoke(app, COMMANDS["plan"].split()).exit_code == 0
    assert stream.getvalue() == ""
