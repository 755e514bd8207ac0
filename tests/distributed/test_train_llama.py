"""``examples/train_llama.py`` as a user runs it: killed, and gone on with on another mesh."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autoshard

from .harness import run_ranks

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


def planned(folder: Path, make: Callable[[], Any], mesh: str, **options: Any) -> tuple[str, str]:
    """The plan files of training and of evaluation."""
    train, evaluate = str(folder / f"train-{mesh}.yaml"), str(folder / f"evaluate-{mesh}.yaml")
    options |= {"mesh": mesh, "hardware": "cpu-gloo"}
    plan = autoshard.plan(*make(), **options)
    autoshard.write_plan(plan, train)
    autoshard.write_plan(autoshard.plan(*make(), **options, held_as=plan, evaluation=True), evaluate)
    return train, evaluate


@contextlib.contextmanager
def job(ranks: int, cache: Path, *arguments: str, restarts: int = 0) -> Iterator[subprocess.Popen[str]]:
    """A job under torchrun, which captures what is not in the cache; no process of it is left."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["--max-restarts", str(restarts), "--monitor-interval", "3"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}
    environment["AUTOSHARD_CACHE"] = str(cache)
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


@pytest.mark.parametrize(
    ("ranks", "mesh", "fewer", "other"),
    [(2, "tp=2", 1, "dp=1"), pytest.param(4, "dp=2,tp=2", 2, "dp=2", marks=pytest.mark.thorough)],
)
def test_a_rank_is_killed_and_torchrun_starts_again_then_all_are_and_fewer_go_on_under_another_plan(
    tmp_path: Path, example: ModuleType, ranks: int, mesh: str, fewer: int, other: str
) -> None:
    expected = in_one_process(example)
    folder, cache = str(tmp_path / "checkpoints"), tmp_path / "cache"
    options = ("--no-dropout", "--checkpoints", folder)
    with job(ranks, cache, *planned(tmp_path, example.certain, mesh), *options, restarts=1) as process:
        first = until(process, EVERY + 1)
        before = ranks_of(process)
        os.kill(before[-1], signal.SIGKILL)
        again = until(process, STEPS // 2 + 1)
        after = ranks_of(process)
        killed(process)
        said = "" if process.stderr is None else process.stderr.read()
    assert len(after) == ranks and not set(after) & set(before), said
    check_alike(first, expected[: EVERY + 1])
    check_alike(again, expected[EVERY : STEPS // 2 + 1])
    assert "autoshard: rank " in said and " lost another rank in " in said, said
    with job(fewer, cache, *planned(tmp_path, example.certain, other), *options) as process:
        out, error = process.communicate(timeout=TIMEOUT_S)
    assert not process.returncode, error
    check_alike(lines(out), expected[STEPS // 2 :])


def _whole_and_rest(files: tuple[str, str], folder: Path) -> list[str]:
    """What the script prints of a whole run, and of one that goes on where only half of its checkpoints are left."""
    sys.path.insert(0, str(EXAMPLES))
    import train_llama

    plans = [autoshard.read_plan(path) for path in files]
    mesh = init_device_mesh("cpu", plans[0].mesh.shape, mesh_dim_names=plans[0].mesh.axes)
    options, printed = argparse.Namespace(steps=STEPS, every=EVERY), []
    for _ in range(2):
        job = train_llama.Job(autoshard.parallelize(train_llama.student()[0], plans, mesh), folder)
        with contextlib.redirect_stdout(io.StringIO()) as out:
            train_llama.train(job, plans, mesh, options)
        printed.append(out.getvalue())
        dist.barrier()
        for path in folder.glob("step-*") if dist.get_rank() == 0 else ():
            if path.name > f"step-{STEPS // 2:06}":
                shutil.rmtree(path)
        dist.barrier()
    return printed


def test_with_dropout_and_in_bfloat16_a_run_that_was_cut_short_says_what_a_whole_one_says(
    tmp_path: Path, example: ModuleType
) -> None:
    """On the same mesh the numbers drawn after a resume are those that would have been drawn."""
    files = planned(tmp_path, example.student, "dp=2", param_dtype="bfloat16", reduce_dtype="float32")
    (tmp_path / "checkpoints").mkdir()
    whole, rest = map(lines, run_ranks(2, _whole_and_rest, files, tmp_path / "checkpoints", timeout_s=TIMEOUT_S)[0])
    assert [each["step"] for each in whole] == [*range(1, STEPS + 1)]
    assert rest == whole[STEPS // 2 :]
