"""Experts that sort their tokens, under the schemes that people use, on simulated ranks against one process."""

from __future__ import annotations

import pytest

import autoshard

from ..capture.dropless import WAYS, Dropless, example
from .as_before import check_as_before

# Over one axis. Matrices are (E, 2 I, C) and (E, C, I): experts, columns, and what a product sums over.
CUTS = {
    "ddp": ["family a=ddp"],
    "fsdp": ["family a=fsdp"],
    "by experts": ["up=a:S(0)", "down=a:S(0)", "x=a:S(0)"],
    "by columns": ["down=a:S(1)", "forbid all_gather over a of parameters"],
    "by the sum": ["up=a:S(2)", "down=a:S(2)", "forbid all_gather over a of parameters"],
}


@pytest.mark.parametrize("mesh", ["a=2", "a=4"])
@pytest.mark.parametrize("cut", CUTS)
def test_a_step_is_that_of_one_process_however_experts_are_cut(cut: str, mesh: str) -> None:
    _check("put_back", mesh, CUTS[cut])


@pytest.mark.parametrize("way", WAYS)
def test_a_step_is_that_of_one_process_with_the_batch_and_the_experts_cut(way: str) -> None:
    _check(way, "dp=2,ep=2", ["family dp=ddp", "up=dp:R ep:S(0)", "down=dp:R ep:S(0)"])


def _check(way: str, mesh: str, constraints: list[str]) -> None:
    """Products are in bfloat16, as the model has them, and sums of other addends in another order."""
    model, args = Dropless(WAYS[way]), example()
    plan = autoshard.plan(model, args, mesh=mesh, hardware="cpu-gloo", constraints=constraints, cache=False)
    check_as_before(model, args, plan, rtol=2e-2, atol=2e-3)
