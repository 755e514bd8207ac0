"""Answers that hold ever less: they are answers, their peaks fall, and none is below the least there is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from solver import INFEASIBLE, Problem, Solution, Status, evaluate, fullest, leaner, routed, solve

from .random_problems import random_lives

BYTE = 1e6
"""What a byte costs: more than all that costs otherwise differ by."""


def _solved(problem: Problem) -> Solution:
    return solve(problem, explains=False)


def _peaks(problem: Problem) -> list[int]:
    """Those of the answers that are lean from the fullest step of the cheapest one on, that one first."""
    free = _solved(problem)
    assert free.choices is not None
    start = routed(problem, free.choices)
    assert start is not None
    step, peak = fullest(problem, start)
    peaks = []
    for answer in leaner(problem, [step], BYTE, lambda priced: _solved(priced).choices):
        assert evaluate(problem, *answer).cost < INFEASIBLE
        assert fullest(problem, answer)[1] == evaluate(problem, *answer).peak_usage
        peaks.append(evaluate(problem, *answer).peak_usage)
    return [peak, *peaks]


def _random(seed: int) -> Problem:
    return replace(random_lives(seed), usage_limit=None, usage_price=None, budgets=())


def test_peaks_fall_and_none_is_below_the_least_one() -> None:
    least_found = helped = tried = 0
    for seed in range(60):
        problem = _random(seed)
        if _solved(problem).status is not Status.OPTIMAL or not any(each.lives for each in problem.networks):
            continue
        free, *peaks = _peaks(problem)
        assert peaks == sorted(set(peaks), reverse=True)
        least = _solved(replace(problem, usage_limit=0, usage_price=10**6))
        assert least.choices is not None
        lowest = evaluate(problem, least.choices, least.routes).peak_usage
        assert min(peaks) >= lowest
        tried += 1
        helped += min(peaks) < free
        least_found += min(free, *peaks) == lowest
    assert helped > tried // 4 and least_found > tried // 2


@pytest.mark.parametrize("explains", [True, False])
def test_why_a_budget_is_hopeless_is_looked_for_only_where_it_is_asked_for(explains: bool) -> None:
    problem = next(
        problem
        for problem in map(_random, range(60))
        if _solved(problem).status is Status.OPTIMAL and min(_peaks(problem)) > 1
    )
    found = solve(replace(problem, usage_limit=0), explains=explains)
    assert found.status is Status.INFEASIBLE
    assert ("the smallest usage limit found to work" in found.report.explanation) is explains
