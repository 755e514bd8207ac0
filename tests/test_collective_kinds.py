"""There is one list of the kinds of collectives, and what knows something of each kind knows it of all."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import get_args

import pytest

from autoshard.lowering.adapter import COLLECTIVES
from autoshard.redistribution import StepKind
from autoshard.redistribution.execution import Emitter
from cost_models.collective_kinds import COLLECTIVE_KINDS, REDISTRIBUTION_KINDS

ROOT = Path(__file__).resolve().parent.parent
THE_LIST = Path("cost_models/collective_kinds.py")
SPELLED = 3  # so many kinds in one place are a list of them; two may be those that reduce, or those of a scheme


def spellings(tree: ast.Module) -> list[tuple[int, set[str]]]:
    """Every place of a module that names several kinds, with its line: displays, and strings that are no docstrings."""
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and isinstance(node.body[0], ast.Expr)
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Tuple | ast.List | ast.Set | ast.Dict):
            parts = [*node.keys, *node.values] if isinstance(node, ast.Dict) else node.elts
            named = {part.value for part in parts if isinstance(part, ast.Constant)} & set(COLLECTIVE_KINDS)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            named = {kind for kind in COLLECTIVE_KINDS if kind in node.value}
        else:
            continue
        if len(named) >= SPELLED and not (isinstance(node, ast.Dict) and named in map(set, LISTS)):
            found.append((node.lineno, named))
    return found


LISTS = (COLLECTIVE_KINDS, REDISTRIBUTION_KINDS)


def test_the_kinds_are_listed_in_one_file() -> None:
    files = (path for package in ("autoshard", "solver", "cost_models") for path in (ROOT / package).rglob("*.py"))
    again = {
        str(path.relative_to(ROOT)): spellings(ast.parse(path.read_text()))
        for path in files
        if path.relative_to(ROOT) != THE_LIST
    }
    assert {name: found for name, found in again.items() if found} == {}
    assert spellings(ast.parse((ROOT / THE_LIST).read_text()))


@pytest.mark.parametrize(
    "source",
    [
        'KINDS = ("all_gather", "all_reduce", "all_to_all")',
        'Kind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "slice"]',
        'PATTERN = r"^(all_gather|reduce_scatter|all_reduce) "',
        'PASSES = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}',
    ],
)
def test_a_second_list_would_be_found(source: str) -> None:
    assert len(spellings(ast.parse(source))) == 1


def test_a_table_with_an_entry_for_every_kind_is_no_second_list() -> None:
    source = f"PASSES = {dict.fromkeys(COLLECTIVE_KINDS, 1)}\nREDUCES = ('reduce_scatter', 'all_reduce')"
    assert spellings(ast.parse(source)) == []


def test_every_kind_can_be_a_step_and_be_lowered() -> None:
    assert get_args(StepKind) == (*REDISTRIBUTION_KINDS, "slice")
    assert sorted(set(COLLECTIVES.values())) == sorted(REDISTRIBUTION_KINDS)
    assert [kind for kind in REDISTRIBUTION_KINDS if not callable(getattr(Emitter, kind, None))] == []
