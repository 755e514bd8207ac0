"""The golden texts, and the command that writes them anew: ``python -m tests.plans.write_golden``.

Look at the difference before you commit it: that is the review these files are for.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path

from autoshard.plans import dump_plan
from autoshard.plans.json_schema import schema_text
from autoshard.plans.show import console_for, show_text

from .synthetic import transformer_plan

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).with_name("golden")
DOCUMENT = ROOT / "docs" / "plan_file.md"
EXAMPLE = re.compile(r"(?<=```yaml\n).*?(?=```)", re.DOTALL)


def shown() -> str:
    """What ``show`` gives a pipe."""
    stream = io.StringIO()
    show_text(transformer_plan(4), console_for(stream))
    return stream.getvalue()


def documented() -> str:
    """``docs/plan_file.md`` with the example that it should hold."""
    return EXAMPLE.sub(lambda _: dump_plan(transformer_plan(4)), DOCUMENT.read_text(), count=1)


GOLDEN: dict[Path, Callable[[], str]] = {
    FOLDER / "transformer.yaml": lambda: dump_plan(transformer_plan(4)),
    FOLDER / "transformer.txt": shown,
    DOCUMENT: documented,
    ROOT / "docs" / "plan.schema.json": schema_text,
}


def main() -> None:
    """Writes every golden text."""
    for path, made in GOLDEN.items():
        path.write_text(made())


if __name__ == "__main__":
    main()
