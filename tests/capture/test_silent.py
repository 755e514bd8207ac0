"""What a forward only says (warnings, prints, logs) is left out of its graph, and nothing is said while planning."""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoshard
from autoshard.capture import capture
from autoshard.errors import CaptureError

LOGGER = logging.getLogger(__name__)


@functools.lru_cache
def once(logger: logging.Logger, text: str) -> None:
    """As the ``warning_once`` that transformers gives its loggers."""
    logger.warning(text)


class Saying(nn.Module):
    def __init__(self, say: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.say = nn.Linear(4, 4), say

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x)
        self.say(y)
        return y * 2


def warn(y: Tensor) -> None:
    warnings.warn("a batch of one", stacklevel=2)
    warnings.warn(f"shape {y.shape}, mean {y.mean()}", category=FutureWarning, stacklevel=2)
    warnings.warn(DeprecationWarning("old"), stacklevel=2)


def use_none(y: Tensor) -> None:
    assert warnings.warn("this gives None", stacklevel=2) is None


def within_filters(y: Tensor) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("ignore", message="this")
        warnings.warn("this", stacklevel=2)


def say(y: Tensor) -> None:
    print("shape", y.shape, y, f"{y.std()}", sep=", ")


def say_a_number(y: Tensor) -> None:
    print(y.mean().item(), int(y.argmax()))


def say_what_is_positive(y: Tensor) -> None:
    print(y[y > 0])


def log(y: Tensor) -> None:
    logging.warning("shape %s", y.shape)
    LOGGER.warning("mean %s", y.mean())
    LOGGER.info("here")
    once(LOGGER, "once")


SAYING = [warn, use_none, within_filters, say, say_a_number, say_what_is_positive, log]


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning")
@pytest.mark.parametrize("say", SAYING, ids=lambda say: say.__name__)
def test_what_a_forward_says_is_left_out_of_its_graph(say: Any, capsys: pytest.CaptureFixture[str]) -> None:
    graph, silent = (capture(Saying(body), (torch.randn(3, 4),), guarded=True) for body in (say, lambda y: None))
    assert [(node.name, node.op) for node in graph.nodes] == [(node.name, node.op) for node in silent.nodes]
    assert graph.guards is not None and graph.guards.broken() is None
    assert capsys.readouterr().out == ""


def test_a_deep_model_that_prints_and_warns_says_nothing_while_it_is_captured(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its forward is run as the Python it is, on tensors without memory."""

    def both(y: Tensor) -> None:
        say(y)
        warnings.warn("a batch of one", stacklevel=2)

    model = nn.Sequential(*(Saying(both) for _ in range(9)))
    assert len(capture(model, (torch.randn(3, 4),)).nodes) > 9
    assert capsys.readouterr().out == ""


def test_what_a_representative_argument_decides_in_the_backward_is_not_warned_of() -> None:
    class Putting(Saying):
        def forward(self, x: Tensor, picked: Tensor) -> Any:  # type: ignore[override]
            made = torch.zeros(3, 4)
            made[picked] = self.linear(x)[:2]
            return made.square()

    picked = autoshard.representative(torch.tensor([True, False, True]))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert capture(Putting(lambda y: None), (torch.randn(3, 4), picked)).gradients
    assert not said


def test_the_filters_of_warnings_stay_as_they_are() -> None:
    def leave_set(y: Tensor) -> None:
        warnings.simplefilter("ignore")

    before = list(warnings.filters)
    capture(Saying(leave_set), (torch.randn(3, 4),))
    assert warnings.filters == before


def test_a_forward_that_records_its_warnings_is_refused() -> None:
    """It would compute with a list that is empty."""

    def record(y: Tensor) -> None:
        with warnings.catch_warnings(record=True) as found:
            warnings.warn("one", stacklevel=2)
        y.mul_(len(found))

    with pytest.raises(CaptureError, match=r"test_silent.py:\d+: with .*leave record=True out"):
        capture(Saying(record), (torch.randn(3, 4),))
