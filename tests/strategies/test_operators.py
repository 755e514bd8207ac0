"""Operators of every kind, every strategy on every rank at real size against an independent oracle.

First those whose result is longer or shorter than what they read, where blocks of one need not be blocks of the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from autoshard.capture import CapturedGraph, TensorMeta
from autoshard.layout import P_SUM, Layout, S
from autoshard.mesh import Mesh
from autoshard.ops import known
from autoshard.strategies import Enumerator, Strategy

from ..oracles import run_node, strategy_error, wide
from .subjects import operator
from .test_rule_check import b, c, f, i

aten = torch.ops.aten
ours = torch.ops.autoshard
OPERATORS = {
    "repeat": lambda n: operator(aten.repeat_interleave.self_int, f(8, n), 2, 1),
    "tile": lambda n: operator(aten.repeat.default, f(8, n), [1, 2]),
    "pool": lambda n: operator(aten.avg_pool2d.default, f(6, 6, n, n), [2, 2], [2, 2]),
    "pool with halo": lambda n: operator(aten.avg_pool2d.default, f(6, 6, n, n), [3, 3], [1, 1], [1, 1]),
    "every other": lambda n: operator(aten.slice.Tensor, f(8, n), 1, 0, None, 2),
    "all but one": lambda n: operator(aten.slice.Tensor, f(8, n), 1, 0, n - 1),
    "all but the first": lambda n: operator(aten.slice.Tensor, f(8, n), 1, 1, n),
    "padded": lambda n: operator(aten.constant_pad_nd.default, f(8, n), [1, 1]),
    "upsampled": lambda n: operator(aten.upsample_nearest2d.default, f(6, 6, n, n), [2 * n, 2 * n], None, None),
    "rolled": lambda n: operator(aten.roll.default, f(8, n), [1], [1]),
    "triangle": lambda n: operator(aten.tril.default, f(n, n)),
    "split": lambda n: operator(aten.split.Tensor, f(8, n), 5, 1),
    "joined": lambda n: operator(aten.cat.default, [f(8, n), f(8, 3)], 1),
    "transposed convolution": lambda n: operator(
        aten.convolution.default, f(4, 6, n), f(6, 4, 2), None, [2], [0], [1], True, [0], 1
    ),
}
# reductions, masks, indices, orders, truths, complex numbers, whose shapes say nothing of what they do
OTHERS = {
    "band": lambda n: operator(aten.triu.default, f(6, n, n), -n // 3),
    "diagonal": lambda n: operator(aten.diagonal.default, f(6, n, n), 1, 1, 2),
    "placed on the diagonal": lambda n: operator(aten.diag_embed.default, f(6, n), 1),
    "reversed": lambda n: operator(aten.flip.default, f(6, n), [1]),
    "squeezed": lambda n: operator(aten.squeeze.default, f(4, 1, n)),
    "squeezed where it is one": lambda n: operator(aten.squeeze.dims, f(4, 1, n), [0, 1]),
    "hidden": lambda n: operator(aten.masked_fill.Scalar, f(6, n), b(6, n), float("-inf")),
    "indexed where there is one": lambda n: operator(aten.index.Tensor, f(n, 4, 1), [None, None, i(6)]),
    "sampled where there is one": lambda n: operator(
        aten._unsafe_index.Tensor, f(n, 4, 1, 1), [None, None, i(6, 1), i(6)]
    ),
    "put where there is one": lambda n: operator(aten.index_put.default, f(n, 1), [None, i(2, 3)], f(n, 2, 3), True),
    "filled where a mask says": lambda n: operator(aten.masked_scatter.default, f(n, 6, 4), b(n, 6, 1), f(2 * n, 4)),
    "filled element by element": lambda n: operator(aten.masked_scatter.default, f(n, 6), b(n, 6), f(n, 1, 4)),
    "filled along a row": lambda n: operator(aten.masked_scatter.default, f(1, n, 6), b(n, 6), f(n * 4)),
    "filled with too few": lambda n: operator(aten.masked_scatter.default, f(n, 6), b(n, 1), f(n, 4)),
    "gradient of what fills": lambda n: operator(
        aten.masked_scatter_backward.default, f(n, 6, 4), b(n, 6, 1), [2 * n, 4]
    ),
    "hidden by a row": lambda n: operator(aten.masked_fill.Scalar, f(6, n), b(n), float("inf")),
    "chosen": lambda n: operator(aten.where.self, b(6, n), f(6, n), f(n)),
    "any": lambda n: operator(aten.any.dim, b(6, n), 0),
    "any at all": lambda n: operator(aten.any.default, b(6, n)),
    "all": lambda n: operator(aten.all.dims, b(6, n, 4), [0, 2], True),
    "any number": lambda n: operator(aten.any.dim, i(6, n), -1),
    "largest number": lambda n: operator(aten.amax.default, i(6, n), [0]),
    "largest": lambda n: operator(aten.amax.default, f(6, n), [0]),
    "largest as a whole number": lambda n: operator(ours.as_whole.default, f(6, n, 4), [0, 2], False, True),
    "largest of whole numbers": lambda n: operator(
        ours.extreme.default,
        *(f(n, 4, 6), TensorMeta((1, 4, 1), torch.int64), [0, 2], True, False),
    ),
    "sum over no dims": lambda n: operator(aten.sum.dim_IntList, f(6, n), [], True),
    "position of the largest": lambda n: operator(aten.argmax.default, f(6, n), 1),
    "counted": lambda n: operator(aten.sum.default, b(6, n)),
    "sum of few bits": lambda n: operator(aten.sum.dim_IntList, TensorMeta((6, n), torch.uint8), [0]),
    "sum in few bits": lambda n: operator(aten.sum.dim_IntList, i(6, n), [0], dtype=torch.int8),
    "product": lambda n: operator(aten.prod.dim_int, f(6, n), 0),
    "mean over two": lambda n: operator(aten.mean.dim, f(6, n, 4), [0, 1]),
    "variance": lambda n: operator(aten.var.correction, f(6, n), [0], correction=1),
    "variance and mean": lambda n: operator(aten.var_mean.correction, f(6, n), [1]),
    "added to means": lambda n: operator(ours.row_mean.default, f(6, n, 4), [1, 2], 4 * n),
    "added to variances": lambda n: operator(
        ours.row_variance.default, f(6, n, 4), TensorMeta((1, n, 1), torch.float64), [0, 2], 23.0
    ),
    "deviation in parts": lambda n: operator(
        *(ours.spread.default, f(n, 4, 6), f(1, 4, 6), f(1, 4, 6)), *([0], 1.0, False, True)
    ),
    "variance and mean in parts": lambda n: operator(
        *(ours.spread_and_mean.default, f(6, n, 4), f(1, n, 1), f(1, n, 1)), *([0, 2], 0.0, False, False)
    ),
    "norm": lambda n: operator(aten.linalg_vector_norm.default, f(6, n), 2, [0]),
    "log of the sum": lambda n: operator(aten.logsumexp.default, f(6, n), [0]),
    "running sum": lambda n: operator(aten.cumsum.default, f(6, n), 1),
    "sorted": lambda n: operator(aten.sort.default, f(6, n), 0),
    "largest few": lambda n: operator(aten.topk.default, f(6, n), 4),
    "gathered": lambda n: operator(aten.gather.default, f(6, n), 1, i(6, 4)),
    "gradient of what is picked": lambda n: operator(
        torch.ops.autoshard.gather_backward.default, f(n, 1), i(n, 1), 1, 9
    ),
    "scattered": lambda n: operator(aten.scatter.src, f(6, n), 0, i(4, n), f(4, n)),
    "picked": lambda n: operator(aten.index_select.default, f(6, n), 0, i(n)),
    "looked up": lambda n: operator(aten.embedding.default, f(6, n), i(n, 4)),
    "gradient of looking up": lambda n: operator(
        aten.embedding_dense_backward.default, f(n, 4, 6), i(n, 4), 9, -1, False
    ),
    "indexed": lambda n: operator(aten.index.Tensor, f(6, n), [i(n), i(n)]),
    "put": lambda n: operator(aten.index_put.default, f(6, n), [i(4)], f(4, n), True),
    "put in place of others": lambda n: operator(aten.index_put.default, f(6, n), [i(4)], f(4, n), False),
    "one number put": lambda n: operator(aten.index_put.default, f(6, n), [None, i(n)], f(1), True),
    "put at pairs": lambda n: operator(aten.index_put.default, f(6, n, n), [i(n, 1), None, i(4)], f(n, 4, n), True),
    "stretched": lambda n: operator(aten._unsafe_index.Tensor, f(6, 4, n, n), [None, None, i(2 * n, 1), i(n)]),
    "indexed by few": lambda n: operator(aten._unsafe_index.Tensor, f(6, n, n), [i(n, 1), None, i(1, 4)]),
    "gradient of stretching": lambda n: operator(
        aten._unsafe_index_put.default, f(6, n, n), [None, i(n, 1), i(n)], f(6, n, n), True
    ),
    "messages": lambda n: operator(aten.index_add.default, f(6, n), 0, i(2 * n), f(2 * n, n)),
    "messages to columns": lambda n: operator(aten.index_add.default, f(n, 6), -1, i(n), f(n, n), alpha=2),
    "degrees": lambda n: operator(aten.index_add.default, f(6), 0, i(n), f(n)),
    "scattered and added": lambda n: operator(aten.scatter_add.default, f(6, n), 0, i(n, n), f(n, n)),
    "fewer scattered and added": lambda n: operator(aten.scatter_add.default, f(6, n), 0, i(4, n), f(n, n)),
    "one repeated": lambda n: operator(aten.repeat.default, f(1, n), [n, 2]),
    "repeated in a new dim": lambda n: operator(aten.repeat.default, f(6, n), [n, 1, 1]),
    "copied": lambda n: operator(aten.copy.default, f(6, n), f(n)),
    "copied as another type": lambda n: operator(aten.copy.default, i(6, n), f(6, n)),
    "filled": lambda n: operator(aten.fill.Tensor, f(6, n), f()),
    "filled with a number": lambda n: operator(aten.fill.Scalar, f(6, n), 2.5),
    "log of a sigmoid": lambda n: operator(aten.log_sigmoid_forward.default, f(6, n)),
    "gradient of a log of a sigmoid": lambda n: operator(aten.log_sigmoid_backward.default, f(6, n), f(6, n), f(6, n)),
    "gradient of a soft plus": lambda n: operator(aten.softplus_backward.default, f(6, n), f(6, n), 1.0, 20.0),
    "divided and rounded": lambda n: operator(aten.floor_divide.default, i(6, n), 2),
    "directions and lengths": lambda n: operator(aten._weight_norm_interface.default, f(n, 6), f(n, 1), 0),
    "running sum of whole numbers": lambda n: operator(aten.cumsum.default, i(n), 0),
    "one of many": lambda n: operator(aten.select.int, f(6, n), 1, n - 1),
    "one among zeros": lambda n: operator(aten.select_backward.default, f(6), [6, n], 1, n - 1),
    "part of another": lambda n: operator(aten.slice_scatter.default, f(6, n), f(6, n - 2), 1, 1, n - 1),
    "gradient of a part": lambda n: operator(aten.slice_backward.default, f(6, n), [6, n + 3], 1, 2, n + 2, 1),
    "rows one by one": lambda n: operator(aten.unbind.int, f(3, 6, n)),
    "gradient of windows": lambda n: operator(aten.unfold_backward.default, f(6, (n - 1) // 3, 4), [6, n], 1, 4, 3),
    "gradient of a diagonal": lambda n: operator(aten.diagonal_backward.default, f(6, n), [n, 6, n], 0, 0, 2),
    "diagonal in memory of its own": lambda n: operator(aten.diagonal_copy.default, f(6, n, n), 1, 1, 2),
    "another diagonal": lambda n: operator(aten.diagonal_scatter.default, f(6, n, n), f(6, n - 1), 1, 1, 2),
    "another row": lambda n: operator(aten.select_scatter.default, f(6, n, 4), f(6, 4), 1, n - 1),
    "another truth": lambda n: operator(aten.select_scatter.default, b(n), b(), 0, -1),
    "patches": lambda n: operator(aten.im2col.default, f(n, 4, 5, 5), [3, 3], [1, 1], [1, 1], [2, 2]),
    "image of patches": lambda n: operator(aten.col2im.default, f(n, 36, 9), [5, 5], [3, 3], [1, 1], [1, 1], [2, 2]),
    "seen at places": lambda n: operator(ours.sample.default, f(n, 4, 6, 3, 4), f(n, 4, 2, 5, 2), 0, 0, False),
    "seen at places of channels": lambda n: operator(
        ours.sample.default, f(4, 3, n, 3, 4), f(4, 3, 2, 5, 2), 2, 1, True
    ),
    "gradient of what is seen": lambda n: operator(
        ours.sample_backward.default, f(n, 4, 6, 2, 5), f(n, 4, 6, 3, 4), f(n, 4, 2, 5, 2), 0, 2, False
    ),
    "leaky": lambda n: operator(aten._prelu_kernel.default, f(6, n, 4), f(1, n, 1)),
    "gradient of leaky": lambda n: operator(aten._prelu_kernel_backward.default, f(6, n), f(1, 1), f(6, n)),
    "norm of rows": lambda n: operator(aten.norm.ScalarOpt_dim, f(6, n, 4), 2, [2]),
    "matrix and vector": lambda n: operator(aten.mv.default, f(6, n), f(n)),
    "two vectors": lambda n: operator(aten.vdot.default, f(n), f(n)),
    "matrix, vector and bias": lambda n: operator(aten.addmv.default, f(6), f(6, n), f(n)),
    "numbers between": lambda n: operator(aten.linspace.default, 0, 1, n),
    "places of a triangle": lambda n: operator(aten.tril_indices.default, n, n, -1),
    "numbers written down": lambda n: operator(
        torch.ops.autoshard.constant.default,
        *(tuple(range(6 * n)), (6, n)),
        dtype=torch.float32,
        device=torch.device("cpu"),
    ),
    "gated": lambda n: operator(aten.glu.default, f(6, 2 * n), 1),
    "windows": lambda n: operator(aten.unfold.default, f(6, n), 1, 4, 3),
    "expanded": lambda n: operator(aten.expand.default, f(6, 1, n), [4, 6, n, -1]),
    "complex product": lambda n: operator(aten.mul.Tensor, c(6, n), c(n)),
    "matrix product of complex numbers": lambda n: operator(aten.mm.default, c(6, n), c(n, 4)),
    "magnitude": lambda n: operator(aten.abs.default, c(6, n)),
    "conjugate": lambda n: operator(aten._conj.default, c(6, n)),
    "pairs": lambda n: operator(aten.view_as_real.default, c(6, n)),
    "spectrum": lambda n: operator(aten._fft_c2c.default, c(6, n), [1], 0, True),
    "layer norm": lambda n: operator(aten.native_layer_norm.default, f(6, n, 4), [n, 4], None, None, 1e-5),
    "group norm": lambda n: operator(aten.native_group_norm.default, f(6, 4, n), f(4), None, 6, 4, n, 2, 1e-5),
    "gradient of a group norm": lambda n: operator(
        aten.native_group_norm_backward.default,
        *(f(6, 4, n), f(6, 4, n), f(6, 2), f(6, 2), f(4), 6, 4, n, 2, [True, True, True]),
    ),
    "softmax": lambda n: operator(aten._softmax.default, f(6, n), -1, False),
    "batched product": lambda n: operator(aten.baddbmm.default, f(6, n, 4), f(6, n, 5), f(6, 5, 4)),
    "biased product": lambda n: operator(aten.addmm.default, f(4), f(6, n), f(n, 4)),
    "cast": lambda n: operator(aten._to_copy.default, i(6, n), dtype=torch.float32),
    "truth of a number": lambda n: operator(aten._to_copy.default, f(6, n), dtype=torch.bool),
    "numbers in order": lambda n: operator(aten.arange.start_step, 3, 3 + 2 * n, 2),
    "zeros": lambda n: operator(aten.full.default, [6, n], 0.0),
    "grouped convolution": lambda n: operator(
        aten.convolution.default, *(f(n, 12, 5), f(24, 2, 3), f(24), [1], [1], [1], False, [0], 6)
    ),
    "transposed convolution in groups": lambda n: operator(
        aten.convolution.default, *(f(n, 12, 5), f(12, 4, 3), f(24), [2], [1], [1], True, [0], 6)
    ),
    "gradient of a grouped convolution": lambda n: operator(
        aten.convolution_backward.default,
        *(f(n, 24, 5), f(n, 12, 5), f(24, 2, 3), [24], [1], [1], [1], False, [0], 6, [True, True, True]),
    ),
    "distances": lambda n: operator(aten._cdist_forward.default, f(6, n, 4), f(6, 5, 4), 1.0, None),
    "distances of a batch and a matrix": lambda n: operator(
        aten._cdist_forward.default, f(n, 6, 4), f(5, 4), 1.0, None
    ),
    "distances of a matrix and a batch": lambda n: operator(
        aten._cdist_forward.default, f(1, 6, 4), f(6, n, 5, 4), 1.0, None
    ),
    "distances by a product": lambda n: operator(aten._euclidean_dist.default, f(n, 6), f(30, 6)),
    "gradient of distances": lambda n: operator(aten._cdist_backward.default, f(n, 6), f(n, 4), f(6, 4), 2.0, f(n, 6)),
    "product of three": lambda n: operator(
        aten._trilinear.default, f(n, 6), f(4, 6, 5), f(n, 5), [1, 3], [0], [1, 2], [2, 3]
    ),
    "gradient of a product of three": lambda n: operator(
        aten._trilinear.default, f(n, 6), f(n, 4), f(n, 5), [1, 3], [2, 3], [1, 2], [0]
    ),
    "eigenvectors": lambda n: operator(aten._linalg_eigh.default, f(n, 3, 3)),
    "singular values": lambda n: operator(aten._linalg_svd.default, f(6, n, 3, 2), False, False),
    "factors": lambda n: operator(aten.linalg_cholesky_ex.default, f(6, n, 3, 3)),
    "inverses": lambda n: operator(aten.linalg_inv_ex.default, f(6, n, 3, 3)),
    "exponentials": lambda n: operator(aten.linalg_matrix_exp.default, f(6, n, 3, 3)),
    "reflections": lambda n: operator(aten.linalg_householder_product.default, f(6, n, 4, 3), f(6, n, 3)),
    "rows and columns apart": lambda n: operator(aten.linalg_qr.default, f(6, n, 4, 3)),
    "lower and upper": lambda n: operator(aten.linalg_lu_factor_ex.default, f(6, n, 3, 3)),
    "solved": lambda n: operator(aten._linalg_solve_ex.default, f(6, n, 3, 3), f(6, n, 3, 8)),
    "solved for rows": lambda n: operator(aten._linalg_solve_ex.default, f(n, 3, 3), f(6, n, 8, 3), left=False),
    "solved for vectors": lambda n: operator(aten._linalg_solve_ex.default, f(6, n, 3, 3), f(6, n, 3)),
    "solved by a triangle": lambda n: operator(
        aten.linalg_solve_triangular.default, f(6, 1, 3, 3), f(6, n, 3, 8), upper=False
    ),
    "solved by factors": lambda n: operator(aten.cholesky_solve.default, f(6, n, 3, 8), f(6, n, 3, 3)),
    "solved by lower and upper": lambda n: operator(
        aten.linalg_lu_solve.default, f(n, 3, 3), TensorMeta((n, 3), torch.int32), f(6, n, 3, 8)
    ),
    "logs of volumes": lambda n: operator(aten._linalg_slogdet.default, f(6, n, 3, 3)),
    "attention": lambda n: operator(
        torch.ops.autoshard.attention.default, f(6, 4, n, 8), f(6, 4, n + 1, 8), f(6, 4, n + 1, 8), None, True, None
    ),
    "alignments": lambda n: operator(torch.ops.autoshard.ctc.default, f(n, 6, 5), i(6, 4), i(6), i(6), 3, False),
    "gradient of alignments": lambda n: operator(
        torch.ops.autoshard.ctc_backward.default,
        *(f(6), f(n, 6, 5), i(6, 4), i(6), i(6), f(6), f(6, n, 9)),
        *(3, True),
    ),
    "recurrence": lambda n: operator(
        torch.ops.autoshard.recur.default, f(n, 4, 20), f(n, 8), f(20, 3), f(20), f(3, 5), b(n, 4), "LSTM", True
    ),
    "recurrence without lengths": lambda n: operator(
        torch.ops.autoshard.recur.default, f(n, 4, 15), f(n, 5), f(15, 5), None, None, None, "GRU", False
    ),
    "gradient of a recurrence": lambda n: operator(
        torch.ops.autoshard.recur_backward.default,
        *(f(n, 4, 3), f(n, 8), f(n, 8), f(20, 3), f(3, 5), b(n, 4), f(n, 4, 3), f(n, 4, 25)),
        *("LSTM", True),
    ),
    "gradient of a recurrence without lengths": lambda n: operator(
        torch.ops.autoshard.recur_backward.default,
        *(f(n, 4, 5), f(n, 5), f(n, 5), f(15, 5), None, None, f(n, 4, 5), f(n, 4, 20)),
        *("GRU", False),
    ),
}


def values_of(graph: CapturedGraph) -> list[Tensor]:
    """Numbers of either sign with zeros and ties among them, coins, and indices of the shorter dims."""
    generator = torch.Generator().manual_seed(0)

    def value(meta: TensorMeta) -> Tensor:
        whole = torch.randint(0, 4, meta.shape, generator=generator)
        if meta.dtype is torch.bool:
            return whole == 0
        if not (meta.dtype.is_floating_point or meta.dtype.is_complex):
            return whole.to(meta.dtype)
        noise = torch.randn(meta.shape, generator=generator, dtype=torch.float64)
        real = torch.where(whole > 0, noise, noise.round())
        return torch.complex(real, real.roll(1)) if meta.dtype.is_complex else real

    values = [value(meta) for leaf in graph.nodes[:-1] for meta in leaf.outputs if meta]
    meant = known(graph.nodes[-1].op).meant
    return list(meant(graph.nodes[-1], tuple(values))) if meant else values


def _wrong(graph: CapturedGraph, mesh: Mesh) -> list[tuple[Strategy, str]]:
    node, values = wide(graph.nodes[-1]), values_of(graph)
    expected = list(run_node(node, lambda ref: values[ref.node]))
    offered = Enumerator(graph, mesh).strategies(graph.nodes[-1])
    errors = ((strategy, strategy_error(node, values, expected, strategy, mesh)) for strategy in offered)
    return [(strategy, error) for strategy, error in errors if error]


@pytest.mark.filterwarnings("ignore::autoshard.errors.StrategyWarning")
@pytest.mark.parametrize("mesh", ["a=2", "a=3", "a=4", "a=2,b=2", "a=2,b=3"])
@pytest.mark.parametrize("length", [9, 12, 16, 22, 30])
@pytest.mark.parametrize("name", OPERATORS)
def test_every_strategy_of_an_operator_that_changes_a_length_is_right(name: str, length: int, mesh: str) -> None:
    """Shrunken blocks may match where the real ones do not: 16 over 3 is 6, 6, 4, and twice as long 11, 11, 10."""
    assert not _wrong(OPERATORS[name](length), Mesh.parse(mesh))


@pytest.mark.filterwarnings("ignore::autoshard.errors.StrategyWarning")
@pytest.mark.parametrize(("length", "mesh"), [(12, "a=2"), (11, "a=3"), (12, "a=2,b=2"), (9, "a=2,b=3")])
@pytest.mark.parametrize("name", OTHERS)
def test_every_strategy_of_an_operator_is_right(name: str, length: int, mesh: str) -> None:
    assert not _wrong(OTHERS[name](length), Mesh.parse(mesh))


@pytest.mark.parametrize(
    ("name", "cuts"),
    [("windows", {0}), ("gradient of windows", {0}), ("diagonal", {0}), ("placed on the diagonal", {0})]
    + [("gradient of a diagonal", {1}), ("patches", {0, 1}), ("image of patches", {0, 1})]
    + [("seen at places", {0, 1, 2}), ("gradient of what is seen", {0, 1, 2}), ("leaky", {0, 1, 2})]
    + [("gradient of leaky", {0, 1}), ("norm of rows", {0, 1}), ("matrix and vector", {0}), ("expanded", {0, 1, 2, 3})]
    + [("matrix, vector and bias", {0}), ("numbers between", {0}), ("places of a triangle", {0, 1})]
    + [
        ("numbers written down", {0, 1}),
        ("filled where a mask says", {0, 2}),
        ("indexed where there is one", {0, 1}),
        ("sampled where there is one", {0, 1}),
        ("put where there is one", {0}),
        ("gradient of what fills", {0, 1}),
        ("group norm", {0}),
        ("gradient of a group norm", {0}),
        ("hidden", {0, 1}),
    ]
    + [("put", {1}), ("one number put", {0}), ("put at pairs", {1}), ("stretched", {0, 1, 2, 3}), ("messages", {1})]
    + [("indexed by few", {0, 1, 2}), ("messages to columns", {0}), ("scattered and added", {1}), ("copied", {0, 1})]
    + [
        ("one repeated", {0}),
        ("repeated in a new dim", {0, 1, 2}),
        ("filled", {0, 1}),
        ("filled with a number", {0, 1}),
    ]
    + [("log of a sigmoid", {0, 1}), ("gradient of a log of a sigmoid", {0, 1}), ("divided and rounded", {0, 1})]
    + [
        ("directions and lengths", {0}),
        ("gradient of a soft plus", {0, 1}),
        ("gradient of what is picked", {0, 1}),
    ]
    + [
        (name, {0, 1})
        for name in ("factors", "inverses", "exponentials", "reflections", "rows and columns apart", "lower and upper")
    ]
    + [(name, {0, 1, 3}) for name in ("solved", "solved by a triangle", "solved by factors")]
    + [("alignments", {0}), ("gradient of alignments", {1})]
    + [("solved by lower and upper", {0, 1, 3}), ("solved for rows", {0, 1, 2}), ("solved for vectors", {0, 1})]
    + [("logs of volumes", {0, 1}), ("another row", {0, 1, 2}), ("another truth", {0})]
    + [("diagonal in memory of its own", {0}), ("another diagonal", {0})],
)
def test_the_dims_of_a_result_that_a_rule_cuts(name: str, cuts: set[int]) -> None:
    graph = OTHERS[name](12)
    offered = Enumerator(graph, Mesh(("a",), (2,))).strategies(graph.nodes[-1])
    found = {s.outputs[0][0].dim for s in offered if s.outputs[0] and s.outputs[0][0].kind == "S"}
    assert found >= cuts


@pytest.mark.parametrize(
    ("name", "rules"),
    [
        ("put", {"P(sum), S(0), S(0)", "P(sum), R, P(sum)"}),
        ("put in place of others", {"P(sum), R, P(sum)"}),
        ("one number put", {"P(sum), S(0), R", "P(sum), R, P(sum)"}),
        ("put at pairs", {"P(sum), S(0), R, S(0)", "P(sum), R, S(0), S(1)", "P(sum), R, R, P(sum)"}),
        ("gradient of stretching", {"P(sum), S(0), R, S(1)", "P(sum), R, S(0), S(2)", "P(sum), R, R, P(sum)"}),
        ("messages", {"P(sum), S(0), S(0)", "P(sum), R, P(sum)"}),
        ("messages to columns", {"P(sum), S(0), S(1)", "P(sum), R, P(sum)"}),
        ("degrees", {"P(sum), S(0), S(0)", "P(sum), R, P(sum)"}),
        ("gradient of what is picked", {"P(sum), R"}),
        ("scattered and added", {"P(sum), S(0), S(0)", "P(sum), R, P(sum)"}),
        ("fewer scattered and added", {"P(sum), R, P(sum)"}),
        ("running sum of whole numbers", {"P(sum)"}),
        ("copied", {"R, P(sum)", "P(sum), P(sum)"}),
        ("copied as another type", set()),
        ("another diagonal", {"P(sum), P(sum)"}),
        ("another row", {"P(sum), P(sum)"}),
        ("zeros", {""}),
    ],
)
@pytest.mark.filterwarnings("ignore::autoshard.errors.StrategyWarning")
def test_what_gives_addends(name: str, rules: set[str]) -> None:
    """Of what is written where an index says, each rank may write a part; not so where it stands for what was there."""
    graph = OTHERS[name](12)
    offered = Enumerator(graph, Mesh(("a",), (2,))).strategies(graph.nodes[-1])
    found = {", ".join(str(layout[0]) for layout in s.inputs) for s in offered if s.outputs[0] == Layout((P_SUM,))}
    assert found == rules


GROUPED = {
    "autoshard::grouped_product": lambda n: (f(n, 6), i(n), f(4, 6, 8), 4),
    "autoshard::grouped_product beside other rows": lambda n: (f(n, 6), i(n), f(4, 6, 8), 7),
    "autoshard::grouped_outer": lambda n: (f(n, 6), f(n, 8), i(n), 4),
    "transformers::grouped_mm_fallback": lambda n: (f(n, 6), f(4, 6, 8), i(4)),
    "transformers::grouped_mm_fallback_backward": lambda n: (f(n, 6), f(4, 6, 8), i(4), f(n, 8)),
}


@pytest.fixture
def grouped_products() -> Iterator[None]:
    """The operators of transformers for products in groups of rows; stand-ins where it is not loaded."""
    if hasattr(torch.ops.transformers, "grouped_mm_fallback"):
        yield
        return
    library = torch.library.Library("transformers", "FRAGMENT")
    three = "Tensor input, Tensor weight, Tensor offs"
    library.define(f"grouped_mm_fallback({three}) -> Tensor")
    library.define(f"grouped_mm_fallback_backward({three}, Tensor grad_output) -> (Tensor, Tensor)")
    library.impl("grouped_mm_fallback", _grouped_product, "CPU")
    library.impl("grouped_mm_fallback", lambda rows, weight, ends: rows.new_empty(len(rows), weight.shape[2]), "Meta")
    library.impl("grouped_mm_fallback_backward", _grouped_product_backward, "CPU")
    library.impl(
        "grouped_mm_fallback_backward",
        lambda rows, weight, ends, grad: (torch.empty_like(rows), torch.empty_like(weight)),
        "Meta",
    )
    yield
    library._destroy()


def _groups(ends: Tensor) -> Iterator[tuple[int, slice]]:
    starts = [0, *ends.tolist()]
    return ((g, slice(start, end)) for g, (start, end) in enumerate(pairwise(starts)))


def _grouped_product(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    result = rows.new_zeros(len(rows), weight.shape[2])
    for g, taken in _groups(ends):
        result[taken] = rows[taken] @ weight[g]
    return result


def _grouped_product_backward(rows: Tensor, weight: Tensor, ends: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    of_rows, of_weight = torch.zeros_like(rows), torch.zeros_like(weight)
    for g, taken in _groups(ends):
        of_rows[taken] = grad[taken] @ weight[g].T
        of_weight[g] = rows[taken].T @ grad[taken]
    return of_rows, of_weight


@pytest.mark.parametrize(("length", "mesh"), [(12, "a=2"), (11, "a=3"), (12, "a=2,b=2"), (9, "a=2,b=3")])
@pytest.mark.parametrize("name", GROUPED)
def test_products_in_groups_of_rows_are_cut_along_rows_columns_and_sums(
    name: str, length: int, mesh: str, grouped_products: None
) -> None:
    namespace, short = name.partition(" ")[0].split("::")
    graph = operator(getattr(getattr(torch.ops, namespace), short).default, *GROUPED[name](length))
    assert not _wrong(graph, Mesh.parse(mesh))
    offered = Enumerator(graph, Mesh(("a",), (3,))).strategies(graph.nodes[-1])
    cuts = {str(layout[0]) for s in offered for layout in (*s.inputs, *s.outputs) if layout}
    assert cuts >= {"R", "S(0)", "S(1)", "S(2)", "P(sum)"}


def test_what_doubles_a_length_may_cut_it_where_the_ranks_divide_it() -> None:
    for parts, offered in [(2, True), (3, False), (4, True)]:
        graph = OPERATORS["repeat"](16)
        strategies = Enumerator(graph, Mesh(("a",), (parts,))).strategies(graph.nodes[-1])
        assert any(s.outputs[0] == Layout((S(1),)) for s in strategies) is offered


@pytest.mark.parametrize("op", ["acos", "asin", "atanh", "erfinv", "logit", "special_ndtri"])
def test_few_elements_are_cut_by_what_is_a_number_between_others_alone(op: str) -> None:
    """Of random ones it makes none, which shows nothing of a rule."""
    graph = operator(getattr(torch.ops.aten, op).default, f(2))
    offered = Enumerator(graph, Mesh(("a",), (2,))).strategies(graph.nodes[-1])
    assert Layout((S(0),)) in {strategy.outputs[0] for strategy in offered}
