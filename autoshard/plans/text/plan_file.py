"""Plan files on disk, and what is made from them; what a plan's text means is in :mod:`dump` and :mod:`parse`."""

from __future__ import annotations

import os

from ...atomic_write import check_can_write, reason, write_whole
from ...errors import PlanFileError
from ..plan import ShardingPlan
from .dump import dump_plan
from .parse import MAX_FILE_BYTES, parse_plan

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
        raise PlanFileError(f"cannot read the plan {os.fspath(path)}: {reason(error)}") from None


def write_plan(plan: ShardingPlan, path: str | os.PathLike[str]) -> None:
    """Writes a plan whole or not at all: see :func:`~autoshard.atomic_write.write_whole`.

    Raises:
        PlanFileError: the plan cannot be written as text, or the path cannot be written; nothing has changed then.
    """
    write_text(dump_plan(plan), path, "plan")


def write_text(text: str, path: str | os.PathLike[str], what: str) -> None:
    """Writes a file as :func:`write_plan` does; ``what`` is what errors call it.

    Raises:
        PlanFileError: the path cannot be written; nothing has changed then.
    """
    try:
        write_whole(path, text.encode())
    except (OSError, ValueError) as error:
        raise PlanFileError(f"cannot write the {what} {os.fspath(path)}: {reason(error)}") from None


def check_writable(path: str | os.PathLike[str], what: str = "plan") -> None:
    """Checks, before the work that makes a plan, that its file can be written. Leaves no file behind.

    Args:
        what: what errors call the file.

    Raises:
        PlanFileError: it cannot; the message says why and what to do.
    """
    try:
        check_can_write(path)
    except (OSError, ValueError) as error:
        raise PlanFileError(f"cannot write the {what} {os.fspath(path)}: {reason(error)}") from None
