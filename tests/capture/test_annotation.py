"""``autoshard.constrain``: nothing in a model that runs, a decision in one that is planned."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoshard
from autoshard.capture import CONSTRAIN, capture, constrain
from autoshard.errors import ConstraintError, InfeasibleError, LayoutError
from autoshard.layout import format_layout
from autoshard.plans import ShardingPlan

from ..plans_of import profile_of


class Annotated(nn.Module):
    """Two linear layers with an annotation between them; none where ``layout`` is None."""

    def __init__(self, layout: Any = "dp:S(0) tp:R") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8)
        self.layout = layout

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x).relu()
        if self.layout is not None:
            hidden = constrain(hidden, self.layout)
        return self.down(hidden).square().mean()


X = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))


def planned(layout: Any, mesh: str = "dp=2,tp=2", **options: Any) -> ShardingPlan:
    return autoshard.plan(Annotated(layout), (X,), mesh=mesh, hardware=profile_of("slow"), **options)


def test_outside_of_capture_it_is_the_tensor_itself() -> None:
    assert autoshard.constrain is constrain
    assert constrain(X, "dp:S(0)") is X and constrain(X, ("dp", None)) is X
    with pytest.raises(LayoutError, match="a layout such as"):
        constrain(X, 3)  # type: ignore[arg-type]


def test_values_and_gradients_are_those_of_the_model_without_it() -> None:
    results = []
    for layout in ("dp:S(0)", None):
        model = Annotated(layout)
        model(X).backward()
        results.append([model(X).detach(), *(p.grad for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results))


def test_a_compiled_model_does_not_see_it() -> None:
    graphs: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        graphs.append(graph.code)
        return graph.forward

    model = Annotated()
    capture(model, (X,))  # leaves no trace
    assert torch.equal(torch.compile(model, backend=backend, fullgraph=True)(X), model(X))
    assert graphs and "constrain" not in graphs[0]


def test_capture_marks_the_forward_and_passes_the_gradient_on() -> None:
    graph, without = capture(Annotated(), (X,)), capture(Annotated(None), (X,))
    marks = [node for node in graph.nodes if node.op is CONSTRAIN]
    assert [(node.name, node.phase, node.args[1]) for node in marks] == [("/constrain", "forward", "dp:S(0) tp:R")]
    assert "test_annotation.py" in marks[0].source and "constrain(hidden" in marks[0].source
    assert len(graph.nodes) == len(without.nodes) + 1


def test_the_fingerprint_is_stable_and_knows_the_annotation() -> None:
    assert capture(Annotated(), (X,)).fingerprint == capture(Annotated(), (X.to("meta"),)).fingerprint
    different = {capture(Annotated(layout), (X,)).fingerprint for layout in ("dp:S(0) tp:R", "dp:S(1)", None)}
    assert len(different) == 3


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ("dp:S(0) tp:R", "dp:S(0) tp:R"),
        ("tp:S(1)", "dp:R tp:S(1)"),
        (("tp", None), "dp:R tp:S(0)"),
        ((("dp", "tp"), None), "dp:S(0) tp:S(0)"),
        ((None, 1), "dp:R tp:S(1)"),
    ],
)
def test_the_plan_keeps_to_it_and_it_takes_no_time(layout: Any, expected: str) -> None:
    plan = planned(layout)
    entry = next(e for e in plan.operators if e.name == "/constrain")
    assert entry.inputs == entry.outputs and format_layout(entry.inputs[0], plan.mesh) == expected
    assert [e.predicted_ns for e in plan.execution if e.name == "/constrain"] == [0]
    assert plan.solver.cost_ns >= planned(None).solver.cost_ns


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ("pp:S(0)", "names axis 'pp'; the mesh dp=2,tp=2 has no such axis"),
        (("dp",), r"has 1 entries, but /constrain has the shape \[8, 12\]"),
        ("dp:X", "cannot read 'dp:X'"),
        ("dp:S(2)", "cannot hold"),
    ],
)
def test_one_that_cannot_hold_is_an_error_that_names_the_line(layout: Any, said: str) -> None:
    with pytest.raises(ConstraintError, match=rf"(?s)test_annotation.py:\d+: .*{said}|{said}.*"):
        planned(layout)


def test_a_pin_against_it_names_both() -> None:
    with pytest.raises(ConstraintError, match=r"annotation 'dp:S\(0\) .*test_annotation.py:\d+.* contradicts the pin"):
        planned("dp:S(0)", constraints=["/constrain=tp:S(0)"])


def test_one_that_leaves_no_plan_is_named() -> None:
    """Nothing makes addends of the result of relu."""
    with pytest.raises(
        InfeasibleError, match=r"annotations in the model count too: 'dp:P\(sum\)' at .*annotation.py:\d+"
    ):
        planned("dp:P(sum)")
