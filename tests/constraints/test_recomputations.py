"""What is computed again by hand, read off the graph; and the names of baselines that do so."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoshard.capture import CapturedGraph, capture
from autoshard.constraints import Recomputation, parse_constraint
from autoshard.constraints.baselines import Baseline, baseline, baselines
from autoshard.constraints.computed_again import again_under
from autoshard.errors import ConstraintError
from autoshard.mesh import Mesh
from autoshard.ops import has, is_free

from ..models import graph_of

MESH = Mesh.parse("dp=2,tp=2")


def again(graph: CapturedGraph, *texts: str) -> frozenset[str]:
    return again_under([parse_constraint(text, MESH) for text in texts], graph)


def test_its_text() -> None:
    assert parse_constraint("recomputation full", MESH) == Recomputation("full", "recomputation full")
    with pytest.raises(ConstraintError, match=r"'half'.*selective, full"):
        parse_constraint("recomputation half", MESH)


@pytest.mark.parametrize(("model", "layers"), [("llama", "layers.*"), ("vit", "layers.*"), ("gpt2", "h.*")])
def test_full_is_every_layer_checkpointed(model: str, layers: str) -> None:
    graph = graph_of(model)
    assert again(graph, "recomputation full") == again(graph, f"checkpoint {layers}") != frozenset()


@pytest.mark.parametrize("model", ["llama", "gpt2", "vit", "routed"])
def test_selective_is_every_attention_and_the_views_of_its_result(model: str) -> None:
    graph = graph_of(model)
    names = again(graph, "recomputation selective")
    chosen = {i for i, node in enumerate(graph.nodes) if node.phase == "forward" and node.name in names}
    attentions = {i for i, node in enumerate(graph.nodes) if has(node, "attention") and node.phase == "forward"}
    assert attentions and {i for i in chosen if not is_free(graph.nodes[i])} == attentions
    assert all(graph.nodes[i].inputs[0].node in chosen for i in chosen - attentions)


class WrittenOut(nn.Module):
    """Attention behind a router, both with a softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.router, self.out = nn.Linear(8, 24), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x * self.router(x).softmax(-1)).chunk(3, -1)
        weights = F.dropout((q @ k.transpose(1, 2) / 3 + torch.ones(5, 5).tril()).softmax(-1), 0.1)
        return self.out(torch.tanh(weights @ v)).square().mean()


def test_of_an_attention_that_is_written_out_selective_is_the_products_and_what_stands_between() -> None:
    graph = capture(WrittenOut(), (torch.randn(2, 5, 8),))
    names = again(graph, "recomputation selective")
    computed = [n.name for n in graph.nodes if n.kind == "operator" and n.name in names and not is_free(n)]
    roles = [name.partition("/")[2].partition(".")[0] for name in computed]
    assert roles[:4] == ["bmm", "div", "add", "_softmax"] and roles[-1] == "bmm"
    assert "tanh" not in roles and not any("router" in name for name in computed)


def test_what_is_to_be_kept_is_kept() -> None:
    graph = graph_of("llama")
    names = again(graph, "keep */attention", "recomputation full")
    assert names == again(graph, "recomputation full") - {"layers.0.attention/attention"}


@pytest.mark.parametrize(("granularity", "missing"), [("full", "no layer"), ("selective", "no attention")])
def test_a_model_without_layers_or_attention_says_so(granularity: str, missing: str) -> None:
    with pytest.raises(ConstraintError, match=f"'recomputation {granularity}'.*{missing}"):
        again(graph_of("moe"), f"recomputation {granularity}")  # its router has a softmax


@pytest.mark.parametrize("mesh", ["dp=2", "dp=2,tp=2", "pod=2,dp=2,tp=2"])
def test_a_baseline_is_found_by_its_name(mesh: str) -> None:
    axes = Mesh.parse(mesh)
    every: list[Baseline] = [each for base in baselines(axes) for each in (base, *base.recomputing())]
    assert [baseline(each.name, axes) for each in every] == every
    assert len({each.constraints(axes) for each in every}) == len({each.title for each in every}) == len(every)


def test_an_unknown_recomputation_suggests_the_nearest_baseline() -> None:
    with pytest.raises(ConstraintError, match=r"also with /selective or /full.*'fsdp.tp/full'"):
        baseline("fsdp+tp/ful", MESH)
