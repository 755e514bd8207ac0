"""What is offered: tensors that enter or leave, operators without a rule, operators of our own."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

from autoshard.capture import TensorMeta, capture
from autoshard.errors import StrategyWarning
from autoshard.layout import Layout, P, R, S, is_even, parse_layout
from autoshard.mesh import Mesh
from autoshard.ops import Rule, has
from autoshard.strategies import Enumerator, Strategy

from ..models import EXAMPLES, graph_of
from ..oracles import all_layouts
from .subjects import operator
from .test_rule_check import b, c, f, i

aten = torch.ops.aten
GRIDS = [Mesh.parse(text) for text in ("a=2,b=2", "a=2,b=3", "a=3,b=2", "a=4,b=2")]


@torch.library.custom_op("autoshard_tests::scramble", mutates_args=())
def scramble(x: Tensor) -> Tensor:
    return x.flip(0).contiguous()


@scramble.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


scramble.register_autograd(lambda ctx, grad: grad.flip(0))


class Scrambling(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.inner = nn.Sequential(Scramble(), nn.Linear(width, width), Scramble())

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.first(x)).sum()


class Scramble(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return scramble(x)  # this line


def _warnings(graph, mesh: Mesh) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        enumerator = Enumerator(graph, mesh)
        for node in graph.nodes:
            enumerator.strategies(node)
    assert all(w.category is StrategyWarning for w in caught)
    return [str(w.message) for w in caught]


@pytest.mark.parametrize("text", ["a=2", "a=3,b=2", "a=2,b=1"])
def test_an_operator_without_a_rule_runs_replicated_with_one_warning(text: str) -> None:
    graph, mesh = capture(Scrambling(), (torch.randn(6, 4),)), Mesh.parse(text)
    (message,) = _warnings(graph, mesh)
    assert "autoshard_tests.scramble" in message
    assert "inner.0/scramble" in message
    assert f"{__file__}:" in message and "# this line" in message
    node = next(node for node in graph.nodes if node.name == "inner.0/scramble")
    with pytest.warns(StrategyWarning):
        strategies = Enumerator(graph, mesh).strategies(node)
    whole = Layout((R,) * mesh.ndim)
    assert strategies == (Strategy((whole,), (whole,)),)


def test_one_rank_warns_of_nothing() -> None:
    """On one rank everything is replicated anyway."""
    assert not _warnings(graph_of("llama"), Mesh.parse("a=1"))
    assert not _warnings(graph_of("gpt2"), Mesh.parse("a=1,b=1"))


@pytest.mark.parametrize("name", ["mlp", "llama", "llama bf16", "llama odd", "gpt2", "moe", "assorted"])
def test_the_test_models_have_a_rule_for_every_operator(name: str) -> None:
    assert not _warnings(graph_of(name), Mesh.parse("a=2"))


@pytest.mark.parametrize("name", ["llama", "llama odd", "gpt2", "conv"])
def test_no_tensor_that_enters_or_leaves_is_cut_unevenly_by_two_axes_or_partial(name: str) -> None:
    """torch loses rows of such a dim when it gathers the DTensor (pytorch#194457)."""
    graph = graph_of(name)
    for mesh in GRIDS:
        enumerator = Enumerator(graph, mesh)
        outputs = [enumerator.held(graph.meta(ref)) for ref in graph.outputs if ref]
        ends = [(graph.meta(ref), held) for ref, held in zip((r for r in graph.outputs if r), outputs)]
        ends += [(node.outputs[0], enumerator.strategies(node)) for node in graph.nodes if node.kind != "operator"]
        for meta, strategies in ends:
            for strategy in strategies:
                layout = strategy.outputs[0]
                assert layout is not None and meta is not None and not layout.has_partial
                twice = any(len(layout.axes_of(dim)) > 1 for dim in range(len(meta.shape)))
                assert not twice or is_even(meta.shape, layout, mesh)


def test_a_five_by_three_tensor_on_two_by_two_ranks_is_held_in_every_layout_but_the_unsafe_ones() -> None:
    mesh = Mesh.parse("a=2,b=2")
    held = {s.outputs[0] for s in Enumerator(graph_of("mlp"), mesh).held(TensorMeta((5, 3), torch.float32))}
    unsafe = {parse_layout(text, mesh) for text in ("a:S(0) b:S(0)", "a:S(1) b:S(1)")}
    assert held == set(all_layouts([R, S(0), S(1)], mesh)) - unsafe


def test_complex_tensors_are_held_in_even_cuts_only() -> None:
    mesh = Mesh.parse("a=3")
    held = {s.outputs[0] for s in Enumerator(graph_of("mlp"), mesh).held(TensorMeta((8, 9), torch.complex64))}
    assert held == {parse_layout(text, mesh) for text in ("a:R", "a:S(1)")}


@pytest.mark.parametrize("dtype", [torch.int16, torch.uint16])
def test_numbers_that_no_collective_takes_are_whole(dtype: torch.dtype) -> None:
    graph = operator(aten._to_copy.default, f(8, 6), dtype=dtype)
    enumerator = Enumerator(graph, Mesh.parse("a=2"))
    assert {s.outputs[0] for s in enumerator.strategies(graph.nodes[-1])} == {Layout((R,))}
    assert {s.outputs[0] for s in enumerator.held(TensorMeta((8, 6), dtype))} == {Layout((R,))}


def test_buffers_are_whole_and_an_axis_of_one_rank_cuts_nothing() -> None:
    graph = graph_of("llama")
    enumerator = Enumerator(graph, Mesh.parse("a=2,b=1"))
    for node in graph.nodes:
        layouts = {s.outputs[0] for s in enumerator.strategies(node)}
        assert all(layout is None or layout[1] == R for layout in layouts)
        if node.kind == "buffer":
            assert layouts == {Layout((R, R))}


@pytest.mark.parametrize("name", EXAMPLES)
def test_partial_results_are_what_a_collective_can_combine(name: str) -> None:
    """No sum of booleans, which 256 ranks make zero; no largest float, of which a collective may lose a NaN, but by
    which a softmax is shifted: there the sum has it.
    """
    graph = graph_of(name)
    enumerator = Enumerator(graph, Mesh.parse("a=2"))
    for _, node in graph.of_kind("operator"):
        for strategy in enumerator.strategies(node):
            for meta, layout in zip(node.outputs, strategy.outputs):
                if meta and layout and layout[0].kind == "P":
                    is_sum = layout[0].reduce == "sum"
                    may_be_float = is_sum or has(node, "shift")
                    can_be = may_be_float or not meta.dtype.is_floating_point
                    assert meta.dtype is not torch.bool if is_sum else can_be, node.name


@pytest.mark.parametrize(
    ("op", "meta", "expected"),
    [
        (aten.any.default, b(8, 6), {("S(0)", "P(max)"), ("S(1)", "P(max)")}),
        (aten.all.default, b(8, 6), {("S(0)", "P(min)"), ("S(1)", "P(min)")}),
        (aten.amax.default, i(8, 6), {("S(0)", "P(max)"), ("S(1)", "P(max)")}),
        (aten.amax.default, f(8, 6), set()),
        (aten.sum.default, b(8, 6), {("S(0)", "P(sum)"), ("S(1)", "P(sum)")}),
    ],
)
@pytest.mark.filterwarnings("ignore::autoshard.errors.StrategyWarning")
def test_truths_and_whole_numbers_are_combined_by_what_they_are(op, meta: TensorMeta, expected) -> None:
    graph = operator(op, meta)
    offered = Enumerator(graph, Mesh.parse("a=2")).strategies(graph.nodes[-1])
    found = {(str(s.inputs[0][0]), str(s.outputs[0][0])) for s in offered if s.outputs[0]}
    assert found - {("R", "R"), ("P(sum)", "P(sum)")} == expected


def test_numbers_that_are_not_finite_and_complex_numbers_have_the_rules_of_others() -> None:
    def strategies(op, *args) -> tuple[Strategy, ...]:
        graph = operator(op, *args)
        return Enumerator(graph, Mesh.parse("a=2,b=2")).strategies(graph.nodes[-1])

    for value in (float("-inf"), float("inf"), float("nan")):
        with_zero = set(strategies(aten.masked_fill.Scalar, f(8, 6), b(8, 6), 0.0))
        assert set(strategies(aten.masked_fill.Scalar, f(8, 6), b(8, 6), value)) == with_zero
    for op in (aten.mul.Tensor, aten.add.Tensor, aten.mm.default):
        assert set(strategies(op, c(8, 8), c(8, 8))) == set(strategies(op, f(8, 8), f(8, 8)))
    assert len(strategies(aten.new_empty_strided.default, f(8, 6), [8, 6], [6, 1])) > 4


@pytest.mark.parametrize(
    ("op", "args", "why"),
    [
        (aten.poisson.default, (f(8, 6),), "it draws random numbers"),
        (torch.ops.autoshard_tests.scramble.default, (f(8, 6),), "neither torch nor autoshard has a rule that cuts it"),
        (aten.cholesky_inverse.default, (f(8, 8),), "neither torch nor autoshard has a rule that cuts it"),
    ],
)
def test_the_warning_says_why_an_operator_is_not_cut(op, args: tuple[object, ...], why: str) -> None:
    (message,) = _warnings(operator(op, *args), Mesh.parse("a=3"))
    assert str(op) in message and why in message and "op runs replicated on every rank" in message


def test_the_warning_says_that_no_rule_passed_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scrambling looks at all rows."""
    wrong = [Rule((S(0),), (S(0),)), Rule((R,), (P("sum"),))]
    monkeypatch.setattr("autoshard.strategies.enumerate.dtensor_rules", lambda *_: wrong)
    (message,) = _warnings(operator(torch.ops.autoshard_tests.scramble.default, f(8, 6)), Mesh.parse("a=2"))
    assert "none of its 2 sharding rules gives its numbers when it is checked" in message


@pytest.mark.parametrize("op", [aten.unsqueeze.default, aten.triu.default, aten.zeros_like.default])
def test_nothing_is_said_of_dims_that_leave_a_rank_nothing(op) -> None:
    """Blocks of 6 rows over 4 ranks are 2, 2, 2 and none; what is left are addends, which no booleans are."""
    args = (0,) if op is aten.unsqueeze.default else ()
    assert not _warnings(operator(op, b(6, 6), *args), Mesh.parse("a=4"))


@pytest.mark.parametrize("shape", [(), (1,), (0,), (0, 6), (1, 1), (2, 1, 3)])
@pytest.mark.parametrize("op", [aten.neg.default, aten.sum.default, aten.squeeze.default, aten.any.default])
def test_scalars_and_dims_of_no_or_one_index_are_enumerated(op, shape: tuple[int, ...]) -> None:
    for mesh in ("a=2", "a=2,b=3"):
        graph = operator(op, f(*shape))
        for strategy in Enumerator(graph, Mesh.parse(mesh)).strategies(graph.nodes[-1]):
            cut = [p.dim for layout in strategy.inputs for p in layout if p.kind == "S"]
            assert all(shape[dim] != 1 for dim in cut)


@pytest.mark.parametrize("op", [aten.arange.default, aten.full.default])
def test_a_factory_can_make_any_block(op) -> None:
    args = (7,) if op is aten.arange.default else ((7,), 0.5)
    graph = operator(op, *args, device=torch.device("cpu"))
    strategies = Enumerator(graph, Mesh.parse("a=3")).strategies(graph.nodes[-1])
    assert {str(s.outputs[0][0]) for s in strategies if s.outputs[0]} == {"R", "S(0)"}


def test_attention_is_cut_over_heads_only_where_ranks_can_share_those_of_keys_and_values() -> None:
    attention = torch.ops.autoshard.attention.default
    for heads, kv_heads, is_cut in [(4, 4, True), (4, 2, True), (12, 4, True), (4, 1, False), (6, 3, False)]:
        expected = {"R", "S(0)", "S(2)", *["S(1)"] * is_cut}
        q, kv = f(2, heads, 5, 3), f(2, kv_heads, 5, 3)
        graph = operator(attention, q, kv, kv, None, True, None)
        strategies = Enumerator(graph, Mesh.parse("a=2")).strategies(graph.nodes[-1])
        assert {str(s.outputs[0][0]) for s in strategies if s.outputs[0]} == expected


@pytest.mark.parametrize(
    ("bias", "wanted"),
    [
        ((2, 4, 5, 5), ["R", "S(0)", "S(1)", "S(2)"]),
        ((1, 4, 5, 5), ["R", "R", "S(1)", "S(2)"]),
        ((2, 1, 5, 5), ["R", "S(0)", "R", "S(2)"]),
        ((2, 1, 1, 5), ["R", "S(0)", "R", "R"]),
        ((5, 5), ["R", "R", "R", "S(0)"]),
    ],
)
def test_an_attention_bias_is_cut_where_it_does_not_broadcast(bias: tuple[int, ...], wanted: list[str]) -> None:
    q = f(2, 4, 5, 3)
    graph = operator(torch.ops.autoshard.attention.default, q, q, q, f(*bias), False, None)
    strategies = Enumerator(graph, Mesh.parse("a=2")).strategies(graph.nodes[-1])
    assert [str(s.inputs[3][0]) for s in strategies] == wanted


def test_a_block_of_queries_takes_all_keys_and_gives_addends_of_their_gradients() -> None:
    q, kv, lse = f(2, 4, 5, 3), f(2, 4, 7, 3), f(2, 4, 5)
    forward, backward = torch.ops.autoshard.attention.default, torch.ops.autoshard.attention_backward.default
    for causal in (False, True):
        found = []
        for op, args in ((forward, (q, kv, kv)), (backward, (q, q, kv, kv, q, lse))):
            graph = operator(op, *args, None, causal, None)
            strategies = Enumerator(graph, Mesh.parse("a=2")).strategies(graph.nodes[-1])
            (cut,) = (s for s in strategies if s.outputs[0] == Layout((S(2),)))
            found.append([str(layout[0]) for layout in (*cut.inputs, *cut.outputs) if layout])
        assert found[0] == ["S(2)", "R", "R", "S(2)", "S(2)"]
        assert found[1] == ["S(2)", "S(2)", "R", "R", "S(2)", "S(2)", "S(2)", "P(sum)", "P(sum)"]


def test_equal_operators_are_enumerated_once() -> None:
    graph = graph_of("llama")
    enumerator = Enumerator(graph, Mesh.parse("a=2"))
    named = {node.name: node for node in graph.nodes}
    w1, w3 = named["layers.0.feed_forward.w1/mm"], named["layers.0.feed_forward.w3/mm"]
    assert enumerator.strategies(w1) is enumerator.strategies(w3)
