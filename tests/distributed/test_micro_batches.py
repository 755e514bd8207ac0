"""Steps of several micro-batches on real processes: gathered and reduced as planned, trained as in one process."""

from __future__ import annotations

from copy import deepcopy
from functools import cache

import pytest
import torch

import autoshard
from autoshard.plans import ShardingPlan

from . import cases
from .harness import caught, run_ranks
from .parity import check_parity, device_mesh_of, full, relative
from .test_parity import LIMIT

FOUR = 4
SCHEMES = {
    "ddp": ("family dp=ddp",),
    "fsdp": ("family dp=fsdp",),
    # optimizer's state cut, parameters whole over the step (ZeRO-1)
    "zero1": (
        "tokens=dp:S(0)",
        "*.wq.weight=dp:S(0)",
        "*.w1.weight=dp:S(0)",
        "*/held_weight=dp:R",
        "*wq/summed_weight=dp:P(sum)",
        "*w1/summed_weight=dp:S(0)",
    ),
    "h": ("tokens=dp:S(0)", "h.*.weight=dp:S(0)", "*c_*/held_weight=dp:R", "*c_fc/summed_weight=dp:P(sum)"),
}


@cache
def planned(case: str, axes: str, scheme: str, memory: int | None = None) -> ShardingPlan:
    model, args = cases.make(case)
    return autoshard.plan(
        model,
        args,
        mesh=axes,
        hardware=cases.slow_machine(),
        constraints=SCHEMES.get(scheme, ()),
        micro_batches=FOUR,
        memory=memory,
        checkpointing="none",
    )


def runs(plan: ShardingPlan, phase: str) -> list[int]:
    """How often each redistribution that communicates parameters or gradients runs in a step."""
    moved = [r for r in plan.redistributions if r.phase == phase and r.collectives]
    marks = ("held_", "summed_")
    return [plan.runs(r) for r in moved if any(mark in name for name in (r.tensor, *r.consumers) for mark in marks)]


def _peak(case: str, text: str) -> int:
    """The peak of this rank in the third step."""
    plan = autoshard.parse_plan(text)
    mesh = device_mesh_of(plan)
    parallel = autoshard.parallelize(cases.make(case)[0], plan, mesh)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3, foreach=False)
    for step in range(3):
        batches = (cases.batch(case, step * FOUR + k) for k in range(FOUR))
        shards = [autoshard.shard_inputs(plan, mesh, *batch) for batch in batches]
        state = [value for each in optimizer.state.values() for value in each.values() if torch.is_tensor(value)]
        with autoshard.measure_memory(*parallel.parameters(), *parallel.buffers(), *state, *shards[0]) as log:
            for given in shards:
                parallel(*given).backward()
            optimizer.step()
        optimizer.zero_grad()
    return log.peak_bytes


@pytest.mark.parametrize(
    ("case", "axes", "scheme"),
    [
        ("llama of 1", "dp=4", "ddp"),
        pytest.param("llama of 1", "dp=4", "fsdp", marks=pytest.mark.thorough),
        pytest.param("llama of 1", "dp=4", "zero1", marks=pytest.mark.thorough),
        pytest.param("llama of 1", "dp=2,tp=2", "zero1", marks=pytest.mark.thorough),
        pytest.param("gpt2", "dp=4", "h", marks=pytest.mark.thorough),
        pytest.param("gpt2", "dp=2,tp=2", "ddp and tp", marks=pytest.mark.thorough),
        pytest.param("llama odd", "dp=3", "zero1", marks=pytest.mark.thorough),
    ],
)
def test_four_micro_batches_train_as_one_process_does_and_communicate_as_planned(case: str, axes: str, scheme: str):
    plan = planned(case, axes, scheme)
    if scheme == "ddp":
        assert set(runs(plan, "backward")) == {1}
    if scheme == "fsdp":
        assert set(runs(plan, "forward")) == set(runs(plan, "backward")) == {FOUR}
    if scheme in ("zero1", "h"):
        assert 1 in runs(plan, "forward") and 1 in runs(plan, "backward")
    results = run_ranks(plan.mesh.size, check_parity, case, autoshard.dump_plan(plan), None, 2, timeout_s=120.0)
    assert all(seen.within(LIMIT) for seen in results), results


