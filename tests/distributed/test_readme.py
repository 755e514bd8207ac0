"""The README's Python, as written but for the size of the machine, on four processes."""

from __future__ import annotations

import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from autoshard import dump_plan, parse_plan, shard_inputs
from examples.llama import Llama, LlamaConfig

from .harness import run_ranks
from .parity import device_mesh_of

README = Path(__file__).resolve().parents[2] / "README.md"
SMALLER = {'"cuda", (8, 8)': '"cpu", (2, 2)', '"cuda"': '"cpu"', "dp=8,tp=8": "dp=2,tp=2", "16, 8192": "8, 32"}
CONFIG = LlamaConfig(n_layers=1, d_model=64, n_heads=4, n_kv_heads=4, d_ffn=64, max_sequence=32)
SHAPE = (8, 32)


def snippets() -> list[str]:
    """The README's Python blocks, for four processes without an accelerator."""
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    for large, small in SMALLER.items():
        blocks = [block.replace(large, small) for block in blocks]
    return blocks


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    pairs = [torch.randint(0, CONFIG.vocab_size, (2, *SHAPE), generator=generator) for _ in range(2)]
    return [(tokens, targets) for tokens, targets in pairs]


def llama() -> Llama:
    model = Llama(CONFIG)
    model.init_weights(0)
    return model


def one_call(block: str) -> tuple[float, float]:
    """The loss of the last step of the first snippet, and that of the same training in one process."""
    model = llama()
    alone = deepcopy(model)
    (tokens, targets), *_ = loader = batches()
    names: dict[str, Any] = {"model": model, "tokens": tokens, "targets": targets, "loader": loader}
    exec(block, names)
    optimizer = torch.optim.AdamW(alone.parameters())
    for tokens, targets in loader:
        loss = alone(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return float(names["loss"]), float(loss)


def two_halves(offline: str, job: str, folder: str) -> tuple[float, float]:
    """The loss of the third snippet on the plan of the second, and that of one process."""
    plan_file = f"{folder}/plan.yaml"
    if torch.distributed.get_rank() == 0:
        exec(offline.replace("plan.yaml", plan_file), {"torch": torch, **_public(), "Llama": Llama, "config": CONFIG})
    torch.distributed.barrier()
    model = llama()
    alone = deepcopy(model)
    tokens, targets = batches()[0]
    names: dict[str, Any] = {**_public(), "model": model, "tokens": tokens, "targets": targets}
    exec(job.replace("plan.yaml", plan_file), names)
    return float(names["loss"]), float(alone(tokens, targets))


def several_plans(job: str, texts: dict[str, str]) -> tuple[list[float], list[float]]:
    """The losses of the fourth snippet's module under each of its plans, and those of one process."""
    names: dict[str, Any] = {**_public(), "model": llama(), "mesh": device_mesh_of(parse_plan(texts["train"]))}
    names |= {name: parse_plan(text) for name, text in texts.items()}
    exec(job, names)
    alone, ours, theirs = llama(), [], []
    for name in texts:
        batch = tuple(tensor[: names[name].inputs[0].shape[0]] for tensor in batches()[0])
        for module in (alone, names["model"]):
            module.train(name != "evaluate")
        with torch.set_grad_enabled(name != "evaluate"):
            ours.append(float(names["model"](*shard_inputs(names[name], names["mesh"], *batch))))
            theirs.append(float(alone(*batch)))
    return ours, theirs


def _public() -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh

    import autoshard

    return {"autoshard": autoshard, "init_device_mesh": init_device_mesh}


def test_one_call_trains_as_one_process_does() -> None:
    first, *_ = snippets()
    for ours, alone in run_ranks(4, one_call, first, timeout_s=240, group_timeout_s=200):
        assert ours == pytest.approx(alone, rel=1e-4)


def test_two_halves_give_the_loss_of_one_process(tmp_path: Path) -> None:
    _, offline, job, _ = snippets()
    for ours, alone in run_ranks(4, two_halves, offline, job, str(tmp_path), timeout_s=240, group_timeout_s=200):
        assert ours == pytest.approx(alone, rel=1e-5)


def test_several_plans_give_the_losses_of_one_process() -> None:
    offline, line, job = snippets()[3].partition("model = autoshard.parallelize")
    tokens, targets = batches()[0]
    names: dict[str, Any] = {**_public(), "torch": torch, "model": llama(), "tokens": tokens, "targets": targets}
    exec(offline, names)
    texts = {name: dump_plan(names[name]) for name in ("train", "evaluate", "last")}
    for ours, alone in run_ranks(4, several_plans, line + job, texts, timeout_s=240, group_timeout_s=200):
        assert ours == pytest.approx(alone, rel=1e-5)
