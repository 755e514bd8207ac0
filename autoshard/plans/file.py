"""Plan files on disk, and what is made from them; what a plan's text means is in :mod:`dump` and :mod:`parse`."""

from __future__ import annotations

import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from ..errors import PlanFileError
from .dump import dump_plan
from .parse import MAX_FILE_BYTES, parse_plan
from .plan import ShardingPlan

__all__ = ["check_writable", "dump_plan", "parse_plan", "read_bytes", "read_plan", "write_plan", "write_text"]


def read_plan(path: str | os.PathLike[str], *, edited: bool = False) -> ShardingPlan:
    """The plan in a file; ``edited`` as for :func:`parse_plan`.

    Raises:
        PlanFileError: the file cannot be read, or :func:`parse_plan` refuses it.
    """
    return parse_plan(read_bytes(path), source=os.fspath(path), edited=edited)


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """What stands in a plan file, and no more than one byte above what a plan file may have.

    Raises:
        PlanFileError: the file cannot be read.
    """
    try:
        with open(path, "rb") as file:
            return file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        raise PlanFileError(f"cannot read the plan {os.fspath(path)}: {_reason(error)}") from None


def write_plan(plan: ShardingPlan, path: str | os.PathLike[str]) -> None:
    """Writes a plan so that at every moment the path holds the old file or the whole new one.

    The text goes to a temporary file in the same folder, onto the disk, and is then renamed. A file that is there keeps
    its permissions; a link keeps pointing where it did, and what it points at is replaced.

    Raises:
        PlanFileError: the plan cannot be written as text, or the path cannot be written; nothing has changed then.
    """
    write_text(dump_plan(plan), path, "plan")


def write_text(text: str, path: str | os.PathLike[str], what: str) -> None:
    """Writes a file as :func:`write_plan` does; ``what`` is what errors call it.

    Raises:
        PlanFileError: the path cannot be written; nothing has changed then.
    """
    check_writable(path, what)
    target = Path(os.path.realpath(path))
    temporary = _beside(target)
    try:
        try:
            _write_through(temporary, text.encode())
            if target.exists():
                temporary.chmod(stat.S_IMODE(target.stat().st_mode))
            os.replace(temporary, target)
        except BaseException:  # also when interrupted: no litter
            with suppress(OSError):
                temporary.unlink()
            raise
    except OSError as error:
        raise PlanFileError(f"cannot write the {what} {os.fspath(path)}: {_reason(error)}") from None
    with suppress(OSError):  # some file systems cannot sync a folder; the file itself is safe
        _sync_folder(target.parent)


def check_writable(path: str | os.PathLike[str], what: str = "plan") -> None:
    """Checks, before the work that makes a plan, that its file can be written. Leaves no file behind.

    Args:
        what: what errors call the file.

    Raises:
        PlanFileError: it cannot; the message says why and what to do.
    """
    given = os.fspath(path)
    try:
        target = Path(os.path.realpath(path))
        if target.is_dir():
            raise PlanFileError(f"cannot write the {what} {given}: it is a folder; name a file in it")
        if not target.parent.is_dir():
            raise PlanFileError(f"cannot write the {what} {given}: there is no folder {target.parent}; make it first")
        if target.exists() and not target.is_file():
            raise PlanFileError(f"cannot write the {what} {given}: it is a device or pipe; name an ordinary file")
        if target.exists() and not os.access(target, os.W_OK):
            raise PlanFileError(f"cannot write the {what} {given}: it is read-only; name another file")
        probe = _beside(target)
        os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        probe.unlink()
    except (OSError, ValueError) as error:
        if isinstance(error, PlanFileError):
            raise
        raise PlanFileError(f"cannot write the {what} {given}: {_reason(error)}") from None


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


def _reason(error: OSError | ValueError) -> str:
    """What the system said, and what to do about the usual cases."""
    advice = {
        "FileNotFoundError": "; check the path",
        "IsADirectoryError": "; name the file in it",
        "PermissionError": "; choose a place you have access to",
    }.get(type(error).__name__, "")
    said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return said[:1].lower() + said[1:] + advice
