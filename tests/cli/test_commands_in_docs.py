"""Every command line in the documents is one that the command takes: options exist, and their values can be read."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from autoshard.cli.commands import app

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
LEFT_OUT = {"...", "COMMAND", "TARGET"}
"""What stands for something else."""


def command_lines(text: str) -> Iterator[str]:
    """The commands of blocks and of what stands in backquotes, without comments and what follows in a pipe."""
    blocks = re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    inline = re.findall(r"`(autoshard [^`]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))
    for line in (*"\n".join(blocks).replace("\\\n", " ").splitlines(), *(each.replace("\n", " ") for each in inline)):
        for command in re.split(r"[|;&>]+", line):
            found = re.match(r"\s*(?:torchrun [^#]* -m )?autoshard ([a-z].*)", command)
            if found and not LEFT_OUT & set(found[1].split()):
                yield found[1]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_commands_of_a_page_are_taken(page: Path) -> None:
    group = typer.main.get_command(app)
    for line in command_lines(page.read_text()):
        name, *given = shlex.split(line, comments=True)
        if given and not all(re.fullmatch(r"[A-Z]+", word) for word in given):
            try:
                group.commands[name].make_context(name, given)
            except Exception as error:  # a sentence may name an option alone: `autoshard plan --held-as`
                if type(error).__name__ not in ("MissingParameter", "BadOptionUsage") or line in blocks(page):
                    raise


def blocks(page: Path) -> list[str]:
    """The commands that stand in blocks."""
    text = "".join(re.findall(r"^```sh\n.*?^```\n", page.read_text(), re.MULTILINE | re.DOTALL))
    return list(command_lines(text))


def test_commands_are_found_and_a_wrong_one_is_refused() -> None:
    text = "```sh\nautoshard show plan.yaml | head  # so\n```\nand `autoshard plan model.py:m --mash dp=2`\n"
    assert list(command_lines(text)) == ["show plan.yaml ", "plan model.py:m --mash dp=2"]
    with pytest.raises(Exception, match="--mash"):
        typer.main.get_command(app).commands["plan"].make_context("plan", "model.py:m --mash dp=2".split())
    pages = {page.name: list(command_lines(page.read_text())) for page in PAGES}
    assert len(pages["README.md"]) > 10 and len(pages["fit.md"]) > 5 and len(pages["search.md"]) > 3
