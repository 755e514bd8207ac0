"""What the schemes make of a plan, and the constraints they are built from: read from plans alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoshard
from autoshard.capture import Ref, capture
from autoshard.constraints.baselines import baseline, baselines
from autoshard.constraints.roles import Roles
from autoshard.errors import ConstraintError
from autoshard.layout import Layout, R, S
from autoshard.mesh import Mesh
from autoshard.plans import Redistribution, ShardingPlan
from solver import Status, solve

from ..fused_models import fused
from ..models import gpt2, graph_of, llama
from ..plans_of import formulated, planned

SCALAR_BYTES = 8

ROWS = {
    "llama": lambda: llama(batch=2),
    "gpt2": lambda: gpt2(batch=2),
    "llama of a row": lambda: llama(batch=1),
}
CONTEXT = [
    ("llama of a row", "cp=2", "cp"),
    ("llama", "dp=2,cp=2", "ddp+cp"),
    ("llama", "dp=2,cp=2", "fsdp+cp"),
    ("gpt2", "dp=2,cp=2", "fsdp+cp"),  # 5 positions on 2 ranks
    ("llama", "dp=2,cp=2,tp=2", "fsdp+cp+tp"),
    ("llama", "dp=2,cp=2,tp=2", "fsdp+cp+sp"),
]


def planned_by(model: nn.Module, args: tuple[object, ...], mesh: str, constraints: Sequence[str]) -> ShardingPlan:
    return autoshard.plan(model, args, mesh=mesh, hardware="dgx-h100", constraints=constraints)


def made(model: str, mesh: str, constraints: Sequence[str]) -> ShardingPlan:
    return planned(model, mesh, "dgx-h100", tuple(constraints)).plan


def moved(plan: ShardingPlan, axis: str) -> list[tuple[Redistribution, str]]:
    """Every redistribution over an axis with the kind of its collective, scalars apart."""
    return [
        (redistribution, collective.kind)
        for redistribution in plan.redistributions
        for collective in redistribution.collectives
        if axis in collective.axes and collective.size_bytes > SCALAR_BYTES
    ]


@pytest.mark.parametrize("model", ["llama", "gpt2", "vit", "routed"])
def test_under_ddp_gradients_alone_communicate_and_are_all_reduced_once(model: str) -> None:
    plan = made(model, "dp=2", ["family dp=ddp"])
    assert all(entry.layout.is_replicated for entry in plan.parameters)
    assert all(entry.layout.axes_of(0) for entry in plan.inputs)
    sent = moved(plan, "dp")
    assert {(r.phase, kind) for r, kind in sent} == {("backward", "all_reduce")}
    assert len(sent) == len(plan.parameters)


class Correlated(nn.Module):
    """J. Zbontar et al., "Barlow Twins", arXiv:2103.03230, algorithm 1."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Linear(6, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x, y = (z / z.square().mean(0).sqrt() for z in (self.features(x), self.features(y)))
        return (x.t() @ y / len(x) - torch.eye(4)).square().sum()


@pytest.mark.parametrize("family", ["ddp", "fsdp"])
def test_of_activations_sums_over_the_batch_are_all_reduced_and_nothing_else_is_sent(family: str) -> None:
    plan = planned_by(Correlated(), (torch.ones(4, 6), torch.ones(4, 6)), "dp=2", [f"family dp={family}"])
    activations = [(r.phase, kind) for r, kind in moved(plan, "dp") if r.tensor.startswith("/")]
    assert activations == [("forward", "all_reduce")] * 3 + [("backward", "all_reduce")] * 2


