"""The numeric check: its parts by hand, and wrong rules planted among the right ones."""

from __future__ import annotations

import pytest
import torch

from autoshard.capture import TensorMeta
from autoshard.layout import P_SUM, Layout, P, Placement, R, S
from autoshard.mesh import Mesh
from autoshard.ops import Rule
from autoshard.strategies import Enumerator, Strategy
from autoshard.strategies.rule_check import agrees, split

from .subjects import operator

aten = torch.ops.aten
EVEN, UNEVEN = (12, 8), (13, 11)
Row = tuple[Placement, ...]


def f(*shape: int) -> TensorMeta:
    return TensorMeta(shape, torch.float32)


def i(*shape: int) -> TensorMeta:
    return TensorMeta(shape, torch.int64)


def b(*shape: int) -> TensorMeta:
    return TensorMeta(shape, torch.bool)


def c(*shape: int) -> TensorMeta:
    return TensorMeta(shape, torch.complex64)


def _cases(shape: tuple[int, ...]) -> dict[str, tuple[object, tuple[object, ...], Rule, Rule]]:
    """Operator, arguments, a right rule and a wrong one."""
    n, m = shape
    x = f(n, m)

    def rule(inputs: Row, outputs: Row) -> Rule:
        return Rule(inputs, outputs)

    return {
        "relu of a partial": (aten.relu.default, (x,), rule((S(0),), (S(0),)), rule((P_SUM,), (P_SUM,))),
        "gelu of a partial": (aten.gelu.default, (x,), rule((S(1),), (S(1),)), rule((P_SUM,), (P_SUM,))),
        "softmax on the cut dim": (
            aten._softmax.default,
            (x, 1, False),
            rule((S(0),), (S(0),)),
            rule((S(1),), (S(1),)),
        ),
        "scalar added to a partial": (aten.add.Tensor, (x, 2.5), rule((S(0),), (S(0),)), rule((P_SUM,), (P_SUM,))),
        "whole added to a partial": (
            aten.add.Tensor,
            (x, x),
            rule((P_SUM, P_SUM), (P_SUM,)),
            rule((P_SUM, R), (P_SUM,)),
        ),
        "product of partials": (aten.mul.Tensor, (x, x), rule((P_SUM, R), (P_SUM,)), rule((P_SUM, P_SUM), (P_SUM,))),
        "mean of a cut batch added up": (
            aten.mse_loss.default,
            (x, x, 0),
            rule((S(0), S(0)), (S(0),)),
            rule((P_SUM, P_SUM), (P_SUM,)),
        ),
        "mean loss of a cut batch": (aten.mse_loss.default, (x, x), rule((R, R), (R,)), rule((S(0), S(0)), (P_SUM,))),
        "mean of a block for the mean": (aten.mean.dim, (x, (0,)), rule((S(0),), (P_SUM,)), rule((S(0),), (R,))),
        "sum kept whole": (aten.sum.dim_IntList, (x, (0,)), rule((S(0),), (P_SUM,)), rule((S(0),), (R,))),
        "cumulative sum along the cut": (aten.cumsum.default, (x, 0), rule((S(1),), (S(1),)), rule((S(0),), (S(0),))),
        "largest of a block": (
            aten.amax.default,
            (i(n, m), (0,)),
            rule((S(0),), (P("max"),)),
            rule((S(0),), (P_SUM,)),
        ),
        "largest of a block, where NaN is larger": (  # which of NaN and 1 a collective takes, its order decides
            aten.amax.default,
            (x, (0,)),
            rule((S(1),), (S(0),)),
            rule((S(0),), (P("max"),)),
        ),
        "band of a mask": (aten.tril.default, (x, -3), rule((S(0),), (S(0),)), rule((S(0),), (R,))),
        "scores hidden by minus infinity": (
            aten.masked_fill.Scalar,
            (x, b(n, m), float("-inf")),
            rule((S(0), S(0)), (S(0),)),
            rule((S(0), S(0)), (S(1),)),
        ),
        "addends hidden by a number": (
            aten.masked_fill.Scalar,
            (x, b(n, m), 0.0),
            rule((P_SUM, R), (P_SUM,)),
            rule((P_SUM, P_SUM), (P_SUM,)),
        ),
        "addends divided, by zero as well": (
            aten.div.Tensor,
            (x, x),
            rule((P_SUM, R), (P_SUM,)),
            rule((R, P_SUM), (P_SUM,)),
        ),
        "logarithm, of negative numbers as well": (
            aten.log.default,
            (x,),
            rule((S(0),), (S(0),)),
            rule((P_SUM,), (P_SUM,)),
        ),
        "complex numbers": (
            aten.mul.Tensor,
            (c(n, m), c(n, m)),
            rule((P_SUM, R), (P_SUM,)),
            rule((P_SUM, P_SUM), (P_SUM,)),
        ),
        "truth of a cut batch": (aten.any.dim, (b(n, m), 0), rule((S(1),), (S(0),)), rule((S(0),), (P_SUM,))),
        "one truth of all": (aten.all.default, (b(n, m),), rule((S(0),), (P("min"),)), rule((S(0),), (P("max"),))),
        "variance of a block": (aten.var.correction, (x, (0,)), rule((S(1),), (S(0),)), rule((S(0),), (R,))),
        "attention over the cut head size": (
            torch.ops.autoshard.attention.default,
            (f(2 * n, 2 * m, 5, 8), f(2 * n, 2 * m, 7, 8), f(2 * n, 2 * m, 7, 8), None, True, None),
            rule((S(0),) * 3, (S(0), S(0))),
            rule((R, S(2), S(2)), (R, R)),
        ),
        "position of the largest": (aten.argmax.default, (x, 1), rule((S(0),), (S(0),)), rule((S(1),), (R,))),
        "norm of a partial": (
            aten.linalg_vector_norm.default,
            (x, 2, (1,)),
            rule((S(0),), (S(0),)),
            rule((P_SUM,), (P_SUM,)),
        ),
        "transposed cut": (aten.t.default, (x,), rule((S(0),), (S(1),)), rule((S(0),), (S(0),))),
        "joined along the cut": (
            aten.cat.default,
            ((x, x), 1),
            rule((S(0), S(0)), (S(0),)),
            rule((S(1), S(1)), (S(1),)),
        ),
        "reversed along the cut": (aten.flip.default, (x, (0,)), rule((S(1),), (S(1),)), rule((S(0),), (S(0),))),
        "contraction taken for whole": (
            aten.mm.default,
            (x, f(m, 6)),
            rule((S(1), S(0)), (P_SUM,)),
            rule((S(1), S(0)), (R,)),
        ),
        "partial times partial": (
            aten.mm.default,
            (x, f(m, 6)),
            rule((P_SUM, R), (P_SUM,)),
            rule((P_SUM, P_SUM), (P_SUM,)),
        ),
        "addends with a whole bias taken for whole": (
            aten.addmm.default,
            (f(6), x, f(m, 6)),
            rule((R, S(1), S(0)), (P_SUM,)),
            rule((R, S(1), S(0)), (R,)),
        ),
        "rows of a cut vocabulary": (
            aten.embedding.default,
            (x, i(3, 4)),
            rule((S(0), R), (P_SUM,)),
            rule((S(0), R), (R,)),
        ),
        "table gradient of a cut batch": (
            aten.embedding_dense_backward.default,
            (f(n, m, 6), i(n, m), 9, -1, False),
            rule((S(0), S(0)), (P_SUM,)),
            rule((S(0), S(0)), (R,)),
        ),
    }


