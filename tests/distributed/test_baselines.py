"""Baselines run like any other plan, and communicate what torch's own data, sharded and tensor parallelism do."""

from __future__ import annotations

import pytest

import autoshard
from autoshard.plans import ShardingPlan
from examples import vit

from . import cases
from .experts import Bytes, bytes_of, reasons, step_of
from .harness import run_ranks
from .parity import check_parity, device_mesh_of

LIMIT = 1e-4  # as in test_parity
ROUTED_LIMIT = 1e-3  # Adam divides by gradients of a router that are near zero: 3.5e-4 is the largest seen

# As torch's plan for the blocks has it: what stands outside of them is whole along the axis that cuts them.
_OUTSIDE = ("patches.weight", "patches.bias", "positions", "norm.weight", "norm.bias", "head.weight", "head.bias")


def _step(scheme: str, axes: str) -> tuple[Bytes, float]:
    return step_of(scheme, axes, lambda: vit.tiny()[0], cases.batch("vit", 0))


@pytest.mark.parametrize(
    ("scheme", "axes"),
    [
        pytest.param("ddp", "dp=4", marks=pytest.mark.thorough),
        ("fsdp", "dp=4"),
        ("hsdp", "dp=2,tp=2"),
        pytest.param("tp", "tp=4", marks=pytest.mark.thorough),
        pytest.param("sp", "tp=4", marks=pytest.mark.thorough),
        ("fsdp+tp", "dp=2,tp=2"),
        ("fsdp+sp", "dp=2,tp=2"),
    ],
)
def test_a_baseline_moves_the_bytes_that_torch_moves(scheme: str, axes: str) -> None:
    if scheme.endswith(("tp", "sp")):
        plan = cases.baseline_plan("vit", axes, scheme, constraints=[f"only {name} tp:R" for name in _OUTSIDE])
    else:
        plan = cases.baseline_plan("vit", axes, scheme, cases.slow_network())
    theirs, _ = run_ranks(4, _step, scheme, axes, timeout_s=120.0)[0]
    expected = bytes_of(plan)
    for reason in reasons(plan, scheme):
        print(f"{scheme} {reason}")
        expected[reason.kind, reason.axis] -= reason.size_bytes
    print(f"{scheme}: ours {dict(bytes_of(plan))}, torch's {dict(theirs)}")
    assert +expected == theirs


def _train_all(case: str, texts: list[str]) -> list[float]:
    mesh = device_mesh_of(autoshard.parse_plan(texts[0]))
    worst = []
    for text in texts:
        seen = check_parity(case, text, mesh, steps=2)
        worst.append(max(seen.loss, seen.gradient, seen.parameter))
    return worst


@pytest.mark.parametrize(
    ("case", "axes", "names"),
    [
        ("llama of 1", "dp=4", ("ddp", "fsdp")),
        pytest.param("llama of 1", "tp=4", ("tp", "sp"), marks=pytest.mark.thorough),
        ("llama of 1", "dp=2,tp=2", ("ddp+tp", "fsdp+sp")),
        pytest.param("llama of 1", "dp=2,tp=2", ("ddp+sp",), marks=pytest.mark.thorough),
        pytest.param("llama of 1", "dp=2,tp=2", ("ddp+sp/selective", "fsdp+tp/full"), marks=pytest.mark.thorough),
        pytest.param("llama of a row", "cp=4", ("cp", "cp/full"), marks=pytest.mark.thorough),
        ("llama of two rows", "dp=2,cp=2", ("ddp+cp", "fsdp+cp/selective")),
        pytest.param("llama of two rows", "dp=2,cp=2", ("fsdp+cp",), marks=pytest.mark.thorough),
        pytest.param("gpt2 of two rows", "dp=2,cp=2", ("fsdp+cp",), marks=pytest.mark.thorough),
        pytest.param("gpt2", "dp=4", ("ddp", "fsdp"), marks=pytest.mark.thorough),
        pytest.param("gpt2", "tp=4", ("tp", "sp"), marks=pytest.mark.thorough),
        pytest.param("gpt2", "dp=2,tp=2", ("fsdp+tp", "fsdp+sp/selective"), marks=pytest.mark.thorough),
        pytest.param("gpt2", "dp=2,tp=2", ("ddp+tp",), marks=pytest.mark.thorough),
        pytest.param("fused", "tp=4", ("tp", "sp"), marks=pytest.mark.thorough),
        pytest.param("fused", "dp=2,tp=2", ("fsdp+tp", "fsdp+tp/full"), marks=pytest.mark.thorough),
        pytest.param("fused 4:1:1", "tp=4", ("tp", "sp"), marks=pytest.mark.thorough),
        ("fused 4:1:1", "dp=2,tp=2", ("fsdp+tp/full", "ddp+sp")),
        pytest.param("fused 4:1:1", "dp=2,tp=2", ("fsdp+tp",), marks=pytest.mark.thorough),
        pytest.param("crossed", "dp=2,tp=2", ("fsdp+tp", "ddp+tp/selective"), marks=pytest.mark.thorough),
        pytest.param("vit", "dp=2,tp=2", ("fsdp+sp",), marks=pytest.mark.thorough),
        pytest.param("vit", "dp=2,tp=2", ("hsdp",), marks=pytest.mark.thorough),
        pytest.param("vit", "dp=2,tp=2", ("fsdp",), marks=pytest.mark.thorough),
        pytest.param("routed", "ep=4", ("tp", "ep"), marks=pytest.mark.thorough),
        ("routed", "dp=2,ep=2", ("ddp+ep", "fsdp+ep")),
    ],
)
def test_a_baseline_trains_like_one_process(case: str, axes: str, names: tuple[str, ...]) -> None:
    plans = [cases.baseline_plan(case, axes, name) for name in names]
    assert all(_communicates(plan) for plan in plans)
    results = run_ranks(4, _train_all, case, [autoshard.dump_plan(plan) for plan in plans], timeout_s=200.0)
    worst = [max(values) for values in zip(*results)]
    print(f"{case} on {axes}: {dict(zip(names, worst))}")
    assert max(worst) <= (ROUTED_LIMIT if case == "routed" else LIMIT)


def _communicates(plan: ShardingPlan) -> bool:
    return {axis for _, collective in plan.collectives() for axis in collective.axes} == set(plan.mesh.axes)


def test_torch_and_one_process_agree_on_the_loss() -> None:
    """The intercepted step is a right one: torch's schemes give the loss of the whole batch."""
    model, _ = vit.tiny()
    expected = model(*cases.batch("vit", 0)).item()
    for scheme, axes in (("fsdp", "dp=4"), ("sp", "tp=4")):
        losses = [loss for _, loss in run_ranks(4, _step, scheme, axes, timeout_s=120.0)]
        assert losses == pytest.approx([expected] * 4, rel=1e-5)
