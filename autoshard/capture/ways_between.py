"""The way that Python goes through a model's own code, outside of blocks of which there are many."""

from __future__ import annotations

import hashlib
import sys
from types import CodeType, FrameType
from typing import Any

from torch import nn

from .lines import is_models_file, is_of_library


class WaysBetween:
    """Notes every step of Python's in the model's own functions, as long as it is on; :meth:`taken` says which.

    Two ways are one only if what decides is the same: ``k == 6 and flag`` reads the flag in one block alone, and goes
    another way there whatever the flag is. Libraries go other ways the first time, as they keep what they found: of
    theirs only the files count that the model's classes are in.
    """

    def __init__(self, model: nn.Module) -> None:
        self._files = {getattr(sys.modules.get(type(each).__module__), "__file__", None) for each in model.modules()}
        self._digest = hashlib.blake2b(digest_size=16)
        self._known: dict[CodeType, bytes | None] = {}
        self._others: Any = None
        self._is_on = False

    def on(self) -> None:
        """From here on steps are noted; a debugger's own function waits until they are not."""
        self._others, self._is_on = sys.gettrace(), True
        sys.settrace(self._called)

    def off(self) -> None:
        """No more steps are noted."""
        if self._is_on:
            sys.settrace(self._others)
        self._is_on = False

    def taken(self) -> str:
        """What tells the way since the last time from others; of equal ways the same."""
        found = self._digest.hexdigest()
        self._digest = hashlib.blake2b(digest_size=16)
        return found

    def _called(self, frame: FrameType, event: str, arg: object) -> Any:
        name = self._name(frame.f_code)
        if name is None:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        self._digest.update(name)
        return self._stepped

    def _stepped(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "opcode":
            self._digest.update(frame.f_lasti.to_bytes(4, "little"))
        return self._stepped

    def _name(self, code: CodeType) -> bytes | None:
        """What a function is called; None for one that is not the model's."""
        if code not in self._known:
            file = code.co_filename
            is_own = is_models_file(file) and (file in self._files or not is_of_library(file))
            self._known[code] = f"{code.co_filename} {code.co_qualname}\n".encode() if is_own else None
        return self._known[code]
