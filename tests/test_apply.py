"""A plan runs only if every entry of it is one that the model's graph and the plan's own layouts give."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autoshard
from autoshard import apply
from autoshard.apply import check_once, check_plan
from autoshard.errors import InputError, PlanMismatchError, VerificationError
from autoshard.layout import Layout, R, S
from autoshard.plans import Redistribution, ShardingPlan, TensorEntry

from .one_process import fake_ranks
from .plans.synthetic import costed
from .plans_of import Planned, planned


def made() -> Planned:
    return planned("mlp with loss", "dp=2,tp=2", pins=("x=dp:S(0)", "target=dp:S(0)"))


def without(entries: tuple[Any, ...], index: int = 0) -> tuple[Any, ...]:
    return (*entries[:index], *entries[index + 1 :])


def first(plan: ShardingPlan, choose: Callable[[Redistribution], object]) -> tuple[int, Redistribution]:
    return next((i, entry) for i, entry in enumerate(plan.redistributions) if choose(entry))


def moved(plan: ShardingPlan, index: int, *entries: Redistribution) -> ShardingPlan:
    others = without(plan.redistributions, index)
    return costed(replace(plan, redistributions=(*others, *entries)), sums=True)


def lost(plan: ShardingPlan) -> ShardingPlan:
    """A redistribution less; one that nothing is kept from."""
    kept = {entry.tensor for entry in plan.redistributions if entry.kept}
    return moved(plan, first(plan, lambda e: not e.kept and e.tensor not in kept)[0])


def unwanted(plan: ShardingPlan) -> ShardingPlan:
    """A redistribution more, which moves nothing between ranks."""
    whole = next(e for e in plan.inputs if e.layout[1] == R)
    added = Redistribution(whole.name, "backward", (whole.layout, whole.layout.replace(1, S(1))), ())
    return costed(replace(plan, redistributions=(*plan.redistributions, added)), sums=True)


def for_another(plan: ShardingPlan) -> ShardingPlan:
    index, entry = first(plan, lambda e: e.consumers and "/" in e.consumers[0])
    other = next(e.name for e in plan.operators if e.phase == entry.phase and e.name not in entry.consumers)
    return moved(plan, index, replace(entry, consumers=(other,)))


def other_bytes(plan: ShardingPlan) -> ShardingPlan:
    """Bytes of a result of an operator, whose shape the file does not say."""
    named = {e.name for e in (*plan.parameters, *plan.inputs, *plan.outputs)}
    index, entry = first(plan, lambda e: e.collectives and e.tensor not in named and not named & set(e.consumers))
    sent = tuple(replace(c, size_bytes=c.size_bytes + 4) for c in entry.collectives)
    return moved(plan, index, replace(entry, collectives=sent))


def operator(plan: ShardingPlan, **changes: object) -> ShardingPlan:
    return replace(plan, operators=(replace(plan.operators[0], **changes), *plan.operators[1:]), execution=())


CHANGES: dict[str, tuple[Callable[[ShardingPlan], ShardingPlan], type[Exception], str]] = {
    "no parameter": (lambda p: replace(p, parameters=without(p.parameters)), PlanMismatchError, "has the parameter"),
    "no input": (lambda p: replace(p, inputs=without(p.inputs)), PlanMismatchError, "the model has the input x"),
    "no output": (lambda p: replace(p, outputs=()), PlanMismatchError, "the model has the output output.0"),
    "unknown parameter": (
        lambda p: replace(p, parameters=(*p.parameters, replace(p.parameters[0], name="z"))),
        PlanMismatchError,
        "the plan has the parameter z, which the model does not have",
    ),
    "unknown operator": (
        lambda p: replace(p, operators=(*p.operators, replace(p.operators[0], name="z/mm")), execution=()),
        PlanMismatchError,
        "the plan has the operator z/mm, which the model does not have",
    ),
    "no operator": (
        lambda p: replace(p, operators=without(p.operators), execution=()),
        PlanMismatchError,
        "which the plan does not have",
    ),
    "parameter twice": (
        lambda p: replace(p, parameters=(*p.parameters, replace(p.parameters[0], layout=Layout((R, R))))),
        VerificationError,
        "is named 2 times among the parameters",
    ),
    "output twice": (lambda p: replace(p, outputs=p.outputs * 2), PlanMismatchError, "names a output twice"),
    "operator in both phases": (
        lambda p: replace(p, operators=(*p.operators, replace(p.operators[0], phase="backward")), execution=()),
        VerificationError,
        "is named 2 times among the operators",
    ),
    "another phase": (lambda p: operator(p, phase="backward"), PlanMismatchError, "is one of the forward, not of the"),
    "shape of an output": (
        lambda p: replace(p, outputs=(TensorEntry("output.0", (2,), "float32", p.outputs[0].layout),)),
        VerificationError,
        "but float32[2] in the layout",
    ),
    "type of an input": (
        lambda p: replace(p, inputs=(p.inputs[0], replace(p.inputs[1], dtype="int32"))),
        PlanMismatchError,
        "other arguments: the input target is int32[6, 8] in the plan and float32[6, 8] in the example",
    ),
    "order of inputs": (
        lambda p: replace(p, inputs=p.inputs[::-1]),
        PlanMismatchError,
        "the inputs are target, x in the plan and x, target in the model",
    ),
    "order of execution": (
        lambda p: replace(p, execution=(p.execution[1], p.execution[0], *p.execution[2:])),
        PlanMismatchError,
        "where the model runs",
    ),
    "no redistribution": (lost, VerificationError, "but its operators need one"),
    "unwanted redistribution": (unwanted, VerificationError, "which nothing wants"),
    "another consumer": (for_another, VerificationError, "want it"),
    "bytes": (other_bytes, VerificationError, "does not communicate as planned: the plan says"),
    "gap": (
        lambda p: replace(p, solver=replace(p.solver, gap=0.5)),
        VerificationError,
        "the plan contradicts itself: the gap is 0.5",
    ),
}


def test_the_plan_as_it_was_made_runs() -> None:
    check_plan(made().plan, made().graph)


@pytest.mark.parametrize("change", CHANGES)
def test_a_plan_with_another_entry_is_refused(change: str) -> None:
    changed, kind, said = CHANGES[change]
    plan = changed(made().plan)
    assert plan != made().plan
    with pytest.raises(kind) as caught:
        check_plan(plan, made().graph)
    assert said in str(caught.value)


def test_a_plan_that_was_right_before_is_not_checked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOSHARD_CACHE", str(tmp_path / "cache"))
    check_once(made().plan, made().graph)
    with monkeypatch.context() as without:
        without.setattr(apply, "check_plan", None)
        check_once(made().plan, made().graph)
        for other in (replace(made().plan, solver=replace(made().plan.solver, gap=0.5)), planned("mlp", "dp=2").plan):
            with pytest.raises(TypeError):
                check_once(other, made().graph)
        without.setattr(apply, "registered", lambda: {"aten.mm.default": "another rule"})
        with pytest.raises(TypeError):
            check_once(made().plan, made().graph)


@pytest.mark.parametrize("change", CHANGES)
def test_so_is_one_beside_a_plan_that_was_right(change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOSHARD_CACHE", str(tmp_path / "cache"))
    changed, kind, said = CHANGES[change]
    check_once(made().plan, made().graph)
    for _ in range(2):
        with pytest.raises(kind, match=re.escape(said)):
            check_once(changed(made().plan), made().graph)


def test_a_second_entry_for_a_tied_parameter_is_refused() -> None:
    """The model has one tensor under two names; the plan decides it under the first."""
    found = planned("gpt2", "dp=2")
    ((alias, name),) = found.graph.aliases
    (entry,) = (e for e in found.plan.parameters if e.name == name)
    plan = replace(found.plan, parameters=(*found.plan.parameters, replace(entry, name=alias)))
    with pytest.raises(PlanMismatchError, match=f"the plan has the parameter {alias}, which the model does not have"):
        check_plan(plan, found.graph)


def test_a_path_is_no_plan() -> None:
    with pytest.raises(InputError, match=r"got the path plan.yaml; read it: autoshard.read_plan\('plan.yaml'\)"):
        apply.parallelize(nn.Linear(2, 2), "plan.yaml", None)  # type: ignore[arg-type]


def test_a_size_that_cuts_batch_and_sequence_otherwise_is_refused_with_those_that_do_not() -> None:
    """3 and 2 samples of 6 words are 18 and 12 rows; a cut of the 30 has 15 and 15."""

    class Words(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.as_tensor(super().forward(x)).square().mean()

    def parallel(size: int) -> nn.Module:
        return autoshard.parallelize(Words(nn.Linear(4, 4)), plan, mesh, (x,), batches=[size])

    x = torch.randn(8, 6, 4)
    plan = autoshard.plan(
        Words(nn.Linear(4, 4)), (x,), mesh="dp=2", hardware="cpu-gloo", constraints=["baseline ddp"], cache=False
    )
    with fake_ranks(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        parallel(6)
        with pytest.raises(PlanMismatchError, match="Give a multiple of 2, the ranks that the batch is cut over"):
            parallel(5)
