"""Constraints gathered from files and texts."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from autoshard.api import plan
from autoshard.constraints import (
    Alike,
    Exclusion,
    Pin,
    PlacementRule,
    StrategyPin,
    gather_constraints,
    parse_constraint,
)
from autoshard.errors import (
    AutoshardError,
    BudgetError,
    ConstraintError,
    ContradictionError,
    InfeasibleError,
    LayoutError,
    MeshError,
)
from autoshard.layout import parse_layout
from autoshard.mesh import Mesh

from ..models import graph_of, mlp
from ..plans_of import formulated, planned, profile_of

MESH = Mesh.parse("dp=2,tp=2")

FILE = """\
autoshard_constraints: 1
mesh: "dp=2,tp=2"
families: {dp: dp-only, tp: sp}
pins:
  tokens: "dp:S(0) tp:R"
  "layers.*.wq.weight": [tp, null]
  "layers.*.wk.weight": [[dp, tp], null]
  layers.0.wq/mm: "*, dp:R tp:S(1) -> *"
not: {output.0: "dp:R tp:R"}
only: {"*.wo.weight": "tp:S dp:R"}
forbid: {"*.norm.weight": "tp:S"}
forbid_collectives: ["all_gather over tp of activations"]
alike: [[embed.weight, head.weight]]
constraints: ["forbid layers.0.* dp:S(0)"]
"""
TEXTS = (
    "family dp=dp-only",
    "family tp=sp",
    "tokens=dp:S(0) tp:R",
    "layers.*.wq.weight=(tp, None)",
    "layers.*.wk.weight=((dp, tp), None)",
    "layers.0.wq/mm=*, dp:R tp:S(1) -> *",
    "output.0!=dp:R tp:R",
    "only *.wo.weight tp:S",
    "only *.wo.weight dp:R",
    "forbid *.norm.weight tp:S",
    "forbid all_gather over tp of activations",
    "alike embed.weight head.weight",
    "forbid layers.0.* dp:S(0)",
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "c.yaml"
    path.write_text(FILE)
    return path


def test_a_file_says_the_same_as_the_texts(file: Path) -> None:
    found = gather_constraints(file, MESH)
    assert found.texts == TEXTS
    assert found.values == gather_constraints(TEXTS, MESH).values == tuple(parse_constraint(t, MESH) for t in TEXTS)
    assert found.places["tokens=dp:S(0) tp:R"] == f"{file}, line 5"
    assert found.places["forbid layers.0.* dp:S(0)"] == f"{file}, line 14"


def test_files_and_texts_mix_and_what_is_said_twice_counts_once(file: Path) -> None:
    found = gather_constraints(["x=dp:S(0)", str(file), "tokens=dp:S(0) tp:R"], MESH)
    assert found.texts == ("x=dp:S(0)", *TEXTS)


def test_the_new_text_forms_are_read_as_what_they_say() -> None:
    held = parse_layout("tp:S(1)", MESH)
    assert parse_constraint("a!=tp:S(1)", MESH) == Exclusion("a", held, "a!=tp:S(1)")
    assert parse_constraint("alike a b.*", MESH) == Alike(("a", "b.*"), "alike a b.*")
    text = "a/mm=*, tp:S(1) -> *, -"
    assert parse_constraint(text, MESH) == StrategyPin("a/mm", (None, held), (None, None), text)


def test_a_file_may_say_what_a_rank_may_hold(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("autoshard_constraints: 1\nmemory: 2 KiB\noptimizer: sgd\n")
    assert gather_constraints(path, MESH).budgets == {"memory": "2 KiB", "optimizer": "sgd"}
    model, args = mlp()
    options: dict[str, Any] = {"mesh": "dp=2,tp=2", "hardware": profile_of("slow"), "constraints": [path]}
    memory = plan(model, args, **options).memory
    assert memory is not None and (memory.budget_bytes, memory.optimizer) == (2048, "sgd")
    own = plan(model, args, **options, memory="1MiB", optimizer="adamw").memory
    assert own is not None and (own.budget_bytes, own.optimizer) == (1 << 20, "adamw")
    other = tmp_path / "d.yaml"
    other.write_text("autoshard_constraints: 1\nmemory: 3KiB\n")
    with pytest.raises(ConstraintError, match=r"d.yaml says memory: 3KiB, another file says 2 KiB"):
        gather_constraints([path, other], MESH)
    for line, error in (
        ("memory: much", BudgetError),
        ("optimizer: adm", BudgetError),
        ("memory_soft: x", ConstraintError),
    ):
        path.write_text(f"autoshard_constraints: 1\n{line}\n")
        with pytest.raises(error):
            plan(model, args, **options)


def test_a_baseline_is_the_family_of_every_axis(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("autoshard_constraints: 1\nfamilies: fsdp+tp\n")
    assert gather_constraints(path, MESH).texts == ("family dp=fsdp", "family tp=tp")
    assert gather_constraints("baseline dp-only", MESH).texts == ("family dp=ddp", "family tp=ddp")
    full = ("family dp=ddp", "family tp=ddp", "recomputation full")
    assert gather_constraints("baseline dp-only/full", MESH).texts == full


@pytest.mark.parametrize(
    ("old", "new", "error", "said"),
    [
        ("constraints: 1", "constraints: 2", ConstraintError, "no line 'autoshard_constraints: 1'"),
        ('mesh: "dp=2,tp=2"', 'mesh: "dp=4"', MeshError, "line 2: the constraints are for the mesh dp=4"),
        ('mesh: "dp=2,tp=2"', "mesh: dp", ConstraintError, "line 2: cannot read the mesh 'dp'"),
        ("tp: sp", "pp: sp", MeshError, "line 3: unknown mesh axis 'pp'"),
        ("tp: sp", "tp: ssp", ConstraintError, "line 3: unknown scheme 'ssp'"),
        ("families: {dp: dp-only, tp: sp}", "families: fdsp", ConstraintError, "line 3: unknown baseline 'fdsp'"),
        ('"dp:S(0) tp:R"', '"pp:S(0)"', LayoutError, "line 5: the layout 'pp:S(0)' names axis 'pp'"),
        ("[tp, null]", "[pp, null]", LayoutError, "line 6: the partition spec '(pp, None)' names axis 'pp'"),
        ("[tp, null]", "{a: b}", ConstraintError, "line 6: found a mapping in pins; expected one line NAME: LAYOUT"),
        ("alike: [[embed.weight, head.weight]]", "alike: [a, b]", ConstraintError, "a list of lists of names"),
        ("forbid: {", "forbidden: {", ConstraintError, "line 11: 'forbidden' is not known here; expected"),
        ("all_gather over", "all_gathr over", ConstraintError, "line 12: unknown collective 'all_gathr'"),
        ("pins:", "pins: &a", ConstraintError, "the anchor &a is not allowed in a constraints file"),
        ("not: {", "not: !!map {", ConstraintError, "is not allowed in a constraints file"),
        ("pins:", "pins: [", ConstraintError, "is not YAML"),
        ("  tokens:", "  tokens: x\n  tokens:", ConstraintError, "a second time"),
    ],
)
def test_a_mistake_in_a_file_is_told_with_its_line(
    file: Path, old: str, new: str, error: type[Exception], said: str
) -> None:
    assert FILE.count(old) == 1
    file.write_text(FILE.replace(old, new))
    with pytest.raises(error) as found:
        gather_constraints(file, MESH)
    assert said in str(found.value) and str(file) in str(found.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty; it should hold constraints"),
        (b"autoshard_plan: 8\n", "holds no constraints: it is a plan; name a file of constraints"),
        (b"- a\n", "no line 'autoshard_constraints: 1'"),
        (b"\xff\xfe", "not UTF-8"),
        (b"# " + b"x" * (5 << 20), "larger than the 4 MiB"),
        (b"autoshard_constraints: 1\nalike: " + b"[" * 10_000, "nested more than"),
    ],
)
def test_a_file_that_is_none_is_refused_quickly(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_bytes(content)
    started_s = time.process_time()
    with pytest.raises(ConstraintError, match=said):
        gather_constraints(path, MESH)
    assert time.process_time() - started_s < 5
    with pytest.raises(ConstraintError, match="check the path"):
        gather_constraints(str(tmp_path / "none.yaml"), MESH)


def test_an_error_that_quotes_a_constraint_of_a_file_says_where_it_stands(file: Path) -> None:
    found = gather_constraints(file, MESH)
    for error in (ConstraintError, InfeasibleError):
        with pytest.raises(error, match=rf"^'alike embed.weight head.weight' is bad \({file}, line 13\)$"):
            with found.located():
                raise error("'alike embed.weight head.weight' is bad")
    with pytest.raises(AutoshardError, match=r"^other$"), found.located():
        raise ConstraintError("other")


def test_an_exclusion_leaves_every_other_layout() -> None:
    graph, free = graph_of("mlp"), planned("mlp", "dp=2,tp=2")
    name, chosen = next((e.name, e.layout) for e in free.plan.parameters if e.name == "up.weight")
    text = "up.weight!=" + " ".join(f"{a}:{p}" for a, p in zip(free.plan.mesh.axes, chosen))
    index = next(i for i, node in enumerate(graph.nodes) if node.name == name)
    before, after = (
        {s.outputs[0] for s in formulated(graph, "dp=2,tp=2", "slow", pins).strategies[index]} for pins in ((), (text,))
    )
    assert before - after == {chosen}


def test_tensors_that_are_to_be_alike_get_one_layout_and_it_costs_no_less() -> None:
    free = planned("mlp", "dp=2,tp=2")
    alike = planned("mlp", "dp=2,tp=2", pins=("alike up.weight down.*t",))
    layouts = {e.name: e.layout for e in alike.plan.parameters}
    assert layouts["up.weight"] == layouts["down.weight"]
    before = {e.name: e.layout for e in free.plan.parameters}
    assert before["up.weight"] != before["down.weight"]
    assert alike.solution.cost is not None and free.solution.cost is not None
    assert alike.solution.cost > free.solution.cost


def test_tensors_that_have_no_layout_in_common_cannot_be_alike() -> None:
    with pytest.raises(ContradictionError, match=r"no layout is one that both up.weight and down.weight can have"):
        formulated(
            graph_of("mlp"), "dp=2", "slow", ("up.weight=dp:S(0)", "down.weight=dp:S(1)", "alike up.weight down.weight")
        )
    with pytest.raises(ConstraintError) as error:
        formulated(graph_of("mlp"), "dp=2", "slow", ("only up.weight dp:S(1)", "alike up.weight up.bias"))
    assert str(error.value).endswith(
        "up.weight can have dp:S(1) under the constraint 'only up.weight dp:S(1)', and up.bias can have dp:R; dp:S(0)"
    )


@pytest.mark.parametrize("pin", ["down/bwd.mm=dp:P(sum), * -> *", "down/addmm=*, dp:P(sum) -> *"])
def test_a_pin_to_what_nothing_leads_to_is_refused_with_what_the_operator_can_have(pin: str) -> None:
    def made(text: str) -> object:
        return plan(*mlp(), mesh="dp=2", hardware=profile_of("slow"), constraints=text, cache=False)

    with pytest.raises(InfeasibleError) as error:
        made(pin)
    said = str(error.value)
    assert f"{pin!r} leaves none, whatever the others say; in a plan {pin.partition('=')[0]} can have dp:" in said
    for strategy in said.partition(" can have ")[2].split("; "):
        made(f"{pin.partition('=')[0]}={strategy}")


def test_the_strategy_of_an_operator_can_be_pinned_in_part() -> None:
    graph = graph_of("mlp")
    index = next(i for i, node in enumerate(graph.nodes) if node.name == "down/addmm")
    wanted = parse_layout("tp:S(1)", MESH)
    found = formulated(graph, "dp=2,tp=2", "slow", ("down/addmm=*, tp:S(1) -> *",)).strategies[index]
    every = formulated(graph, "dp=2,tp=2", "slow").strategies[index]
    assert set(found) == {s for s in every if s.inputs[1] == wanted} and len(found) > 1
    with pytest.raises(ConstraintError, match=r"down/addmm can have .* -> .*; and \d+ more"):
        formulated(graph, "dp=2,tp=2", "slow", ("down/addmm=*, tp:S(1) -> tp:S(1) dp:P(sum)",))


def test_a_spec_for_another_number_of_dims_is_an_error() -> None:
    with pytest.raises(ConstraintError, match=r"has 1 entries, but x has the shape \[6, 8\]; write one entry for each"):
        formulated(graph_of("mlp"), "dp=2", "slow", ("x=(dp,)",))


@pytest.mark.parametrize(
    ("second", "said"),
    [
        ("x!=dp:S(0)", "the constraint 'x!=dp:S(0)' contradicts the pin 'x=dp:S(0)'"),
        ("x=dp:R", "the pin 'x=dp:R' contradicts the pin 'x=dp:S(0)'"),
        ("only x dp:S(1)", "the constraint 'only x dp:S(1)' contradicts the pin 'x=dp:S(0)'"),
    ],
)
def test_constraints_on_one_tensor_that_contradict_each_other_are_both_named(second: str, said: str) -> None:
    with pytest.raises(ContradictionError) as error:
        formulated(graph_of("mlp"), "dp=2", "slow", ("x=dp:S(0)", second))
    assert said in str(error.value)


def test_a_pin_is_a_value() -> None:
    assert parse_constraint("x=dp:S(0)", MESH) == Pin("x", parse_layout("dp:S(0)", MESH), "x=dp:S(0)")
    assert isinstance(parse_constraint("only x tp:S(0)", MESH), PlacementRule)
