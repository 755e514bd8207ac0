"""Each loop under torchrun on four ranks, against a few lines in one process (``make loops``)."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

import autoshard

FOLDER = Path(__file__).parent
sys.path += [str(FOLDER), str(FOLDER.parent)]

import trainer  # noqa: E402

from llama import DEMO, DEMO_BATCH, demo  # noqa: E402
from text import batches  # noqa: E402

LIMIT, TIMEOUT_S = 1e-4, 280


def losses_of(script: str, *arguments: object) -> list[float]:
    """What a script says on four ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [*command, str(FOLDER / script), *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("losses")]
    return [float(word) for word in line.split()[1:]]


def in_one_process(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    calls: Iterable[Callable[[nn.Module], Tensor]],
    after: Callable[[int], None] = lambda step: None,
) -> Iterator[float]:
    """The same training by hand."""
    for step, call in enumerate(calls):
        loss = call(model)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        after(step)
        optimizer.zero_grad()
        yield float(loss.detach())


def llama_in_one_process() -> list[float]:
    """The demo on four batches."""
    model, _ = demo()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    given = batches(4, batch=DEMO_BATCH, sequence=DEMO.max_sequence, seed=0)
    return list(in_one_process(model, optimizer, [partial(demo_loss, batch) for batch in given]))


def demo_loss(batch: tuple[Tensor, Tensor], model: nn.Module) -> Tensor:
    """That of the demo."""
    loss: Tensor = model(*batch)
    return loss


def their_loss(batch: dict[str, Tensor], model: nn.Module) -> Tensor:
    """That of a model of transformers."""
    loss: Tensor = model(**batch).loss
    return loss


@pytest.mark.parametrize(
    ("script", "axes"), [("fabric.py", ("data_parallel", "tensor_parallel")), ("titan.py", ("dp", "tp"))]
)
def test_lightning_fabric_and_a_loop_as_of_torchtitan(script: str, axes: tuple[str, str], tmp_path: Path) -> None:
    """The second one goes on from a checkpoint halfway."""
    model, args = demo()
    mesh = ",".join(f"{axis}=2" for axis in axes)
    pins = [f"tokens={axes[0]}:S(0) {axes[1]}:R", f"layers.*.attention.wq.weight={axes[0]}:S(1) {axes[1]}:S(0)"]
    autoshard.write_plan(autoshard.plan(model, args, mesh=mesh, hardware="cpu-gloo", pins=pins), tmp_path / "plan.yaml")
    arguments = (tmp_path / "checkpoints",) if script == "titan.py" else ()
    found = losses_of(script, tmp_path / "plan.yaml", *arguments)
    assert found == pytest.approx(llama_in_one_process(), rel=LIMIT)


def test_the_trainer_of_hugging_face(tmp_path: Path) -> None:
    """With its own clipping, schedule and logging."""
    model, args, kwargs = trainer.small()
    pins = ["input_ids=dp:S(0) tp:R", "labels=dp:S(0) tp:R", "model.layers.*.mlp.up_proj.weight=dp:S(1) tp:S(0)"]
    plan = autoshard.plan(model, args, kwargs, mesh="dp=2,tp=2", hardware="cpu-gloo", pins=pins)
    autoshard.write_plan(plan, tmp_path / "plan.yaml")
    found = losses_of("trainer.py", tmp_path / "plan.yaml")

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    falling = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / trainer.STEPS)
    rows = trainer.Rows()
    loader = DataLoader(rows, trainer.BATCH, sampler=DistributedSampler(rows, 1, 0, seed=42))
    calls = [partial(their_loss, batch) for batch in loader]
    expected = list(in_one_process(model, optimizer, calls, lambda step: falling.step()))
    assert found == pytest.approx(expected, rel=LIMIT)
