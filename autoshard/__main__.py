"""The command ``autoshard``, and ``python -m autoshard``. Its libraries are an extra: ranks of a job do without."""

from __future__ import annotations

import signal
import sys
from typing import Any

from .garbage import seldom_collected

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
    try:
        with seldom_collected():
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


if __name__ == "__main__":
    main()
