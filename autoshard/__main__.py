"""``python -m autoshard``."""

from .cli import main

main()
