"""The command ``autoshard``, and ``python -m autoshard``. Its libraries are an extra: ranks of a job do without."""

from __future__ import annotations

import sys

LIBRARIES = ("typer", "rich")
"""What the extra ``cli`` installs."""


def main() -> None:
    """Runs the command line, or says which extra it needs (exit code 2)."""
    try:
        from .cli import main as command
    except ModuleNotFoundError as error:
        if error.name not in LIBRARIES:
            raise
        needed = f"the command needs {error.name}, which is not installed"
        print(f"error: {needed}; pip install 'autoshard[cli]'", file=sys.stderr)
        sys.exit(2)
    command()


if __name__ == "__main__":
    main()
