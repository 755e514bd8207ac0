"""Plan files of older formats, brought to the present one before they are read.

A step takes a document of one format to the next; reading runs those that are needed. Writing always writes the present
format, so ``autoshard`` upgrades a file by reading and writing it. A step adds what the older format could not say as
*not known*, never as a guess.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from .yaml_text import Node

Document = dict[str, Node]


class UnknownSection(ValueError):
    """A section of a later format in a file that says it is of an earlier one."""

    def __init__(self, section: str, version: int) -> None:
        super().__init__(f"a plan of format {version} has no section {section!r}; write autoshard_plan: {version + 1}")
        self.section = section


def _from_1(document: Document) -> Document:
    """Format 1 listed every operator under ``operators`` and knew neither memory, consumers nor order of execution."""
    for section in ("memory", "followers", "execution"):
        if section in document:
            raise UnknownSection(section, 1)
    empty: dict[str, Node] = {"forward": [], "backward": []}
    return {**document, "followers": {**empty}, "execution": {**empty}}


MIGRATIONS: Mapping[int, Callable[[Document], Document]] = MappingProxyType({1: _from_1})
"""From each older format to the one after it."""


def migrate(document: Document, version: int) -> Document:
    """A document of format ``version`` in the present format."""
    while version in MIGRATIONS:
        document = MIGRATIONS[version](document)
        version += 1
        document["autoshard_plan"] = str(version)
    return document
