"""Functions that torch says fail for some matrices, and its own code that calls them: planned, as in one process where
they do not fail, and NaN where they do.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import LowRankMultivariateNormal, MultivariateNormal, Wishart
from torch.nn.utils.parametrizations import orthogonal
from torch.utils.checkpoint import checkpoint

import autoshard
from autoshard.capture import capture
from autoshard.errors import CaptureError
from autoshard.mesh import Mesh

from ..fuzz.random_plans import random_plans
from ..one_process import one_rank
from ..thorough import some_thorough
from .as_before import check_as_before

SIZE = 3
Body = Callable[[Any, Tensor], Tensor]


class Matrices(nn.Module):
    """A matrix of each row, by a product, and what a body makes of all of them."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = body
        self.enter, self.of_vector = nn.Linear(SIZE, SIZE * SIZE), nn.Linear(SIZE, SIZE)
        self.double()

    def matrices(self, x: Tensor) -> Tensor:
        """Shape (rows, SIZE, SIZE), each positive definite."""
        a = self.enter(x).unflatten(-1, (SIZE, SIZE))
        return a @ a.mT + torch.eye(SIZE, dtype=x.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x).square().mean()


BODIES: dict[str, Body] = {
    "cholesky": lambda m, x: torch.linalg.cholesky(m.matrices(x)),
    "in a checkpoint": lambda m, x: checkpoint(lambda y: torch.linalg.cholesky(m.matrices(y)), x, use_reentrant=False),
    "upper": lambda m, x: torch.linalg.cholesky(m.matrices(x).mT, upper=True),
    "inv": lambda m, x: torch.linalg.inv(m.matrices(x)),
    "inverse": lambda m, x: m.matrices(x).inverse() + torch.inverse(m.matrices(x).mT),
    "solve": lambda m, x: torch.linalg.solve(m.matrices(x), m.enter(x).unflatten(-1, (SIZE, SIZE))),
    "solve for rows": lambda m, x: torch.linalg.solve(m.matrices(x).mT, m.matrices(2 * x), left=False),
    "solve for vectors": lambda m, x: torch.linalg.solve(m.matrices(x), m.of_vector(x)),
    "solve by one": lambda m, x: torch.linalg.solve(m.matrices(x)[0] + m.of_vector.weight.mT, m.of_vector(x).mT),
    "solve as it is": lambda m, x: torch.linalg.solve_ex((m.matrices(x) + m.of_vector.weight).mT, m.matrices(x))[0],
    "triangle": lambda m, x: torch.linalg.solve_triangular(m.matrices(x).tril(), m.matrices(2 * x), upper=False),
    "lower and upper": lambda m, x: torch.linalg.lu_solve(
        *torch.linalg.lu_factor_ex(m.matrices(x))[:2], m.matrices(2 * x)
    ),
    "solve by factors": lambda m, x: torch.cholesky_solve(m.matrices(2 * x), torch.linalg.cholesky(m.matrices(x))),
    "normal": lambda m, x: MultivariateNormal(m.of_vector(x), m.matrices(x)).log_prob(x),
    "normal by precision": lambda m, x: MultivariateNormal(x, precision_matrix=m.matrices(x)).log_prob(m.of_vector(x)),
    "normal of low rank": lambda m, x: LowRankMultivariateNormal(
        m.of_vector(x), m.matrices(x)[..., :2], m.of_vector(x).exp()
    ).log_prob(x),
    "wishart": lambda m, x: Wishart(torch.tensor(4.0, dtype=x.dtype), m.matrices(x)).log_prob(m.matrices(2 * x)),
}


SIBLINGS = (
    *("upper", "inv", "solve", "solve by one", "solve as it is", "solve by factors"),
    *("normal by precision", "normal of low rank", "wishart"),
)


