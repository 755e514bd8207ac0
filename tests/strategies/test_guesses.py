"""Guesses at the rules of operators that have none: tried in a child that may die, hang or say nothing."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autoshard.capture import TensorMeta, capture
from autoshard.layout import Layout, R, S
from autoshard.mesh import Mesh
from autoshard.ops import Rule
from autoshard.strategies import Enumerator, guesses
from autoshard.strategies.guesses import in_child

from ..oracles import run_node, strategy_error, wide
from .subjects import operator
from .test_rule_check import f

aten = torch.ops.aten
UNGUARDED = {
    "weight norm": lambda: operator(
        aten._weight_norm_interface_backward.default, f(12, 8), f(12, 8), f(12, 1), f(12, 1), 0
    ),
    "weight norm of the last dim": lambda: operator(
        aten._weight_norm_interface_backward.default, f(12, 8), f(12, 8), f(1, 8), f(1, 8), 1
    ),
    "batch norm": lambda: operator(
        aten.native_batch_norm_backward.default,
        *(f(6, 6, 6), f(6, 6, 6), f(6), f(6), f(6), f(6), f(6), True, 1e-5, [True, True, True]),
    ),
    "adaptive pool": lambda: operator(
        aten.adaptive_max_pool2d_backward.default, f(4, 6, 2, 2), f(4, 6, 4, 4), TensorMeta((4, 6, 2, 2), torch.int64)
    ),
    "reflected padding": lambda: operator(aten.reflection_pad2d_backward.default, f(6, 4, 5), f(6, 3, 3), [0, 2, 0, 1]),
    "distances": lambda: operator(aten._pdist_backward.default, f(6), f(4, 4), 2.0, f(6)),
    "adaptive average": lambda: operator(
        aten._adaptive_avg_pool3d_backward.default, f(2, 3, 5, 4, 6), f(2, 3, 4, 3, 5)
    ),
}


def _crash() -> bool:
    return bool(ctypes.string_at(0))


def _hang() -> bool:
    time.sleep(1000)
    return True


def _raise() -> bool:
    raise KeyboardInterrupt


def _children() -> list[int]:
    found = []
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if pid == 0:
            return [*found, -1]  # one that lives
        found.append(pid)


@pytest.mark.parametrize("deadly", [_crash, _raise, _hang])
def test_a_question_that_kills_or_outlasts_its_child_is_a_no_and_the_others_are_answered(
    deadly: Callable[[], bool],
) -> None:
    before = _children()
    questions = [lambda: True, lambda: False, deadly, lambda: True, deadly]
    assert in_child(questions, limit_s=1.0) == [True, False, False, True, False]
    assert _children() == before


def test_no_questions_need_no_child_and_no_child_means_no(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "fork")
    assert in_child([]) == [] and in_child([lambda: True, lambda: True]) == [False, False]


@pytest.mark.filterwarnings("ignore::autoshard.errors.StrategyWarning")
@pytest.mark.parametrize("mesh", ["a=2", "a=4", "a=2,b=3"])
@pytest.mark.parametrize("name", UNGUARDED)
def test_an_operator_that_writes_outside_of_shards_that_do_not_fit_leaves_the_process_alone(
    name: str, mesh: str
) -> None:
    graph, ranks = UNGUARDED[name](), Mesh.parse(mesh)
    node, generator = graph.nodes[-1], torch.Generator().manual_seed(0)
    values = [
        torch.rand(m.shape, generator=generator, dtype=torch.float64) + 0.5
        if m.dtype.is_floating_point
        else torch.zeros(m.shape, dtype=m.dtype)
        for m in (graph.meta(ref) for ref in node.inputs)
    ]
    supply = iter(values)
    expected = list(run_node(wide(node), lambda _: next(supply)))
    for strategy in Enumerator(graph, ranks).strategies(node):
        assert not strategy_error(wide(node), values, expected, strategy, ranks), strategy


def test_weight_norm_is_cut_over_the_rows_it_normalises() -> None:
    class OfWhatIsGiven(nn.Module):  # of a parameter alone it is taken apart
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.lengths = nn.Parameter(torch.randn(12, 8)), nn.Parameter(torch.rand(12, 1))

        def forward(self, x: Tensor) -> Tensor:
            return torch._weight_norm(self.weight * x, self.lengths, 0).sum()

    graph = capture(OfWhatIsGiven(), (torch.randn(12, 8),))
    enumerator = Enumerator(graph, Mesh.parse("a=2"))
    found = {
        str(node.op): {str(layout[0]) for s in enumerator.strategies(node) for layout in s.outputs if layout}
        for _, node in graph.of_kind("operator")
        if "weight_norm" in str(node.op)
    }
    assert found == {
        "aten._weight_norm_interface.default": {"R", "S(0)"},
        "aten._weight_norm_interface_backward.default": {"R", "S(0)", "P(sum)"},
    }


def test_a_bound_that_small_numbers_do_not_reach_is_tried_smaller() -> None:
    """Lengths of rows that are held to 10 are lengths of whole rows."""
    graph = operator(aten.renorm.default, f(6, 8), 2, 0, 10.0)
    node = graph.nodes[-1]
    assert guesses.guessed_rules(node, (graph.meta(node.inputs[0]),), 2) == [Rule((S(0),), (S(0),))]
    found = {str(s.outputs[0]) for s in Enumerator(graph, Mesh.parse("a=2")).strategies(node)}
    assert found == {str(Layout((placement,))) for placement in (R, S(0))}


def test_an_operator_that_has_rules_is_not_guessed_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guesses, "in_child", lambda questions: pytest.fail("a guess"))
    graph = operator(aten.mm.default, f(8, 8), f(8, 8))
    assert len(Enumerator(graph, Mesh.parse("a=2")).strategies(graph.nodes[-1])) > 3
