"""What a forward leaves in attributes of its modules is there after a step, as in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autoshard
from autoshard.capture import capture
from autoshard.errors import CaptureError
from autoshard.mesh import Mesh
from autoshard.plans import ShardingPlan

from ..fuzz.judge import capturing_once
from ..fuzz.random_plans import random_plan
from ..fuzz.ranks import run_ranks
from ..thorough import some_thorough
from .as_before import check_as_before
from .sessions import full

MESH = {"a": 2, "b": 2}
ROWS, STEPS, WIDTH = 8, 4, 16


class Attention(nn.Module):
    """Keeps its weights to be looked at, in a list with another tensor, and its shape beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.weights: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        self.weights = (q @ k.mT / WIDTH**0.5).softmax(-1)
        self.kept = {"entropy": [-(self.weights * self.weights.log()).sum(-1).detach()], "shape": tuple(x.shape)}
        return self.out(self.weights @ v)  # type: ignore[no-any-return]


class Stacked(nn.Module):
    """Has a loss of its own beside the result, as models with experts do, and the results of all layers in a list."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Attention() for _ in range(depth))
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.aux, self.states = 0.0, []
        for block in self.blocks:
            x = x + block(x)
            self.aux = self.aux + block.weights.square().mean()
            self.states.append(x.detach())
        return F.cross_entropy(self.head(x).flatten(0, 1), y.flatten())


class Convolutions(nn.Module):
    """Weights that a hook computes before every call and sets as attributes, as torch's older normalisations do."""

    def __init__(self, normed: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.first = normed(nn.Conv1d(STEPS, 8, 3, padding=1))
        self.second = normed(nn.Conv1d(8, STEPS, 3, padding=1))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.second(self.first(x).relu()) - x).square().mean() * (1 + y.float().mean())  # type: ignore[no-any-return]


