"""Every strategy of every operator of the test models, executed on all ranks at the real sizes in float64."""

from __future__ import annotations

import random
import warnings
from functools import cache

import pytest
import torch

from autoshard.errors import StrategyWarning
from autoshard.layout import P_SUM, Layout, P, Placement, R, S, has_empty_shard
from autoshard.mesh import Mesh
from autoshard.strategies import Enumerator, Strategy, rule_check

from ..models import EXAMPLES
from ..oracles import all_layouts, chunks, shards_of, strategy_error, whole_of
from ..thorough import some_thorough
from .subjects import Subject, subjects

MESHES = {text: Mesh.parse(text) for text in ("a=2", "a=3", "a=4", "a=2,b=2", "a=2,b=3", "a=3,b=2")}
SAMPLED = 5
ALIKE = {"llama bf16", "fused 2:1:1", "fused 4:1:1"}
"""Models that are looked at in `make test-all`: their operators are much like those of another one."""
MODELS = some_thorough(EXAMPLES, ALIKE)
MORE = {*ALIKE, "llama", "fused", "gpt2", "moe", "mlp"}
"""Those that are looked at there where a law needs no numbers."""


def _enumerate(name: str, text: str) -> dict[str, tuple[Strategy, ...]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StrategyWarning)
        enumerator = Enumerator(subjects(name)[0].graph, MESHES[text])
        return {subject.node.name: enumerator.strategies(subject.node) for subject in subjects(name)}


strategies_of = cache(_enumerate)


def _complaint(subject: Subject, strategy: Strategy, error: str) -> str:
    return f"{subject.node.name} {[m.shape for m in subject.metas]} {strategy}: {error}"


@pytest.mark.parametrize("axis", some_thorough(["a=2", "a=3", "a=4"], ["a=2", "a=4"]))
@pytest.mark.parametrize("name", MODELS)
def test_every_one_axis_strategy_gives_the_whole_result(name: str, axis: str) -> None:
    mesh, wrong = MESHES[axis], []
    for subject in subjects(name):
        for strategy in strategies_of(name, axis)[subject.node.name]:
            error = strategy_error(subject.wide, subject.values, subject.expected, strategy, mesh)
            wrong += [_complaint(subject, strategy, error)] if error else []
    assert not wrong


@pytest.mark.parametrize(
    "grid", ["a=2,b=3", *(pytest.param(g, marks=pytest.mark.thorough) for g in ("a=2,b=2", "a=3,b=2"))]
)
@pytest.mark.parametrize("name", some_thorough(EXAMPLES, {*ALIKE, "llama", "vit", "fused"}))
def test_sampled_two_axis_strategies_give_the_whole_result(name: str, grid: str) -> None:
    mesh, wrong = MESHES[grid], []
    rng = random.Random(grid)
    for subject in subjects(name):
        strategies = strategies_of(name, grid)[subject.node.name]
        cutting_both = [s for s in strategies if all(any(p != R for p in axis) for axis in _by_axis(s))]
        for strategy in rng.sample(cutting_both, min(SAMPLED, len(cutting_both))):
            error = strategy_error(subject.wide, subject.values, subject.expected, strategy, mesh)
            wrong += [_complaint(subject, strategy, error)] if error else []
    assert not wrong


def _by_axis(strategy: Strategy) -> list[tuple[Placement, ...]]:
    return list(zip(*(*strategy.inputs, *(layout for layout in strategy.outputs if layout))))


@pytest.mark.parametrize("name", some_thorough(EXAMPLES, MORE))
def test_no_strategy_leaves_a_rank_without_elements(name: str) -> None:
    for text, mesh in MESHES.items():
        for subject in subjects(name):
            for strategy in strategies_of(name, text)[subject.node.name]:
                pairs = [*zip(strategy.inputs, subject.metas), *zip(strategy.outputs, subject.node.outputs)]
                assert not any(layout and meta and has_empty_shard(meta.shape, layout, mesh) for layout, meta in pairs)


@pytest.mark.parametrize("name", MODELS)
def test_replication_is_always_among_the_strategies_and_none_comes_twice(name: str) -> None:
    for text, mesh in MESHES.items():
        whole = Layout((R,) * mesh.ndim)
        for subject in subjects(name):
            strategies = strategies_of(name, text)[subject.node.name]
            assert len(set(strategies)) == len(strategies)
            outputs = tuple(meta and whole for meta in subject.node.outputs)
            assert Strategy((whole,) * len(subject.metas), outputs) in strategies


@pytest.mark.parametrize("name", ["llama", "llama bf16", "llama odd", "gpt2", "mlp", "moe"])
def test_matrix_products_attention_and_embeddings_are_cut_over_rows_columns_and_contraction(name: str) -> None:
    """The oracles above would be content with an enumerator that only replicates."""
    least = {"mm": 4, "bmm": 5, "addmm": 3, "attention": 3, "attention_backward": 3, "embedding": 3, "add": 3}
    for subject in subjects(name):
        role = subject.node.op._schema.name.split("::")[1]  # type: ignore[union-attr]
        roomy = all(size >= 2 for meta in subject.metas for size in meta.shape)
        if role in least and roomy:
            assert len(strategies_of(name, "a=2")[subject.node.name]) >= least[role], subject.node.name


@pytest.mark.parametrize("name", some_thorough(EXAMPLES, MORE))
def test_every_rule_is_verified_on_shrunken_sizes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models are too large to check a rule on real sizes, so what holds there must also be seen to hold when small."""
    either = {text: strategies_of(name, text) for text in ("a=2", "a=3", "a=4")}
    monkeypatch.setattr(rule_check, "LARGEST_REAL", -1)
    for text in either:
        shrunken = _enumerate(name, text)
        for subject in subjects(name):
            assert shrunken[subject.node.name] == either[text][subject.node.name], subject.metas


def test_the_oracle_reassembles_what_it_split() -> None:
    generator = torch.Generator().manual_seed(0)
    for mesh in MESHES.values():
        for shape in [(4, 6), (5, 3), (1, 7), (2, 2)]:
            whole = torch.randn(shape, generator=generator, dtype=torch.float64)
            for layout in all_layouts([R, S(0), S(1), P_SUM], mesh):
                again = whole_of(shards_of(whole, layout, mesh, generator), layout, mesh)
                torch.testing.assert_close(again, whole)


def test_the_oracle_cuts_as_written_by_hand() -> None:
    generator = torch.Generator()
    mesh = MESHES["a=2,b=2"]
    nested = shards_of(torch.arange(5), Layout((S(0), S(0))), mesh, generator)
    assert {at: shard.tolist() for at, shard in nested.items()} == {
        (0, 0): [0, 1],
        (0, 1): [2],
        (1, 0): [3],
        (1, 1): [4],
    }
    assert [chunk.tolist() for chunk in chunks(torch.arange(5), 4, 0)] == [[0, 1], [2, 3], [4], []]
    partial = {(0,): torch.tensor([1.0, 5.0]), (1,): torch.tensor([2.0, -1.0])}
    assert whole_of(partial, Layout((P("max"),)), MESHES["a=2"]).tolist() == [2.0, 5.0]
    assert whole_of(partial, Layout((P_SUM,)), MESHES["a=2"]).tolist() == [3.0, 4.0]
    with pytest.raises(AssertionError, match="replicas differ"):
        whole_of(partial, Layout((R,)), MESHES["a=2"])
