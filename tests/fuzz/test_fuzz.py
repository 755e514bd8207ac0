"""Programs that the fuzzer writes give what one process gives, or an autoshard error; and it finds bugs that are there.

``python -m tests.fuzz --programs 5000`` runs more of them (docs/testing.md).
"""

from __future__ import annotations

import re
from itertools import count, islice
from pathlib import Path

import pytest
import torch

from ..thorough import some_thorough
from .batch import program_of
from .campaign import report, run_campaign
from .mutants import MUTANTS

PROGRAMS, PARTS = 64, 8
FOR_A_MUTANT = 25


@pytest.mark.parametrize("part", some_thorough(range(PARTS), range(1, PARTS)))
def test_programs_give_what_one_process_gives_or_are_refused(part: int, tmp_path: Path) -> None:
    each = PROGRAMS // PARTS
    outcomes = run_campaign(range(part * each, (part + 1) * each), tmp_path, shrink_s=20)
    findings = [outcome for outcome in outcomes if outcome.verdict.is_finding]
    assert not findings, f"{report(outcomes)}\n\n{Path(findings[0].file).read_text()}"
    equal = sum(outcome.kind == "equal" for outcome in outcomes)
    assert equal >= each * 2 / 3, report(outcomes)


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_planted_bug_is_found(mutant: str, tmp_path: Path) -> None:
    matching = (s for s in count(2000) if re.search(MUTANTS[mutant].where, program_of(s).source))
    outcomes = run_campaign(list(islice(matching, FOR_A_MUTANT)), tmp_path, mutant=mutant, shrink_s=0)
    assert any(outcome.kind == "wrong" for outcome in outcomes), report(outcomes)


def test_a_seed_always_stands_for_the_same_program() -> None:
    before = [program_of(seed) for seed in range(20)]
    torch.rand(3)
    assert [program_of(seed) for seed in reversed(range(20))] == before[::-1]