def example() -> Tensor:
    return torch.randn(8, SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.filterwarnings("ignore::autoshard.errors.StrategyWarning")
@pytest.mark.parametrize("body", some_thorough(BODIES, SIBLINGS))
def test_functions_of_matrices_compute_what_one_process_computes(body: str) -> None:
    model, args = Matrices(BODIES[body]), (example(),)
    options: dict[str, Any] = {"hardware": "cpu-gloo", "cache": False}
    plans = [autoshard.plan(model, args, mesh="a=2", constraints=["baseline ddp"], **options)]
    plans += islice(random_plans(capture(model, args), Mesh.parse("a=2"), 0, model, args, {}), 2)
    for plan in plans:
        check_as_before(model, args, plan, rtol=1e-7, atol=1e-9)


@pytest.mark.filterwarnings("ignore::autoshard.errors.StrategyWarning")
@pytest.mark.parametrize("how", ["cayley", "householder", "matrix_exp"])
def test_orthogonal_parametrizations_train(how: str) -> None:
    torch.manual_seed(0)
    model, args = Matrices(lambda m, x: m.of_vector(x)), (example(),)
    orthogonal(model.of_vector, orthogonal_map=how)
    plan = autoshard.plan(model, args, mesh="a=2", constraints=["baseline ddp"], hardware="cpu-gloo", cache=False)
    check_as_before(model, args, plan, rtol=1e-8, atol=1e-10)


FAILS: dict[str, Body] = {
    "cholesky": lambda m, x: torch.linalg.cholesky(-m.matrices(x)),
    "inv": lambda m, x: torch.linalg.inv(m.matrices(x) * 0),
    "solve": lambda m, x: torch.linalg.solve(m.matrices(x) * 0, m.matrices(x)),
    "solve for vectors": lambda m, x: torch.linalg.solve(m.matrices(x) * 0, m.of_vector(x)),
    "normal": lambda m, x: MultivariateNormal(m.of_vector(x), -m.matrices(x), validate_args=False).log_prob(x),
}


@pytest.mark.parametrize("body", FAILS)
def test_of_a_matrix_that_has_none_the_result_is_nan(body: str) -> None:
    with pytest.raises(torch.linalg.LinAlgError):
        Matrices(FAILS[body])(example())
    with one_rank() as mesh:
        parallel = autoshard.auto_parallelize(
            Matrices(FAILS[body]), mesh, (example(),), hardware="cpu-gloo", cache=False
        )
        assert parallel(example()).isnan()


def test_what_has_no_form_without_that_look_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"at .*test_matrix_functions\.py.*an error that depends on data"):
        capture(Matrices(lambda m, x: torch.linalg.matrix_power(m.matrices(x), -2)), (example(),))


HOW = [
    {"upper": False},
    {"upper": True, "unitriangular": True},
    {"upper": False, "left": False},
    {"upper": True, "left": False, "unitriangular": True},
]


class Heads(nn.Module):
    """A triangular system of each head, as a delta rule in chunks has."""

    def __init__(self, how: dict[str, bool]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how = how
        self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(3))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        k, v = (f(x).unflatten(-1, (4, -1)).transpose(1, 2) for f in (self.k, self.v))
        a = torch.eye(x.shape[1], dtype=x.dtype) + (k @ k.mT).tril(-1)
        a = a.mT if self.how["upper"] else a
        if self.how.get("left", True):
            solved = torch.linalg.solve_triangular(a, v, **self.how)
        else:
            solved = torch.linalg.solve_triangular(a, v.mT, **self.how).mT
        return x + self.o(solved.transpose(1, 2).flatten(2))


@pytest.mark.filterwarnings("ignore::autoshard.errors.StrategyWarning")
@pytest.mark.parametrize("how", HOW, ids=str)
def test_heads_of_triangular_systems_are_cut(how: dict[str, bool]) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads, self.norm = Heads(how), nn.LayerNorm(8).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.heads(self.norm(x)).square().mean()

    torch.manual_seed(0)
    model, args = Model(), (torch.randn(4, 6, 8, dtype=torch.float64),)
    plan = autoshard.plan(model, args, mesh="a=4", constraints=["baseline tp"], hardware="cpu-gloo", cache=False)
    check_as_before(model, args, plan, rtol=1e-8, atol=1e-10)
    (plan,) = islice(random_plans(capture(model, args), Mesh.parse("a=2"), 0, model, args, {}), 1)
    check_as_before(model, args, plan, rtol=1e-8, atol=1e-10)
