"""How predictions are judged: pairs, regret and speedups on made-up plans."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    """The script as a module, without the folders that it puts on the path."""
    path = list(sys.path)
    spec = importlib.util.spec_from_file_location("calibration_benchmark", ROOT / "benchmarks" / "calibration.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    sys.path[:] = path
    return module


def timed(benchmark: ModuleType, **plans: tuple[float, float, float]) -> list[object]:
    """Plans from (predicted, measured, half of the spread)."""
    return [
        benchmark.Timed("the optimum" if name == "optimum" else name, p, p, 0.0, m, m - spread, m + spread)
        for name, (p, m, spread) in plans.items()
    ]


def test_a_right_order_has_no_regret(benchmark: ModuleType) -> None:
    verdict = benchmark.judge(timed(benchmark, optimum=(1, 2, 0.1), a=(2, 3, 0.1), b=(3, 5, 0.1)))
    assert (verdict.pairs, verdict.ordered, verdict.regret) == (3, 3, 0.0)
    assert (verdict.speedup_worst, verdict.speedup_best) == (2.5, 1.5)
    assert verdict.error == pytest.approx(0.4)  # of a half, a third and two fifths


def test_pairs_within_the_spread_do_not_count(benchmark: ModuleType) -> None:
    verdict = benchmark.judge(timed(benchmark, optimum=(1, 2.0, 0.3), a=(2, 2.5, 0.3), b=(3, 5, 0.1)))
    assert (verdict.pairs, verdict.ordered) == (2, 2)


def test_a_wrong_choice_costs_its_regret(benchmark: ModuleType) -> None:
    verdict = benchmark.judge(timed(benchmark, optimum=(1, 3, 0.1), a=(2, 2, 0.1)))
    assert (verdict.pairs, verdict.ordered, verdict.regret) == (1, 0, 0.5)
