"""What every command does around its work: mistakes as one line on stderr, warnings, progress, exit codes."""

from __future__ import annotations

import errno
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

from ..errors import AutoshardError, InfeasibleError
from ..progress import CLEAR, progress_line

# Exit codes; 0 is done.
EXIT_DIFFERENT = 1
EXIT_MISTAKE = 2
EXIT_INFEASIBLE = 3
EXIT_DISAGREES = 4
EXIT_NO_READER = 141  # as shells say it of a command that SIGPIPE ended: 128 and the number of the signal

FIRST_SPEAKS_S = 3.0
"""Seconds that other ranks of a torchrun job leave the first one to say what is wrong."""


class Commands(TyperGroup):
    """The commands. Standard output that takes no more is an end of its own: 1 would say that two plans differ."""

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        """As in typer; ``--help`` is printed here."""
        with output_explained():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: Any) -> Any:
        """As in typer: runs the command."""
        with output_explained():
            return super().invoke(ctx)


@contextmanager
def output_explained() -> Iterator[None]:
    """Ends the command where standard output takes no more: silently where its reader has gone (``| head -1``), with a
    line where the disk is full.
    """
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python flushes as it ends
        if error.errno == errno.EPIPE:
            raise typer.Exit(EXIT_NO_READER) from None
        fail(f"cannot write to standard output: {error.strerror or error}", EXIT_MISTAKE)


@contextmanager
def mistakes_explained() -> Iterator[None]:
    """Ends the command with one line on stderr where the library refuses what it was given."""
    try:
        yield
    except InfeasibleError as error:
        fail(str(error), EXIT_INFEASIBLE)
    except AutoshardError as error:
        fail(str(error), EXIT_MISTAKE)
    except ModuleNotFoundError as error:
        if error.name == "jinja2":
            fail("a report needs jinja2, which is not installed; pip install 'autoshard[report]'", EXIT_MISTAKE)
        if error.name not in ("torch", "numpy"):
            raise
        fail(f"this needs {error.name}, which is not installed; pip install autoshard", EXIT_MISTAKE)


def fail(message: str, code: int) -> NoReturn:
    """Ends the command with a message on stderr. Of a torchrun job the first rank speaks for all; another one that is
    still there when it could have spoken speaks for itself, as torchrun ends all once one has ended.
    """
    rank = os.environ.get("RANK", "0")
    if rank != "0":
        time.sleep(FIRST_SPEAKS_S)
    typer.echo(f"error: {message}" if rank == "0" else f"error on rank {rank}: {message}", err=True)
    raise typer.Exit(code)


@contextmanager
def warnings_explained() -> Iterator[None]:
    """Prints a warning as one line on stderr, without the place in our source that raised it."""

    def show(message: Warning | str, category: object, file: object, line: object, *rest: object) -> None:
        above = CLEAR if sys.stderr.isatty() else ""  # the line of progress is drawn again below
        typer.echo(f"{above}warning: {message}", err=True)

    with warnings.catch_warnings():
        warnings.showwarning = show  # type: ignore[assignment]
        yield


@contextmanager
def progress_shown() -> Iterator[Callable[[str], None]]:
    """Says on stderr what is going on, see :mod:`autoshard.progress`."""
    with progress_line("starting") as say:
        yield say