class Clamped(nn.Module):
    """A weight of norm one, times a scale that is clamped."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.ones(6, 4)), nn.Parameter(torch.ones(6, 1))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ (F.normalize(self.weight, dim=1) * self.scale.clamp(max=3.0))).square().mean()


@pytest.mark.parametrize(("family", "kinds"), [("ddp", ["all_reduce"]), ("fsdp", ["all_gather", "reduce_scatter"])])
def test_gradients_of_what_is_computed_of_parameters_are_sums_over_the_batch(family: str, kinds: list[str]) -> None:
    """Reduced once for both, before the derivatives; of rows of a weight, where these are cut, by the shard."""
    plan = planned_by(Clamped(), (torch.ones(4, 6),), "dp=2", [f"family dp={family}"])
    assert sorted({kind for _, kind in moved(plan, "dp")}) == kinds
    assert [r.tensor for r, kind in moved(plan, "dp") if kind == kinds[-1]] == ["/bwd.mm"]


@pytest.mark.parametrize("model", ["llama", "gpt2", "vit", "routed"])
def test_under_fsdp_parameters_are_gathered_in_both_phases_and_gradients_scattered(model: str) -> None:
    plan = made(model, "dp=2", ["family dp=fsdp"])
    assert all(entry.layout.axes_of(0) for entry in (*plan.parameters, *plan.inputs))
    sent = moved(plan, "dp")
    assert {(r.phase, kind) for r, kind in sent} == {
        ("forward", "all_gather"),
        ("backward", "all_gather"),
        ("backward", "reduce_scatter"),
    }
    assert sum(kind == "reduce_scatter" for _, kind in sent) == len(plan.parameters)
    assert not any(r.kept for r in plan.redistributions if r.tensor in {e.name for e in plan.parameters})


def test_under_fsdp_what_computes_a_layer_again_gathers_each_parameter_once() -> None:
    plan = made("llama", "dp=2", ["family dp=fsdp", "recomputation full"])
    gathered = [r.tensor for r, kind in moved(plan, "dp") if r.phase == "backward" and kind == "all_gather"]
    assert sorted(gathered) == sorted(entry.name for entry in plan.parameters if entry.name != "tok_embeddings.weight")


def test_hybrid_sharding_scatters_inside_and_reduces_the_shard_outside() -> None:
    plan = made("llama", "dp=2,tp=2", baseline("hsdp", Mesh.parse("dp=2,tp=2")).constraints(Mesh.parse("dp=2,tp=2")))
    assert all(entry.layout[0] == R and entry.layout[1].kind == "S" for entry in plan.parameters)
    assert {kind for _, kind in moved(plan, "dp")} == {"all_reduce"}
    assert {kind for _, kind in moved(plan, "tp")} == {"all_gather", "reduce_scatter"}


@pytest.mark.parametrize(("scheme", "kinds"), [("tp", {"all_reduce"}), ("sp", {"all_gather", "reduce_scatter"})])
@pytest.mark.parametrize(
    ("model", "columns", "rows"),
    [("llama", ("wq", "wk", "wv", "w1", "w3"), ("wo", "w2")), ("vit", ("query", "key", "up"), ("project", "down"))],
)
def test_megatron_cuts_pairs_of_columns_and_rows(model, columns, rows, scheme, kinds) -> None:
    """Two exchanges of each kind in each direction for every layer, whatever the solver was free to do."""
    plan = made(model, "tp=2", [f"family tp={scheme}"])
    layouts = {entry.name: str(entry.layout[0]) for entry in plan.parameters if entry.name.startswith("layers.")}
    for name, placement in layouts.items():
        part = name.split(".")[-2]
        if name.endswith("weight") and part in (*columns, *rows):
            assert placement == ("S(0)" if part in columns else "S(1)"), name
    expected = 2 * len({name.split(".")[1] for name in layouts})
    for phase in ("forward", "backward"):
        found = [kind for r, kind in moved(plan, "tp") if r.phase == phase and r.tensor.startswith("layers.")]
        streams = [kind for kind in found if kind in kinds]
        assert set(streams) == kinds
        assert all(expected - 1 <= streams.count(kind) <= expected + 1 for kind in kinds)  # the ends of the model
        assert set(found) <= kinds | {"all_reduce"}  # gradients of norms


@pytest.mark.parametrize(("model", "mesh", "name"), CONTEXT)
def test_context_parallelism_cuts_the_sequence_and_gathers_keys_and_values(model: str, mesh: str, name: str) -> None:
    axes = Mesh.parse(mesh)
    cp = axes.index("cp")
    plan = planned_by(*ROWS[model](), mesh=mesh, constraints=baseline(name, axes).constraints(axes))
    assert all(entry.layout[cp] == S(1) for entry in plan.inputs)
    shards = name.startswith("fsdp")
    assert all((entry.layout[cp].kind == "S") == shards for entry in plan.parameters)
    gradients = {"all_gather", "reduce_scatter"} if shards else {"all_reduce"}
    parameters = {entry.name for entry in plan.parameters}
    attention, other = [], set()
    for redistribution, kind in moved(plan, "cp"):
        is_attention = redistribution.tensor.split("/")[0].rpartition(".")[2] in ("attention", "attn")
        if redistribution.tensor not in parameters and is_attention:
            attention.append((redistribution.phase, kind))
        else:
            other.add(kind)
    assert sorted(attention) == [("backward", "reduce_scatter")] * 2 + [("forward", "all_gather")] * 2
    assert other == gradients
    queries = {
        str(e.outputs[0][cp]) for e in plan.operators if "attention" in e.name.rpartition("/")[2] and e.outputs[0]
    }
    assert queries == {"S(2)"}


def test_keys_and_values_are_gathered_before_heads_are_repeated() -> None:
    """Llama's two heads of keys and values, not the four that queries see: 6 positions of 2 heads of 6 in float32."""
    plan = planned_by(*ROWS["llama"](), mesh="dp=2,cp=2", constraints=["baseline ddp+cp"])
    sizes = [
        c.size_bytes for r in plan.redistributions for c in r.collectives if c.kind == "all_gather" and "cp" in c.axes
    ]
    assert sizes == [6 * 2 * 6 * 4] * 2