def _offered(case: str, shape: tuple[int, ...], parts: int, monkeypatch: pytest.MonkeyPatch) -> set[Strategy]:
    op, args, right, wrong = _cases(shape)[case]
    graph = operator(op, *args)  # type: ignore[arg-type]
    rules = dict.fromkeys((wrong, right), "torch")
    monkeypatch.setattr("autoshard.strategies.enumerate._written_rules", lambda *_: rules)
    return set(Enumerator(graph, Mesh(("a",), (parts,))).strategies(graph.nodes[-1]))


def _strategy(rule: Rule) -> Strategy:
    return Strategy(tuple(Layout((p,)) for p in rule.inputs), tuple(p and Layout((p,)) for p in rule.outputs))


@pytest.mark.filterwarnings("ignore::autoshard.errors.StrategyWarning")
@pytest.mark.parametrize("parts", [2, 3, 4])
@pytest.mark.parametrize("shape", [EVEN, UNEVEN])
@pytest.mark.parametrize("case", _cases(EVEN))
def test_a_planted_wrong_rule_is_not_offered_and_the_right_one_is(case, shape, parts, monkeypatch) -> None:
    _, _, right, wrong = _cases(shape)[case]
    offered = _offered(case, shape, parts, monkeypatch)
    assert _strategy(wrong) not in offered
    assert _strategy(right) in offered
    assert len(offered) == 1 + (right.inputs != (R,) * len(right.inputs))


