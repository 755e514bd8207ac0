"""Lines of the user's model, found in the stack traces that torch keeps."""

from __future__ import annotations

import os
import re

import torch
from torch.fx import Node as FxNode

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in \S+\n\s*(?P<code>[^\n]*)')
_HERE = os.path.dirname(__file__)
# Frames that are no lines of the model.
_NOT_THE_MODEL = (
    os.path.dirname(torch.__file__),
    os.path.join(_HERE, "annotation.py"),
    os.path.join(_HERE, "observed.py"),
    os.path.join(_HERE, "unvalidated.py"),
)


def is_models_file(path: str) -> bool:
    """Whether code in this file belongs to a user's model."""
    return not path.startswith(_NOT_THE_MODEL)


def line_in(trace: str) -> str:
    """``file:line: code`` of the innermost frame of the model in a printed traceback; empty if there is none."""
    frames = [m for m in _FRAME.finditer(trace) if is_models_file(m["file"])]
    return f"{frames[-1]['file']}:{frames[-1]['line']}: {frames[-1]['code'].strip()}" if frames else ""


def line_of(node: FxNode) -> str:
    """The line of the model that called an operator."""
    return line_in(node.meta.get("stack_trace") or "")


def at(line: str) -> str:
    """`` at file:line: code`` for the end of a sentence; empty where the line is not known."""
    return f" at {line}" if line else ""