@pytest.mark.parametrize(
    ("case", "axes", "scheme"),
    [("llama of 1", "dp=4", "zero1"), pytest.param("gpt2", "dp=4", "h", marks=pytest.mark.thorough)],
)
def test_the_measured_peak_is_within_three_percent_of_the_predicted(case: str, axes: str, scheme: str):
    plan = planned(case, axes, scheme)
    assert plan.memory is not None
    for peak in run_ranks(plan.mesh.size, _peak, case, autoshard.dump_plan(plan), timeout_s=120.0):
        assert abs(peak - plan.memory.peak.size_bytes) <= 0.03 * plan.memory.peak.size_bytes


def _misused(text: str) -> list[tuple[str, str]]:
    """What a rank is told that steps too early, and that goes on without setting gradients to None."""
    plan = autoshard.parse_plan(text)
    mesh = device_mesh_of(plan)
    parallel = autoshard.parallelize(cases.make("llama of 1")[0], plan, mesh)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    shards = autoshard.shard_inputs(plan, mesh, *cases.batch("llama of 1", 0))
    parallel(*shards).backward()
    early = caught(optimizer.step)
    for _ in range(FOUR - 1):
        parallel(*shards).backward()
    found = [early, caught(lambda: parallel(*shards).backward()), caught(optimizer.step)]
    first, second = list(parallel.parameters())[:2]

    def replaced() -> None:
        parallel(*shards).backward()
        first.grad = full(first.grad)
        parallel(*shards).backward()

    computed = {name: 1.0 * value for name, value in parallel.named_parameters()}
    for misuse in [
        replaced,
        lambda: parallel(*shards).backward(inputs=[second]),
        lambda: torch.autograd.grad(parallel(*shards), [first]),
        lambda: torch.func.functional_call(parallel, computed, shards).backward(),
    ]:
        optimizer.zero_grad()
        found.append(caught(misuse))
    return found


def test_steps_that_are_not_all_backwards_for_all_gradients_are_refused():
    expected = [
        ("BackwardError", "after 1 of the 4 backwards"),
        ("BackwardError", "zero_grad()"),
        ("", ""),
        ("BackwardError", "is a plain tensor between two backwards"),
        ("BackwardError", "this backward leaves out"),
        ("BackwardError", "this backward leaves out"),
        ("BackwardError", "was computed from other tensors"),
    ]
    for found in run_ranks(4, _misused, autoshard.dump_plan(planned("llama of 1", "dp=4", "zero1"))):
        for (kind, text), (wanted, part) in zip(found, expected, strict=True):
            assert kind == wanted and part in text, (kind, text, part)


def _interrupted(text: str) -> float:
    """The difference of gradients after a step that was given up, and with evaluations in between. Weights change where
    no step is going on, by operators on lists: torch counts no such change.
    """
    plan = autoshard.parse_plan(text)
    mesh = device_mesh_of(plan)
    model, _ = cases.make("llama of 1")
    reference = deepcopy(model)
    parallel = autoshard.parallelize(model, plan, mesh)
    shards = [autoshard.shard_inputs(plan, mesh, *cases.batch("llama of 1", k)) for k in range(FOUR)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (parallel, reference)]
    results = []

    def averaged() -> None:
        with torch.no_grad():
            for m in (parallel, reference):
                torch._foreach_mul_(list(m.parameters()), 0.9)

    for _ in range(2):
        for given in shards[:2]:
            parallel(*given).backward()
        optimizers[0].zero_grad()
        averaged()
        for k, given in enumerate(shards):
            with torch.no_grad():
                before = full(parallel(*given))
            loss = parallel(*given)
            assert torch.equal(before, full(loss).detach())
            loss.backward()
            reference(*cases.batch("llama of 1", k)).backward()
        pairs = list(zip(parallel.parameters(), reference.parameters()))
        worst = max(relative(full(ours.grad), theirs.grad) for ours, theirs in pairs)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        results.append(parallel(*shards[0]))  # an evaluation with gradients, whose result is kept
        averaged()
    return worst


def test_a_step_that_is_given_up_and_evaluations_in_between_leave_no_trace():
    text = autoshard.dump_plan(planned("llama of 1", "dp=4", "zero1"))
    assert max(run_ranks(4, _interrupted, text, timeout_s=120.0)) <= LIMIT
