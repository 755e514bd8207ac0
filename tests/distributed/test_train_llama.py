"""``examples/train_llama.py`` as a user runs it: planned by the command, killed, gone on with on another mesh."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import autoshard

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
TIMEOUT_S = 240.0
STEPS, EVERY = 8, 2


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    """The script as a module."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        import train_llama

        yield train_llama
    finally:
        sys.path.remove(str(EXAMPLES))


def planned(folder: Path, example: ModuleType, mesh: str) -> tuple[str, str]:
    """The plan files of training and of evaluation, without dropout."""
    train, evaluate = str(folder / f"train-{mesh}.yaml"), str(folder / f"evaluate-{mesh}.yaml")
    options: dict[str, Any] = {"mesh": mesh, "hardware": "cpu-gloo"}
    plan = autoshard.plan(*example.certain(), **options)
    autoshard.write_plan(plan, train)
    autoshard.write_plan(autoshard.plan(*example.certain(), **options, held_as=plan, evaluation=True), evaluate)
    return train, evaluate


def commanded(folder: Path, *options: str) -> tuple[str, str]:
    """The same with dropout, made by the command."""
    train, evaluate = str(folder / "train.yaml"), str(folder / "evaluate.yaml")
    asked = [sys.executable, "-m", "autoshard", "plan", "examples/train_llama.py:student", "--hardware", "cpu-gloo"]
    for path, more in ((train, []), (evaluate, ["--evaluation", "--held-as", train])):
        command = [*asked, *options, *more, "-o", path]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S)
        assert not done.returncode, done.stderr
    return train, evaluate


@contextmanager
def job(ranks: int, *arguments: str, restarts: int = 0) -> Iterator[subprocess.Popen[str]]:
    """A job under torchrun; no process of it is left."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["--max-restarts", str(restarts), "--monitor-interval", "3"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # see docs/training.md
    with subprocess.Popen(
        [*command, "examples/train_llama.py", *arguments, "--steps", str(STEPS), "--every", str(EVERY)],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            killed(process)


def killed(job: subprocess.Popen[str]) -> None:
    """Kills a job that still runs, its ranks first."""
    if job.poll() is None:
        for rank in ranks_of(job):
            os.kill(rank, signal.SIGKILL)
        job.kill()
        job.wait(timeout=20)


def ranks_of(job: subprocess.Popen[str]) -> list[int]:
    """The process ids of the ranks that run now, in order."""
    return [int(rank) for rank in Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()]


def lines(said: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in said.splitlines() if line.startswith("{")]


def in_one_process(example: ModuleType) -> list[dict[str, float]]:
    """What the script says, of the same model in this process alone."""
    model, _ = example.certain()
    optimizer = torch.optim.AdamW(model.parameters(), lr=example.LEARNING_RATE)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=example.WARM_UP_STEPS)
    size = {"batch": example.BATCH, "sequence": example.CONFIG.max_sequence}
    given = example.batches(STEPS * example.ACCUMULATED, **size, seed=example.SEED)
    said: list[dict[str, float]] = []
    for step in range(STEPS):
        losses = []
        for batch in given[step * example.ACCUMULATED : (step + 1) * example.ACCUMULATED]:
            loss = model(*batch) / example.ACCUMULATED
            loss.backward()
            losses.append(float(loss.detach()))
        norm = nn.utils.clip_grad_norm_(model.parameters(), example.MOST_NORM)
        optimizer.step()
        warm_up.step()
        optimizer.zero_grad()
        said.append({"step": step + 1, "loss": sum(losses), "norm": float(norm)})
        if (step + 1) % EVERY == 0:
            with torch.no_grad():
                said[-1]["evaluation"] = float(model(*example.batches(1, **size, seed=example.SEED + 1)[0]))
    return said


def check_alike(found: Sequence[dict[str, Any]], expected: Sequence[dict[str, Any]]) -> None:
    assert [list(each) for each in found] == [list(each) for each in expected]
    for one, other in zip(found, expected, strict=True):
        for name, value in other.items():
            assert one[name] == pytest.approx(value, rel=1e-4), (name, one, other)


def until(job: subprocess.Popen[str], step: int) -> list[dict[str, Any]]:
    """What a job says, to the line of a step or to its end."""
    assert job.stdout is not None
    said: list[dict[str, Any]] = []
    for line in job.stdout:
        said += lines(line)
        if said and said[-1]["step"] == step:
            break
    return said


def test_a_rank_is_killed_and_torchrun_starts_again_then_all_are_and_two_ranks_go_on_under_another_plan(
    tmp_path: Path, example: ModuleType
) -> None:
    expected = in_one_process(example)
    folder = str(tmp_path / "checkpoints")
    options = ("--no-dropout", "--checkpoints", folder)
    with job(4, *planned(tmp_path, example, "dp=2,tp=2"), *options, restarts=1) as process:
        first = until(process, EVERY + 1)
        before = ranks_of(process)
        os.kill(before[-1], signal.SIGKILL)
        again = until(process, STEPS // 2 + 1)
        after = ranks_of(process)
        killed(process)
        said = "" if process.stderr is None else process.stderr.read()
    assert len(after) == 4 and not set(after) & set(before), said
    check_alike(first, expected[: EVERY + 1])
    check_alike(again, expected[EVERY : STEPS // 2 + 1])
    assert "autoshard: rank " in said and " lost another rank in " in said, said
    with job(2, *planned(tmp_path, example, "dp=2"), *options) as process:
        out, error = process.communicate(timeout=TIMEOUT_S)
    assert not process.returncode, error
    check_alike(lines(out), expected[STEPS // 2 :])


def test_with_dropout_and_in_bfloat16_a_run_that_was_cut_short_says_what_a_whole_one_says(tmp_path: Path) -> None:
    """On the same mesh the numbers drawn after a resume are those that would have been drawn."""
    plans = commanded(tmp_path, "--mesh", "dp=2", "--param-dtype", "bfloat16", "--reduce-dtype", "float32")
    folder = tmp_path / "checkpoints"
    said = []
    for _ in range(2):
        with job(2, *plans, "--checkpoints", str(folder)) as process:
            out, error = process.communicate(timeout=TIMEOUT_S)
        assert not process.returncode, error
        said.append(lines(out))
        for path in folder.glob("step-*"):
            if path.name > f"step-{STEPS // 2:06}":
                shutil.rmtree(path)
    whole, rest = said
    assert [each["step"] for each in whole] == [*range(1, STEPS + 1)]
    assert rest == whole[STEPS // 2 :]
