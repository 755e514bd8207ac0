"""Batch norms whose batch is cut, with statistics of all of it, against one process.

On simulated ranks, in double precision. Only numbers for channels travel, as with SyncBatchNorm.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoshard
from autoshard.capture import Ref, capture
from autoshard.lowering import Rank, lower
from autoshard.plans import ShardingPlan

from ..thorough import some_thorough
from .as_before import check_as_before

ours = torch.ops.autoshard
aten = torch.ops.aten


class Images(nn.Module):
    """A convolution, a batch norm and a head; the second has what is asked for."""

    def __init__(self, **options: object) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3)
        self.norm = nn.BatchNorm2d(6, **options)  # type: ignore[arg-type]
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.norm(self.conv(x)).relu().mean((2, 3))), label)


class Rows(nn.Module):
    """Rows instead of images, of which the statistics are not kept."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.head = nn.Linear(3, 6), nn.Linear(6, 5)

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(self.head(F.batch_norm(self.up(x), None, None, training=True).relu()), label)


class Frozen(Images):
    """The scale is not trained, and nothing before it is."""

    def __init__(self) -> None:
        super().__init__(momentum=0.5)
        self.norm.weight.requires_grad_(False)
        self.conv.requires_grad_(False)


MODELS = {
    "images": Images,
    "without weights": lambda: Images(affine=False),
    "without statistics": lambda: Images(track_running_stats=False),
    "rows": Rows,
    "frozen": Frozen,
    "far from zero": lambda: _shifted(Images()),
}


def _shifted(model: Images) -> Images:
    """The numbers to norm have means of a thousand deviations: their squares would leave nothing of the variance."""
    assert model.conv.bias is not None
    with torch.no_grad():
        model.conv.bias += 1000
    return model


def _example(name: str, batch: int = 8) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    model = MODELS[name]().double()
    shape = (batch, 3) if name == "rows" else (batch, 3, 5, 5)
    return model, (torch.randn(shape, dtype=torch.float64), torch.randint(0, 5, (batch,)))


def _plan(model: nn.Module, args: tuple[Tensor, ...], mesh: str, *constraints: str) -> ShardingPlan:
    return autoshard.plan(model, args, mesh=mesh, hardware="cpu-gloo", constraints=constraints, cache=False)


