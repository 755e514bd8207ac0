"""Numbers that Python or numpy draws: left out where they change nothing, and refused elsewhere."""

from __future__ import annotations

import inspect
import operator
import pickle
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autoshard.capture import CapturedGraph, capture
from autoshard.capture.dynamo.python_draws import compared
from autoshard.errors import CaptureError

RELATIONS = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}
DRAWN = [0.0, 2.0**-53, 0.25, 0.5, 0.75, 1 - 2.0**-53]
NUMBERS = [-1, -0.0, 0, 0.25, 0.5, True, 1.0, 3]


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize("is_turned", [False, True])
def test_what_is_known_is_so_of_every_number(relation: str, is_turned: bool) -> None:
    """The numbers that are drawn hold the least, the largest, and those that are compared with."""
    for number in NUMBERS:
        pairs = [(number, drawn) if is_turned else (drawn, number) for drawn in DRAWN]
        found = {RELATIONS[relation](a, b) for a, b in pairs}
        assert compared(relation, number, is_turned=is_turned) == (found.pop() if len(found) == 1 else None)


@pytest.mark.parametrize("number", [None, "a", float("nan"), 1j])
def test_nothing_is_known_of_what_is_no_number(number: object) -> None:
    assert compared("<", number) is None


class Dropping(nn.Module):
    """A linear layer, and a function that draws."""

    def __init__(self, body: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.linear, self.body = nn.Linear(4, 4), body
        self.layerdrop, self.always, self.generator = 0.0, 1.0, random.Random(0)

    def forward(self, x: Any) -> Any:
        return self.body(self, self.linear(x))


def layers(m: Any, x: Tensor) -> Tensor:
    """As MusicGen and its like drop layers."""
    for _ in range(2):
        drawn = random.uniform(0, 1)
        if m.training and (drawn < m.layerdrop):
            continue
        x = x.tanh()
    return x


def turned(m: Any, x: Tensor) -> Tensor:
    return x if m.layerdrop > random.random() else x.tanh().tanh()


def kept(m: Any, x: Tensor) -> Tensor:
    return x.tanh().tanh() if not m.training or random.random() < m.always else x


def chained(m: Any, x: Tensor) -> Tensor:
    return x.tanh().tanh() if 0 <= random.random() < 1 else x


def passed(m: Any, x: Tensor) -> Tensor:
    def is_dropped(drawn: float) -> bool:
        return drawn < m.layerdrop

    return x if is_dropped(random.random()) else x.tanh().tanh()


def ignored(m: Any, x: Tensor) -> Tensor:
    random.random()
    return x.tanh().tanh()


def layers_by_numpy(m: Any, x: Tensor) -> Tensor:
    """As fairseq drops layers."""
    for _ in range(2):
        drawn = np.random.random()
        if not m.training or (drawn >= m.layerdrop and np.random.uniform(0, 1) >= m.layerdrop):
            x = x.tanh()
    return x


def kept_by_numpy(m: Any, x: Tensor) -> Tensor:
    return x.tanh().tanh() if np.random.rand() < m.always and np.random.uniform() >= m.layerdrop else x


def states() -> tuple[object, bytes]:
    """Where Python's numbers and numpy's go on."""
    return random.getstate(), pickle.dumps(np.random.get_state())


def graph_of(body: Callable[[Any, Any], Any], **attributes: Any) -> tuple[Dropping, CapturedGraph]:
    model = Dropping(body)
    for name, value in attributes.items():
        setattr(model, name, value)
    return model, capture(model, (torch.randn(3, 4),), guarded=True)


@pytest.mark.parametrize("body", [layers, turned, kept, chained, passed, ignored, layers_by_numpy, kept_by_numpy])
@pytest.mark.parametrize("training", [True, False])
def test_a_number_that_decides_nothing_is_not_drawn(body: Any, training: bool) -> None:
    if body is passed and torch.__version__ < "2.12":
        pytest.skip("dynamo of torch 2.11 draws a number that is handed to a function")
    before = states()
    _, graph = graph_of(body, training=training)
    assert [node.op for node in graph.nodes if node.phase == "forward"].count(torch.ops.aten.tanh.default) == 2
    assert states() == before


@pytest.mark.parametrize(
    ("body", "name", "value"), [(layers, "layerdrop", 0.1), (turned, "layerdrop", 0.1), (kept, "always", 0.9)]
)
def test_the_number_that_it_is_compared_with_must_stay(body: Any, name: str, value: float) -> None:
    model, graph = graph_of(body)
    guards = graph.guards
    assert guards is not None and guards.broken() is None
    setattr(model, name, value)
    broken = guards.broken()
    assert broken is not None and broken[0].startswith(f"model.{name} == ") and "test_python_draws.py" in broken[1]


def undecided(m: Any, x: Tensor) -> Tensor:
    return x if random.uniform(0, 1) < 0.5 else x.tanh()  # culprit


def between(m: Any, x: Tensor) -> Tensor:
    drawn = random.random()  # culprit
    return x if drawn < 1 and drawn < 0.5 else x.tanh()


def two(m: Any, x: Tensor) -> Tensor:
    return x if random.random() < random.random() else x.tanh()  # culprit


def truth(m: Any, x: Tensor) -> Tensor:
    return x if random.random() else x.tanh()  # culprit


def computed(m: Any, x: Tensor) -> Tensor:
    return x * random.random()  # culprit


def returned(m: Any, x: Tensor) -> Any:
    return x, random.random()  # culprit


def attribute(m: Any, x: Tensor) -> Tensor:
    m.last = random.random()  # culprit
    return x


def of_others(m: Any, x: Tensor) -> Tensor:
    return x if random.uniform(0, 2) < 0 else x.tanh()  # culprit


def of_its_own(m: Any, x: Tensor) -> Tensor:
    return x if m.generator.random() < 0 else x.tanh()  # culprit


def within_checkpoint(m: Any, x: Tensor) -> Tensor:
    drawn = random.random()  # culprit
    result: Tensor = checkpoint(lambda y: y.exp() if drawn < 0 else y.tanh(), x, use_reentrant=False)
    return result


def by_numpy(m: Any, x: Tensor) -> Tensor:
    return x if np.random.rand() > 0.5 else x.tanh()  # culprit


def times_numpy(m: Any, x: Tensor) -> Tensor:
    return x * np.random.normal(0.0, scale=1.0)  # culprit


def integer_of_numpy(m: Any, x: Tensor) -> Tensor:
    return x * int(np.random.randint(3))  # culprit


def of_a_generator(m: Any, x: Tensor) -> Tensor:
    return x * np.random.default_rng().random()  # culprit


def mixed(m: Any, x: Tensor) -> Tensor:
    """As mixup weighs."""
    return x * np.random.beta(0.4, 0.4)  # culprit


REFUSED = [undecided, between, two, truth, computed, returned, attribute, of_others, of_its_own, within_checkpoint]
REFUSED_OF_NUMPY = [by_numpy, times_numpy, integer_of_numpy, of_a_generator, mixed]


@pytest.mark.parametrize("body", REFUSED + REFUSED_OF_NUMPY)
def test_a_number_that_decides_something_is_refused(body: Any) -> None:
    before = states()
    with pytest.raises(CaptureError, match=r"draws a random number in Python .*torch\.rand") as caught:
        graph_of(body)
    lines, first = inspect.getsourcelines(body)
    (culprit,) = (first + k for k, line in enumerate(lines) if "# culprit" in line)
    assert f"{__file__}:{culprit}" in str(caught.value)
    assert states() == before


def test_a_layer_with_a_probability_is_refused() -> None:
    with pytest.raises(CaptureError, match="draws a random number"):
        graph_of(layers, layerdrop=0.1)


def test_several_numbers_of_numpy_are_drawn_by_torch() -> None:
    before = states()
    _, graph = graph_of(lambda m, x: x * torch.from_numpy(np.random.rand(4)).float())
    assert any("uniform" in str(node.op) or "rand" in str(node.op) for node in graph.nodes)
    assert states() == before
