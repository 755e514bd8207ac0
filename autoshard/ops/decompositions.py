"""Decompositions of matrices and what solves with them, cut along the dims in front of the matrices; what solves, also
along the columns that it solves for.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ..capture import Node, TensorMeta
from ..layout import P_SUM, Placement, R, S
from .local import on_contiguous
from .operator import Metas, Operator, Shape, enter
from .rule import Rule

Dims = tuple[int, ...]
"""How many dims each of some tensors has for one matrix: 2 for a matrix, 1 for its pivots, 0 for a number."""


def _matrix_by_matrix(taken: Dims, made: Dims, node: Node, inputs: Metas) -> list[Rule]:
    """Any dim in front, of those tensors that are as long there: others stand for all."""
    front = torch.broadcast_shapes(*(meta.shape[: len(meta.shape) - own] for meta, own in zip(inputs, taken)))

    def cut(meta: TensorMeta, own: int, behind: int) -> Placement:
        d = len(meta.shape) - own - behind
        return S(d) if d >= 0 and meta.shape[d] == front[-behind] else R

    def made_so(meta: TensorMeta | None, own: int, behind: int) -> Placement | None:
        return None if meta is None else cut(meta, own, behind)

    return [
        Rule(
            tuple(cut(meta, own, behind) for meta, own in zip(inputs, taken)),
            tuple(made_so(meta, own, behind) for meta, own in zip(node.outputs, made)),
        )
        for behind in range(len(front), 0, -1)
    ]


def _solved_for(which: int, taken: Dims, made: Dims, node: Node, inputs: Metas) -> list[Rule]:
    """The same, and of what is solved for each column by itself, or each row where the matrix stands behind it; addends
    of it make addends. It makes the first result alone.
    """
    given, result = inputs[which], node.outputs[0]
    assert result is not None

    def of_it(before: Placement, after: Placement) -> Rule:
        others = (None if meta is None else R for meta in node.outputs[1:])
        return Rule(tuple(before if k == which else R for k in range(len(inputs))), (after, *others))

    addends = of_it(P_SUM, P_SUM)
    if node.op is torch.ops.aten._linalg_solve_ex.default and _are_vectors(given.shape, inputs[0].shape):
        return [*_matrix_by_matrix((2, 1), (1, *made[1:]), node, inputs), addends]
    behind = 1 if dict(node.kwargs).get("left", True) else 2
    alone = of_it(S(len(given.shape) - behind), S(len(result.shape) - behind))
    return [*_matrix_by_matrix(taken, made, node, inputs), alone, addends]


def _are_vectors(given: Shape, matrices: Shape) -> bool:
    return len(given) == 1 or given == matrices[:-1]


def _exchanging_no_rows(node: Node, values: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Pivots that leave every row where it is: random ones name rows that there are not."""
    decomposed, pivots, *others = values
    own = torch.arange(1, pivots.shape[-1] + 1, dtype=pivots.dtype)
    return _regular(decomposed), own.expand(pivots.shape).contiguous(), *others


def _definite(node: Node, values: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Matrices that have a factor of Cholesky's, and an inverse."""
    (a,) = values
    return (_regular(a @ a.mH),)


def _with_regular(which: int, node: Node, values: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Matrices to solve with, among others."""
    return *values[:which], _regular(values[which]), *values[which + 1 :]


def _regular(a: torch.Tensor) -> torch.Tensor:
    """Random matrices with so much on their diagonals that what solves with them, or with their triangles, is tame."""
    rows, columns = a.shape[-2:]
    return a + 4 * columns * torch.eye(rows, columns, dtype=a.dtype)


def _decomposes(taken: Dims, made: Dims, **known: Any) -> Operator:
    return Operator(rules=partial(_matrix_by_matrix, taken, made), **known)


def _solves(which: int, taken: Dims, made: Dims, **known: Any) -> Operator:
    return Operator(rules=partial(_solved_for, which, taken, made), **known)


enter("_linalg_eigh", _decomposes((2,), (1, 2)))
enter("_linalg_svd", _decomposes((2,), (2, 1, 2)))
# By how matrices lie in memory, torch makes another thing of them, of which the gradient would know nothing: they lie
# in the order of their dims, as capture has them lie in one process.
enter("_linalg_det", _decomposes((2,), (0, 2, 1), local=on_contiguous(0)))
enter("_linalg_slogdet", _decomposes((2,), (0, 0, 2, 1), local=on_contiguous(0)))
enter("_linalg_solve_ex", _solves(1, (2, 2), (2, 2, 1, 0), local=on_contiguous(0), meant=partial(_with_regular, 0)))
enter("linalg_cholesky_ex linalg_inv_ex", _decomposes((2,), (2, 0), meant=_definite))
enter("cholesky_inverse", _decomposes((2,), (2,)))
enter("linalg_matrix_exp", _decomposes((2,), (2,), local=on_contiguous(0)))
enter("linalg_lu_factor_ex", _decomposes((2,), (2, 1, 0)))
enter("linalg_qr", _decomposes((2,), (2, 2)))
enter("geqrf", _decomposes((2,), (2, 1)))
enter("linalg_householder_product", _decomposes((2, 1), (2,)))
enter("ormqr", _decomposes((2, 1, 2), (2,)))
enter("lu_unpack", _decomposes((2, 1), (2, 2, 2), meant=_exchanging_no_rows))
enter("linalg_lu_solve", _solves(2, (2, 1, 2), (2,), meant=_exchanging_no_rows))
enter("linalg_solve_triangular", _solves(1, (2, 2), (2,), meant=partial(_with_regular, 0)))
enter("cholesky_solve", _solves(0, (2, 2), (2,), meant=partial(_with_regular, 1)))
enter("triangular_solve", _solves(0, (2, 2), (2, 2), meant=partial(_with_regular, 1)))
