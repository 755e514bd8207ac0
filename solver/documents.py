"""Files of JSON: read fast where they hold lists of lists of integers, and written so that nothing is lost.

Plain or gzipped. Integers fit int64. A list of lists of integers becomes one numpy array per inner list, equal ones one
array object, so that a 250 MB file needs little more memory than its text. Nothing in a file is ever run.
"""

from __future__ import annotations

import gzip
import json
import re
import warnings
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from .integers import IntArray, ProblemError

Rows = list[IntArray]
T = TypeVar("T")

_SPACE = re.compile(r"[ \t\r\n]*")
_ROW = re.compile(r"\[([^][{}\"]*)\]")
_INTEGER = r"[ \t\r\n]*-?(?:0|[1-9][0-9]*)[ \t\r\n]*"
_INTEGERS = re.compile(rf"[ \t\r\n]*|{_INTEGER}(?:,{_INTEGER})*")
_INT64 = np.iinfo(np.int64)


class FormatError(ProblemError):
    """The file is not a problem in a format that is known; the text says where and what was found."""


def read_document(path: str | Path, understand: Callable[[Any], T]) -> T:
    """What `understand` makes of the document in the file.

    Raises:
        FormatError: the file is not JSON, or is not understood; with the path in the text.
        OSError: the file cannot be read.
    """
    data = Path(path).read_bytes()
    try:
        text = (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode()
        return understand(parse_document(text))
    except (EOFError, zlib.error, gzip.BadGzipFile, UnicodeDecodeError) as error:
        raise FormatError(f"{path}: neither text nor gzipped text: {error}") from None
    except ProblemError as error:
        raise FormatError(f"{path}: {error}") from None


def parse_document(text: str) -> Any:
    """Objects and scalars as the json module reads them, lists of lists of integers as `Rows`; raises FormatError."""
    try:
        document, end = _Parser(text).value(0)
    except RecursionError:
        raise FormatError("objects are nested too deeply") from None
    if _SPACE.fullmatch(text, end) is None:
        raise FormatError(f"text after the end of the document, at character {end}")
    return document


def write_document(path: str | Path, text: str) -> None:
    """Writes beside the file, then renames: a failing write loses nothing."""
    data = text.encode()
    # mtime=0: the same problem gives the same bytes.
    data = gzip.compress(data, mtime=0) if str(path).endswith(".gz") else data
    temporary = Path(f"{path}.tmp")
    try:
        temporary.write_bytes(data)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@dataclass
class _Parser:
    """Objects and scalars as the json module reads them; a list of lists as one numpy array per inner list."""

    text: str

    def __post_init__(self) -> None:
        self.decoder = json.JSONDecoder()
        self.known: dict[str, IntArray] = {}

    def value(self, at: int) -> tuple[Any, int]:
        at = self._skip(at)
        if self.text.startswith("{", at):
            return self._object(at)
        if self.text.startswith("[", at) and self.text.startswith("[", self._skip(at + 1)):
            return self._list_of_rows(at)
        try:
            return self.decoder.raw_decode(self.text, at)
        except (ValueError, RecursionError) as error:  # ValueError: also an integer of thousands of digits
            raise FormatError(f"not JSON at character {at}: {error}") from None

    def _object(self, at: int) -> tuple[dict[str, Any], int]:
        members: dict[str, Any] = {}
        at = self._skip(at + 1)
        while not self.text.startswith("}", at):
            if members:
                at = self._expect(",", at)
            key, at = self.value(at)
            if not isinstance(key, str):
                raise FormatError(f"a key must be text, found {key!r} before character {at}")
            if key in members:
                raise FormatError(f"member {key!r} is there twice, before character {at}")
            members[key], at = self.value(self._expect(":", at))
            at = self._skip(at)
        return members, at + 1

    def _list_of_rows(self, at: int) -> tuple[Rows, int]:
        rows: Rows = []
        at += 1
        while True:
            match = _ROW.match(self.text, self._skip(at))
            if match is None:
                raise FormatError(f"expected a list of integers at character {self._skip(at)}")
            rows.append(self._row(match[1], match.start()))
            at = self._skip(match.end())
            if self.text.startswith("]", at):
                return rows, at + 1
            at = self._expect(",", at)

    def _row(self, text: str, at: int) -> IntArray:
        if text not in self.known:
            if _INTEGERS.fullmatch(text) is None:
                raise FormatError(f"the list at character {at} holds something that is no integer: {text[:60]!r}")
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                row = np.fromstring(text, np.int64, sep=",") if text.strip() else np.zeros(0, np.int64)
            if row.size and (row.max() == _INT64.max or row.min() == _INT64.min):
                raise FormatError(f"the list at character {at} holds an integer that does not fit int64")
            self.known[text] = row
        return self.known[text]

    def _expect(self, character: str, at: int) -> int:
        at = self._skip(at)
        if not self.text.startswith(character, at):
            raise FormatError(f"expected {character!r} at character {at}, found {self.text[at : at + 20]!r}")
        return at + 1

    def _skip(self, at: int) -> int:
        match = _SPACE.match(self.text, at)
        assert match is not None
        return match.end()
