"""Graphs kept for the next process: node for node those of a capture, and none where anything is not as it was."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import nn

from autoshard.capture import CapturedGraph, Node, capture
from autoshard.capture.kept_graph import read_graph
from autoshard.precision import AS_IT_IS, Precision

from ..models import EXAMPLES, Example
from .test_flat import FLAT, WIDTH, Deep, deep, gpt2, llama

CAPTURE = import_module("autoshard.capture.capture")  # the package has a function of that name
FACTOR = 2.0


class Graphs(dict[str, bytes]):
    """A folder of graphs."""

    def put(self, key: str, data: bytes) -> None:
        """Keeps one."""
        self[key] = data


class Tracer:
    """Traces a model, or refuses to."""

    def __init__(self) -> None:
        self.runs, self.traced = 0, CAPTURE.trace

    def __call__(self, *args: Any) -> Any:
        self.runs += 1
        return self.traced(*args)


@pytest.fixture
def tracer(monkeypatch: pytest.MonkeyPatch) -> Tracer:
    found = Tracer()
    monkeypatch.setattr(CAPTURE, "trace", found)
    return found


def stacked(make: Callable[[], nn.Module]) -> Callable[[], Example]:
    return lambda: (make(), (torch.zeros(8, WIDTH),))


def language(make: Callable[[], nn.Module]) -> Callable[[], Example]:
    return lambda: (make(), (torch.zeros(2, 8, dtype=torch.int64),) * 2)


MODELS: dict[str, Callable[[], Example]] = {name: EXAMPLES[name] for name in ("llama", "conv", "moe")}
MODELS |= {name: stacked(FLAT[name]) for name in ("buffers that are written", "dropout", "parts computed again")}
MODELS |= {"two stacks": stacked(FLAT["two stacks"]), "ties": language(gpt2), "a stack": language(llama)}


def same(one: CapturedGraph, other: CapturedGraph) -> None:
    """Checks that two graphs are alike in all but their guards."""
    for mine, its in zip(one.nodes, other.nodes, strict=True):
        for field in fields(Node):
            pair = getattr(mine, field.name), getattr(its, field.name)
            assert repr(pair[0]) == repr(pair[1]), (mine.name, field.name)  # 1, 1.0 and True are equal
    for field in fields(CapturedGraph):
        if field.name not in ("nodes", "guards"):
            assert getattr(one, field.name) == getattr(other, field.name), field.name
    assert type(one.guards) is type(other.guards) and one.fingerprint == other.fingerprint


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        *((name, AS_IT_IS) for name in MODELS),
        pytest.param("a stack", Precision.of("bfloat16", "float32"), marks=pytest.mark.thorough),
    ],
)
def test_a_kept_graph_is_that_of_a_capture_node_by_node(name: str, precision: Precision, tracer: Tracer) -> None:
    graphs = Graphs()
    first, again = (capture(*MODELS[name](), guarded=True, precision=precision, graphs=graphs) for _ in range(2))
    assert tracer.runs == 1
    same(first, again)


class Scaled(nn.Linear):
    """Reads numbers from here and there."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.scale = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (super().forward(x) * self.scale * FACTOR).sum()


def _factor(model: nn.Module, patch: pytest.MonkeyPatch) -> None:
    patch.setitem(globals(), "FACTOR", 3.0)


def _code(model: nn.Module, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Scaled, "forward", lambda self, x: nn.Linear.forward(self, x).sum())


CHANGES: dict[str, Callable[[Any, pytest.MonkeyPatch], object]] = {
    "an attribute": lambda model, patch: setattr(model, "scale", 2.0),
    "a global": _factor,
    "code": _code,
    "mode": lambda model, patch: model.eval(),
    "what is trained": lambda model, patch: model.bias.requires_grad_(False),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_changed_is_captured(change: str, tracer: Tracer, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs, x = Graphs(), torch.zeros(2, 4)
    capture(Scaled(), (x,), guarded=True, graphs=graphs)
    model = Scaled()
    CHANGES[change](model, monkeypatch)
    capture(model, (x,), guarded=True, graphs=graphs)
    capture(model, (torch.zeros(3, 4),), guarded=True, graphs=graphs)
    assert tracer.runs == 3


def test_guards_of_a_kept_graph_see_a_change_of_any_block(tracer: Tracer) -> None:
    graphs, model = Graphs(), deep()
    for each in (deep(), model):
        graph = capture(each, (torch.zeros(8, WIDTH),), guarded=True, graphs=graphs)
    assert tracer.runs == 1 and isinstance(model, Deep) and graph.guards is not None
    for index in (0, 4, len(model.blocks) - 1):
        assert graph.guards.broken() is None
        model.blocks[index].scale = 0.25  # type: ignore[assignment]
        broken = graph.guards.broken()
        assert broken is not None and broken[0] == f"model.blocks.{index}.scale == 0.5" and __file__ not in broken[1]
        assert "test_flat.py" in broken[1]
        model.blocks[index].scale = 0.5  # type: ignore[assignment]


@pytest.fixture(scope="module")
def kept() -> tuple[Any, Any]:
    """What is kept of a model, and the structure of its result."""
    graphs = Graphs()
    graph = capture(Scaled(), (torch.zeros(2, 4),), guarded=True, graphs=graphs)
    (data,) = graphs.values()
    return json.loads(data), graph.out_spec


def _sources(document: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    return [held for name, held in document["guards"]["sources"] if name == kind]


DAMAGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "a part is missing": lambda document: document.pop("gradients"),
    "an operator that is none": lambda document: document["nodes"][-1].__setitem__(4, "aten.nothing.default"),
    "a function in the place of an operator": lambda document: document["nodes"][-1].__setitem__(4, "os.system.x"),
    "a value of an unknown kind": lambda document: document["nodes"][-1].__setitem__(5, ["code", "1 + 1"]),
    "another condition": lambda document: document["guards"]["conditions"][-1].append("model.k == 1"),
    "code in the place of a name": lambda document: _sources(document, "AttrSource")[0].update(
        member="training or breakpoint()"
    ),
    "a module that is not there": lambda document: document["guards"]["modules"].update({"m": "antigravity"}),
    "a source of another kind": lambda document: document["guards"]["sources"][0].__setitem__(0, "ConstantSource"),
    "a guard that is none": lambda document: document["guards"]["guards"][0].__setitem__(1, "__init__"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_no_graph_is_not_read(damage: str, kept: tuple[Any, Any]) -> None:
    document, structure = kept
    assert read_graph(json.dumps(document).encode(), Scaled(), structure, AS_IT_IS) is not None
    damaged = json.loads(json.dumps(document))
    DAMAGES[damage](damaged)
    assert read_graph(json.dumps(damaged).encode(), Scaled(), structure, AS_IT_IS) is None


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"null", b'"text"'])
def test_other_data_is_no_graph(data: bytes, kept: tuple[Any, Any]) -> None:
    assert read_graph(data, Scaled(), kept[1], AS_IT_IS) is None


def test_a_kept_graph_is_not_for_a_model_that_its_guards_refuse(kept: tuple[Any, Any]) -> None:
    model = Scaled()
    model.scale = 2.0
    assert read_graph(json.dumps(kept[0]).encode(), model, kept[1], AS_IT_IS) is None
