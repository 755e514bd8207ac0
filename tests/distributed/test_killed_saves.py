"""Jobs killed while they save: the checkpoint before stays whole, time and again."""

from __future__ import annotations

import multiprocessing
import os
import random
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from .harness import _ENVIRONMENT, _PRELOAD

EXAMPLES = str(Path(__file__).parents[2] / "examples")
RANKS, MOST_S, TIMEOUT_S = 2, 0.08, 20.0


def _saving(rank: int, folder: Path, store: Path, said: Path) -> None:
    """A rank that goes on from the last checkpoint and saves for ever; every weight is the number of the step."""
    sys.path.insert(0, EXAMPLES)
    os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    import torch.distributed as dist

    from train_llama import Job

    torch.set_num_threads(1)
    timeout = timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS, timeout=timeout)
    model = nn.Linear(64, 64)
    job = Job(model, folder)
    step = job.resume()
    if step:
        assert all(bool((p == step).all()) for p in model.parameters())
    while True:
        step += 1
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(step)
        job.save(step)
        if rank == 0:
            (folder / "saves").touch()


def _last(folder: Path) -> int:
    """The number of the last checkpoint, which is loaded and looked at."""
    found = sorted(folder.glob("step-*"))
    if not found:
        return 0
    step, model = int(found[-1].name.removeprefix("step-")), nn.Linear(64, 64)
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=found[-1], no_dist=True)
    assert all(bool((value == step).all()) for value in state["model"].values())
    return step


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("kills", [16, pytest.param(50, marks=pytest.mark.thorough)])
def test_a_job_that_is_killed_while_it_saves_leaves_the_checkpoint_before(kills: int, tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    os.environ.update(_ENVIRONMENT)
    context.set_forkserver_preload(_PRELOAD)
    folder, chosen, unfinished, step = tmp_path / "checkpoints", random.Random(0), 0, 0
    folder.mkdir()
    for kill in range(kills):
        store, said = tmp_path / f"store{kill}", tmp_path / f"said{kill}"
        (folder / "saves").unlink(missing_ok=True)
        ranks = [context.Process(target=_saving, args=(r, folder, store, said)) for r in range(RANKS)]
        try:
            for rank in ranks:
                rank.start()
            deadline = time.monotonic() + TIMEOUT_S
            while not (folder / "saves").exists():
                assert time.monotonic() < deadline and all(rank.is_alive() for rank in ranks), said.read_text()
                time.sleep(0.002)
            time.sleep(chosen.uniform(0, MOST_S))
        finally:
            for rank in chosen.sample(ranks, RANKS):
                rank.kill()
            for rank in ranks:
                rank.join()
        before, step = step, _last(folder)
        assert step > before
        unfinished += any(folder.glob("unfinished-*"))
    assert unfinished > kills // 4  # that many were killed while they saved
