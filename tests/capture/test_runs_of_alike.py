"""``itertools.groupby`` as dynamo follows it, against Python's."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoshard.capture import capture
from autoshard.capture.dynamo.runs_of_alike import groups

Groups = Iterator[tuple[Any, Iterator[Any]]]
# What is done with the groups; of each, how much is taken before the next one is asked for differs.
TAKEN: dict[str, Callable[[Groups], Any]] = {
    "all": lambda found: [(key, list(group)) for key, group in found],
    "none": lambda found: [key for key, _ in found],
    "one": lambda found: [next(group) for _, group in found],
    "too late": lambda found: [(key, list(group)) for key, group in list(found)],
}


@pytest.mark.parametrize("taken", TAKEN)
@pytest.mark.parametrize("word", ["", "a", "aabbbaac", "aAaB"])
@pytest.mark.parametrize("key", [None, str.lower])
def test_groups_are_those_of_python(taken: str, word: str, key: Callable[[str], str] | None) -> None:
    assert TAKEN[taken](groups(word, key)) == TAKEN[taken](itertools.groupby(word, key))


class Runs(nn.Module):
    """Scales by how long runs are of words of one length, as far as they are asked for in time."""

    def forward(self, x: Tensor) -> Tensor:
        words = ["a", "b", "cc", "d"]
        for size, run in itertools.groupby(words, len):
            x = x * (10 * size + len(list(run)))
        for _, late in list(itertools.groupby(words, key=len)):
            x = x + len(list(late))
        return x


def test_a_forward_goes_through_them() -> None:
    graph = capture(Runs(), (torch.ones(2),))
    numbers = [argument for node in graph.nodes for argument in node.args if isinstance(argument, int)]
    assert numbers == [12, 21, 11, 0, 0, 0]