@pytest.mark.parametrize(
    ("mesh", "baseline"), some_thorough([("dp=4", "ddp"), ("dp=2", "fsdp"), ("a=2,b=2", "hsdp")], [("dp=2", "fsdp")])
)
@pytest.mark.parametrize("name", MODELS)
def test_the_batch_is_cut_and_only_numbers_for_channels_travel(name: str, mesh: str, baseline: str) -> None:
    model, args = _example(name)
    plan = _plan(model, args, mesh, f"baseline {baseline}")
    (norm,) = (e for e in plan.operators if e.name.rpartition("/")[2].startswith("_native_batch_norm"))
    assert all(str(placement) == "S(0)" for placement in norm.inputs[0])
    graph = capture(model, args)
    held = {node.name for kind in ("parameter", "input") for _, node in graph.of_kind(kind)}
    gradients = {graph.tensor_name(ref) for _, ref in graph.gradients}
    refs = [Ref(i, k) for i, node in enumerate(graph.nodes) for k, meta in enumerate(node.outputs) if meta]
    sizes = {graph.tensor_name(ref): graph.meta(ref).shape for ref in refs}
    sent = {e.tensor for e in plan.redistributions if e.collectives} - held - gradients
    assert {name for name in sent if "channel_" in name} and all(sizes[name] in ((6,), ()) for name in sent)
    check_as_before(model, args, plan, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(
    ("mesh", "layout", "batch"), [("a=3", "a:S(0)", 8), ("a=2,b=2", "a:S(0) b:S(1)", 8), ("a=2", "a:S(2)", 6)]
)
def test_blocks_that_are_shorter_channels_beside_the_batch_and_parts_of_images(
    mesh: str, layout: str, batch: int
) -> None:
    model, args = _example("images", batch)
    pins = [
        f"norm/{name}={layout}" for name in ("_native_batch_norm_legit_functional", "bwd.native_batch_norm_backward")
    ]
    check_as_before(model, args, _plan(model, args, mesh, *pins), rtol=1e-8, atol=1e-10)


def test_where_channels_are_whole_torchs_kernels_run_alone() -> None:
    model, args = _example("images")
    roles = ("_native_batch_norm_legit_functional", "bwd.native_batch_norm_backward")
    plan = _plan(model, args, "tp=2", *(f"norm/{name}=tp:S(1)" for name in roles))
    parts = {"norm/channel_sum", "norm/channel_squares", "norm/bwd.channel_sum", "norm/bwd.channel_products"}
    assert {e.name: e.predicted_ns for e in plan.execution if e.name in parts} == dict.fromkeys(parts, 0)
    rank = Rank((0,) * plan.mesh.ndim, torch.device("cpu"), {link: link for link in plan.links})
    program = lower(capture(model, args), plan, rank)
    assert program.backward is not None
    called = {str(node.target) for graph in (program.forward, program.backward) for node in graph.graph.nodes}
    assert {"aten._native_batch_norm_legit_functional.default", "aten.native_batch_norm_backward.default"} <= called
    assert not any(name.startswith("autoshard.channel") or name.startswith("autoshard.batch") for name in called)
    check_as_before(model, args, plan, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(
    ("mesh", "constraint"), [("dp=4", "baseline ddp"), ("dp=2", "baseline fsdp"), ("a=2", "only norm/_native* a:S(1)")]
)
@pytest.mark.parametrize("name", ["images", "without weights", "frozen"])
def test_by_statistics_that_are_kept_rows_are_not_mixed(name: str, mesh: str, constraint: str) -> None:
    """A norm in evaluation mode, in a model that is trained."""
    model, args = _example(name)
    model.norm.eval()  # type: ignore[union-attr]
    plan = _plan(model, args, mesh, constraint)
    check_as_before(model, args, plan, rtol=1e-8, atol=1e-10)


class ChannelsLast(nn.Module):
    """A norm of images of one column, whose channels lie last in memory, behind or before their one column."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Conv2d(3, 8, 1), norm, nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        images = self.up(x)
        if isinstance(self.norm, nn.GroupNorm):
            images = images.clone(memory_format=torch.channels_last)
        else:
            images = images.transpose(1, 3).clone(memory_format=torch.contiguous_format).transpose(1, 3)
        return self.down(self.norm(images).tanh()).square().mean()


@pytest.mark.parametrize(
    ("norm", "role", "layout", "before"),
    [
        (nn.BatchNorm2d(8), "batch", "S(1)", "S(0)"),
        (nn.BatchNorm2d(8).eval(), "batch", "S(1)", "S(0)"),
        (nn.GroupNorm(2, 8), "group", "S(0)", "R"),
        (nn.GroupNorm(2, 8), "group", "R", "S(0)"),
    ],
)
def test_a_gradient_that_arrives_lies_otherwise_in_memory_than_the_images(
    norm: nn.Module, role: str, layout: str, before: str
) -> None:
    """Torch's kernels take the order of one for that of both."""
    torch.manual_seed(0)
    model, args = ChannelsLast(norm).double(), (torch.randn(8, 3, 6, 1, dtype=torch.float64),)
    images = "/clone" if role == "group" else "/transpose.1"
    pins = (
        f"norm/bwd.native_{role}_norm_backward=a:{layout}",
        f"{images}=a:{layout}",
        f"/bwd.tanh_backward=a:{before}",
    )
    check_as_before(model, args, _plan(model, args, "a=2", *pins), rtol=1e-8, atol=1e-10)


class Block(nn.Module):
    """Two convolutions around a batch norm, as in a ResNet."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, 8, 3)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv2d(8, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 8, 3, padding=1))
            for _ in range(2)
        )
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        x = self.enter(x)
        for layer in self.layers:
            x = x + layer(x)
        return F.cross_entropy(self.head(x.mean((2, 3))), label)


@pytest.mark.parametrize(("mesh", "scheme"), [("tp=4", "tp"), ("dp=2,tp=2", "fsdp+tp")])
def test_channels_are_cut_between_two_convolutions(mesh: str, scheme: str) -> None:
    """One gives some channels, the other takes them, and an all-reduce adds up what that makes, as of two matrices."""
    torch.manual_seed(0)
    model, (_, label) = Block().double(), _example("images")[1]
    args = torch.randn(8, 3, 5, 5, dtype=torch.float64), label
    plan = _plan(model, args, mesh, f"baseline {scheme}")
    layouts = {e.name: e.outputs[0] for e in plan.operators}
    for k in range(2):
        placed = [str(layout[-1]) for name in ("0", "3") if (layout := layouts[f"layers.{k}.{name}/convolution"])]
        assert sorted(placed) == ["P(sum)", "S(1)"]
    inside = [
        e for e in plan.redistributions if e.tensor.startswith("layers") and not e.tensor.endswith(("weight", "bias"))
    ]
    over = [c.kind for e in inside if e.phase == "forward" for c in e.collectives if "tp" in c.axes]
    assert over == ["all_reduce"] * 2
    check_as_before(model, args, plan, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(8, 6), (4, 6, 5), (4, 6, 5, 3)])
def test_the_parts_together_are_torchs_batch_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Also for numbers in channels_last, which stay so."""
    generator = torch.Generator().manual_seed(0)
    x, grad = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2))
    if x.dim() == 4:
        x, grad = (t.contiguous(memory_format=torch.channels_last) for t in (x, grad))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    weight, bias, mean, var = (torch.rand(6, generator=generator, dtype=wide) + 0.5 for _ in range(4))
    theirs = aten._native_batch_norm_legit_functional(x, weight, bias, mean, var, True, 0.1, 1e-5)
    count = x.numel() // 6
    total = ours.channel_sum(x)
    squares = ours.channel_squares(x, total, count)
    found = ours.batch_norm_in_training(x, total, squares, weight, bias, mean, var, 0.1, 1e-5, count, theirs[1].dtype)
    torch.testing.assert_close(found, tuple(theirs))
    assert found[0].stride() == theirs[0].stride()
    back = aten.native_batch_norm_backward(grad, x, weight, None, None, theirs[1], theirs[2], True, 1e-5, [True] * 3)
    sums = ours.channel_sum(grad), ours.channel_products(grad, x, theirs[1], theirs[2])
    again = ours.batch_norm_backward(grad, x, *sums, theirs[1], theirs[2], weight, 1e-5, [True] * 3, count)
    torch.testing.assert_close(
        again,
        tuple(back),
        rtol=2e-2 if dtype == torch.bfloat16 else None,
        atol=2e-2 if dtype == torch.bfloat16 else None,
    )
    assert again[0].stride() == back[0].stride()


