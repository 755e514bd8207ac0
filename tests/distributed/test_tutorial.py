"""The tutorial, as written: its files are written, its commands run, one after the other."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from autoshard import read_plan
from cost_models import load_profile

ROOT = Path(__file__).resolve().parents[2]
TUTORIAL = ROOT / "docs" / "tutorial.md"
COMMANDS = {"autoshard": "autoshard", "torchrun": "torch.distributed.run"}


def test_every_command_of_the_tutorial_runs_and_prints_what_the_page_shows(tmp_path: Path) -> None:
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", TUTORIAL.read_text(), re.MULTILINE | re.DOTALL)
    commands = tmp_path / "commands"
    commands.mkdir()
    for name, module in COMMANDS.items():
        (commands / name).write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m {module} "$@"\n')
        (commands / name).chmod(0o700)
    environment = {**os.environ, "PATH": f"{commands}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    said = ""
    for kind, text in blocks:
        if kind == "python":
            named = re.match(r"# (\w+\.py)\n", text)
            assert named, "a block of Python begins with the name of its file"
            (tmp_path / named[1]).write_text(text)
        elif kind == "sh":
            command = ["sh", "-eu", "-c", text]
            done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500)
            assert done.returncode == 0, f"{text}{done.stdout}{done.stderr}"
            said += done.stdout
        else:
            assert kind == "", f"nobody runs a block of {kind}"
    losses = [float(loss) for loss in re.findall(r"step \d: loss ([0-9.]+)", said)]
    assert losses == sorted(losses, reverse=True) and len(losses) == 3
    assert "blocks.*.up.weight" in (tmp_path / "difference.md").read_text()
    assert load_profile(str(tmp_path / "profile.yaml")).name == "profile"
    for name, ranks in (("plan.yaml", 2), ("whatif.yaml", 2), ("cluster.yaml", 64)):
        assert read_plan(tmp_path / name).mesh.size == ranks
    printed = {_numberless(line) for line in said.splitlines()}
    for line in "".join(text for kind, text in blocks if kind == "").splitlines():
        shown = _numberless(line.removesuffix("..."))
        # what was measured decides whether the plan is still good
        is_measured = shown.startswith(("ok    optimality", "plan.yaml is good"))
        assert is_measured or any(each.startswith(shown) for each in printed), line


def _numberless(line: str) -> str:
    """A line without its numbers, which differ from machine to machine, and from one version of prices to the next."""
    return re.sub(r"[0-9][0-9.,]*( [num]?s\b)?", "0", line).strip()
