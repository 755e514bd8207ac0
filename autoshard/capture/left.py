"""Attributes of modules in which a forward leaves what it has computed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def put_back(model: nn.Module, paths: Iterable[str]) -> Iterator[None]:
    """Inside, the model may be run; attributes of these paths are afterwards what they were."""
    places = [(vars(model.get_submodule(owner)), name) for owner, _, name in (path.rpartition(".") for path in paths)]
    before = [(space, name, name in space, space.get(name)) for space, name in places]
    try:
        yield
    finally:
        for space, name, was_there, value in before:
            space.pop(name, None)
            space.update({name: value} if was_there else {})
