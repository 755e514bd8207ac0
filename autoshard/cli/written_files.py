"""What a command writes is none of the files that it reads, no two are one file, and files of other kinds stay."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from itertools import combinations
from pathlib import Path
from typing import Any, TypeAlias

from .terminal import EXIT_MISTAKE, fail

WRITTEN = frozenset({"output", "plans", "report", "samples", "trace"})
"""The parameters of commands that name what is written. Any other may name what is read."""
IN_PLACE = {"replan": ("path", "original")}
"""Parameters of a command that may name what it writes, too: of ``replan`` the plans whose place the new one takes."""

_PLAN = ("plan", re.compile(rb"^(autoshard_plan:|# Sharding plan of autoshard)", re.MULTILINE))
_PAGE = ("report", re.compile(rb"<!doctype html>", re.IGNORECASE))
_KINDS = {
    ("plan", "output"): _PLAN,
    ("explain", "output"): _PLAN,
    ("replan", "output"): _PLAN,
    ("report", "output"): _PAGE,
    ("report", "trace"): ("trace", re.compile(rb'"(displayTimeUnit|traceEvents)"')),
    ("export", "output"): ("export", re.compile(rb"Written by `autoshard export`")),
    ("calibrate", "output"): ("profile", re.compile(rb"^provenance:", re.MULTILINE)),
    ("calibrate", "report"): _PAGE,
}
"""What the parameter of a command writes, and what such a file has in its first bytes."""
HEAD_BYTES = 8192

Named: TypeAlias = tuple[str, str]
"""What a parameter is called on the command line, and the path it names."""


def make_folder(folder: Path) -> None:
    """Makes a folder for plans and those around it, if they are not there, before the work that makes the plans; ends
    the command with why it cannot be made or written into.
    """
    from ..plans import check_writable

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = "it is a file, and a folder is needed; name another" if folder.is_file() else error.strerror
        fail(f"cannot make the folder {folder}: {why}", EXIT_MISTAKE)
    check_writable(folder / "plan.yaml")


def check_files(context: Any) -> None:
    """Ends a command with one line on stderr where its arguments have it write over a file that they name."""
    parameters = [each for each in context.command.params if each.name not in IN_PLACE.get(context.command.name, ())]
    written = [each for each in parameters if each.name in WRITTEN]
    read = [each for each in parameters if each.name not in WRITTEN]
    check_apart(_named(written, context.params), _named(read, context.params))
    for each in written:
        if kind := _KINDS.get((context.command.name, each.name)):
            for name, path in _named([each], context.params):
                check_replaced(name, path, *kind)


def check_apart(written: Iterable[Named], read: Iterable[Named] = ()) -> None:
    """Ends the command where a path to write is one to read, or another one to write; links are followed. A model may
    be read by its file and function.
    """
    written = list(written)
    files = [(name, path) for name, text in read for path in (text, text.rpartition(":")[0]) if os.path.isfile(path)]
    for name, path in written:
        for other, source in files:
            if os.path.realpath(path) == os.path.realpath(source):
                fail(f"{name} would write over {source}, which {other} has it read; name another file", EXIT_MISTAKE)
    for (name, path), (other, target) in combinations(written, 2):
        if os.path.realpath(path) == os.path.realpath(target):
            fail(f"{name} and {other} both name {path}; give each a file of its own", EXIT_MISTAKE)


def check_replaced(name: str, path: str, what: str, sign: re.Pattern[bytes]) -> None:
    """Ends the command where a path to write is a file that was not written so: a script, a plan where a profile goes.

    Args:
        what: what is written.
        sign: what such files have in their first ``HEAD_BYTES``; an empty file may be replaced, too.
    """
    if not os.path.isfile(path) or not os.access(path, os.R_OK):
        return
    with open(path, "rb") as file:
        head = file.read(HEAD_BYTES)
    if head and not sign.search(head):
        fail(f"{name} would write over {path}, which holds no {what}; name another file, or remove it", EXIT_MISTAKE)


def _named(parameters: Iterable[Any], values: dict[str, Any]) -> Iterator[Named]:
    for each in parameters:
        given = values.get(each.name)
        name = each.opts[0] if each.param_type_name == "option" else each.metavar
        for value in given if isinstance(given, list | tuple) else [given]:
            if isinstance(value, str | os.PathLike):
                yield name, os.fspath(value)
