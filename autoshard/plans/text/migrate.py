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
    """A section of a later format, or a key in one, in a file that says it is of an earlier format."""

    def __init__(self, path: tuple[str, ...], version: int) -> None:
        what = "section" if len(path) == 1 else f"key in {path[0]}"
        super().__init__(f"a plan of format {version} has no {what} {path[-1]!r}; write autoshard_plan: {version + 1}")
        self.path = path


def _from_1(document: Document) -> Document:
    """Format 1 listed every operator under ``operators`` and knew neither memory, consumers nor order of execution."""
    for section in ("memory", "followers", "execution"):
        if section in document:
            raise UnknownSection((section,), 1)
    empty: dict[str, Node] = {"forward": [], "backward": []}
    return {**document, "followers": {**empty}, "execution": {**empty}}


def _from_2(document: Document) -> Document:
    """Format 2 did not say whether identical layers were decided alike."""
    result = document.get("result")
    if not isinstance(result, dict):
        return document  # which the schema refuses
    if "identical_layers" in result:
        raise UnknownSection(("result", "identical_layers"), 2)
    return {**document, "result": {**result, "identical_layers": "unknown"}}


def _from_3(document: Document) -> Document:
    """In format 3 every redistribution ran all steps of its path, or none."""
    lines = document.get("redistributions")
    for line in lines if isinstance(lines, list) else []:
        if isinstance(line, dict) and "shared" in line:
            raise UnknownSection(("redistributions", "shared"), 3)
    return dict(document)


def _from_4(document: Document) -> Document:
    """Format 4 knew neither a price of the optimizer's step nor a margin of the allocator."""
    for section, key in (("result", "optimizer_s"), ("memory", "allocator_margin")):
        lines = document.get(section)
        if isinstance(lines, dict) and key in lines:
            raise UnknownSection((section, key), 4)
    return dict(document)


def _from_5(document: Document) -> Document:
    """In format 5 a step was one micro-batch."""
    if "micro_batches" in document:
        raise UnknownSection(("micro_batches",), 5)
    return dict(document)


def _from_6(document: Document) -> Document:
    """In format 6 nothing travelled together."""
    if "bucket_bytes" in document:
        raise UnknownSection(("bucket_bytes",), 6)
    return dict(document)


def _from_7(document: Document) -> Document:
    """In format 7 the batch was dim 0, and parameters that travelled together were gathered ahead, in the dtypes of the
    model.
    """
    for section in ("batch_dim", "gathers_ahead", "deferred", "param_dtype", "reduce_dtype"):
        if section in document:
            raise UnknownSection((section,), 7)
    for section, key in (("result", "at_peak_s"), ("result", "against"), ("memory", "kinds")):
        lines = document.get(section)
        if isinstance(lines, dict) and key in lines:
            raise UnknownSection((section, key), 7)
    return dict(document)


MIGRATIONS: Mapping[int, Callable[[Document], Document]] = MappingProxyType(
    {1: _from_1, 2: _from_2, 3: _from_3, 4: _from_4, 5: _from_5, 6: _from_6, 7: _from_7}
)
"""From each older format to the one after it."""


def migrate(document: Document, version: int) -> Document:
    """A document of format ``version`` in the present format."""
    while version in MIGRATIONS:
        document = MIGRATIONS[version](document)
        version += 1
        document["autoshard_plan"] = str(version)
    return document
