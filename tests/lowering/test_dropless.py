"""Experts that sort their tokens, under the schemes that people use, on simulated ranks against one process."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoshard
from autoshard.errors import ConstraintError

from ..capture.dropless import EACH, EXPERTS, WAYS, Dropless, example
from .as_before import check_as_before

# Over one axis. Matrices are (E, 2 I, C) and (E, C, I): experts, columns, and what a product sums over.
CUTS = {
    "ddp": ["family a=ddp"],
    "fsdp": ["family a=fsdp"],
    "by experts": ["up=a:S(0)", "down=a:S(0)", "x=a:S(0)"],
    "by columns": ["down=a:S(1)", "forbid all_gather over a of parameters"],
    "by the sum": ["up=a:S(2)", "down=a:S(2)", "forbid all_gather over a of parameters"],
}


@pytest.mark.parametrize("mesh", [pytest.param("a=2", marks=pytest.mark.thorough), "a=4"])
@pytest.mark.parametrize("cut", CUTS)
def test_a_step_is_that_of_one_process_however_experts_are_cut(cut: str, mesh: str) -> None:
    _check("put_back", mesh, CUTS[cut])


@pytest.mark.parametrize("way", WAYS)
def test_a_step_is_that_of_one_process_with_the_batch_and_the_experts_cut(way: str) -> None:
    _check(way, "dp=2,ep=2", ["family dp=ddp", "up=dp:R ep:S(0)", "down=dp:R ep:S(0)"])


class Balanced(Dropless):
    """With the loss that balances the load: shares of the tokens times mean probabilities, over all tokens.

    W. Fedus et al., "Switch Transformers", arXiv:2101.03961, equations 4 to 6.
    """

    def forward(self, x: Tensor, wanted: Tensor) -> Tensor:
        probabilities = F.linear((x * self.scale).flatten(0, 1), self.router).softmax(-1)
        shares = F.one_hot(probabilities.topk(EACH).indices, EXPERTS).float().mean((0, 1))
        return super().forward(x, wanted) + EXPERTS * (shares * probabilities.mean(0)).sum()


@pytest.mark.parametrize("family", ["ddp", "fsdp"])
def test_experts_are_balanced_by_the_tokens_of_all_ranks(family: str) -> None:
    _check("put_back", "a=2", [f"family a={family}"], Balanced)


class InLayers(nn.Module):
    """Layers of experts with biases, beside what passes by them, as in gpt-oss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Dropless(WAYS["put_back"]) for _ in range(2))
        for layer in self.layers:
            layer.down_bias = nn.Parameter(torch.randn(EXPERTS, layer.scale.numel()) / 4)

    def forward(self, x: Tensor, wanted: Tensor) -> Tensor:
        for layer in self.layers:
            tokens = F.rms_norm(x, x.shape[-1:], layer.scale).flatten(0, 1)
            scores, experts = F.linear(tokens, layer.router).softmax(-1).topk(EACH)
            biases = (scores.unsqueeze(-1) * layer.down_bias[experts]).sum(1)
            x = x + (layer.way(layer, tokens, experts, scores) + biases).view_as(x)
        return (x - wanted).square().mean()


@pytest.mark.parametrize("data", ["ddp", pytest.param("fsdp", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("family", ["tp", "sp"])
def test_columns_of_experts_are_cut_with_and_without_the_sequence_between_them(family: str, data: str) -> None:
    torch.manual_seed(0)
    model, args, families = InLayers(), example(), [f"family dp={data}", f"family tp={family}"]
    plan = autoshard.plan(model, args, mesh="dp=2,tp=2", hardware="cpu-gloo", constraints=families, cache=False)
    sent = {step.kind for entry in plan.redistributions for step in entry.collectives if step.axis == "tp"}
    assert ("reduce_scatter" in sent) is (family == "sp"), sent
    check_as_before(model, args, plan, rtol=2e-2, atol=2e-3)


def test_no_expert_parallelism_for_experts_whose_tokens_are_counted_as_the_step_runs() -> None:
    options = {"mesh": "ep=2", "hardware": "cpu-gloo", "constraints": ["family ep=ep"]}
    with pytest.raises(ConstraintError, match=r"those of up take as many tokens as come.* tp cuts the columns"):
        autoshard.plan(Dropless(WAYS["put_back"]), example(), **options)


class InFloat32(nn.Module):
    """torch computes such products, and refuses to say what shape they have."""

    def __init__(self, by_place: bool) -> None:
        super().__init__()
        self.router, self.by_place = nn.Linear(16, EXPERTS), by_place
        self.up, self.down = nn.Parameter(torch.randn(EXPERTS, 16, 32)), nn.Parameter(torch.randn(EXPERTS, 32, 16))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        scores, experts = self.router(tokens).softmax(-1).topk(EACH, -1)
        order = experts.flatten().argsort(stable=True)
        ends = torch.bincount(experts.flatten(), minlength=EXPERTS).cumsum(0).to(torch.int32)
        hidden = F.silu(F.grouped_mm(tokens[order // EACH], self.up, offs=ends))
        rows = F.grouped_mm(hidden, self.down, offs=ends) * scores.flatten()[order, None]
        if self.by_place:
            rows = rows * torch.linspace(0, 1, len(rows))[:, None]
        return torch.zeros_like(tokens).index_add_(0, order // EACH, rows).square().mean()


@pytest.mark.filterwarnings("ignore::autoshard.errors.StrategyWarning")
@pytest.mark.parametrize("by_place", [False, True])
def test_products_in_groups_may_be_in_float32(by_place: bool) -> None:
    """In the tokens' own order, or as the model has them where the order is seen."""
    torch.manual_seed(0)
    model, args = InFloat32(by_place), (torch.randn(4, 6, 16),)
    plan = autoshard.plan(model, args, mesh="a=2", hardware="cpu-gloo", constraints=["family a=fsdp"])
    assert any("grouped_mm" in entry.name for entry in plan.operators) is by_place
    check_as_before(model, args, plan, rtol=1e-4, atol=1e-5)


def _check(way: str, mesh: str, constraints: list[str], kind: type[Dropless] = Dropless) -> None:
    """Products are in bfloat16, as the model has them, and sums of other addends in another order."""
    model, args = kind(WAYS[way]), example()
    plan = autoshard.plan(model, args, mesh=mesh, hardware="cpu-gloo", constraints=constraints, cache=False)
    check_as_before(model, args, plan, rtol=2e-2, atol=2e-3)