class Body(nn.Module):
    """A linear layer with what a forward leaves; ``body`` is the forward."""

    def __init__(self, body: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.body, self.linear = body, nn.Linear(WIDTH, WIDTH)
        self.kept: Any = None
        self.plain = torch.zeros(ROWS, STEPS, WIDTH)
        self.number = 0

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.body(self, x).square().mean() + y.float().mean()


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(ROWS, STEPS, WIDTH, generator=generator), torch.randint(0, 8, (ROWS, STEPS), generator=generator)


def made(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make()


def two_steps(
    model: nn.Module, args: tuple[Tensor, ...], loss: Callable[[Any, Any], Tensor], see: Callable[[Any], list[Any]]
) -> list[Any]:
    seen: list[Any] = []
    for _ in range(2):
        model.zero_grad()
        found = loss(model, args)
        found.backward()
        seen += [full(value).detach() for value in (found, *see(model))]
        seen += [full(p.grad).detach().clone() for p in model.parameters() if p.grad is not None]
    return seen


def check(
    make: Callable[[], nn.Module],
    see: Callable[[Any], list[Any]],
    loss: Callable[[Any, Any], Tensor] = lambda model, args: model(*args),
    constraint: str = "random",
) -> ShardingPlan:
    """Two steps under a plan leave on every rank what they leave in one process."""
    model, args = made(make), batch()
    graph = capture(model, args, guarded=True)
    if constraint == "random":
        plan = random_plan(graph, Mesh(tuple(MESH), tuple(MESH.values())), 1, model, args, {})
    else:
        plan = autoshard.plan(model, args, mesh=MESH, constraints=[constraint] if constraint else ())
    expected = two_steps(made(make), args, loss, see)
    models = [made(make) for _ in range(plan.mesh.size)]

    def one(rank: int) -> list[Any]:
        mesh = init_device_mesh("cpu", plan.mesh.shape, mesh_dim_names=plan.mesh.axes)
        parallel = autoshard.parallelize(models[rank], plan, mesh, args)
        return two_steps(parallel, autoshard.shard_inputs(plan, mesh, *args), loss, see)

    with capturing_once(graph):
        for found in run_ranks(plan.mesh.size, one):
            if isinstance(found, BaseException):
                raise found
            for value, theirs in zip(found, expected, strict=True):
                torch.testing.assert_close(value, theirs, rtol=1e-4, atol=1e-5)
    return plan


def of_attention(model: Any) -> list[Any]:
    assert {block.kept["shape"] for block in model.blocks} == {(ROWS, STEPS, WIDTH)}
    of_blocks = [tensor for block in model.blocks for tensor in (block.weights, *block.kept["entropy"])]
    return [model.aux, *model.states, *of_blocks]


@pytest.mark.parametrize("constraint", ["random", "baseline ddp", "baseline fsdp", ""])
def test_what_layers_keep_is_what_one_process_keeps(constraint: str) -> None:
    check(Stacked, of_attention, constraint=constraint)


def test_a_gradient_goes_back_through_what_was_left() -> None:
    check(Stacked, of_attention, lambda model, args: (model(*args), model.aux)[1])


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("constraint", ["random", "baseline fsdp"])
@pytest.mark.parametrize("normed", [nn.utils.weight_norm, nn.utils.spectral_norm], ids=lambda normed: normed.__name__)
def test_weights_that_hooks_compute_and_set(normed: Callable[..., nn.Module], constraint: str) -> None:
    def see(model: Any) -> list[Any]:
        return [model.first.weight, model.second.weight, *model.buffers()]

    check(lambda: Convolutions(normed), see, constraint=constraint)


def twice(m: Any, x: Tensor) -> Tensor:
    m.kept = m.linear(x)
    m.kept = m.kept.relu() + m.kept
    return m.kept  # type: ignore[no-any-return]


def an_argument(m: Any, x: Tensor) -> Tensor:
    m.kept = x
    return m.linear(x)  # type: ignore[no-any-return]


def a_view(m: Any, x: Tensor) -> Tensor:
    x = m.linear(x)
    m.kept = x[0]
    return x


def no_gradient(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        m.kept = (x > 0).float().mean()
    return m.linear(x)  # type: ignore[no-any-return]


def in_place_of_a_tensor(m: Any, x: Tensor) -> Tensor:
    m.plain = m.linear(x)
    return m.plain.relu()  # type: ignore[no-any-return]


def in_place_of_a_tensor_without_gradient(m: Any, x: Tensor) -> Tensor:
    x = m.linear(x)
    m.plain = x.detach().clone()
    return x


def beside_a_setting(m: Any, x: Tensor) -> Tensor:
    m.number = 3
    m.kept = m.linear(x)
    return m.kept * m.number  # type: ignore[no-any-return]


LEFT = (
    *(twice, an_argument, a_view, no_gradient),
    *(in_place_of_a_tensor, in_place_of_a_tensor_without_gradient, beside_a_setting),
)


@pytest.mark.parametrize(
    "body", some_thorough(LEFT, {in_place_of_a_tensor_without_gradient, an_argument}), ids=lambda body: body.__name__
)
@pytest.mark.parametrize("is_called", [False, True], ids=["", "called before"])
def test_what_is_left(body: Callable[[Any, Tensor], Tensor], is_called: bool) -> None:
    def make() -> nn.Module:
        model = Body(body)
        if is_called:
            with torch.no_grad():
                model(*batch())
        return model

    check(make, lambda model: [each for each in (model.kept, model.plain) if each is not None])


def test_what_only_the_first_call_sets_is_set_before() -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        if m.number == 0:
            m.number = 2
        m.kept = m.linear(x)
        return m.kept * m.number  # type: ignore[no-any-return]

    model = Body(body)
    assert capture(model, batch()).left == ("kept",)
    assert model.number == 2 and model.kept is None


def state(m: Any, x: Tensor) -> Tensor:
    x = m.linear(x if m.kept is None else x + m.kept)
    m.kept = x.detach()
    return x


def asked_for(m: Any, x: Tensor) -> Tensor:
    x = m.linear(x + 1 if hasattr(m, "other") else x)
    m.other = x.detach()
    return x


def counted(m: Any, x: Tensor) -> Tensor:
    m.number += 1
    m.kept = m.linear(x)
    return m.kept  # type: ignore[no-any-return]


def a_number(m: Any, x: Tensor) -> Tensor:
    x = m.linear(x)
    m.kept = x.sum().item()
    return x


def a_parameter(m: Any, x: Tensor) -> Tensor:
    m.other = m.linear.weight
    return m.linear(x)  # type: ignore[no-any-return]


def deleted(m: Any, x: Tensor) -> Tensor:
    m.kept = m.linear(x)
    x = m.kept
    del m.kept
    return x


def first_alone(m: Any, x: Tensor) -> Tensor:
    if m.number == 0:
        m.number, m.kept = 1, x.mean(0)
    return m.linear(x)  # type: ignore[no-any-return]


def cached(m: Any, x: Tensor) -> Tensor:
    """As PaLM keeps its mask."""
    if m.kept is None:
        m.kept = torch.ones(WIDTH, WIDTH).triu()
    return m.linear(x) @ m.kept  # type: ignore[no-any-return]


REFUSED = {
    cached: "changes model.kept .* leaves a tensor behind that it reads before; where .* call it once before planning",
    state: "changes model.kept .*, and reads before what another call has left there; .*register_buffer",
    asked_for: "changes model.other .*, and reads before",
    counted: "changes model.number .*, and reads before",
    a_number: "takes a number out of a tensor",
    a_parameter: "changes model",
    deleted: "changes model.kept",
    first_alone: "leaves a tensor behind that it has computed, as later calls do not",
}


@pytest.mark.parametrize("body", REFUSED, ids=lambda body: body.__name__)
def test_what_the_next_call_would_find_is_refused(body: Callable[[Any, Tensor], Tensor]) -> None:
    model = Body(body)
    with pytest.raises(CaptureError, match=REFUSED[body]):
        capture(model, batch())
    assert model.kept is None and model.number == 0 and not hasattr(model, "other")


def test_what_the_first_call_leaves_for_all_others_is_there_once_it_was_made() -> None:
    model = Body(cached)
    model(*batch())
    assert not capture(model, batch()).left


class Kept(nn.Module):
    """Alike blocks; what is left is of the model, or of a block."""

    def __init__(self, depth: int, is_in_blocks: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))
        self.is_in_blocks = is_in_blocks

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x).relu()
            if self.is_in_blocks:
                block.kept = x
        self.last = x
        return x.square().mean()


@pytest.mark.parametrize("is_in_blocks", [False, True])
def test_a_deep_model_leaves_what_all_its_blocks_leave(is_in_blocks: bool) -> None:
    model, x = Kept(10, is_in_blocks), batch()[0]
    model.last = None
    graph = capture(model, (x,))
    assert graph.left == (*sorted(f"blocks.{k}.kept" for k in range(10 * is_in_blocks)), "last")
    assert len(graph.gradients) == 20 and all(output is not None for output in graph.outputs[:1])
    assert model.last is None and not any(hasattr(block, "kept") for block in model.blocks)


def test_torch_compile_leaves_the_step_as_it_is() -> None:
    """Torch wants a gradient for each result that is a DTensor and could have one (pytorch issue 172556)."""
    model, args = made(Stacked), batch()
    plan = autoshard.plan(model, args, mesh={"a": 1})
    expected = two_steps(made(Stacked), args, lambda m, given: m(*given) + m.aux, of_attention)

    def one(rank: int) -> list[Any]:
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("a",))
        parallel = autoshard.parallelize(model, plan, mesh, args)
        given = autoshard.shard_inputs(plan, mesh, *args)
        with pytest.raises(Exception, match="leaves a tensor in the attribute aux"):
            torch.compile(parallel, backend="aot_eager", fullgraph=True)(*given)
        compiled = torch.compile(parallel, backend="aot_eager")
        return two_steps(parallel, given, lambda m, each: compiled(*each) + m.aux, of_attention)

    (found,) = run_ranks(1, one)
    if isinstance(found, BaseException):
        raise found
    for value, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(value, theirs, rtol=1e-4, atol=1e-5)


class Positions(nn.Module):
    """Keeps what it has computed, and asks before whether it is there, as Qwen-VL does with positions."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.delta, self.decodes = nn.Linear(8, 8), None, False

    def forward(self, x: Tensor) -> Tensor:
        if self.delta is None or not self.decodes:
            self.delta = x.detach().cumsum(1)[:, -1:]
        else:
            x = x + self.delta
        return self.enter(x).square().mean()


def test_what_a_forward_asks_for_and_does_not_read_is_a_buffer_once_it_is_there() -> None:
    model, x = Positions().double(), torch.randn(4, 8, dtype=torch.float64)
    with pytest.raises(CaptureError, match="call it once before planning"):
        capture(model, (x,))
    model(x)
    plan = autoshard.plan(model, (x,), mesh="a=2", hardware="cpu-gloo")
    assert "delta" in dict(model.named_buffers())
    check_as_before(model, (x,), plan, rtol=1e-8, atol=1e-10, batch=(2 * x,))
