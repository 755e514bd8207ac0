"""``plan``: its options, bad input, and that equal input gives equal bytes."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn

import autoshard
from autoshard.api import plan
from autoshard.errors import CaptureError, ConstraintError, InfeasibleError, LayoutError, MeshError
from cost_models import ProfileError, load_profile
from examples.llama import Llama
from solver import Problem, Solution, Status, solve

from .models import LLAMA, MLP, mlp, mlp_loss


def _plan(**options) -> autoshard.ShardingPlan:
    model, args = mlp()
    return plan(model, args, **({"mesh": "dp=2", "hardware": "cpu-gloo"} | options))


def test_a_plan_says_what_it_was_made_for_and_what_was_proven() -> None:
    found = _plan(pins=["x=dp:S(0)"], name="my model")
    assert (found.model, str(found.mesh), found.hardware, found.objective) == (
        "my model",
        "dp=2",
        "cpu-gloo",
        "step-time",
    )
    assert found.hardware_fingerprint == load_profile("cpu-gloo").fingerprint
    assert (found.solver.status, found.solver.gap) == ("optimal", 0.0)
    assert found.solver.cost_ns == found.solver.bound_ns > 0
    assert found.pins == ("x=dp:S(0)",)
    assert autoshard.parse_plan(autoshard.dump_plan(found), "text") == found
    assert _plan().model == "MLP"


def test_a_mesh_may_be_a_text_a_mapping_or_a_value() -> None:
    plans = [_plan(mesh=mesh) for mesh in ("dp=2,tp=2", {"dp": 2, "tp": 2}, autoshard.Mesh(("dp", "tp"), (2, 2)))]
    assert len({autoshard.dump_plan(p) for p in plans}) == 1


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"mesh": "dp"}, MeshError, "dp=2,tp=4"),
        ({"mesh": "dp=0"}, MeshError, "at least 1"),
        ({"mesh": {}}, MeshError, "at least|one size per axis|axis"),
        ({"hardware": "dgx-h1000"}, ProfileError, "dgx-h100"),
        ({"objective": "speed"}, ValueError, "step-time, communication-time"),
        ({"checkpointing": "all"}, ValueError, "as-marked, none"),
        ({"backend": "gurobi"}, ValueError, "highs"),
        ({"time_limit_s": 0}, ValueError, "positive"),
        ({"time_limit_s": -1.0}, ValueError, "positive"),
        ({"time_limit_s": float("nan")}, ValueError, "positive"),
        ({"pins": ["x"]}, ConstraintError, "NAME=LAYOUT"),
        ({"pins": ["y=dp:S(0)"]}, ConstraintError, "nearest name is"),
        ({"pins": ["x=dp:S(2)"]}, ConstraintError, "can have dp:R"),
        ({"pins": ["x=dp:Q"]}, LayoutError, "dp:S\\(0\\)"),
        ({"pins": ["x=pp:S(0)"]}, LayoutError, r"no such axis \(in the constraint 'x=pp:S\(0\)'\)"),
        ({"pins": ["x=dpp:S(0)"]}, LayoutError, "no such axis; did you mean 'dp'"),
    ],
)
def test_a_bad_option_is_a_clear_error_before_anything_is_solved(options, error, text, monkeypatch) -> None:
    if "backend" not in options and "time_limit_s" not in options:
        monkeypatch.setattr("autoshard.planning.budget.solve", lambda *_, **__: pytest.fail("solved"))
    with pytest.raises(error, match=text):
        _plan(**options)


def test_a_pin_given_as_one_text_is_one_pin() -> None:
    assert _plan(pins="x=dp:S(0)") == _plan(pins=("x=dp:S(0)",))


class Negated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.neg() @ self.weight).sum()


def test_one_argument_needs_no_tuple() -> None:
    options = {"mesh": "dp=2", "hardware": "cpu-gloo"}
    example = torch.ones(4, 4)
    assert plan(Negated(), example, **options) == plan(Negated(), (example,), **options)


@pytest.mark.parametrize("backend", ["auto", "highs", "cbc"])
def test_pins_that_no_plan_satisfies_are_infeasible(backend: str) -> None:
    """The negation of a partial is a partial, but nothing makes the input one."""
    model, args = Negated(), (torch.ones(4, 4),)
    options = {"mesh": "dp=2", "hardware": "cpu-gloo", "backend": backend}
    with pytest.raises(InfeasibleError, match=r"x=dp:R, /neg=dp:P\(sum\): .* leaves none, .* /neg can have dp:R; "):
        plan(model, args, pins=["x=dp:R", "/neg=dp:P(sum)"], **options)
    assert plan(model, args, pins=["x=dp:S(1)", "/mm=dp:P(sum)"], **options).solver.status == "optimal"


def test_no_plan_in_the_time_given_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_slow(problem: Problem, **options) -> Solution:
        return Solution(Status.TIME_LIMIT, None, None, None, float("inf"), solve(problem, **options).report)

    monkeypatch.setattr("autoshard.planning.budget.solve", too_slow)
    with pytest.raises(InfeasibleError, match=r"no plan: Time limit"):
        _plan()


def test_a_plan_that_is_not_proven_optimal_warns_with_its_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    def unproven(problem: Problem, **options) -> Solution:
        found = solve(problem, **options)
        assert found.cost is not None
        return Solution(Status.FEASIBLE, found.choices, found.cost, found.cost // 2, 0.5, found.report)

    monkeypatch.setattr("autoshard.planning.budget.solve", unproven)
    with pytest.warns(UserWarning, match=r"not proven optimal: its gap is 50\.00%$"):
        assert _plan().solver.status == "feasible"
    with pytest.warns(UserWarning, match=r"not proven optimal.*time limit of 0\.001 s ended the search"):
        _plan(time_limit_s=0.001)


def test_a_solver_that_ends_without_a_bound_leaves_zero_as_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    def unbounded(problem: Problem, **options) -> Solution:
        found = solve(problem, **options)
        return Solution(Status.FEASIBLE, found.choices, found.cost, None, float("inf"), found.report)

    monkeypatch.setattr("autoshard.planning.budget.solve", unbounded)
    with pytest.warns(UserWarning, match="not proven optimal.*100.00%"):
        made = _plan().solver
    assert (made.status, made.bound_ns, made.gap) == ("feasible", 0, 1.0) and made.cost_ns > 0


def test_a_model_that_cannot_be_captured_is_a_capture_error() -> None:
    class Branches(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.sum() > 0 else -x

    with pytest.raises(CaptureError, match=r"test_api.py:\d+"):
        plan(Branches(), (torch.ones(3),), mesh="dp=2")


@pytest.mark.parametrize("mesh", ["dp=1", "dp=1,tp=1"])
def test_one_rank_replicates_everything_and_moves_nothing(mesh: str) -> None:
    model, args = mlp_loss()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = plan(model, args, mesh=mesh, hardware="cpu-gloo")
    assert found.redistributions == () and found.communication_s == 0.0 < found.compute_s
    assert all(entry.layout.is_replicated for entry in (*found.parameters, *found.inputs, *found.outputs))


def test_a_meta_model_is_planned_for_512_ranks_without_a_process_group() -> None:
    with torch.device("meta"):
        model = Llama(LLAMA)
        tokens = torch.empty((512, 6), dtype=torch.int64)
    found = plan(model, (tokens, tokens), mesh="dp=128,tp=4", hardware="dgx-h100", pins=["tokens=dp:S(0)"])
    assert not torch.distributed.is_initialized()
    assert found.mesh.size == 512 and found.solver.status == "optimal"
    assert all(p.device.type == "meta" for p in model.parameters())


def test_progress_names_the_stages_in_order_then_what_is_known_of_cost_and_bound() -> None:
    stages: list[str] = []
    _plan(progress=stages.append)
    assert [stage.split()[0] for stage in stages[:3]] == ["capturing", "enumerating", "solving"]
    assert stages[-1].startswith("solving: ") and stages[-1].endswith("gap 0.00%")


def test_objectives_rank_plans_as_they_say() -> None:
    """Communication alone is least where every rank does everything."""
    free = _plan(objective="communication-time")
    assert free.communication_s == 0.0 and free.solver.cost_ns == 0
    balanced = _plan()
    assert balanced.step_s <= free.step_s


_PROGRAM = """
import sys, torch, autoshard
from tests.models import gpt2
model, args = gpt2()
pins = ["tokens=dp:S(0)", "h.*.mlp.c_fc.weight=tp:S(0)"]
sys.stdout.write(autoshard.dump_plan(autoshard.plan(model, args, mesh="dp=2,tp=2", hardware="cpu-gloo", pins=pins)))
"""


def test_the_same_input_gives_the_same_bytes_in_another_process() -> None:
    jobs = [
        subprocess.Popen(
            [sys.executable, "-c", _PROGRAM], env=os.environ | {"PYTHONHASHSEED": seed}, stdout=subprocess.PIPE
        )
        for seed in ("1", "2")
    ]
    first, second = (job.communicate(timeout=240)[0] for job in jobs)
    assert all(job.returncode == 0 for job in jobs)
    assert first == second and len(first) > 1000


def test_the_model_and_its_arguments_are_left_alone() -> None:
    model, (x,) = MLP(), (torch.randn(6, 8),)
    before = {name: (id(p), p.detach().clone()) for name, p in model.named_parameters()}
    plan(model, (x,), mesh="dp=2", hardware="cpu-gloo")
    after = {name: (id(p), p.detach()) for name, p in model.named_parameters()}
    assert all(before[k][0] == after[k][0] and torch.equal(before[k][1], after[k][1]) for k in before)