class Spectrograms(nn.Module):
    """Bins are the channels of the norm and a dim of the picture before and after (CLAP)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm2d(16), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x.transpose(1, 3)).transpose(1, 3)).square().mean()


def test_a_whole_norm_is_right_however_its_tensors_lie_in_memory() -> None:
    """Gathered, one of them is contiguous and the other is not, and torch's kernel takes both to lie alike."""
    torch.manual_seed(0)
    model, args = Spectrograms().double(), (torch.randn(8, 1, 24, 16, dtype=torch.float64),)
    plan = _plan(model, args, "a=2", "x=a:S(0)", "norm/channel_*=a:P(sum)", "norm/bwd.channel_*=a:R")
    (backward,) = (entry for entry in plan.operators if entry.name == "norm/bwd.native_batch_norm_backward")
    assert all(layout.is_replicated for layout in backward.inputs)
    check_as_before(model, args, plan, rtol=1e-8, atol=1e-10)


def test_a_rank_without_rows_adds_nothing() -> None:
    total = torch.tensor([3.0, 4.0])
    assert ours.channel_sum(torch.empty(0, 2, 3)).tolist() == [0.0, 0.0]
    assert ours.channel_squares(torch.empty(0, 2, 3), total, 4).tolist() == [0.0, 0.0]