def test_expert_parallelism_sends_tokens_and_no_expert() -> None:
    plan = made("routed", "ep=2", ["family ep=ep"])
    experts = {entry.name: entry for entry in plan.parameters if ".experts." in entry.name}
    assert experts and all(entry.layout.axes_of(0) for entry in experts.values())
    assert all(e.layout.is_replicated for e in plan.parameters if e.name not in experts)
    forward = [kind for r, kind in moved(plan, "ep") if r.phase == "forward"]
    assert set(forward) == {"all_to_all"} and len(forward) == 2 * 2  # to the experts and back, in two layers
    reduced = [r.tensor for r, kind in moved(plan, "ep") if kind == "all_reduce"]
    assert reduced and not any("experts/" in tensor for tensor in reduced)


@pytest.mark.parametrize(
    ("model", "mesh", "constraints", "said"),
    [
        ("llama", "dp=8", ["family dp=ddp"], "the 8 ranks of dp cannot share 4 rows"),
        ("routed", "dp=3,tp=2", ["family dp=ddp", "family tp=ddp"], "cannot share 8 rows evenly"),
        ("llama", "tp=3", ["family tp=tp"], "the 3 ranks of tp cannot share the 4 heads of layers.0.attention/view"),
        ("gpt2", "tp=5", ["family tp=tp"], "the 5 ranks of tp cannot share the 3 heads of h.0.attn/view"),
        ("llama", "ep=2", ["family ep=ep"], "no parameter of three dims"),
        ("llama", "dp=4,cp=4", ["family dp=fsdp", "family cp=cp"], "the 4 ranks of cp cannot share 6 positions"),
        ("mlp", "tp=2", ["family tp=sp"], r"nothing there is \(batch, sequence, channels\); tp cuts layers alone"),
        ("mlp", "cp=2", ["family cp=cp"], "but the model has none .* a softmax between two products"),
        ("llama", "dp=2", ["family dp=ddp", "family dp=fsdp"], "give one axis two schemes"),
    ],
)
def test_a_scheme_that_a_model_cannot_have_says_why(model: str, mesh: str, constraints: list[str], said: str) -> None:
    with pytest.raises(ConstraintError, match=said):
        formulated(graph_of(model), mesh, "dgx-h100", constraints)


