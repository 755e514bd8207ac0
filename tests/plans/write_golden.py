"""The golden texts, and the command that writes them anew: ``python -m tests.plans.write_golden``.

Look at the difference before you commit it: that is the review these files are for.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path

from autoshard.plans import ShardingPlan, dump_plan, read_plan
from autoshard.plans.text.json_schema import schema_text
from autoshard.plans.views.diff import diff_plans
from autoshard.plans.views.diff_text import diff_markdown, print_diff
from autoshard.plans.views.exports import parallelize_module_source, partition_spec_source
from autoshard.plans.views.show import console_for, show_text

from .synthetic import sharded_plan, transformer_plan

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


def compared(old: ShardingPlan, new: ShardingPlan) -> str:
    """The difference as text."""
    stream = io.StringIO()
    print_diff(diff_plans(old, new), console_for(stream))
    return stream.getvalue()


def llama_markdown() -> str:
    """The comment on a pull request that replaces one plan of Llama-3-8B by another (``write_llama.py``)."""
    names = "llama3_8b.yaml", "llama3_8b-tight.yaml"
    return diff_markdown(diff_plans(*(read_plan(FOLDER / name) for name in names)), *names)


GOLDEN: dict[Path, Callable[[], str]] = {
    FOLDER / "transformer.yaml": lambda: dump_plan(transformer_plan(4)),
    FOLDER / "transformer.txt": shown,
    FOLDER / "diff.txt": lambda: compared(transformer_plan(4), sharded_plan(4)),
    FOLDER / "diff.md": lambda: diff_markdown(diff_plans(transformer_plan(4), sharded_plan(4)), "old.yaml", "new.yaml"),
    FOLDER / "llama3_8b.diff.md": llama_markdown,
    FOLDER / "parallelize_module.py.txt": lambda: parallelize_module_source(sharded_plan(4)),
    FOLDER / "partition_spec.py.txt": lambda: partition_spec_source(sharded_plan(4)),
    DOCUMENT: documented,
    ROOT / "docs" / "plan.schema.json": schema_text,
}


def main() -> None:
    """Writes every golden text."""
    for path, made in GOLDEN.items():
        path.write_text(made())


if __name__ == "__main__":
    main()
