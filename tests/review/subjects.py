"""Plans that the tests of the review ask about, and the questions whose answers are kept as golden texts."""

from __future__ import annotations

import warnings
from functools import cache
from pathlib import Path
from typing import Any

from autoshard.api import plan
from autoshard.errors import StrategyWarning
from autoshard.plans import ShardingPlan
from autoshard.review import explain
from autoshard.review.explain_text import explanation_text

from ..models import EXAMPLES, Example, llama, mlp
from ..plans_of import profile_of

GOLDEN = Path(__file__).parent / "golden"
MESH = "dp=2,tp=2"

MODELS = EXAMPLES | {
    "mlp of 8": lambda: mlp(batch=8),
    "llama of 2": lambda: llama(n_layers=2),
    "llama of 3": lambda: llama(n_layers=3),
}


def example(name: str) -> Example:
    return MODELS[name]()


@cache
def plan_of(name: str, mesh: str = MESH, hardware: str = "slow", constraints: tuple[str, ...] = ()) -> ShardingPlan:
    model, args = example(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StrategyWarning)
        return plan(model, args, mesh=mesh, hardware=profile_of(hardware), constraints=constraints, name=name)


def ask(name: str, constraints: tuple[str, ...] = (), **question: Any) -> str:
    """The answer to a question about a plan, as text."""
    found = explain(plan_of(name, constraints=constraints), *example(name), hardware=profile_of("slow"), **question)
    return explanation_text(found)


# model, constraints and question, by the name of the golden file
QUESTIONS: dict[str, tuple[str, tuple[str, ...], dict[str, str]]] = {
    "weight": ("mlp", ("x=dp:S(0)",), {"why": "up.weight", "instead": "dp:R tp:S(1)"}),
    "weight_otherwise": ("mlp", ("x=dp:S(0)",), {"why": "up.weight"}),
    "layers": ("llama of 3", (), {"why": "layers.*.attention.wq.weight", "instead": "('dp', None)"}),
    "activation": ("mlp", ("x=dp:S(0)",), {"why": "/relu", "instead": "dp:S(0) tp:R"}),
    "impossible_rule": ("mlp", ("x=dp:S(0)",), {"why": "/relu", "instead": "dp:P(sum)"}),
    "impossible_shape": ("mlp", ("x=dp:S(0)",), {"why": "up.weight", "instead": "dp:S(2)"}),
    "impossible_pin": ("mlp", ("x=dp:S(0)",), {"why": "x", "instead": "dp:R tp:S(0)"}),
}


def golden(name: str) -> str:
    model, constraints, question = QUESTIONS[name]
    return ask(model, constraints, **question)


def main() -> None:
    """Writes the golden texts: ``python -m tests.review.subjects``; read what changed before committing it."""
    for name in QUESTIONS:
        (GOLDEN / f"{name}.txt").write_text(golden(name))


if __name__ == "__main__":
    main()
