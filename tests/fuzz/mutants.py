"""Bugs to plant, which the fuzzer has to find.

Each breaks what no check of the product looks at: what runs after the rules were checked and the plan was verified, or
the check of the rules itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch

from autoshard import ops
from autoshard.layout import P
from autoshard.lowering import local_program
from autoshard.lowering.step import Step
from autoshard.redistribution.execution import run_step
from autoshard.strategies import Source, enumerate
from autoshard.strategies.rule_check import Check


@dataclass(frozen=True)
class Mutant:
    """A bug, and a pattern of programs that may meet it."""

    plant: Callable[[], Any]
    where: str


@contextmanager
def _unchecked_rules() -> Iterator[None]:
    """No rule is checked, and a wrong one is there: functions of one tensor are taken of partial sums."""

    written = enumerate._written_rules

    def added(node: Any, metas: Any, parts: int) -> dict[ops.Rule, Source]:
        partial = ops.Rule((P("sum"),), (P("sum"),))
        wrong: list[ops.Rule] = [partial] * (len(metas) == 1 and node.outputs == metas)
        return written(node, metas, parts) | dict.fromkeys(wrong, "torch")

    with patch.object(Check, "holds", lambda *_: True), patch.object(enumerate, "_written_rules", added):
        yield


def _local_means() -> Any:
    """A mean over a cut dim divides by the length of the shard, where programs are lowered."""
    whole = ops.run_local

    def run_local(caller: Any, node: Any, values: Any, *rest: Any) -> Any:
        with patch("autoshard.ops.reductions._mean_length", lambda *_: None):
            return whole(caller, node, values, *rest)

    return patch.object(local_program, "run_local", run_local)


def _lost_tangents() -> Any:
    """Nothing flows back from results that are not scalars."""
    real = Step.tangent

    def tangent(step: Step, index: int, gradient: torch.Tensor) -> torch.Tensor:
        found = real(step, index, gradient)
        return torch.zeros_like(found) if found.dim() else found

    return patch.object(Step, "tangent", tangent)


def _padding_kept() -> Any:
    """A reduction that pads uneven shards adds one to the first rank's."""

    def step(emit: Any, x: Any, before: Any, after: Any, shard: Any) -> Any:
        result = run_step(emit, x, before, after, shard)
        uneven = len({shard.local(after), shard.largest(after)}) > 1
        return emit.call(torch.ops.aten.add.Scalar, result, 1) if uneven else result

    return patch.object(local_program, "run_step", step)


MUTANTS = {
    "unchecked rules": Mutant(_unchecked_rules, r"tanh|sigmoid|exp\("),
    "local means": Mutant(_local_means, r"\.mean\("),
    "lost tangents": Mutant(_lost_tangents, r"return [\[({]"),
    "padding": Mutant(_padding_kept, "backward"),
}

__all__ = ["MUTANTS", "Mutant", "mutated"]


@contextmanager
def mutated(name: str) -> Iterator[None]:
    """Runs with one of the bugs; with none for the empty name."""
    if not name:
        yield
        return
    with MUTANTS[name].plant():
        yield
