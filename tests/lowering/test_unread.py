"""A result that is made when it is read: what reads it makes it, what does not leaves it alone, and it is made once."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import init_device_mesh

import autoshard
from autoshard.errors import JobError
from autoshard.lowering.adapter import BoxedCodeGen
from autoshard.lowering.emitter import LocalGraph
from autoshard.lowering.unread import Pending, Unread

from ..distributed import cases
from ..one_process import fake_ranks

READS: dict[str, Callable[[Tensor], Any]] = {
    "item": Tensor.item,
    "float": float,
    "bool": bool,
    "repr": repr,
    "format": "{:.2f}".format,
    "tolist": Tensor.tolist,
    "numpy": lambda loss: loss.detach().numpy(),
    "detach": Tensor.detach,
    "data": lambda loss: loss.data,
    "half": lambda loss: loss / 2,
    "stacked": lambda loss: torch.stack([loss, loss]),
    "pair": lambda loss: torch.cat([loss[None], torch.ones(1)]),
    "isnan": torch.isnan,
    "compared": lambda loss: loss > 1,
    "copied": lambda loss: copy.deepcopy(loss.detach()),
    "pickled": lambda loss: pickle.loads(pickle.dumps(loss.detach())),
    "address": Tensor.data_ptr,
    "retained": lambda loss: loss.retain_grad(),
    "hooked": lambda loss: loss.register_hook(lambda gradient: gradient),
    "compiled": torch.compile(lambda loss: loss * 2, backend="eager"),
}
LEAVES: dict[str, Callable[[Tensor], Any]] = {
    "requires_grad": lambda loss: loss.requires_grad,
    "grad_fn": lambda loss: loss.grad_fn,
    "shape": lambda loss: (loss.shape, loss.size(), loss.dim(), loss.ndim, loss.numel()),
    "kind": lambda loss: (loss.dtype, loss.device, loss.is_leaf),
    "identity": id,
    "in a list": lambda loss: [loss],
}


class NoFailures:
    def telling(self, doing: str, anew: bool = True) -> Any:
        return nullcontext()


def doubled() -> LocalGraph:
    graph = fx.Graph()
    graph.set_codegen(BoxedCodeGen())
    given = graph.placeholder("given")
    made = graph.call_function(torch.mul, (given, 2))
    made.meta["val"] = torch.empty(())
    graph.output((made,))
    return LocalGraph(graph, "Doubled")


def unread(value: float) -> tuple[Tensor, Tensor]:
    """A result that is to be twice a number, and what its gradient gets to."""
    pending = Pending(doubled(), [torch.tensor(value)], NoFailures())  # type: ignore[arg-type]
    source = torch.zeros((), requires_grad=True)
    result = _Placed.apply(source, pending.places[0].detach())
    pending.show([result])
    return result, source


class _Placed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, source: Tensor, place: Tensor) -> Tensor:
        return place.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's own, of any tensor in its graph
@pytest.mark.parametrize("name", READS)
def test_what_reads_it_makes_it(name: str) -> None:
    result, _ = unread(1.5)
    READS[name](result)
    assert type(result) is Tensor and result.item() == 3.0


@pytest.mark.parametrize("name", LEAVES)
def test_what_does_not_leaves_it(name: str) -> None:
    result, _ = unread(1.5)
    LEAVES[name](result)
    assert type(result) is Unread
    with torch._C.DisableTorchFunctionSubclass():
        assert math.isnan(result.item()), "who gets at it all the same sees no number"


@pytest.mark.parametrize("how", ["backward", "grad"])
def test_to_go_backward_reads_nothing(how: str) -> None:
    result, source = unread(1.5)
    if how == "backward":
        result.backward()
        gradient = source.grad
    else:
        (gradient,) = torch.autograd.grad(result, source)
    assert type(result) is Unread and gradient == 1
    assert result.item() == 3.0


def test_a_result_that_breaks_off_does_so_each_time() -> None:
    class Broken(NoFailures):
        @contextmanager
        def telling(self, doing: str, anew: bool = True) -> Iterator[None]:
            assert not anew, "what this rank told of before still counts"
            raise JobError("another rank has ended")
            yield

    pending = Pending(doubled(), [torch.tensor(1.0)], Broken())  # type: ignore[arg-type]
    result = pending.places[0].detach()
    pending.show([result])
    for _ in range(2):
        with pytest.raises(JobError, match="another rank has ended"):
            float(result)


def test_a_step_shows_it_in_the_models_own_structure() -> None:
    """Of a loss beside other results the loss alone is late; a step of which nothing goes backward has none."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            y = self.linear(x)
            return {"loss": y.square().mean(), "y": y, "count": (y > 0).sum()}

    x = torch.randn(8, 4)
    plan = autoshard.plan(
        Model(), (x,), mesh="dp=2", hardware="cpu-gloo", pins=["x=dp:S(0)", "*/addmm=dp:S(0)", "*/pow=dp:S(0)"]
    )
    assert [name for name in plan.deferred if name.startswith("output")] == ["output.0"]
    with fake_ranks(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        model = autoshard.parallelize(Model(), plan, mesh, (x,))
        given = autoshard.shard_inputs(plan, mesh, x)
        found = model(*given)
        assert [type(found[name]) is Unread for name in ("loss", "y", "count")] == [True, False, False]
        found["loss"].backward()
        assert type(found["loss"]) is Tensor and not found["loss"].isnan()
        with torch.no_grad():
            assert type(model(*given)["loss"]) is Tensor


class OfWhatTheCallerHas(nn.Module):
    """A loss of a number that the caller can change before it is read: an input, a buffer, another result."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.linear, self.what = nn.Linear(4, 4), what
        self.register_buffer("calls", torch.ones(()))

    def forward(self, x: Tensor, scale: Tensor) -> Any:
        squares = self.linear(x).square()
        if self.what == "input":
            return squares.mean() / scale
        if self.what == "buffer":
            loss = squares.mean() + self.calls
            self.calls += 1
            return loss
        auxiliary = squares.amax(1).mean()
        return squares.mean() + auxiliary, auxiliary


@pytest.mark.parametrize("what", ["input", "buffer", "result"])
def test_what_the_caller_can_change_is_read_in_the_forward(what: str) -> None:
    args = (torch.randn(8, 4), torch.tensor(2.0))
    pins = ["x=dp:S(0)", "*/addmm=dp:S(0)", "*/pow=dp:S(0)"]
    plan = autoshard.plan(OfWhatTheCallerHas(what), args, mesh="dp=2", hardware="cpu-gloo", pins=pins)
    assert "output.0" not in plan.deferred
    assert any(entry.phase == "forward" and entry.collectives for entry in plan.redistributions)


def test_a_plan_that_says_nothing_of_it_waits_in_the_forward() -> None:
    plan = cases.baseline_plan("mlp", "dp=2", "ddp")
    assert plan.deferred
    text = "".join(line for line in autoshard.dump_plan(plan).splitlines(True) if not line.startswith("deferred:"))
    before = autoshard.parse_plan(text)
    assert not before.deferred
    model, args = cases.make("mlp")
    with fake_ranks(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        parallel = autoshard.parallelize(model, before, mesh, args)
        assert type(parallel(*autoshard.shard_inputs(before, mesh, *args))) is Tensor
