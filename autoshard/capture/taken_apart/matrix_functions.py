"""Functions of matrices without the look at whether each matrix has what is asked for, at which torch raises an error.

A captured step raises none: of a matrix that is singular, or not positive definite, the result is NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx


def cholesky(A: Tensor, upper: bool = False) -> Tensor:
    """What ``torch.linalg.cholesky`` gives."""
    factor, failed = torch.linalg.cholesky_ex(A, upper=upper)
    return _told(factor, failed, 2)


def inverse(A: Tensor) -> Tensor:
    """What ``torch.linalg.inv`` gives."""
    inverted, failed = torch.linalg.inv_ex(A)
    return _told(inverted, failed, 2)


def solve(A: Tensor, B: Tensor, *, left: bool = True) -> Tensor:
    """What ``torch.linalg.solve`` gives, also of vectors, one for each matrix. Its gradient solves with what it made of
    the matrices, or of their transposes, by how they lie in memory.
    """
    solved, failed = torch.linalg.solve_ex(A.contiguous(), B, left=left)
    are_vectors = B.dim() == 1 or B.shape == A.shape[:-1]
    return _told(solved, failed, 1 if are_vectors else 2)


def _told(result: Tensor, failed: Tensor, dims: int) -> Tensor:
    """A result of that many dims for each matrix, NaN where that failed."""
    return result.masked_fill(failed.ne(0)[(..., *[None] * dims)], torch.nan)


_FUNCTIONS: dict[Any, Callable[..., Tensor]] = {
    torch.linalg.cholesky: cholesky,
    torch.cholesky: cholesky,
    "cholesky": cholesky,
    torch.linalg.inv: inverse,
    torch.inverse: inverse,
    "inverse": inverse,
    torch.linalg.solve: solve,
}


def leave_looks_out(module: fx.GraphModule) -> None:
    """Rewrites such functions in place, those in checkpoints and other parts of the graph too."""
    for part in module.modules():
        if isinstance(part, fx.GraphModule):
            for node in part.graph.nodes:
                if node.target in _FUNCTIONS and node.args and "out" not in node.kwargs:
                    node.op, node.target = "call_function", _FUNCTIONS[node.target]
            part.recompile()
