"""Lines of the user's model, found in the stack traces that torch keeps."""

from __future__ import annotations

import os
import re
import sysconfig
from functools import cache

import torch
from torch.fx import Node as FxNode

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in \S+\n\s*(?P<code>[^\n]*)')
_MOST = 100
"""So many characters of a line are quoted."""
# Frames that are no lines of the model: torch's, and those of what capture puts in its place.
_NOT_THE_MODEL = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(__file__) + os.sep)


def is_models_file(path: str) -> bool:
    """Whether code in this file belongs to a user's model."""
    return not path.startswith(_NOT_THE_MODEL)


def is_of_library(path: str) -> bool:
    """Whether code in this file belongs to Python itself, which writes some of its own (that of dataclasses), or to
    an installed package.
    """
    return path.startswith(("<string>", "<frozen ")) or is_installed(path)


@cache
def is_installed(path: str) -> bool:
    """Whether a file is of Python itself or of an installed package, wherever links to it lie."""
    real = os.path.realpath(path) if os.path.islink(path) else os.path.join(_real(os.path.dirname(path)), "")
    return "site-packages" in real or "dist-packages" in real or real.startswith(_library_folders())


@cache
def _library_folders() -> tuple[str, ...]:
    """Where libraries are, and not all of a prefix: under /usr there may be a user's own code, too."""
    kinds = ("stdlib", "platstdlib", "purelib", "platlib", "scripts")
    return tuple({_real(sysconfig.get_path(kind)) + os.sep for kind in kinds})


@cache
def _real(folder: str) -> str:
    return os.path.realpath(folder)


def line_in(trace: str) -> str:
    """``file:line: code`` of the innermost frame of the model in a printed traceback; empty if there is none."""
    return next((_line(frame) for frame in reversed(_frames(trace))), "")


def lines_in(trace: str) -> str:
    """As :func:`line_in`, of the innermost frame that is no library's; where a library's is behind it, that in
    parentheses. Of a model that is all in a library, the innermost.
    """
    frames = _frames(trace)
    own = [frame for frame in frames if not is_of_library(frame["file"])]
    if not own or own[-1] is frames[-1]:
        return line_in(trace)
    return f"{_line(own[-1])} (in {_line(frames[-1])})"


def line_of(node: FxNode) -> str:
    """The line of the model that called an operator."""
    return line_in(node.meta.get("stack_trace") or "")


def at(line: str) -> str:
    """`` at file:line: code`` for the end of a sentence; empty where the line is not known."""
    return f" at {line}" if line else ""


def _frames(trace: str) -> list[re.Match[str]]:
    """The frames of the model in a printed traceback, the innermost last."""
    return [frame for frame in _FRAME.finditer(trace) if is_models_file(frame["file"])]


def _line(frame: re.Match[str]) -> str:
    code = frame["code"].strip()
    return f"{frame['file']}:{frame['line']}: {code if len(code) <= _MOST else code[: _MOST - 3] + '...'}"
