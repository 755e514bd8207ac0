"""Sessions: the same Python code on a model and on the parallel module made of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

import autoshard
from autoshard.errors import AutoshardError

SIZE = 4


class Model(nn.Module):
    """Two matrices, a vector, a frozen vector, and two buffers for a forward that is any function, ``body``."""

    def __init__(self, body: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.v, self.w = (nn.Parameter(torch.randn(SIZE, SIZE, generator=generator) / 2) for _ in range(2))
        self.bias = nn.Parameter(torch.randn(SIZE, generator=generator))
        self.frozen = nn.Parameter(torch.randn(SIZE, generator=generator), requires_grad=False)
        self.register_buffer("scale", torch.rand(SIZE, generator=generator) + 0.5)
        self.register_buffer("count", torch.zeros(SIZE))
        self.body = body

    def forward(self, x: Tensor) -> Any:
        return self.body(self, x)


def example() -> Tensor:
    return torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(1))


def both(body: Callable[[Any, Tensor], Any], mesh: DeviceMesh) -> tuple[nn.Module, Model]:
    """The parallel module, and the model as it was."""
    reference = Model(body)
    return autoshard.auto_parallelize(deepcopy(reference), mesh, (example(),)), reference


def full(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def state_of(module: nn.Module) -> list[Any]:
    """Every gradient (None included) and every buffer."""
    gradients = [None if p.grad is None else full(p.grad).clone() for p in module.parameters()]
    return [*gradients, *(full(buffer).clone() for buffer in module.buffers())]


def loss_of(results: Any) -> Tensor:
    """A loss that every differentiable result enters, each in its own way."""
    found = [leaf for leaf in tree_leaves(results) if isinstance(leaf, Tensor) and leaf.requires_grad]
    return sum((k + 1) * (leaf * leaf).sum() for k, leaf in enumerate(found))  # type: ignore[return-value]


def outcome_of(session: Callable[[nn.Module], Any], module: nn.Module) -> tuple[Any, Exception | None]:
    """What a session gives, and the state it leaves the module in; or the exception it ends with."""
    try:
        given = session(module)
    except Exception as error:
        return None, error
    return (given, state_of(module)), None


def differences(ours: Any, theirs: Any) -> Iterator[str]:
    """What differs between two results: values, dtypes, and what requires a gradient."""
    mine, other = tree_leaves(ours), tree_leaves(theirs)
    if len(mine) != len(other):
        yield f"{len(mine)} leaves against {len(other)}"
    for k, (a, b) in enumerate(zip(mine, other)):
        if not isinstance(b, Tensor):
            if isinstance(a, Tensor) or a != b:
                yield f"leaf {k}: {a} against {b}"
        elif not isinstance(a, Tensor) or (a.dtype, a.shape, a.requires_grad) != (b.dtype, b.shape, b.requires_grad):
            yield f"leaf {k}: {a} against {b}"
        elif not torch.allclose(full(a.detach()), b.detach(), rtol=1e-4, atol=1e-5, equal_nan=True):
            yield f"leaf {k}: {full(a)} against {b}"


def is_parity(session: Callable[[nn.Module], Any], pair: tuple[nn.Module, nn.Module]) -> bool:
    """Whether a session gives the same with both modules; an exception counts as neither, and is raised."""
    (ours, failed), (theirs, refused) = (outcome_of(session, module) for module in pair)
    if failed or refused:
        raise failed or refused  # type: ignore[misc]
    found = list(differences(ours, theirs))
    assert not found, found
    return True


def refusal(session: Callable[[nn.Module], Any], module: nn.Module) -> AutoshardError:
    """The error of autoshard's that a session ends with."""
    _, error = outcome_of(session, module)
    assert isinstance(error, AutoshardError), f"{type(error).__name__}: {error}"
    return error
