"""Files that are written whole or not at all: at every moment a path holds the old file or the whole new one.

Errors are those of the system, or ``OSError`` with a sentence of ours; :func:`reason` is their text. Whoever calls says
which file it was, and raises an error of its own.
"""

from __future__ import annotations

import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path


def write_whole(path: str | os.PathLike[str], data: bytes) -> None:
    """Writes a file through a temporary one in the same folder, which goes onto the disk and is then renamed.

    A file that is there keeps its permissions; a link keeps pointing where it did, and what it points at is replaced.

    Raises:
        OSError, ValueError: the path cannot be written; nothing has changed then.
    """
    check_can_write(path)
    target = Path(os.path.realpath(path))
    temporary = _beside(target)
    try:
        _write_through(temporary, data)
        if target.exists():
            temporary.chmod(stat.S_IMODE(target.stat().st_mode))
        os.replace(temporary, target)
    except BaseException:  # also when interrupted: no litter
        with suppress(OSError):
            temporary.unlink()
        raise
    with suppress(OSError):  # some file systems cannot sync a folder; the file itself is safe
        _sync_folder(target.parent)


def check_can_write(path: str | os.PathLike[str]) -> None:
    """Checks, before the work that makes its content, that a file can be written. Leaves no file behind.

    Raises:
        OSError, ValueError: it cannot.
    """
    target = Path(os.path.realpath(path))
    if target.is_dir():
        raise OSError("it is a folder; name a file in it")
    if not target.parent.is_dir():
        raise OSError(f"there is no folder {target.parent}; make it first")
    if target.exists() and not target.is_file():
        raise OSError("it is a device or pipe; name an ordinary file")
    if target.exists() and not os.access(target, os.W_OK):
        raise OSError("it is read-only; name another file")
    probe = _beside(target)
    os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    probe.unlink()


def reason(error: OSError | ValueError) -> str:
    """Why a file could not be read or written, and what to do about the usual cases.

    >>> reason(FileNotFoundError(2, "No such file or directory"))
    'no such file or directory; check the path'
    """
    advice = {
        "FileNotFoundError": "; check the path",
        "IsADirectoryError": "; name the file in it",
        "PermissionError": "; choose a place you have access to",
    }.get(type(error).__name__, "")
    said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return said[:1].lower() + said[1:] + advice


def _beside(target: Path) -> Path:
    return target.with_name(f".{target.name[:100]}.{secrets.token_hex(6)}.tmp")


def _write_through(path: Path, data: bytes) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
