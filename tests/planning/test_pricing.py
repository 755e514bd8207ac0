"""Prices: compute on the largest shard, redistributions along the cheapest path."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from autoshard.capture import TensorMeta, capture
from autoshard.layout import Layout, R, S, block, parse_layout, replicated
from autoshard.mesh import HybridMesh, Mesh
from autoshard.ops import is_free, is_part, known
from autoshard.planning import Prices
from autoshard.planning.pricing import ALONE, Together
from autoshard.redistribution import size_bytes, steps_along
from autoshard.strategies import Enumerator, Strategy
from cost_models import OP_KINDS, load_profile

from ..models import graph_of
from ..strategies.subjects import operator
from ..strategies.test_rule_check import f

aten = torch.ops.aten
PROFILE = load_profile("dgx-h100")
MESH = Mesh.parse("dp=2,tp=4")


def _seconds(graph, strategy: Strategy, mesh: Mesh = MESH) -> float:
    return float(Prices(graph, mesh, PROFILE).compute_s(graph.nodes[-1], (strategy,))[0])


def _strategy(*texts: str) -> Strategy:
    *inputs, output = (parse_layout(text, MESH) for text in texts)
    return Strategy(tuple(inputs), (output,))


@pytest.mark.parametrize(
    ("strategy", "shapes"),
    [
        (_strategy("dp:R tp:R", "dp:R tp:R", "dp:R tp:R"), (64, 32, 48)),
        (_strategy("dp:S(0) tp:R", "dp:R tp:S(1)", "dp:S(0) tp:S(1)"), (32, 32, 12)),
        (_strategy("dp:S(0) tp:S(1)", "dp:R tp:S(0)", "dp:S(0) tp:P(sum)"), (32, 8, 48)),
    ],
)
def test_a_product_costs_two_m_n_k_of_the_largest_shard_and_the_bytes_it_touches(strategy, shapes) -> None:
    m, k, n = shapes
    bytes_moved = 4 * (m * k + k * n + m * n)
    expected = PROFILE.op_s("float32", 2.0 * m * n * k, bytes_moved, "matmul")
    assert _seconds(operator(aten.mm.default, f(64, 32), f(32, 48)), strategy) == expected


def test_attention_counts_two_products_forward_five_backward_and_half_where_causal() -> None:
    q = f(2, 4, 16, 8)
    lse = f(2, 4, 16)
    forward, backward = torch.ops.autoshard.attention.default, torch.ops.autoshard.attention_backward.default
    product_flops = 2 * 2 * 4 * 16 * 16 * 8
    for op, args, products, count in [(forward, (q, q, q), 2, 4), (backward, (q, q, q, q, q, lse), 5, 8)]:
        for causal in (False, True):
            graph = operator(op, *args, None, causal, None)
            outputs = tuple(m and replicated(MESH) for m in graph.nodes[-1].outputs)
            seconds = _seconds(graph, Strategy((replicated(MESH),) * len(args), outputs))
            tensors = count * 2 * 4 * 16 * 8 * 4 + 2 * 4 * 16 * 4
            flops = products * product_flops * (0.5 if causal else 1.0)
            assert seconds == pytest.approx(PROFILE.op_s("float32", flops, tensors, "attention"))


@pytest.mark.parametrize(("length", "ranks"), [(16, 2), (16, 4), (17, 4), (13, 5)])
def test_a_block_of_causal_queries_costs_what_it_does_on_the_rank_that_sees_the_most(length: int, ranks: int) -> None:
    """Of a triangle of T by T the widest block between two lines, uneven ones included."""
    q = f(2, 4, length, 8)
    mesh = Mesh.parse(f"cp={ranks}")
    graph = operator(torch.ops.autoshard.attention.default, q, q, q, None, True, None)
    cut, whole = Layout((S(2),)), Layout((R,))
    strategy = Strategy((cut, whole, whole), (cut, cut))
    blocks = [block(length, ranks, rank) for rank in range(ranks)]
    pairs = max((hi**2 - lo**2) / 2 for lo, hi in blocks)
    held = 2 * 4 * 4 * (2 * blocks[0][1] * 8 + 2 * length * 8 + blocks[0][1])
    expected = PROFILE.op_s("float32", 2 * 2 * 2 * 4 * 8 * pairs, held, "attention")
    assert _seconds(graph, strategy, mesh) == pytest.approx(expected)


def test_a_gather_reads_the_rows_it_returns_not_the_table() -> None:
    whole = replicated(MESH)
    ids = operator(aten.arange.default, 3, device=torch.device("cpu")).nodes[0].outputs[0]
    small = _seconds(operator(aten.embedding.default, f(100, 8), ids), Strategy((whole, whole), (whole,)))
    large = _seconds(operator(aten.embedding.default, f(100_000, 8), ids), Strategy((whole, whole), (whole,)))
    assert small == large > 0


@pytest.mark.parametrize(
    ("op", "kind"),
    [
        (aten._softmax.default, "softmax"),
        (torch.ops.autoshard.log_softmax_backward.default, "softmax"),
        (aten.native_layer_norm.default, "normalization"),
        (aten.native_layer_norm_backward.default, "normalization"),
        (torch.ops.autoshard.batch_norm_in_training.default, "normalization"),
        (aten.sum.dim_IntList, "reduction"),
        (aten.mean.dim, "reduction"),
        (aten.embedding.default, "indexing"),
        (aten.embedding_dense_backward.default, "indexing"),
        (torch.ops.autoshard.gather_backward.default, "indexing"),
        (aten.cat.default, "copy"),
        (aten.clone.default, "copy"),
        (aten._to_copy.default, "copy"),
        (aten.mul.Tensor, "pointwise"),
        (aten.silu_backward.default, "pointwise"),
    ],
)
def test_every_operator_of_the_models_is_priced_as_a_kernel_of_its_kind(op, kind: str) -> None:
    """At a machine where each kind has a share of its own, large enough that the launch hardly counts."""
    shares = {kind: 1 / (3 + i) for i, kind in enumerate(OP_KINDS)} | {"default": 1.0}
    slow = dataclasses.replace(PROFILE.compute, memory_bandwidth_bytes_per_s=1.0, memory_efficiency=shares)
    profile = dataclasses.replace(PROFILE, compute=slow)
    for name in ("llama", "gpt2", "moe", "conv"):
        graph = graph_of(name)
        nodes = [node for _, node in graph.of_kind("operator") if node.op is op]
        for node in nodes[:1]:
            whole = replicated(MESH)
            outputs = tuple(m and whole for m in node.outputs)
            strategy = Strategy((whole,) * len(node.inputs), outputs)
            dear = float(Prices(graph, MESH, profile).compute_s(node, (strategy,))[0])
            equal = dataclasses.replace(profile, compute=dataclasses.replace(slow, memory_efficiency={"default": 1.0}))
            plain = float(Prices(graph, MESH, equal).compute_s(node, (strategy,))[0])
            assert dear / plain == pytest.approx(1 / shares[kind], rel=1e-4)
            return
    pytest.fail(f"no model has {op}")


def test_a_mesh_is_priced_in_its_order_of_ranks() -> None:
    """tp=8,dp=8 on hosts of 8: counted through, dp is inside a host; with tp kept inside, tp is the fast one.

    Even so the slow all-reduce is not ten times dearer: the cheapest path cuts over dp first, and gathers after.
    """
    graph, meta = graph_of("llama"), f(1 << 12, 1 << 12)
    plain, kept = Mesh.parse("tp=8,dp=8"), HybridMesh.fit("tp=8,dp=8", 8, ("tp",)).mesh
    before, after = (parse_layout(text, plain) for text in ("tp:P(sum) dp:R", "tp:R dp:R"))
    seconds = [float(Prices(graph, mesh, PROFILE).matrix_s(meta, (before,), (after,))[0, 0]) for mesh in (plain, kept)]
    assert seconds[0] > 1.5 * seconds[1] > 0


def test_views_are_free_and_kernels_are_not() -> None:
    free = {aten.view.default, aten._unsafe_view.default, aten.t.default, aten.transpose.int, aten.expand.default}
    for name in ("llama", "gpt2", "moe"):
        for _, node in graph_of(name).of_kind("operator"):
            if node.op in free:
                assert is_free(node)
            if node.op in (aten.mm.default, aten.add.Tensor, aten.cat.default, aten._to_copy.default):
                assert not is_free(node)


def test_what_the_host_adds_is_paid_by_every_operator_alike_and_three_times_by_a_step_that_communicates() -> None:
    issue_s = 3e-5
    host = dataclasses.replace(PROFILE, compute=dataclasses.replace(PROFILE.compute, issue_s=issue_s))
    graph = graph_of("llama")
    plain, added = (Prices(graph, MESH, profile) for profile in (PROFILE, host))
    enumerator = Enumerator(graph, MESH)
    for _, node in graph.of_kind("operator"):
        strategies = enumerator.strategies(node)
        more = added.compute_s(node, strategies) - plain.compute_s(node, strategies)
        runs = plain.compute_s(node, strategies) > 0
        assert more == pytest.approx(np.where(runs | is_free(node), issue_s, 0.0)), node.name
    meta = f(64, 48)
    path = tuple(parse_layout(text, MESH) for text in ("dp:P(sum) tp:S(0)", "dp:R tp:S(0)", "dp:R tp:R"))
    steps = zip(added.along_s(meta, path), plain.along_s(meta, path), strict=True)
    assert [more - less for (_, _, more), (_, _, less) in steps] == pytest.approx([3 * issue_s] * 2)


def test_of_a_bucket_each_tensor_pays_its_copies_and_its_part_of_the_meeting() -> None:
    meeting_s, whole = 1.5e-3, 1 << 20
    machine = dataclasses.replace(PROFILE, meeting_s=meeting_s, bucket_copies=True)
    graph = graph_of("llama")
    plain, added = (Prices(graph, MESH, profile) for profile in (PROFILE, machine))
    meta = f(64, 48)
    size = 64 * 48 * 4
    ways = [
        (("dp:R tp:S(0)", "dp:R tp:R"), "all_gather", 2 * (size // 4 + size)),
        (("dp:R tp:P(sum)", "dp:R tp:R"), "all_reduce", 2 * size),
        (("dp:R tp:P(sum)", "dp:R tp:S(0)"), "reduce_scatter", 2 * size),
    ]
    for texts, kind, copied in ways:
        path = tuple(parse_layout(text, MESH) for text in texts)
        for together, part, copies in [
            (ALONE, 1.0, 0.0),
            (Together(frozenset({kind}), size), 1.0, 0.0),  # it is all there is
            (Together(frozenset({kind}), whole), size / whole, machine.copy_s(copied)),
            (
                Together(frozenset({kind}), whole, is_written=True),
                size / whole,
                0.0 if kind == "all_reduce" else machine.copy_s(copied),
            ),
        ]:
            ((step, _, more),) = added.along_s(meta, path, together)
            ((_, _, less),) = plain.along_s(meta, path, together)
            assert step.kind == kind
            assert more - less == pytest.approx(part * meeting_s + copies)


class Added(nn.Module):
    """Two matrices that are one product's: what reads the gradient of it is both."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.other = (nn.Parameter(torch.ones(8, 8)) for _ in range(2))
        self.alone = nn.Parameter(torch.ones(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        """(B, 8) to ()."""
        return F.linear(F.linear(x, self.weight + self.other), self.alone).sum()


def test_a_gradient_is_written_where_it_travels_if_nobody_else_reads_it() -> None:
    graph = capture(Added(), (torch.ones(4, 8),))
    prices = Prices(graph, MESH, PROFILE, bucket_bytes=1 << 20)
    gradients = dict(graph.gradients)
    assert gradients["weight"] == gradients["other"]
    found = {name: prices.together(ref).is_written for name, ref in gradients.items()}
    assert found == {"weight": False, "other": False, "alone": True}
    lean = Prices(graph, MESH, PROFILE, bucket_bytes=1 << 20, gathers_ahead=False)
    assert not lean.together(gradients["alone"]).is_written, "its bucket is made as it sets out"


def test_every_strategy_of_every_operator_has_a_finite_price_and_cutting_never_costs_more_than_the_whole() -> None:
    """But for operators that are several kernels where they are cut, and parts of one that is one kernel where it is
    whole.
    """
    for name in ("llama", "gpt2", "conv"):
        graph = graph_of(name)
        prices, enumerator = Prices(graph, MESH, PROFILE), Enumerator(graph, MESH)
        for _, node in graph.of_kind("operator"):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("warnings.warn", lambda *_, **__: None)
                strategies = enumerator.strategies(node)
            seconds = prices.compute_s(node, strategies)
            assert np.isfinite(seconds).all() and (seconds >= 0).all()
            is_dearer = is_part(node) or known(node.op).passes is not None
            assert seconds.max() == seconds[0] or is_free(node) or is_dearer, node.name
            assert seconds[0] == 0 or not is_part(node), node.name


def test_a_path_costs_what_its_steps_cost_and_each_step_what_the_cost_model_says() -> None:
    graph = graph_of("llama")
    prices = Prices(graph, MESH, PROFILE)
    topology = PROFILE.topology(MESH.axes, MESH.shape)
    meta = f(64, 48)
    layouts = tuple(parse_layout(text, MESH) for text in ("dp:P(sum) tp:P(sum)", "dp:S(0) tp:S(1)", "dp:R tp:R"))
    matrix = prices.matrix_s(meta, layouts, layouts)
    for i, before in enumerate(layouts):
        for j, after in enumerate(layouts):
            if j == 0 and i != 0:
                assert matrix[i, j] == math.inf
                continue
            path = prices.path(meta, before, after)
            steps = prices.along_s(meta, path)
            assert matrix[i, j] == pytest.approx(sum(seconds for _, _, seconds in steps))
            assert [step for step, _, _ in steps] == list(steps_along(path))
            for (step, size, seconds), at in zip(steps, path):
                assert size == size_bytes(step, at, meta.shape, 4, MESH)
                if step.communicates:
                    assert seconds >= topology.collective_s(step.kind, step.axes, size) > 0


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 6), st.integers(0, 3)), min_size=2, max_size=30))
def test_steps_of_a_way_that_was_priced_before_cost_what_they_cost_anew(asked: list[tuple[int, int, int]]) -> None:
    machine = dataclasses.replace(PROFILE, meeting_s=1.5e-3, bucket_copies=True)
    graph = graph_of("llama")
    metas = [TensorMeta(shape, dtype) for shape in ((64, 48), (48, 64)) for dtype in (torch.float32, torch.bfloat16)]
    texts = [
        ("dp:R tp:S(0)", "dp:R tp:R"),
        ("dp:R tp:S(1)", "dp:R tp:R"),
        ("dp:S(0) tp:R", "dp:R tp:R"),
        ("dp:S(0) tp:S(1)", "dp:R tp:S(1)"),
        ("dp:S(0) tp:S(1)", "dp:R tp:S(1)", "dp:R tp:R"),
        ("dp:R tp:P(sum)", "dp:R tp:S(0)"),
        ("dp:R tp:P(sum)", "dp:R tp:R"),
    ]
    paths = [tuple(parse_layout(text, MESH) for text in each) for each in texts]
    reductions = frozenset({"all_reduce", "reduce_scatter"})
    together = [ALONE, *(Together(frozenset({"all_gather"}), 1 << k) for k in (20, 24)), Together(reductions, 1 << 20)]
    prices = Prices(graph, MESH, machine)
    for meta, path, kinds in asked:
        given = metas[meta], paths[path], together[kinds]
        assert prices.along_s(*given) == Prices(graph, MESH, machine).along_s(*given)
