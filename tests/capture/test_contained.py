"""Tensors in lists, tuples and dicts of modules: buffers that stay where they are."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from autoshard.capture import CapturedGraph, capture
from autoshard.errors import CaptureError

SIZE = 4


class Pair(NamedTuple):
    """A tensor and a number."""

    tensor: Tensor
    number: int


def ones(factor: float = 1.0) -> Tensor:
    return torch.full((SIZE,), factor)


class Containing(nn.Module):
    """A linear layer beside containers of tensors; ``body`` is the forward."""

    def __init__(self, body: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.body, self.linear = body, nn.Linear(SIZE, SIZE)
        self.tables = {"a": ones(), "b.c": ones(2), 3: ones(3), "nested": {"d": [ones(4)]}}
        self.ordered: dict[str, Tensor] = OrderedDict(a=ones(5))
        self.masks = [ones(6), ones(7)]
        self.pairs = (Pair(ones(8), 3), Pair(ones(9), 4))
        self.again = (self.tables["a"], self.masks)
        self.register_buffer("kept", ones(10))
        self.of_kept = [self.kept]
        self.views = list(torch.ones(2, SIZE))
        self.trained = [ones().requires_grad_()]
        self.attribute = ones().requires_grad_()
        self.of_attribute = [self.attribute.detach()]
        self.frozen = [nn.Parameter(ones(), requires_grad=False)]

    def forward(self, x: Any) -> Any:
        return self.body(self, self.linear(x))


def example() -> Tensor:
    return torch.randn(3, SIZE, generator=torch.Generator().manual_seed(0))


def captured(model: nn.Module) -> CapturedGraph:
    return capture(model, (example(),), guarded=True)


def buffers(graph: CapturedGraph) -> list[str]:
    return [node.name for _, node in graph.of_kind("buffer")]


def from_all(m: Any, x: Tensor) -> Tensor:
    for mask in m.masks:
        x = x * mask
    x = x * m.tables["a"] * m.tables["b.c"] * m.tables[3] * m.tables["nested"]["d"][0]
    return x * m.ordered["a"] * m.pairs[1].tensor


READS: list[tuple[Callable[[Any, Any], Any], list[str]]] = [
    (lambda m, x: x * m.tables["a"], ["tables-a"]),
    (lambda m, x: x * m.tables["b.c"] * m.tables[3], ["tables-b_c", "tables-3"]),
    (lambda m, x: x * m.tables["nested"]["d"][0], ["tables-nested-d-0"]),
    (lambda m, x: x * m.ordered["a"], ["ordered-a"]),
    (lambda m, x: x * m.masks[1], ["masks-1"]),
    (lambda m, x: x * m.pairs[0].tensor * m.pairs[1].number, ["pairs-0-0"]),
    (lambda m, x: x * m.again[0] * m.again[1][0], ["tables-a", "masks-0"]),
    (lambda m, x: x * m.of_kept[0], ["kept"]),
    (lambda m, x: x, []),
]


@pytest.mark.parametrize(("body", "names"), READS, ids=[" ".join(names) for _, names in READS])
def test_what_is_read_out_of_a_container_becomes_a_buffer_that_checkpoints_leave_out(body: Any, names: Any) -> None:
    model = Containing(body)
    saved, before = list(model.state_dict()), contents(model)
    assert sorted(buffers(captured(model))) == sorted(names)
    assert list(model.state_dict()) == saved and contents(model) == before
    assert set(dict(model.named_buffers())) == {*names, "kept"}


def contents(model: Any) -> list[int]:
    """The identities of containers and of all that is in them."""

    def inside(value: Any) -> Iterator[int]:
        yield id(value)
        for item in value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ():
            yield from inside(item)

    return [
        identity
        for name in ("tables", "ordered", "masks", "pairs", "again")
        for identity in inside(getattr(model, name))
    ]


@pytest.mark.parametrize("name", ["views", "trained", "of_attribute", "frozen"])
def test_views_and_what_is_trained_stay_as_they_are(name: str) -> None:
    model = Containing(lambda m, x: x * getattr(m, name)[0])
    with pytest.raises(CaptureError, match="register_buffer"):
        captured(model)
    assert set(dict(model.named_buffers())) == {"kept"}


def put(m: Any, x: Tensor) -> Tensor:
    m.tables["a"] = x.detach()
    return x


def appended(m: Any, x: Tensor) -> Tensor:
    m.masks.append(x.detach())
    return x * m.masks[0]


@pytest.mark.parametrize("body", [put, appended])
def test_a_forward_that_changes_a_container_is_refused(body: Any) -> None:
    model = Containing(body)
    before = contents(model)
    with pytest.raises(CaptureError, match=r"the forward changes model\.(tables|masks)"):
        captured(model)
    assert contents(model) == before and set(dict(model.named_buffers())) == {"kept"}


def test_a_tensor_in_a_container_may_be_written_into() -> None:
    graph = captured(Containing(lambda m, x: x * m.masks[0].mul_(0.9)))
    assert [name for name, _ in graph.mutations] == ["masks-0"]


def test_the_next_capture_finds_the_same_buffers_in_a_copy_too() -> None:
    model = Containing(from_all)
    first = captured(model)
    for again in (model, deepcopy(model)):
        assert buffers(captured(again)) == buffers(first)
        assert again.get_buffer("tables-a") is again.tables["a"]


def test_what_is_in_the_container_is_the_buffer() -> None:
    model = Containing(from_all)
    names = buffers(captured(model))
    model.tables["a"] = ones(20)
    model.half().float()  # other buffers, in the same containers
    assert buffers(captured(model)) == names
    assert model.get_buffer("tables-a") is model.tables["a"] and model.tables["a"][0] == 20
    assert model.get_buffer("masks-0") is model.masks[0]


def test_guards_know_the_kinds_and_lengths_of_containers() -> None:
    model = Containing(from_all)
    guards = captured(model).guards
    assert guards is not None and guards.broken() is None
    model.masks.append(ones())
    assert guards.broken() == ("len(model.masks) == 2", guards.broken()[1])  # type: ignore[index]
    model.masks.pop()
    model.pairs = list(model.pairs)  # type: ignore[assignment]
    assert guards.broken()[0] == "type(model.pairs) is tuple"  # type: ignore[index]


def test_a_list_in_a_tuple_has_its_tensors_back() -> None:
    model = nn.Linear(3, 3)
    first, second = torch.ones(3), torch.full((3,), 2.0)
    model.tables = (first, [second, {"third": first * 3}])  # type: ignore[assignment]
    model.forward = lambda x: (nn.functional.linear(x, model.weight) * model.tables[1][0]).sum()  # type: ignore
    inner, third = model.tables[1], model.tables[1][1]["third"]  # type: ignore
    capture(model, (torch.ones(2, 3),))
    assert model.tables[0] is first and model.tables[1] is inner  # type: ignore
    assert inner[0] is second and inner[1]["third"] is third  # type: ignore