class Fused(nn.Module):
    """Falcon's attention: 4 heads of queries, and one of keys and of values, of one projection."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(8, 24), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).view(*x.shape[:2], 6, 4)
        q, k, v = parts[..., :-2, :], parts[..., [-2], :], parts[..., [-1], :]
        y = F.scaled_dot_product_attention(*(each.transpose(1, 2) for each in (q, k, v)))
        return self.o(y.transpose(1, 2).flatten(2))


def falcon() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return nn.Sequential(Fused(), nn.Flatten(0)), (torch.ones(2, 6, 8),)


@pytest.mark.parametrize("scheme", ["tp", "sp"])
@pytest.mark.parametrize(
    ("make", "ranks", "loose"),
    [
        (falcon, 2, ("0.qkv.weight", "0.qkv.bias")),
        (falcon, 4, ("0.qkv.weight", "0.qkv.bias")),
        (lambda: fused("split", groups=4), 4, ("qkv.weight",)),
        (lambda: fused("ranges", groups=1), 2, ("qkv.weight",)),
        (lambda: llama(batch=2, max_sequence=8), 4, ("wk.weight", "wv.weight")),
    ],
    ids=["falcon", "falcon on 4", "4 of 8 heads", "1 of 8 heads", "2 of 4 heads, apart"],
)
def test_projections_that_ranks_cannot_share_are_left_whole_and_attention_is_cut_by_heads(
    make: Callable[[], tuple[nn.Module, tuple[Tensor, ...]]],
    ranks: int,
    loose: tuple[str, ...],
    scheme: str,
) -> None:
    """Of fewer heads than ranks, or fused in unequal parts: every other matrix is cut, and of activations no scheme
    sends more than it does otherwise, but the gradients of heads.
    """
    model, args = make()
    plan = planned_by(model, args, f"tp={ranks}", [f"family tp={scheme}"])
    graph = capture(model, args)
    roles, names = Roles(graph), {node.name: i for i, node in enumerate(graph.nodes)}
    for entry in plan.parameters:
        if names[entry.name] in roles.matrices and not entry.name.endswith(loose):
            assert entry.layout[0].kind == "S", entry.name
    assert {e.inputs[0][0] for e in plan.operators if e.name.endswith("/attention")} == {S(1)}
    own = {"all_reduce"} if scheme == "tp" else {"all_gather", "reduce_scatter"}
    for redistribution, kind in moved(plan, "tp"):
        name, _, output = redistribution.tensor.partition(":")
        ref = Ref(names[name], int(output or 0))
        if roles.of(ref) != "activations" or roles.layered.get(ref.node) in (None, ""):
            continue
        is_of_heads = len(graph.meta(ref).shape) == 4 and redistribution.phase == "backward"
        assert kind in own or (is_of_heads and kind == "all_gather"), redistribution


def test_placements_and_collectives_that_are_forbidden_do_not_occur() -> None:
    free = made("llama", "dp=2,tp=2", [])
    constraints = [
        "only tokens dp:S(0)",
        "forbid layers.*.attention.wq.weight tp:R tp:S(1)",
        "forbid all_gather,all_to_all over tp of tensors",
        "forbid collectives over dp of parameters",
    ]
    plan = made("llama", "dp=2,tp=2", constraints)
    assert plan.pins == tuple(constraints)
    tokens = next(entry for entry in plan.inputs if entry.name == "tokens")
    assert tokens.layout.axes_of(0)[:1] == (0,)
    wq = [str(entry.layout[1]) for entry in plan.parameters if entry.name.endswith("wq.weight")]
    assert set(wq) == {"S(0)"}
    assert not {kind for _, kind in moved(plan, "tp")} & {"all_gather", "all_to_all"}
    parameters = {entry.name for entry in plan.parameters}
    assert not [r for r, _ in moved(plan, "dp") if r.tensor.partition("/")[0] in parameters]
    assert plan.solver.cost_ns >= free.solver.cost_ns


def test_forbidding_what_a_gradient_needs_is_infeasible() -> None:
    cut, whole = "only x dp:S(0)", "only up.weight dp:R"
    for forbidden, status in (("gradients", Status.OPTIMAL), ("tensors", Status.INFEASIBLE)):
        constraints = [cut, whole, f"forbid collectives over dp of {forbidden}"]
        assert solve(formulated(graph_of("mlp"), "dp=2", "dgx-h100", constraints).problem).status is status


def test_every_tensor_has_one_role_and_gradients_belong_to_parameters() -> None:
    for model in ("llama", "gpt2", "routed"):
        graph = graph_of(model)
        roles = Roles(graph)
        held = {ref for _, ref in graph.gradients}
        assert held <= roles.gradients.keys()
        assert not {ref.node for ref in roles.gradients} & roles.origins.keys()
        shapes = {ref: graph.meta(ref).shape for ref in held}
        for name, ref in graph.gradients:
            parameter = graph.nodes[roles.gradients[ref]]
            assert parameter.name == name and parameter.outputs[0].shape == shapes[ref]
    routed = Roles(graph_of("routed"))
    names = {graph_of("routed").nodes[i].name for i in routed.experts}
    assert names == {f"layers.{i}.moe.experts.w{k}" for i in range(2) for k in (1, 2, 3)}
    assert not any("gate" in graph_of("routed").nodes[i].name for i in routed.matrices)


OF_LENGTHS = "mul sum neg mul.2 masked_fill div.3 masked_fill.1 expand mul.5".split()
"""What leads through the lengths of a weight to its gradient: the derivative of the root is whole."""


@pytest.mark.parametrize(
    ("model", "found"),
    [
        *((name, set()) for name in ("llama", "gpt2", "vit", "moe", "routed", "conv")),
        ("assorted", {"rows/bwd.mm"} | {f"rows.parametrizations.weight.0/bwd.{role}" for role in OF_LENGTHS}),
    ],
)
def test_gradients_are_reduced_as_they_leave_but_where_a_derivative_of_a_function_follows(
    model: str, found: set[str]
) -> None:
    graph = graph_of(model)
    assert {graph.nodes[i].name for i in Roles(graph).led_back} == found


class Scaled(nn.Module):
    """Channels between two matrices that have a number each, as the heads of Mamba-2 have."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x) * self.scale))


