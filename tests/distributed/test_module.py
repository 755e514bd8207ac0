"""A parallel module behaves as any module: optimizers, accumulation, checkpoints, modes of calling, ties."""

from __future__ import annotations

import gc
import inspect
import logging
import time
from contextlib import nullcontext
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import autoshard
from autoshard.lowering.adapter import StorageWatch
from autoshard.lowering.placements import placements_of
from autoshard.plans.schedule import sent

from . import cases
from .harness import caught, run_ranks
from .parity import both, device_mesh_of, full, relative, worst_parameter

LIMIT = 1e-4
AXES = "dp=2,tp=2"
CASE = "gpt2 small"  # batch 5, 3 heads, width 12, tied embeddings

OPTIMIZERS: dict[str, Any] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    "AdamW foreach": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, foreach=True),
    "SGD momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-1, momentum=0.9),
}


@pytest.fixture(scope="module")
def plan_text() -> str:
    return autoshard.dump_plan(cases.sharded_plan(CASE, AXES))


def _refuse(record: logging.LogRecord) -> bool:
    raise AssertionError(f"torch's log says what a user cannot mend: {record.getMessage()}")


def _accumulate_and_clip(plan_text: str) -> dict[str, tuple[float, float]]:
    """Three steps of two backward calls each, clipped; the largest differences of norm and parameters."""
    plan, parallel, reference, mesh = both(CASE, plan_text)
    # of parameters cut over two axes DTensor would have advice
    assert any(sum(q.is_shard() for q in p.placements) > 1 for p in parallel.parameters() if isinstance(p, DTensor))
    logging.getLogger("torch.distributed.tensor._redistribute").addFilter(_refuse)
    modules = (parallel, reference)
    initial = [deepcopy(module.state_dict()) for module in modules]
    seen = {}
    for name, make in OPTIMIZERS.items():
        for module, state in zip(modules, initial):
            module.load_state_dict(state)
        optimizers = [make(module.parameters()) for module in modules]
        worst = 0.0
        for step in range(3):
            for half in range(2):
                batch = cases.batch(CASE, 2 * step + half)
                parallel(*autoshard.shard_inputs(plan, mesh, *batch)).backward()
                reference(*batch).backward()
            ours, theirs = (full(nn.utils.clip_grad_norm_(module.parameters(), 0.1)) for module in modules)
            worst = max(worst, relative(ours, theirs))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=step > 0)
            assert all(p.grad is None if step > 0 else not full(p.grad).any() for p in parallel.parameters())
        seen[name] = worst, worst_parameter(parallel, reference)
    return seen


def test_accumulation_clipping_and_optimizers(plan_text: str):
    for seen in run_ranks(4, _accumulate_and_clip, plan_text):
        assert seen.keys() == OPTIMIZERS.keys()
        assert max(max(pair) for pair in seen.values()) <= LIMIT, seen


def _save_and_load(plan_text: str, folder: str) -> None:
    plan, parallel, _, mesh = both(CASE, plan_text)
    assert parallel.lm_head.weight is parallel.wte.weight
    saved = {name: value.clone() for name, value in parallel.state_dict().items()}
    assert list(saved) == list(cases.make(CASE)[0].state_dict())
    dcp.save(dict(saved), checkpoint_id=folder)
    batch = autoshard.shard_inputs(plan, mesh, *cases.batch(CASE, 0))
    before = parallel(*batch).detach()

    def change() -> None:
        with torch.no_grad():
            for parameter in parallel.parameters():
                parameter.add_(1.0)
        assert not torch.equal(parallel(*batch).detach(), before)

    change()
    parallel.load_state_dict(saved)
    assert torch.equal(parallel(*batch).detach(), before)
    change()
    loaded = parallel.state_dict()
    dcp.load(loaded, checkpoint_id=folder)
    parallel.load_state_dict(loaded)
    assert torch.equal(parallel(*batch).detach(), before)
    assert parallel.lm_head.weight is parallel.wte.weight
    other = init_device_mesh("cpu", (4,), mesh_dim_names=("ranks",))  # as FSDP2 and other plans have it
    for part, prefix in ((parallel, ""), (parallel.wte, "wte.")):
        change()
        cut = {
            name: distribute_tensor(value.full_tensor(), other, [Shard(0)]) if isinstance(value, DTensor) else value
            for name, value in saved.items()
        }
        part.load_state_dict({name.removeprefix(prefix): cut[name] for name in cut if name.startswith(prefix)})
        for name in [name for name in saved if name.startswith(prefix)]:
            assert torch.equal(full(parallel.state_dict()[name]), full(saved[name]))
    assert parallel.lm_head.weight is parallel.wte.weight


def test_state_dict_and_distributed_checkpoint_round_trips(plan_text: str, tmp_path):
    run_ranks(4, _save_and_load, plan_text, str(tmp_path / "checkpoint"))


