"""What all commands have: below the options of ``--help`` examples, and the names that options take, from their tables;
and a look at the files that they write.
"""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand

from .option_names import option_names
from .written_files import check_files

EXAMPLES: dict[str, tuple[str, ...]] = {
    "plan": (
        "autoshard plan examples/llama.py:demo --mesh dp=2,tp=2 -o plan.yaml",
        "autoshard plan examples/llama.py:llama3_8b --mesh dp=8,tp=8 --memory 80GiB -o plan.yaml",
        "autoshard plan examples/llama.py:demo --mesh dp=2,tp=2 --against experts -o plan.yaml",
        "autoshard plan examples/llama.py:demo --mesh dp=2,tp=2 --baseline fsdp+tp -o megatron.yaml",
    ),
    "show": ("autoshard show plan.yaml", "autoshard show plan.yaml --format json"),
    "diff": ("autoshard diff old.yaml plan.yaml", "autoshard diff old.yaml plan.yaml --format markdown"),
    "report": (
        "autoshard report plan.yaml -o plan.html --baseline megatron.yaml --trace plan.trace.json",
        "autoshard report plan.yaml megatron.yaml -o comparison.html",
    ),
    "export": ("autoshard export plan.yaml --to parallelize-module -o sharding.py",),
    "check": ("autoshard check plan.yaml", "autoshard check plan.yaml model.py:factory --memory 60GiB --within 2%"),
    "explain": (
        "autoshard explain plan.yaml --why layers.0.attention.wq.weight",
        "autoshard explain plan.yaml --why 'layers.*.wq.weight' --not 'dp:R tp:R' -o other.yaml",
    ),
    "replan": ("autoshard replan plan.yaml", "autoshard replan edited.yaml model.py:factory -o plan.yaml"),
    "compare": ("autoshard compare examples/llama.py:demo --mesh dp=2,tp=2 --plans plans",),
    "audit": (
        "autoshard audit examples/llama.py:demo --mesh dp=2,tp=2",
        "autoshard audit examples/llama.py:llama3_8b --mesh dp=8,tp=8 --format json",
    ),
    "search": (
        "autoshard search examples/llama.py:demo --devices 4 -o meshes",
        "autoshard search examples/llama.py:llama3_8b --devices 8,16,32,64 --memory 80GiB --batch 16,32 -o meshes",
    ),
    "calibrate": (
        "torchrun --nproc-per-node 4 -m autoshard calibrate --mesh dp=2,tp=2 -o profile.yaml",
        "torchrun --nproc-per-node 4 -m autoshard calibrate --check profile.yaml",
    ),
}
"""Command lines, by command."""


class Command(TyperCommand):
    """A command whose help ends with examples and names, and that writes over nothing that it reads."""

    def invoke(self, ctx: Any) -> Any:
        """As in typer: runs the command."""
        check_files(ctx)
        return super().invoke(ctx)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Writes them; the tables are loaded here, as only ``--help`` needs them."""
        super().format_epilog(ctx, formatter)
        with formatter.section("Examples"):
            for line in EXAMPLES[str(self.name)]:
                formatter.write(f"  {line}\n")
        options = {option for p in self.params if getattr(p, "metavar", "") != "PLAN" for option in p.opts}
        names = [(option, ", ".join(known)) for option, known in option_names().items() if option in options]
        if names:
            with formatter.section("Names"):
                formatter.write_dl(names)