def test_a_vector_that_tensor_parallelism_cuts_is_whole_over_the_axis_that_shards() -> None:
    model = nn.Sequential(Scaled(), nn.Flatten(0))
    plan = planned_by(model, (torch.ones(2, 6, 8),), "dp=2,tp=2", ["baseline fsdp+tp"])
    layouts = {entry.name: entry.layout for entry in plan.parameters}
    assert layouts["0.scale"] == layouts["0.up.bias"] == Layout((R, S(0)))
    assert all(layouts[f"0.{name}.weight"][0].kind == "S" for name in ("up", "down"))
    assert layouts["0.down.bias"] == Layout((S(0), R))


class Parted(nn.Module):
    """A layer whose channels are seen as some parts, as by hyper-connections; there is no attention."""

    def __init__(self, parts: int) -> None:
        super().__init__()
        self.parts, self.up, self.down = parts, nn.Linear(12, 12), nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).unflatten(-1, (self.parts, -1)).flatten(2).relu())


def test_parts_of_columns_are_not_called_heads_of_attention() -> None:
    model, args = nn.Sequential(Parted(3), nn.Flatten(0)), (torch.ones(2, 5, 12),)
    with pytest.raises(ConstraintError, match=r"cannot share the 3 parts that 0/view makes of columns") as said:
        planned_by(model, args, "tp=2", ["family tp=tp"])
    assert "attention" not in str(said.value)
    assert planned_by(nn.Sequential(Parted(1), nn.Flatten(0)), args, "tp=2", ["family tp=tp"]).parameters


class Choosing(nn.Module):
    """A layer that keeps the largest two of eight channels, by a router that is as large as any matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        largest, index = self.router(x).softmax(-1).topk(2)
        return self.down(F.relu(self.up(x))) * torch.zeros_like(x).scatter(-1, index, largest)


def test_a_router_is_no_matrix_to_be_cut_however_large_it_is() -> None:
    model = nn.Sequential(Choosing(), nn.Flatten(0))
    plan = planned_by(model, (torch.ones(2, 6, 8),), "tp=2", ["family tp=tp"])
    assert all(e.layout[0].kind == "S" for e in plan.parameters if e.name in ("0.up.weight", "0.down.weight"))
    for name in ("llama", "routed"):
        graph = graph_of(name)
        found = {graph.nodes[i].name for i in Roles(graph).routers}
        assert found == {f"layers.{i}.moe.router.gate.weight" for i in range(2)} if name == "routed" else not found


class Begun(nn.Module):
    """A sum of experts that begins with zeros in the shape of some columns, as in the MLP of ViTPose+."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.experts = nn.Linear(8, 16), nn.ModuleList(nn.Linear(16, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.up(x))
        total = torch.zeros_like(h[..., -8:])
        for expert in self.experts:
            total = total + expert(h) * (x.mean((1, 2), keepdim=True) > 0)
        return total


def test_columns_of_which_only_the_shape_is_asked_are_cut() -> None:
    plan = planned_by(nn.Sequential(Begun(), nn.Flatten(0)), (torch.ones(2, 6, 8),), "tp=2", ["family tp=tp"])
    layouts = {entry.name: entry.layout for entry in plan.parameters}
    assert layouts["0.up.weight"] == Layout((S(0),))
    assert all(layouts[f"0.experts.{k}.weight"] == Layout((S(1),)) for k in range(2))
    assert not [entry for entry in plan.redistributions if entry.tensor.startswith("0/slice")]


@pytest.mark.parametrize("mesh", ["a=2", "a=2,b=2", "a=2,b=2,c=2"])
def test_a_baseline_names_a_scheme_for_every_axis(mesh: str) -> None:
    axes = Mesh.parse(mesh)
    found = baselines(axes)
    assert len({b.name for b in found}) == len({b.schemes for b in found}) == len(found)
    for b in found:
        assert len(b.constraints(axes)) == axes.ndim and baseline(b.name, axes) == b and b.title


def test_an_unknown_baseline_names_those_there_are() -> None:
    with pytest.raises(ConstraintError, match=r"ddp, fsdp, tp, sp, cp, ep, each also with .*; did you mean 'fsdp'"):
        baseline("fdsp", Mesh.parse("a=2"))
