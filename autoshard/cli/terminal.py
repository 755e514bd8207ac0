"""What every command does around its work: mistakes as one line on stderr, warnings, progress, exit codes."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

import typer
from rich.console import Console

from ..errors import AutoshardError, InfeasibleError

# Exit codes; 0 is done.
EXIT_DIFFERENT = 1
EXIT_MISTAKE = 2
EXIT_INFEASIBLE = 3
EXIT_DISAGREES = 4


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
    """Ends the command with a message on stderr."""
    if os.environ.get("RANK", "0") == "0":  # of a torchrun job the first rank speaks for all
        typer.echo(f"error: {message}", err=True)
    raise typer.Exit(code)


@contextmanager
def warnings_explained() -> Iterator[None]:
    """Prints a warning as one line on stderr, without the place in our source that raised it."""

    def show(message: Warning | str, category: object, file: object, line: object, *rest: object) -> None:
        typer.echo(f"warning: {message}", err=True)

    with warnings.catch_warnings():
        warnings.showwarning = show  # type: ignore[assignment]
        yield


@contextmanager
def progress_shown() -> Iterator[Callable[[str], None]]:
    """Says on stderr which stage runs, where a person watches."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda stage: None
        return
    with console.status("planning") as status:
        yield lambda stage: status.update(stage)
