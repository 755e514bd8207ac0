"""The small form in which an operator is checked means what the operator means, whatever integers it carries."""

from __future__ import annotations

import pytest
import torch

from autoshard.capture import CapturedGraph, Node
from autoshard.layout import Layout, Placement, R
from autoshard.mesh import Mesh
from autoshard.ops import carries_lengths, small
from autoshard.strategies import Enumerator, Strategy, rule_check

from ..oracles import run_node, strategy_error, wide
from .subjects import operator
from .test_rule_check import c, f, i

aten = torch.ops.aten
BATCH, WIDE = 16, 8192

# An operator too large to be tried as it is, and every pair of cuts of its first tensor and first result that is right.
LARGE = {
    "causal mask": (lambda: operator(aten.tril.default, f(BATCH, WIDE, WIDE)), "0>0 1>1 2>2 P>P"),
    "sliding window": (lambda: operator(aten.tril.default, f(BATCH, WIDE, WIDE), -1024), "0>0 1>1 2>2 P>P"),
    "window from above": (lambda: operator(aten.triu.default, f(BATCH, WIDE, WIDE), 4000), "0>0 1>1 2>2 P>P"),
    "diagonal": (lambda: operator(aten.diagonal.default, f(BATCH, WIDE, WIDE), 0, 1, 2), "0>0 P>P"),
    "diagonal far off": (lambda: operator(aten.diagonal.default, f(BATCH, WIDE, WIDE), 4096, 1, 2), "0>0 P>P"),
    "rolled": (lambda: operator(aten.roll.default, f(BATCH, WIDE), [1024], [1]), "0>0 P>P"),
    "rolled over all dims": (lambda: operator(aten.roll.default, f(BATCH, WIDE), [1024]), "P>P"),
    "reversed": (lambda: operator(aten.flip.default, f(BATCH, WIDE), [1]), "0>0 P>P"),
    "padded": (lambda: operator(aten.constant_pad_nd.default, f(BATCH, WIDE), [512, 512]), "0>0 P>P"),
    "tiled": (lambda: operator(aten.repeat.default, f(BATCH, WIDE), [1, 3]), "0>0 P>P"),
    "one of many": (lambda: operator(aten.select.int, f(BATCH, WIDE), 1, 5000), "0>0 P>P"),
    "one among zeros": (lambda: operator(aten.select_backward.default, f(BATCH), [BATCH, WIDE], 1, 5000), "0>0 P>P"),
    "range": (lambda: operator(aten.slice.Tensor, f(BATCH, WIDE), 1, 1000, 5096), "0>0 P>P"),
    "largest few": (lambda: operator(aten.topk.default, f(BATCH, WIDE), 512), "0>0"),
    "large one": (lambda: operator(aten.kthvalue.default, f(BATCH, WIDE), 512), "0>0"),
    "expanded": (lambda: operator(aten.expand.default, f(BATCH, WIDE), [64, BATCH, WIDE]), "0>1 1>2 R>0 P>P"),
    "normalised": (
        lambda: operator(aten.native_layer_norm.default, f(BATCH, WIDE), [WIDE], f(WIDE), f(WIDE), 1e-5),
        "0>0",
    ),
    "looked up": (lambda: operator(aten.embedding.default, f(50000, 512), i(BATCH, WIDE)), "0>P R>0 R>1 1>2"),
    "zeros like it": (lambda: operator(aten.new_zeros.default, f(BATCH, WIDE), [BATCH, WIDE]), "0>0 0>R 1>1 1>R P>R"),
    "complex": (lambda: operator(aten.mul.Tensor, c(BATCH, WIDE), c(BATCH, WIDE)), "0>0 1>1 P>P R>P"),
    "upsampled image": (
        lambda: operator(aten.upsample_nearest2d.default, f(BATCH, 8, 64, 64), [128, 128], None, None),
        "0>0 1>1 P>P",
    ),
    "grouped norm": (
        lambda: operator(aten.native_group_norm.default, f(BATCH, 64, 32, 32), f(64), f(64), BATCH, 64, 1024, 8, 1e-5),
        "0>0 1>1",
    ),
    "gradient of a grouped norm": (
        lambda: operator(
            aten.native_group_norm_backward.default,
            *(f(BATCH, 64, 32, 32), f(BATCH, 64, 32, 32), f(BATCH, 8), f(BATCH, 8), f(64)),
            *(BATCH, 64, 1024, 8, [True, True, True]),
        ),
        "0>0 1>1",
    ),
    "rows one by one": (lambda: operator(aten.unbind.int, f(3, BATCH, WIDE)), "1>0 2>1 P>P"),
    "columns apart": (
        lambda: operator(aten.split_with_sizes.default, f(BATCH, WIDE), [4096, 1024, 3072], 1),
        "0>0 P>P",
    ),
    "split rows": (lambda: operator(aten.view.default, f(BATCH, WIDE, 768), (BATCH, WIDE, 12, 64)), "0>0 1>1 2>2 P>P"),
    "joined rows": (lambda: operator(aten.view.default, f(BATCH, WIDE, 64), (BATCH * WIDE, 64)), "0>0 2>1 P>P"),
}