def _call_in_other_ways(plan_text: str) -> None:
    plan, parallel, reference, mesh = both(CASE, plan_text)
    batch = cases.batch(CASE, 0)
    expected = reference(*batch)
    shards = autoshard.shard_inputs(plan, mesh, *batch)
    with torch.no_grad(), autoshard.measure_collectives(mesh) as log:
        loss = parallel(*shards)
    assert not loss.requires_grad and relative(loss, expected) <= LIMIT
    forward = [(c.kind, c.axis, c.size_bytes) for c in sent(plan) if c.phase == "forward"]
    assert sorted(log.records) == sorted(forward)
    dtensors = [
        DTensor.from_local(
            shard, mesh, placements_of(entry.layout), run_check=False, shape=entry.shape, stride=full_size.stride()
        )
        for shard, entry, full_size in zip(shards, plan.inputs, batch)
    ]
    assert torch.equal(parallel(*dtensors), loss)
    assert torch.equal(parallel(targets=shards[1], tokens=shards[0]), loss)
    assert torch.equal(parallel(shards[0], targets=dtensors[1]), loss)
    _check_memory_without_a_backward(parallel, shards, loss)
    _check_users_model(parallel, reference)


def _check_memory_without_a_backward(parallel: nn.Module, shards: tuple[torch.Tensor, ...], loss: torch.Tensor) -> None:
    peaks = []
    for around in (nullcontext, torch.no_grad, torch.inference_mode):
        with around(), autoshard.measure_memory(*parallel.parameters(), *shards) as log:
            assert torch.equal(parallel(*shards).detach(), loss)
        peaks.append(log.peak_bytes - log.held_bytes)
    assert peaks[1] == peaks[2] < 0.5 * peaks[0], peaks


def _check_users_model(parallel: nn.Module, reference: nn.Module) -> None:
    assert isinstance(parallel, type(reference)) and repr(parallel) == repr(reference)
    assert inspect.signature(parallel.forward) == inspect.signature(reference.forward)
    kind, text = caught(lambda: parallel.ln_f(torch.ones(1, 12)))
    assert kind == "InputError" and "the submodule ln_f of a parallel module was called by itself" in text


def test_no_grad_keyword_dtensor_inputs_and_the_users_class(plan_text: str):
    run_ranks(4, _call_in_other_ways, plan_text)


def _values_of_the_first_rank() -> tuple[str, bool]:
    plan_mesh = cases.Mesh.parse(AXES)
    mesh = device_mesh_of(plan_mesh)
    model, args = cases.make(CASE)
    first = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(float(dist.get_rank()))
    parallel = autoshard.auto_parallelize(model, mesh, args, pins=cases.pins(CASE, plan_mesh))
    same = all(torch.equal(full(value), first[name]) for name, value in parallel.state_dict().items())
    return autoshard.dump_plan(parallel.plan), same


def test_one_call_gives_every_rank_the_same_plan_and_the_values_of_the_first():
    results = run_ranks(4, _values_of_the_first_rank, timeout_s=120.0)
    assert len({text for text, _ in results}) == 1
    assert all(same for _, same in results)


def _backward_twice(plan_text: str) -> tuple[str, float]:
    """What a second backward says, and the largest difference between gradients of a retained graph and twice one's."""
    plan, parallel, _, mesh = both(CASE, plan_text)
    batch = autoshard.shard_inputs(plan, mesh, *cases.batch(CASE, 0))
    loss = parallel(*batch)
    loss.backward()
    once = [full(parameter.grad) for parameter in parallel.parameters()]
    said = ""
    try:
        loss.backward()
    except RuntimeError as error:
        said = str(error)
    parallel.zero_grad()
    loss = parallel(*batch)
    loss.backward(retain_graph=True)
    loss.backward()
    twice = [full(parameter.grad) for parameter in parallel.parameters()]
    return said, max(relative(b, 2 * a) for a, b in zip(once, twice))


def test_a_second_backward_needs_a_retained_graph_as_in_torch(plan_text: str):
    for said, difference in run_ranks(4, _backward_twice, plan_text):
        assert "backward" in said and "retain_graph=True" in said
        assert difference <= LIMIT


def _alive_after_a_step(plan_text: str) -> tuple[int, int]:
    """Bytes that a step leaves behind once its loss is gone, and once its backward has run."""
    plan, parallel, _, mesh = both(CASE, plan_text)
    batch = autoshard.shard_inputs(plan, mesh, *cases.batch(CASE, 0))
    left = []
    for goes_backward in (False, True):
        gc.collect()
        gc.disable()
        try:
            with StorageWatch([*parallel.parameters(), *batch]) as watch:
                before = watch.used_bytes
                loss = parallel(*batch)
                if goes_backward:
                    loss.backward()
                    parallel.zero_grad()
                else:
                    del loss
                time.sleep(0.1)  # gloo's threads let go of their buffers
                left.append(watch.used_bytes - before)
        finally:
            gc.enable()
    return left[0], left[1]


def test_a_step_leaves_nothing_behind_without_waiting_for_the_garbage_collector(plan_text: str):
    for dropped, done in run_ranks(4, _alive_after_a_step, plan_text):
        assert dropped == 0
        assert done <= 64  # the loss, still in use
