"""Files that a run writes at its end: the old one or the whole new one, at every moment."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path

from ..errors import CalibrationError


def check_writable(path: Path) -> None:
    """Checks, before the work, that a file can be written. Leaves none behind.

    Raises:
        CalibrationError: it cannot; says why.
    """
    if path.exists() and not path.is_file():
        raise CalibrationError(f"cannot write {path}: it is no ordinary file; name another")
    if path.exists() and not os.access(path, os.W_OK):
        raise CalibrationError(f"cannot write {path}: it is read-only; name another file")
    if not path.resolve().parent.is_dir():
        raise CalibrationError(f"cannot write {path}: there is no folder {path.resolve().parent}; make it first")
    _written(path, b"").unlink()


def write(path: Path, data: bytes) -> None:
    """Writes a file through a temporary one beside it.

    Raises:
        CalibrationError: it cannot be written, for example because the disk is full; what was there stays.
    """
    temporary = _written(path, data)
    try:
        os.replace(temporary, path.resolve())
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise CalibrationError(f"cannot write {path}: {error.strerror or error}; what was there stays") from None


def _written(path: Path, data: bytes) -> Path:
    target = path.resolve()
    temporary = target.with_name(f".{target.name[:100]}.{secrets.token_hex(6)}.tmp")
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise CalibrationError(f"cannot write {path}: {error.strerror or error}; what was there stays") from None
    return temporary
