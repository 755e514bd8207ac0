"""Context parallelism whose ranks have a block of every part of the sequence, as the last queries see most keys."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autoshard
from autoshard.capture import capture
from autoshard.errors import ConstraintError
from autoshard.layout import Layout, R, S, block, local_ranges, local_shape
from autoshard.mesh import Mesh
from autoshard.ops import known
from autoshard.planning.comparison import compare
from autoshard.plans import ShardingPlan, dump_plan, parse_plan
from autoshard.review import check

from ..fuzz.judge import capturing_once
from ..fuzz.ranks import run_ranks
from ..lowering.as_before import check_as_before
from ..thorough import some_thorough

LONG = 512


class Words(nn.Module):
    """A layer of causal attention whose keys have half of the heads; targets are shifted by the model, or given."""

    def __init__(self, shifts: bool, causal: bool = True) -> None:
        super().__init__()
        self.embed, self.head, self.norm = nn.Embedding(16, 8), nn.Linear(8, 16), nn.LayerNorm(8)
        self.q, self.k, self.v, self.o = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 4), nn.Linear(8, 8)
        self.register_buffer("turns", torch.arange(LONG)[:, None] / 10.0)
        self.shifts, self.causal = shifts, causal

    def forward(self, words: Tensor, targets: Tensor) -> Tensor:
        logits = self.see(words)
        if self.shifts:
            targets = F.pad(words, (0, 1), value=-100)[:, 1:]
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def see(self, words: Tensor) -> Tensor:
        h = self.embed(words)
        h = h + torch.cos(self.turns[: words.shape[1]])
        x = self.norm(h)
        q, k, v = (each(x).unflatten(-1, (-1, 2)).transpose(1, 2) for each in (self.q, self.k, self.v))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=True)
        return self.head(h + self.o(seen.transpose(1, 2).flatten(2)))  # type: ignore[no-any-return]


def _example(rows: int, length: int, **options: bool) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    words = torch.randint(16, (rows, length))
    return Words(**{"shifts": False, **options}).double(), (words, words.roll(-1, 1))


def _plan(model: nn.Module, args: tuple[Tensor, ...], mesh: str, *constraints: str) -> ShardingPlan:
    return autoshard.plan(model, args, mesh=mesh, hardware="cpu-gloo", constraints=list(constraints))


def _queries(plan: ShardingPlan) -> Layout:
    return next(entry.inputs[0] for entry in plan.operators if entry.name == "/attention")


@pytest.mark.filterwarnings("ignore::autoshard.errors.StrategyWarning")
@pytest.mark.parametrize(
    ("mesh", "baseline", "rows", "shifts"),
    [
        ("a=2", "cp", 2, False),
        pytest.param("a=2,b=2", "fsdp+cp", 4, True, marks=pytest.mark.thorough),
        pytest.param("a=2", "cp", 1, False, marks=pytest.mark.thorough),
        pytest.param("a=4", "cp", 1, True, marks=pytest.mark.thorough),
        pytest.param("a=2,b=2", "fsdp+cp", 2, True, marks=pytest.mark.thorough),
        pytest.param("a=2,b=2", "ddp+cp", 2, False, marks=pytest.mark.thorough),
        pytest.param("a=2,b=2", "ddp+cp", 6, False, marks=pytest.mark.thorough),
    ],
)
def test_long_sequences_are_cut_in_parts_and_computed_as_by_one_process(
    mesh: str, baseline: str, rows: int, shifts: bool
) -> None:
    model, args = _example(rows, LONG, shifts=shifts)
    plan = _plan(model, args, mesh, f"baseline {baseline}")
    assert _queries(plan)[-1] == S(2, (1,) * 4)
    assert all(entry.layout[-1] == S(1, (1,) * 4) for entry in plan.inputs if shifts is False)
    assert parse_plan(dump_plan(plan)) == plan and check(plan, model, args).fits
    check_as_before(model, args, plan, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(
    ("mesh", "rows", "length", "causal"),
    some_thorough([("a=2", 3, LONG, False), ("a=4", 2, 24, True), ("a=2,b=2", 4, 16, True)], [("a=2", 3, LONG, False)]),
)
def test_of_several_rows_a_rank_has_a_block_of_each(mesh: str, rows: int, length: int, causal: bool) -> None:
    """Rows and places are one dim for a product, of which a rank has a block of as many parts as it has rows."""
    axes = Mesh.parse(mesh)
    model, args = _example(rows, length, causal=causal)
    plan = _plan(model, args, mesh, "baseline cp" if axes.ndim == 1 else "baseline fsdp+cp")
    each = rows // axes.shape[0] if axes.ndim > 1 else rows
    product = next(entry for entry in plan.operators if entry.name == "q/addmm")
    assert plan.inputs[0].layout[-1] == S(1) and _queries(plan)[-1] == S(2)
    assert product.outputs[0] is not None and product.outputs[0][-1] == S(0, (1,) * each)
    check_as_before(model, args, plan, rtol=1e-8, atol=1e-10)
    assert check(plan, model, args).fits


@pytest.mark.parametrize(
    ("mesh", "rows", "baseline", "said"),
    [("a=3,b=2", 5, "ddp+cp", "of 5 rows some would have 2"), ("a=2", 65, "cp", "64 at most; of 65 rows")],
)
def test_rows_that_ranks_have_not_as_many_of_or_too_many_are_refused(
    mesh: str, rows: int, baseline: str, said: str
) -> None:
    model, args = _example(rows, 4)
    with pytest.raises(ConstraintError, match=said):
        _plan(model, args, mesh, f"baseline {baseline}")


class Read(Words):
    """Gives the scores of words beside the loss."""

    def forward(self, words: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        logits = self.see(words)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten()), logits


@pytest.mark.parametrize("mesh", ["a=2", "a=2,b=2"])
def test_results_are_tensors_in_parts_that_can_be_put_together(mesh: str) -> None:
    axes = Mesh.parse(mesh)
    _, args = _example(axes.ndim, LONG)
    torch.manual_seed(0)
    model = Read(shifts=False).double()
    plan = _plan(model, args, mesh, "baseline cp" if axes.ndim == 1 else "baseline ddp+cp")
    assert plan.outputs[1].layout[-1] == S(1, (1,) * 4)
    expected = model(*args)[1].detach()
    models = [copy.deepcopy(model) for _ in range(axes.size)]

    def one(rank: int) -> Tensor:
        device_mesh = init_device_mesh("cpu", axes.shape, mesh_dim_names=axes.axes)
        parallel = autoshard.parallelize(models[rank], plan, device_mesh, args)
        loss, logits = parallel(*autoshard.shard_inputs(plan, device_mesh, *args))
        loss.backward()
        return logits.detach().full_tensor()  # type: ignore[no-any-return]

    with capturing_once(capture(model, args, guarded=True)):
        for found in run_ranks(axes.size, one):
            assert isinstance(found, Tensor), found
            torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(
    ("length", "options", "why"),
    [(16, {}, "so little to do that kernels take longer"), (LONG, {"causal": False}, "all queries see all keys")],
)
def test_parts_are_taken_where_they_are_faster(length: int, options: dict[str, bool], why: str) -> None:
    model, args = _example(1, length, **options)
    assert _queries(_plan(model, args, "a=2", "baseline cp"))[0] == S(2), why


@pytest.mark.parametrize(("length", "parts"), [(12, 3), (8, 4), (20, 2), (10, 0)])
def test_a_sequence_has_the_most_parts_that_ranks_can_share(length: int, parts: int) -> None:
    model, args = _example(1, length)
    if parts:
        plan = _plan(model, args, "a=2", "baseline cp", f"/attention=a:S(2/{parts})")
        check_as_before(model, args, plan, rtol=1e-8, atol=1e-10)
        return
    with pytest.raises(autoshard.AutoshardError, match="attention can have"):
        _plan(model, args, "a=2", "baseline cp", "/attention=a:S(2/5)")


@pytest.mark.parametrize(("ranks", "parts"), [(2, 2), (2, 4), (8, 4), (3, 3), (8, 1)])
def test_the_share_of_the_slowest_rank_is_counted_key_by_key(ranks: int, parts: int) -> None:
    length = 8 * ranks * parts
    q = torch.empty(1, 2, length, 4)
    graph = capture(_Attention(), (q,))
    node = next(node for node in graph.nodes if node.op is not None and "attention" in str(node.op))
    mesh, entry = Mesh.parse(f"a={ranks}"), known(node.op)
    assert entry.blocks is not None and entry.flops is not None

    def keys(layout: Layout, rank: int) -> float:
        """What the queries of a rank see, a query half of its own key."""
        ranges = local_ranges(length, layout, 2, mesh, (rank,))
        return sum(row + 0.5 for start, stop in ranges for row in range(start, stop))

    layout, together = Layout((S(2, (1,) * parts),)), Layout((S(2),))
    shape = local_shape(tuple(q.shape), layout, mesh, (0,))
    share, further = entry.blocks(node, [shape, tuple(q.shape), tuple(q.shape)], (layout, Layout((R,)), Layout((R,))))
    slowest = [max(keys(each, rank) for rank in range(ranks)) for each in (layout, together)]
    assert share == pytest.approx(slowest[0] / slowest[1])
    assert further == 2 * (parts - 1)
    assert block(length, ranks, 0)[1] == shape[2]


class _Attention(nn.Module):
    def forward(self, q: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, q, q, is_causal=True)


def test_the_optimum_may_cut_what_the_best_baseline_does_and_is_checked_as_such() -> None:
    """Without a constraint that asks for parts: the plan itself says that it has them."""
    model, args = _example(1, LONG)
    limits = ["only words a:S", "only targets a:S", "forbid /attention a:R a:S(1)"]
    contest = compare(model, args, mesh="a=4", hardware="cpu-gloo", constraints=["family a=cp"])
    assert contest.optimum.plan is not None and _queries(contest.optimum.plan)[0] == S(2, (1,) * 4)
    free = autoshard.plan(model, args, mesh="a=4", hardware="cpu-gloo", constraints=limits)
    assert not _queries(free)[0].parts  # nobody asked
    contest = compare(model, args, mesh="a=4", hardware="cpu-gloo", constraints=limits)
    best, optimum = contest.best, contest.optimum.plan
    assert best is not None and best.name == "cp" and best.plan is not None and optimum is not None
    assert _queries(best.plan)[0].parts and optimum.solver.cost_ns <= best.plan.solver.cost_ns
    assert _queries(optimum)[0].parts and optimum.pins == tuple(limits)
    assert check(optimum, model, args).fits
    check_as_before(model, args, optimum, rtol=1e-8, atol=1e-10)