def test_split_cuts_in_blocks_as_chunk_does() -> None:
    tensor = torch.arange(10).reshape(5, 2)
    shards = split(tensor, S(0), 3, torch.Generator())
    assert [shard.tolist() for shard in shards] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8, 9]]]
    assert all(torch.equal(shard, tensor) for shard in split(tensor, R, 3, torch.Generator()))


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64])
def test_split_into_addends_adds_up_and_no_addend_is_the_whole(dtype: torch.dtype) -> None:
    tensor = torch.arange(10).to(dtype)
    addends = split(tensor, P_SUM, 3, torch.Generator().manual_seed(0))
    torch.testing.assert_close(sum(addends), tensor)
    assert not any(torch.equal(addend, tensor) for addend in addends)


def test_booleans_and_maxima_cannot_be_split_into_addends() -> None:
    for tensor, placement in [(torch.ones(3, dtype=torch.bool), P_SUM), (torch.ones(3), P("max"))]:
        with pytest.raises(ValueError, match="cannot be split"):
            split(tensor, placement, 2, torch.Generator())


INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("shards", "placement", "expected", "verdict"),
    [
        ([[1.0, 2.0], [1.0, 2.0]], R, [1.0, 2.0], True),
        ([[1.0, 2.0], [1.0, 2.1]], R, [1.0, 2.0], False),
        ([[1.0, 2.0], [3.0]], S(0), [1.0, 2.0, 3.0], True),
        ([[1.0], [2.0, 3.0]], S(0), [1.0, 2.0, 3.0], False),  # the first block is the longer one
        ([[3.0], [2.0], [1.0]], S(0), [1.0, 2.0, 3.0], False),
        ([[1.0, 5.0], [2.0, -1.0]], P_SUM, [3.0, 4.0], True),
        ([[1.0, 5.0], [2.0, -1.0]], P_SUM, [2.0, 5.0], False),
        ([[1, 5], [2, -1]], P("max"), [2, 5], True),
        ([[1, 5], [2, -1]], P("min"), [1, -1], True),
        ([[1, 5], [2, -1]], P("min"), [2, -1], False),
        ([[1.0, 5.0], [2.0, -1.0]], P("max"), [2.0, 5.0], False),  # a collective may lose a NaN
        ([[True, False], [False, False]], P("max"), [True, False], True),
        ([[True, False], [False, False]], P_SUM, [True, False], False),  # 256 bytes of one are zero
        ([[1, 5, 2]], P_SUM, [8], False),
        ([[-INF, 1.0], [NAN]], S(0), [-INF, 1.0, NAN], True),
        ([[-INF, 1.0], [NAN]], S(0), [INF, 1.0, NAN], False),
        ([[NAN, 1.0], [NAN, 1.0]], R, [-INF, 1.0], False),
    ],
)
def test_agreement_of_shards_with_the_whole(shards, placement, expected, verdict: bool) -> None:
    dtype = torch.tensor(expected).dtype
    tensors = [torch.tensor(shard, dtype=dtype) for shard in shards]
    assert agrees(tensors, placement, torch.tensor(expected, dtype=dtype)) is verdict


@pytest.mark.parametrize(
    ("found", "expected", "verdict"),
    [
        ([NAN, 2.0], [INF, 2.0], True),
        ([-INF, 2.0], [NAN, 2.0], True),
        ([7.0, 2.0], [INF, 2.0], False),
        ([NAN, 2.0], [1.0, 2.0], False),
        ([INF, 2.1], [INF, 2.0], False),
    ],
)
def test_addends_may_make_another_number_that_is_not_finite_and_no_other_difference(found, expected, verdict) -> None:
    assert agrees([torch.tensor(found)] * 2, R, torch.tensor(expected), "finite values") is verdict


def test_what_an_operator_leaves_uninitialised_is_judged_by_its_shape_alone() -> None:
    whole, blocks = torch.zeros(4, 2), [torch.full((2, 2), 7.0)] * 2
    assert agrees(blocks, S(0), whole, "shapes") and not agrees(blocks, S(0), whole)
    assert not agrees(blocks, S(1), whole, "shapes") and not agrees(blocks, R, whole, "shapes")


def test_another_dtype_does_not_agree() -> None:
    assert not agrees([torch.ones(2)] * 2, R, torch.ones(2, dtype=torch.float64))
