"""What a forward changes and puts back within a call, as ``torch.func.functional_call`` does with the tensors of
modules in modules: as in one process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import autoshard

from ..thorough import some_thorough
from .as_before import check_as_before

SIZE = 4
Body = Callable[[Any, Tensor], Tensor]


class Model(nn.Module):
    def __init__(self, body: Body) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = body
        self.seq = nn.Sequential(nn.Linear(SIZE, SIZE), nn.Tanh(), nn.Linear(SIZE, SIZE))
        self.tied = nn.Sequential(nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE))
        self.tied[1].weight = self.tied[0].weight
        self.norm = nn.Sequential(nn.BatchNorm1d(SIZE))
        self.other = nn.Parameter(torch.randn(SIZE, SIZE))
        self.register_buffer("mean", torch.randn(SIZE))
        self.register_buffer("variance", torch.rand(SIZE))
        self.widths, self.tables = [1, 2], {"a": [1, 2], "b": [3]}
        self.current, self.plain = self.tied, {"a": torch.ones(SIZE).double(), "b": torch.ones(SIZE)}
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return (self.body(self, x) + self.tied(self.seq(x))).square().mean()


def one_weight(m: Any, x: Tensor) -> Tensor:
    return functional_call(m.seq, {"0.weight": m.other}, (x,))


def all_of_them(m: Any, x: Tensor) -> Tensor:
    return functional_call(m.seq, {name: p * 2 for name, p in m.seq.named_parameters()}, (x,))


def twice(m: Any, x: Tensor) -> Tensor:
    return one_weight(m, one_weight(m, x)) + all_of_them(m, x)


def both_of_two_that_are_tied(m: Any, x: Tensor) -> Tensor:
    return functional_call(m.tied, {"0.weight": m.other}, (x,))


def buffers(m: Any, x: Tensor) -> Tensor:
    given = {"0.running_mean": m.mean, "0.running_var": m.variance * 2, "0.weight": m.other.sum(0)}
    return functional_call(m.norm, given, (x,))


def a_list(m: Any, x: Tensor) -> Tensor:
    kept, m.widths = m.widths, [3]
    x = x * sum(m.widths)
    m.widths = kept
    return x * sum(m.widths)


def a_list_in_a_dict(m: Any, x: Tensor) -> Tensor:
    kept, m.tables["a"] = m.tables["a"], m.tables["b"]
    x = x * sum(m.tables["a"])
    m.tables["a"] = kept
    return x * sum(m.tables["a"])


def a_module_beside_plain_tensors(m: Any, x: Tensor) -> Tensor:
    kept, m.current = m.current, m.seq
    x = m.current(x)
    m.current = kept
    return m.current(x) * m.plain["a"]


BODIES: list[Body] = [
    one_weight, all_of_them, twice, both_of_two_that_are_tied, buffers, a_list, a_list_in_a_dict,
    a_module_beside_plain_tensors,
]  # fmt: skip


@pytest.mark.parametrize("baseline", some_thorough(["ddp", "fsdp"], ["ddp"]))
@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_what_is_put_back_is_no_change(body: Body, baseline: str) -> None:
    model, x = Model(body), torch.randn(8, SIZE, dtype=torch.float64)
    constraints = [f"baseline {baseline}"]
    plan = autoshard.plan(model, x, mesh="a=2", hardware="cpu-gloo", constraints=constraints, cache=False)
    check_as_before(model, (x,), plan, rtol=1e-9, atol=1e-12)
