"""The command ``autoshard``, and ``python -m autoshard``. Its libraries are an extra: ranks of a job do without."""

from __future__ import annotations

import sys

LIBRARIES = ("typer", "rich")
"""What the extra ``cli`` installs."""


INTERRUPTED = 130
"""The exit code of shells for Ctrl-C: 128 and the number of the signal."""


def main() -> None:
    """Runs the command line, or says which extra it needs (exit code 2)."""
    try:
        from .cli import main as command

        command()
    except KeyboardInterrupt:  # while the libraries load; later, typer ends the command alike
        sys.exit(INTERRUPTED)
    except ModuleNotFoundError as error:
        if error.name not in LIBRARIES:
            raise
        needed = f"the command needs {error.name}, which is not installed"
        print(f"error: {needed}; pip install 'autoshard[cli]'", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
