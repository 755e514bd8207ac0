"""The constraints ``recompute``, ``checkpoint`` and ``keep`` held against a graph."""

from __future__ import annotations

import pytest

from autoshard.capture import recomputed
from autoshard.constraints import Recompute, parse_constraint
from autoshard.constraints.computed_again import again_under
from autoshard.errors import ConstraintError
from autoshard.mesh import Mesh

from ..models import graph_of

MESH = Mesh.parse("dp=2,tp=2")


def again(*texts: str, model: str = "llama") -> frozenset[str]:
    return again_under([parse_constraint(text, MESH) for text in texts], graph_of(model))


def forward(model: str = "llama") -> set[str]:
    return {node.name for _, node in graph_of(model).of_kind("operator") if node.phase == "forward"}


def test_their_texts() -> None:
    assert parse_constraint("recompute */silu", MESH) == Recompute("*/silu", "recompute", "recompute */silu")
    assert parse_constraint("keep */silu", MESH) == Recompute("*/silu", "keep", "keep */silu")
    with pytest.raises(ConstraintError, match="'checkpoint MODULE'"):
        parse_constraint("checkpoint a b", MESH)


def test_operators_by_their_names() -> None:
    assert again("recompute */silu") == {"layers.0.feed_forward/silu"}
    assert again("recompute *") == forward()
    assert again() == frozenset()


def test_with_an_operator_go_the_views_of_what_it_makes() -> None:
    """The backward of a product reads a view of gelu, which would keep gelu's memory."""
    names = again("recompute */gelu", model="gpt2")
    assert names == {"h.0.mlp/gelu", "h.0.mlp.c_proj/view"}
    assert recomputed(graph_of("gpt2"), names).again == tuple(sorted(names, reverse=True))


def test_what_the_backward_does_not_read_is_refused() -> None:
    with pytest.raises(ConstraintError, match=r"'recompute \*w2/mm' would change nothing"):
        again("recompute *w2/mm")


def test_keep_comes_last_wherever_it_stands() -> None:
    assert again("keep */silu", "recompute *") == forward() - {"layers.0.feed_forward/silu"}


def test_a_checkpointed_module_keeps_what_goes_in_and_what_comes_out() -> None:
    names = again("checkpoint layers.*")
    inside = {name for name in forward() if name.startswith("layers.0")}
    graph = graph_of("llama")
    result = next(
        graph.nodes[ref.node].name
        for node in graph.nodes
        if node.name.startswith("norm/") and node.phase == "forward"
        for ref in node.inputs
        if graph.nodes[ref.node].name.startswith("layers.0")
    )
    assert names == inside - {result}
    parts = again("checkpoint layers.*.attention", "checkpoint layers.*.feed_forward")
    assert parts < names and not any(name.startswith("layers.0/") for name in parts)


@pytest.mark.parametrize(
    ("text", "nearest"),
    [
        ("recompute layers.0.feed_forward/silo", "layers.0.feed_forward/silu"),
        ("checkpoint layer.0", "layers.0"),
        ("keep nothing", ""),
    ],
)
def test_one_that_names_nothing_suggests_the_nearest(text: str, nearest: str) -> None:
    with pytest.raises(ConstraintError, match=f"'{text.replace('*', '.')}' names no .*nearest name is .*{nearest}"):
        again(text)
