"""Results of every kind come back as the model gives them, and gradients flow into all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

import autoshard
from autoshard.capture import capture
from autoshard.errors import CaptureError

from ..one_process import one_rank
from .sessions import Model, both, differences, example, full, loss_of, state_of

Body = Callable[[Any, Tensor], Any]


@dataclass
class Output:
    loss: Tensor
    logits: Tensor | None = None
    hidden: tuple[Tensor, ...] | None = None


BODIES: dict[str, Body] = {
    "a view of another": lambda m, x: ((y := x @ m.w), y[0]),
    "a view of a later one": lambda m, x: ((y := x @ m.w)[0], y),
    "a transposed one": lambda m, x: ((y := x @ m.w), y.t()),
    "the same twice": lambda m, x: ((y := x @ m.w), y),
    "the same thrice, in containers": lambda m, x: {"a": (y := x @ m.w), "b": [y, (x @ m.v, y)]},
    "a parameter": lambda m, x: (x @ m.w, m.w),
    "an unused parameter": lambda m, x: (x @ m.w, m.bias),
    "a frozen parameter": lambda m, x: (x @ m.w, m.frozen),
    "a view of a parameter": lambda m, x: (x @ m.w, m.w.t()),
    "an expanded parameter": lambda m, x: m.bias.expand(2, -1),
    "an input": lambda m, x: (x @ m.w, x),
    "a view of an input": lambda m, x: (x @ m.w, x[0]),
    "a buffer": lambda m, x: (x @ m.w, m.scale),
    "a changed buffer": lambda m, x: (x @ m.w, m.count.add_(1)),
    "a view of a buffer that changes later": lambda m, x: (m.count[:2], m.count.add_(1), x @ m.w)[::2],
    "buffers that change places": lambda m, x: (m.count.copy_(m.scale), m.scale.add_(1), x @ m.w)[2],
    "detached": lambda m, x: ((y := x @ m.w), y.detach()),
    "parts of one": lambda m, x: (x @ m.w).split(2),
    "columns of one": lambda m, x: (x @ m.w).unbind(1),
    "changed in place": lambda m, x: ((y := x @ m.w), y.add_(1)),
    "without a change": lambda m, x: ((y := x @ m.w), y.contiguous(), y.to(y.dtype), F.dropout(y, 0.5, training=False)),
    "reshaped": lambda m, x: ((y := x @ m.w), y.reshape(-1), y.reshape(2, 8)),
    "scalars": lambda m, x: ((y := (x @ m.w).sum(0)), y[0], y.sum(), (x > 0).sum(), (x > 0).any(), y.sum().half()),
    "a loss that is a view": lambda m, x: (x @ m.w).square().mean().view(1)[0],
    "no tensors": lambda m, x: {"y": x @ m.w, "none": None, "three": 3, "text": ["a", (True, 1.5)]},
    "a dataclass": lambda m, x: Output((y := x @ m.w).mean(), hidden=(y, x @ m.v)),
    "a dataclass with what is there already": lambda m, x: Output((y := x @ m.w).mean(), y, (y, m.w, x)),
    "a dataclass that is a buffer": lambda m, x: (x @ m.w, Output(m.scale, x)),
    "integers and booleans": lambda m, x: ((y := x @ m.w), y.argmax(1), y > 0, y.max(dim=0)),
    "lower precision": lambda m, x: ((x @ m.w).half(), (x.bfloat16() @ m.v.bfloat16()).sum()),
    "statistics in lower precision": lambda m, x: F.batch_norm(
        (x @ m.w).half(), None, None, m.bias.half(), training=True
    ),
    "two parameters with one gradient": lambda m, x: x @ (m.v + m.w),
    "the gradient that is given": lambda m, x: m.v * 1.0 + m.w,
}


@pytest.mark.parametrize("name", BODIES)
def test_results_and_gradients_are_those_of_the_model(name: str) -> None:
    with one_rank() as mesh:
        parallel, reference = both(BODIES[name], mesh)
        for _ in range(2):  # the second time, gradients add up and buffers go on from where they are
            ours, theirs = parallel(example()), reference(example())
            assert not list(differences(ours, theirs))
            for results in (ours, theirs):
                loss_of(results).backward()
            assert not list(differences(state_of(parallel), state_of(reference)))


def test_a_result_that_is_another_tensor_is_that_very_tensor() -> None:
    def body(m: Any, x: Tensor) -> Any:
        y = x @ m.w
        return y, m.w, y, x, m.scale

    with one_rank() as mesh:
        parallel, _ = both(body, mesh)
        y, w, again, x, scale = parallel(example())
        assert again is y and w is parallel.w
        x, scale = (value.to_local() for value in (x, scale))
        given = example()
        _, _, _, back, _ = parallel(given)
        assert isinstance(back, DTensor)
        back.zero_()
        assert not given.any(), "a write into the result is a write into the argument"
        assert scale.data_ptr() == parallel.scale.data_ptr()


def test_no_two_results_share_memory_with_each_other_or_with_what_the_caller_has() -> None:
    def body(m: Any, x: Tensor) -> Any:
        y = x @ m.w
        return y, y[0], y.view(-1), x[1:], m.w[0], m.scale[:2], y.detach()

    with one_rank() as mesh:
        parallel, _ = both(body, mesh)
        x = example()
        results = [value.to_local() for value in parallel(x)]
        held = [x, *parallel.buffers(), *(p.to_local() for p in parallel.parameters())]
        owners = [tensor.untyped_storage().data_ptr() for tensor in (*results, *held)]
        assert len(set(owners)) == len(owners)


def test_only_a_result_that_shares_memory_adds_a_copy_to_the_graph() -> None:
    bodies: list[Body] = [lambda m, x: x @ m.w, lambda m, x: ((y := x @ m.w), y[0])]
    alone, with_view = ({node.name for node in capture(Model(body), (example(),)).nodes} for body in bodies)
    assert with_view - alone == {"/select", "/clone", "grad.1", "/bwd.select_backward", "/bwd.add"}


@pytest.mark.parametrize("body", [lambda m, x: m.w, lambda m, x: (x, 3), lambda m, x: None])
def test_a_model_that_computes_nothing_is_refused(body: Body) -> None:
    with pytest.raises(CaptureError, match="Model computes nothing"):
        capture(Model(body), (example(),))


def test_a_tied_parameter_comes_back_under_either_name() -> None:
    class Tied(Model):
        def __init__(self, body: Body) -> None:
            super().__init__(body)
            self.again = self.w

    with one_rank() as mesh:
        model = Tied(lambda m, x: (x @ m.w, m.again))
        values = model.w.detach().clone()
        parallel = autoshard.auto_parallelize(model, mesh, (example(),))
        result = parallel(example())[1]
        assert result is parallel.w and torch.equal(full(result), values)
