"""A loss whose logits are cut along the vocabulary from the head to the head's gradient, against one process.

On simulated ranks, in double precision, whatever kind of cross-entropy a model writes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import autoshard
from autoshard.capture import capture
from autoshard.errors import VerificationError
from autoshard.layout import replicated
from autoshard.lowering import Rank, lower
from autoshard.mesh import Mesh
from autoshard.plans import ShardingPlan

from .as_before import check_as_before

ours = torch.ops.autoshard
WIDTH, ROWS = 6, 12
Loss = Callable[[Tensor, Tensor], Tensor]


def _written_out(logits: Tensor, targets: Tensor) -> Tensor:
    picked = logits.log_softmax(-1).gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return -(picked * (targets >= 0)).sum() / ROWS


def _masked(logits: Tensor, targets: Tensor) -> Tensor:
    """Some logits are hidden, those of a block of one rank among them."""
    hidden = torch.arange(logits.shape[-1]) < 5
    return F.cross_entropy(logits.masked_fill(hidden, float("-inf")), targets.clamp(min=5))


LOSSES: dict[str, Loss] = {
    "mean": F.cross_entropy,
    "sum": lambda x, y: F.cross_entropy(x, y, reduction="sum"),
    "of each row": lambda x, y: (F.cross_entropy(x, y, reduction="none") * torch.arange(1.0, len(x) + 1)).sum(),
    "smoothed": lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1),
    "ignored": lambda x, y: F.cross_entropy(x, y.where(y != 3, 7), ignore_index=7),
    "weighted": lambda x, y: F.cross_entropy(x, y, weight=torch.linspace(0.5, 2.0, x.shape[-1], dtype=x.dtype)),
    "of probabilities": lambda x, y: F.cross_entropy(x, 0.1 + (torch.arange(x.shape[-1]) == y[:, None]).to(x.dtype)),
    "of two": lambda x, y: F.nll_loss(x.log_softmax(-1), y) + 0.1 * x.log_softmax(-1).exp().square().sum(),
    "computed again": lambda x, y: checkpoint(F.cross_entropy, x, y, use_reentrant=False) / 2,
    "with small logits": lambda x, y: F.cross_entropy(x, y) + 0.1 * torch.logsumexp(x, -1).square().mean(),
    "written out": _written_out,
    "masked": _masked,
}


class Head(nn.Module):
    """Rows are looked up and multiplied with the table again, if it is tied."""

    def __init__(self, vocabulary: int, loss: Loss, tied: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary, WIDTH, padding_idx=1)
        self.head = nn.Linear(WIDTH, vocabulary, bias=not tied)
        if tied:
            self.head.weight = self.table.weight
        self.loss = loss

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return self.loss(self.head(self.table(tokens).tanh()), targets)


def _model(vocabulary: int, name: str, tied: bool = False) -> tuple[Head, tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    torch.manual_seed(0)
    model = Head(vocabulary, LOSSES[name], tied).double()
    tokens, targets = torch.randint(0, vocabulary, (2, ROWS), generator=generator)
    targets[:4] = -100 if name in ("mean", "sum", "of each row", "smoothed", "weighted", "written out") else 3
    return model, (tokens, targets)


def _plan(model: nn.Module, args: tuple[Tensor, ...], mesh: str, pins: dict[str, str]) -> ShardingPlan:
    """Over the axes that cut the vocabulary nothing but an all-reduce may run."""
    given = [f"{name}={layout}" for name, layout in pins.items()]
    axes = [axis for axis in Mesh.parse(mesh).axes if axis != "dp"]
    forbidden = [f"forbid all_gather,all_to_all,reduce_scatter over {axis} of tensors" for axis in axes]
    return autoshard.plan(model, args, mesh=mesh, hardware="cpu-gloo", constraints=[*given, *forbidden], cache=False)


def _made(plan: ShardingPlan, role: str, axes: list[str]) -> set[str]:
    """How operators of a role are placed on some axes."""
    names = {entry.name: entry.name.rpartition("/")[2].removeprefix("bwd.") for entry in plan.operators}
    entries = (entry for entry in plan.operators if names[entry.name].partition(".")[0] == role)
    layouts = (dict(zip(plan.mesh.axes, entry.outputs[0])) for entry in entries if entry.outputs[0])
    return {" ".join(str(layout[axis]) for axis in axes) for layout in layouts}


PLACED = {"_log_softmax": "S(1)", "row_max": "P(max)", "row_sum": "P(sum)", "row_total": "P(sum)"}


@pytest.mark.parametrize(
    ("vocabulary", "mesh"),
    [
        pytest.param(16, "tp=4", marks=pytest.mark.thorough),
        (17, "tp=3"),
        pytest.param(16, "a=2,b=2", marks=pytest.mark.thorough),
        pytest.param(18, "dp=2,tp=2", marks=pytest.mark.thorough),
    ],
)
@pytest.mark.parametrize("name", LOSSES)
def test_logits_stay_cut_and_only_numbers_for_rows_travel(name: str, vocabulary: int, mesh: str) -> None:
    model, args = _model(vocabulary, name)
    axes = [axis for axis in Mesh.parse(mesh).axes if axis != "dp"]
    roles = [node.name for _, node in capture(model, args).of_kind("operator") if node.op is ours.log_softmax.default]
    cut = "dp:S(0) " * ("dp" in mesh) + " ".join(f"{axis}:S(1)" for axis in axes)
    rows = " ".join(f"{axis}:S(0)" for axis in axes)
    plan = _plan(model, args, mesh, dict.fromkeys(roles, cut) | {"head.weight": rows})
    for role, placement in PLACED.items():
        assert _made(plan, role, axes) == {" ".join([placement] * len(axes))}
    sent = [c for entry in plan.redistributions for c in entry.collectives if set(axes) & set(c.axes)]
    assert {c.kind for c in sent} == {"all_reduce"}
    check_as_before(model, args, plan, rtol=1e-9, atol=1e-12)


def test_a_plan_that_leaves_out_a_part_which_is_read_is_refused() -> None:
    """Edited by hand: the largest number of a row is one of whole rows, which torch's kernel would find for itself."""
    model, args = _model(16, "mean")
    plan = _plan(model, args, "tp=2", {"/_log_softmax": "tp:S(1)"})
    whole = replicated(plan.mesh)
    entries = [replace(e, inputs=(whole,), outputs=(whole,)) if e.name == "/row_max" else e for e in plan.operators]
    rank = Rank((0,), torch.device("cpu"), {link: link for link in plan.links})
    with pytest.raises(VerificationError, match="leaves /row_max out"):
        lower(capture(model, args), replace(plan, operators=tuple(entries)), rank)


@pytest.mark.parametrize(("mesh", "layout"), [("dp=2", "dp:S(0)"), ("dp=2,tp=2", "dp:S(0) tp:R")])
def test_where_rows_are_whole_torchs_kernels_run_alone(mesh: str, layout: str) -> None:
    """And the parts of log-softmax, which are in the graph, neither run nor cost anything."""
    model, args = _model(16, "mean")
    pins = dict.fromkeys(("/_log_softmax", "/bwd._log_softmax_backward_data"), layout)
    plan = _plan(model, args, mesh, pins)
    parts = {"/row_max", "/row_sum", "/bwd.row_total"}
    assert {entry.name: entry.predicted_ns for entry in plan.execution if entry.name in parts} == dict.fromkeys(
        parts, 0
    )
    rank = Rank((0,) * plan.mesh.ndim, torch.device("cpu"), {link: link for link in plan.links})
    program = lower(capture(model, args), plan, rank)
    assert program.backward is not None
    called = {str(node.target) for graph in (program.forward, program.backward) for node in graph.graph.nodes}
    assert {"aten._log_softmax.default", "aten._log_softmax_backward_data.default"} <= called
    own = {name for name in called if name.startswith("autoshard.")}
    assert own <= {"autoshard.gather_backward.default"}
