"""The files that a calibration run writes at its end, and its errors about them."""

from __future__ import annotations

from pathlib import Path

from ..atomic_write import check_can_write, reason, write_whole
from ..errors import CalibrationError


def check_writable(path: Path) -> None:
    """Checks, before the work, that a file can be written. Leaves none behind.

    Raises:
        CalibrationError: it cannot; says why.
    """
    try:
        check_can_write(path)
    except (OSError, ValueError) as error:
        raise CalibrationError(f"cannot write {path}: {reason(error)}") from None


def write(path: Path, data: bytes) -> None:
    """Writes a file, whole or not at all.

    Raises:
        CalibrationError: it cannot be written, for example because the disk is full; what was there stays.
    """
    try:
        write_whole(path, data)
    except (OSError, ValueError) as error:
        raise CalibrationError(f"cannot write {path}: {reason(error)}; what was there stays") from None