# Sizes between what is tried as it is and what an oracle can afford.
MEDIUM = {
    "band": lambda n: operator(aten.tril.default, f(4, n, n), -n // 3),
    "band above": lambda n: operator(aten.triu.default, f(4, n, n), n // 3),
    "triangle": lambda n: operator(aten.triu.default, f(4, n, n), 1),
    "band of a wide matrix": lambda n: operator(aten.tril.default, f(n, 2 * n), n + 3),
    "rolled": lambda n: operator(aten.roll.default, f(n, 2 * n), [n // 2], [0]),
    "rolled by itself": lambda n: operator(aten.roll.default, f(n, 2 * n), [n, n], [0, 1]),
    "padded": lambda n: operator(aten.constant_pad_nd.default, f(n, 2 * n), [n // 2, n // 2]),
    "tiled": lambda n: operator(aten.repeat.default, f(n, 2 * n), [4, 3]),
    "one of many": lambda n: operator(aten.select.int, f(n, 2 * n), 1, n),
    "range": lambda n: operator(aten.slice.Tensor, f(n, 2 * n), 1, n // 2, n),
    "largest few": lambda n: operator(aten.topk.default, f(n, 2 * n), n // 2),
    "diagonal": lambda n: operator(aten.diagonal.default, f(4, n, n), n // 2, 1, 2),
    "windows": lambda n: operator(aten.unfold.default, f(n, 2 * n), 1, n // 2, n // 4),
    "seen anew": lambda n: operator(aten.as_strided.default, f(2 * n, n), [n, n], [n, 1], 0),
}


def _cuts(strategies: tuple[Strategy, ...]) -> set[str]:
    def text(placement: Placement) -> str:
        return str(placement.dim) if placement.kind == "S" else placement.kind

    offered = {f"{text(s.inputs[0][0])}>{text(s.outputs[0][0])}" for s in strategies if s.outputs[0]}
    return offered - {"R>R"}


@pytest.mark.filterwarnings("ignore::autoshard.errors.StrategyWarning")
@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.parametrize("name", LARGE)
def test_large_operators_are_offered_the_cuts_that_are_right_and_no_others(name: str, parts: int) -> None:
    graph, expected = LARGE[name][0](), LARGE[name][1]
    metas = [meta for node in graph.nodes for meta in node.outputs if meta]
    assert sum(torch.Size(meta.shape).numel() for meta in metas) > rule_check.LARGEST_REAL or "among" in name
    assert _cuts(Enumerator(graph, Mesh(("a",), (parts,))).strategies(graph.nodes[-1])) == set(expected.split())


@pytest.mark.filterwarnings("ignore::autoshard.errors.StrategyWarning")
@pytest.mark.parametrize(
    ("length", "mesh"),
    [(240, "a=2"), pytest.param(240, "a=2,b=3", marks=pytest.mark.thorough), (250, "a=4"), (250, "a=2,b=2")],
)
@pytest.mark.parametrize("name", MEDIUM)
def test_what_is_offered_on_the_word_of_a_small_form_is_right_at_real_size(name: str, length: int, mesh: str) -> None:
    graph, ranks = MEDIUM[name](length), Mesh.parse(mesh)
    node = graph.nodes[-1]
    is_kept = name == "windows"  # whose dim is as long in the small form
    assert carries_lengths(node) or is_kept or "range" in name or name == "triangle"
    for strategy, error in _errors(graph, ranks):
        assert not error, strategy


def _errors(graph: CapturedGraph, mesh: Mesh) -> list[tuple[Strategy, str]]:
    """What the oracle says of every strategy of the last operator, on numbers that are all different."""
    node = graph.nodes[-1]
    metas = [graph.meta(ref) for ref in node.inputs]
    values = [torch.arange(torch.Size(m.shape).numel(), dtype=torch.float64).reshape(m.shape).cos() for m in metas]
    supply = iter(values)
    expected = list(run_node(wide(node), lambda _: next(supply)))
    strategies = Enumerator(graph, mesh).strategies(node)
    return [(s, strategy_error(wide(node), values, expected, s, mesh)) for s in strategies]


def test_the_gradient_of_a_convolution_without_a_bias_is_cut_over_its_batch() -> None:
    unused = ([0], [2, 2], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False])
    tensors = (f(4, 6, 9, 9), f(4, 3, 18, 18), f(6, 3, 3, 3))
    graph = operator(aten.convolution_backward.default, *tensors, *unused)
    assert "0>0" in _cuts(Enumerator(graph, Mesh.parse("a=2")).strategies(graph.nodes[-1]))


def test_a_mask_whose_local_form_forgets_where_its_block_starts_is_cut_over_its_batch_only(monkeypatch) -> None:
    """The check itself, not the local form: a small diagonal is as far from the corner as the real one."""
    monkeypatch.setattr("autoshard.ops.elements.local_range", lambda *_: (0, 0))
    graph = LARGE["sliding window"][0]()
    assert _cuts(Enumerator(graph, Mesh.parse("a=2")).strategies(graph.nodes[-1])) == {"0>0", "P>P"}


def test_lengths_and_integers_become_small_together_and_in_order() -> None:
    def small_of(graph: CapturedGraph, parts: int, ranks: int) -> tuple[Node, list[tuple[int, ...]]]:
        node = graph.nodes[-1]
        form = small(node, tuple(graph.meta(ref) for ref in node.inputs), parts, ranks)
        assert form is not None
        return form[0], [meta.shape for meta in form[1]]

    node, shapes = small_of(operator(aten.tril.default, f(BATCH, WIDE, WIDE), -1024), 4, 2)
    assert shapes == [(4, 6, 6)] and node.args[1] == -5
    node, shapes = small_of(operator(aten.roll.default, f(9, 10), [8, 9], [0, 1]), 3, 3)
    assert shapes == [(6, 7)] and node.args[1:] == ((3, 6), (0, 1))  # 9 over 3 stays even, 10 uneven
    node, shapes = small_of(operator(aten.topk.default, f(1, 2, 100), 2, -1), 2, 2)
    assert shapes == [(1, 2, 4)] and node.args[1:] == (2, -1)
    node, shapes = small_of(operator(aten.view.default, f(6, 8192), (6, 32, 256)), 2, 2)
    assert shapes == [(4, 48)] and node.args[1] == (4, 6, 8)


@pytest.mark.parametrize("name", ["largest few", "looked up", "complex"])
def test_an_operator_too_large_to_be_tried_and_without_a_small_form_is_not_cut_and_the_warning_says_so(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rule_check, "small", lambda *_: None)
    graph = LARGE[name][0]()
    with pytest.warns(match="cannot be checked"):
        strategies = Enumerator(graph, Mesh.parse("a=2")).strategies(graph.nodes[-1])
    assert all(layout == Layout((R,)) for s in strategies for layout in (*s.inputs, *s.outputs))
