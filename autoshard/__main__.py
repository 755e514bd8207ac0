"""The command ``autoshard``, and ``python -m autoshard``. Its libraries are an extra: ranks of a job do without."""

from __future__ import annotations

import os
import signal
import sys
from io import TextIOWrapper
from typing import Any

from .garbage import at_the_end_of_the_process, seldom_collected

LIBRARIES = ("typer", "rich")
"""What the extra ``cli`` installs."""


INTERRUPTED = 130
"""The exit code of shells for Ctrl-C: 128 and the number of the signal."""


def main() -> None:
    """Runs the command line, or says which extra it needs (exit code 2)."""
    interruptions: list[int] = []

    def interrupt(number: int, frame: Any) -> None:
        interruptions.append(number)
        signal.default_int_handler(number, frame)

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)
    _part_from_native_code()
    try:
        with seldom_collected(), at_the_end_of_the_process():
            from .cli import main as command

            command()
    except KeyboardInterrupt:  # while the libraries load; later, typer ends the command alike
        sys.exit(INTERRUPTED)
    except Exception as error:
        if interruptions:  # of which native code makes another error: pydantic's a SchemaError
            sys.exit(INTERRUPTED)
        if not isinstance(error, ModuleNotFoundError) or error.name not in LIBRARIES:
            raise
        needed = f"the command needs {error.name}, which is not installed"
        print(f"error: {needed}; pip install 'autoshard[cli]'", file=sys.stderr)
        sys.exit(2)


def _part_from_native_code() -> None:
    """From here on what native code prints on stdout goes to stderr, and stdout is what this command says: HiGHS prints
    a line of its own at times, whatever it was told (https://github.com/ERGO-Code/HiGHS/issues/2783).
    """
    out = sys.stdout
    if out is not sys.__stdout__ or not isinstance(out, TextIOWrapper) or sys.stderr is None:
        return
    out.flush()
    buffering = 1 if out.line_buffering or out.write_through else -1
    sys.stdout = open(os.dup(out.fileno()), "w", buffering, encoding=out.encoding, errors=out.errors)
    os.dup2(sys.stderr.fileno(), out.fileno())


if __name__ == "__main__":
    main()
