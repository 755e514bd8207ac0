"""Triangular systems with several dims in front (``torch.linalg.solve_triangular``: delta rules in chunks), whose
gradient is a product that keeps these dims, as :mod:`autoshard.capture.taken_apart.matrix_products` has it: torch's own
makes one dim of them, of which no block is some heads of several rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from ..examples import tensor_of
from .matrix_products import LEAST, product


class _Solved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, how: dict[str, bool]) -> Tensor:
        solved: Tensor = torch.linalg.solve_triangular(a, b, **how)
        ctx.save_for_backward(a, solved)
        ctx.how = how
        return solved

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (a, solved), how = ctx.saved_tensors, ctx.how
        of_b = torch.linalg.solve_triangular(a.mT, grad, **{**how, "upper": not how["upper"]})
        if not ctx.needs_input_grad[0]:
            return None, of_b, None
        of_a = -(product(of_b, solved.mT) if how["left"] else product(solved.mT, of_b))
        own = int(how["unitriangular"])
        return of_a.triu(own) if how["upper"] else of_a.tril(-own), of_b, None


def solve_triangular(A: Tensor, B: Tensor, *, upper: bool, left: bool = True, unitriangular: bool = False) -> Tensor:
    """What ``torch.linalg.solve_triangular`` gives."""
    found: Tensor = _Solved.apply(A, B, {"upper": upper, "left": left, "unitriangular": unitriangular})
    return found


def solve_apart(node: fx.Node) -> bool:
    """Rewrites such a call in place, of real numbers with the same dims in front; else False."""
    if node.target is not torch.linalg.solve_triangular or len(node.args) != 2:
        return False
    a, b = map(tensor_of, node.args)
    if a is None or b is None or a.dim() < LEAST or a.shape[:-2] != b.shape[:-2] or a.is_complex():
        return False
    node.target = solve_triangular
    return True
