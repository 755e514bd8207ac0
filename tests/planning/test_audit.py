from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import autoshard
from autoshard.cli.audit_command import _milliseconds
from autoshard.ops import register_operator, registered
from autoshard.ops.operator import _ENTRIES, known
from autoshard.planning.audit import AuditedOperator
from cost_models import load_profile

from ..models import WithLoss, mlp_loss


@torch.library.custom_op("auditing::opaque", mutates_args=())
def opaque(x: Tensor) -> Tensor:
    return x.clone()


@opaque.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


opaque.register_autograd(lambda ctx, grad: grad)


class Opaque(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return opaque(opaque(x).exp())


@pytest.fixture
def registry() -> Iterator[None]:
    before = dict(_ENTRIES)
    yield
    _ENTRIES.clear()
    _ENTRIES.update(before)
    known.cache_clear()


def audited(mesh: str = "dp=2,tp=2") -> dict[str, AuditedOperator]:
    x = torch.randn(8, 16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = autoshard.audit(WithLoss(Opaque()), (x, x), mesh=mesh, hardware="cpu-gloo")
    return {operator.name: operator for operator in made.operators}


def test_an_operator_without_a_rule_comes_first_with_its_line_and_what_it_costs() -> None:
    found = audited()
    name, operator = next(iter(found.items()))
    assert name == "auditing.opaque.default" and operator.sources == () and operator.count == 2
    assert operator.lack == "neither torch nor autoshard has a rule that cuts it"
    assert "opaque(opaque(x).exp())" in operator.source and "test_audit.py" in operator.source
    profile = load_profile("cpu-gloo")
    whole, share = (profile.op_s("float32", 8 * 16 / n, 2 * 4 * 8 * 16 / n, "pointwise") for n in (1, 4))
    assert operator.replicated_s == pytest.approx(2 * (whole - share))
    assert all(other.sources for other in list(found.values())[1:])


def test_rules_that_the_user_registered_are_the_users(registry: None) -> None:
    register_operator("auditing::opaque", ["S(0) -> S(0)"])
    assert registered() and audited()["auditing.opaque.default"].sources == ("user",)


def test_torchs_rules_and_ours_are_told_apart_and_every_call_is_counted() -> None:
    model, args = mlp_loss()
    made = autoshard.audit(model, args, mesh="dp=2", hardware="cpu-gloo")
    sources = {operator.name: operator.sources for operator in made.operators}
    assert sources["aten.relu.default"] == ("torch",) and sources["aten.addmm.default"] == ("torch", "autoshard")
    plan = autoshard.plan(model, args, mesh="dp=2", hardware="cpu-gloo")
    assert sum(operator.count for operator in made.operators) == len(plan.operators)
    assert made.whole == ()


def test_one_rank_has_nothing_to_gain() -> None:
    assert {operator.replicated_s for operator in audited("dp=1").values()} == {0.0}


def test_dims_that_no_axis_divides_are_said_to_be_too_short() -> None:
    x = torch.randn(2, 2)
    made = autoshard.audit(WithLoss(nn.ReLU()), (x, x), mesh="dp=3", hardware="cpu-gloo")
    assert made.whole and all("too short" in operator.lack for operator in made.whole)


def test_what_is_too_small_to_be_seen_is_shown_as_in_a_report() -> None:
    assert [_milliseconds(seconds) for seconds in (0.0, 8.3e-12, 5e-6, 0.01234567)] == ["0", "<0.01", "0.005", "12.35"]
