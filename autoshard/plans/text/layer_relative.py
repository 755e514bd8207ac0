"""Names written relative to a layer, so that one line of a plan file can speak of every layer.

In a line that stands for all layers, ``layers.*.wq/mm`` is the operator of the same layer, ``layers.*+1.wq/mm`` that of
the next and ``layers.*-1.wq/mm`` that of the one before; ``layers.3.wq/mm`` is always that of layer 3. Which layer is
the current one is told by a *frame*: the index that each path has here, ``{"layers": 3}``; indices inside a path are
written ``*``, as in ``repeats`` (:mod:`autoshard.plans.text.name_patterns`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from .name_patterns import (
    MAX_INDICES,
    Line,
    Pattern,
    Repeats,
    fold,
    format_pattern,
    is_index,
    parse_pattern,
    prefix_of,
    prefixes,
    split_name,
)

Frame = Mapping[str, int]
"""The current index after each path."""

_RELATIVE = re.compile(r"\*(?:[+-][1-9][0-9]{0,5})?")


def frame_of(name: str) -> dict[str, int]:
    """The frame in which names are written that belong to an entry of this name: the index that each path has in it.

    >>> frame_of("layers.3.wq/mm")
    {'layers': 3}
    """
    pattern, indices = split_name(name)
    return dict(zip(prefixes(pattern), indices))


def relative_name(name: str, frame: Frame) -> str:
    """A name as it is written in a frame; :func:`absolute_name` gives it back.

    >>> relative_name("layers.4.wq/mm", {"layers": 3})
    'layers.*+1.wq/mm'
    """
    pattern, indices = split_name(name)
    written = format_pattern(pattern, {}).partition("/")[0].split(".")
    places = (i for i, component in enumerate(pattern.components) if component is None)
    for place, prefix, index in zip(places, prefixes(pattern), indices):
        if prefix in frame:
            written[place] = "*" + (f"{index - frame[prefix]:+d}" if index != frame[prefix] else "")
    return ".".join(written) + pattern.role


def absolute_name(text: str, frame: Frame) -> str:
    """Reads what :func:`relative_name` wrote: a pattern in which ``*+1`` and the like have become numbers.

    Raises:
        ValueError: a number that comes out is below 0 or above 999999.
    """
    path, slash, role = text.partition("/")
    if "*" not in path:
        return text
    components: list[str | None] = []
    read: list[str] = []
    for written in path.split("."):
        prefix = prefix_of(components)
        if prefix in frame and components.count(None) < MAX_INDICES and _RELATIVE.fullmatch(written):
            written = str(frame[prefix] + int(written[1:] or 0))
            if not is_index(written):
                raise ValueError(f"{text!r} is number {written} after {prefix!r}; there is no such layer")
        folds = written == "*" or written.startswith("{") or is_index(written)
        components.append(None if folds and components.count(None) < MAX_INDICES else written.removeprefix("\\"))
        read.append(written)
    return ".".join(read) + slash + role


def relative_patterns(
    names: Sequence[str], frame: Frame, repeats: Repeats, filled: Callable[[Pattern], Pattern] = lambda pattern: pattern
) -> tuple[str, ...]:
    """Several names in a frame, those of other stacks of layers folded; :func:`absolute_names` gives them back.

    Args:
        filled: what the names that a pattern folds stand for.

    >>> relative_patterns(["layers.3.wk/mm", "norms.0.w", "norms.1.w"], {"layers": 3}, {"norms": 2})
    ('layers.*.wk/mm', 'norms.*.w')
    """
    framed = tuple(relative_name(name, frame) for name in names if _meets(name, frame))
    return (*framed, *(format_pattern(filled(line.pattern), repeats) for line in fold_unframed(names, frame)))


def fold_unframed(names: Sequence[str], frame: Frame) -> list[Line[None]]:
    """The names of layers that the frame says nothing of, each set of identical layers as one pattern."""
    return fold([(name, None) for name in names if not _meets(name, frame)])


def absolute_names(text: str, frame: Frame, repeats: Repeats) -> list[str]:
    """The names that one of the texts of :func:`relative_patterns` stands for.

    Raises:
        ValueError: it cannot be read.
    """
    return parse_pattern(absolute_name(text, frame), repeats).names()


def written_for(pattern: Pattern, texts: tuple[str, ...]) -> tuple[str, ...]:
    """The names that belong to a line, as its file writes them.

    A line that stands for several layers has them relative (``layers.*+1.wq/mm``); a line that stands for one name has
    them in full, since there is no other layer to be relative to.
    """
    if pattern.count > 1:
        return texts
    frame = frame_of(pattern.names()[0])
    return tuple(absolute_name(text, frame) for text in texts)


def _meets(name: str, frame: Frame) -> bool:
    return any(prefix in frame for prefix in prefixes(split_name(name)[0]))
