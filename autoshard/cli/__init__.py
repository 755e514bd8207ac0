"""The command line: ``autoshard plan``, ``show``, ``diff`` and the others."""

from .commands import main

__all__ = ["main"]
