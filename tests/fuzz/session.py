"""What a program does with its model: :class:`Session` in one process, :class:`ShardedSession` on each rank.

Both do the same and write down the same things, in order, so that they can be compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

import autoshard
from autoshard.capture import input_names
from autoshard.lowering.placements import as_dtensor
from autoshard.plans import ShardingPlan

OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, eps=1e-3),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-3, foreach=True),
}


ABSENT = "absent"
"""An attribute that a module does not have."""


@dataclass(frozen=True)
class Noise:
    """What is added to every floating-point number that a program starts from: normal numbers of a size."""

    size: float
    seed: int


NO_NOISE = Noise(0.0, 0)


class Maker:
    """Makes tensors of fixed values: the same calls give the same tensors, whatever thread they run in."""

    def __init__(self, seed: int, noise: Noise = NO_NOISE) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._disturbing = torch.Generator().manual_seed(10_000 * (1 + noise.seed) + seed)
        self._noise = noise.size

    def __call__(self, *shape: int, dtype: torch.dtype = torch.float64, bound: int = 5) -> torch.Tensor:
        """Normal numbers; whole ones from 0 to below ``bound``; or truth values."""
        if dtype is torch.bool:
            return torch.rand(shape, generator=self._generator) < 0.5
        if not (dtype.is_floating_point or dtype.is_complex):
            return torch.randint(bound, shape, generator=self._generator).to(dtype)
        kind = torch.complex128 if dtype.is_complex else torch.float64
        made = torch.randn(shape, generator=self._generator, dtype=kind)
        if self._noise:
            made = made + self._noise * torch.randn(shape, generator=self._disturbing, dtype=kind)
        return made.to(dtype)


class Session:
    """A model in one process, and what was seen of it.

    ``seen`` holds (name, value) in the order in which they were looked at; tensors in it are copies.
    """

    def __init__(self, names: Any, model: nn.Module, noise: Noise = NO_NOISE) -> None:
        self.model = model
        self.seen: list[tuple[str, Any]] = []
        self._names, self._noise = names, noise
        self._batches = 0
        self._given: list[tuple[str, torch.Tensor]] = []
        self._attributes = _attributes(model)

    def batch(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of the next call: other values each time."""
        self._batches += 1
        return self._names.arguments(Maker(100 + self._batches, self._noise))  # type: ignore[no-any-return]

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """The model's result; it and the arguments are looked at."""
        result = self._call(args, kwargs)
        self.look("arguments", (args, kwargs))
        self.look("result", result)
        if torch.is_grad_enabled():  # elsewhere some views of parameters say that they want one, and nothing flows
            self.look("wants a gradient", [leaf.requires_grad for leaf in tree_leaves(result) if torch.is_tensor(leaf)])
        self._given += [("argument", leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        return result

    def step(self) -> Any:
        """One call on the next batch."""
        args, kwargs = self.batch()
        return self.call(*args, **kwargs)

    def total(self, result: Any, *which: int) -> torch.Tensor:
        """A weighted sum of the floating-point tensors of a result, or of some of them by number."""
        leaves = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor) and _flows(leaf)]
        chosen = [leaves[k % len(leaves)] for k in which] if which and leaves else leaves
        terms = [_weighted(self._whole(leaf)) for leaf in chosen]
        return sum(terms[1:], terms[0]) if terms else torch.zeros((), dtype=torch.float64)

    def look(self, name: str, value: Any) -> None:
        """Writes a value down: copies of its tensors."""
        leaves, spec = tree_flatten(value)
        where = name if len(leaves) == 1 else f"{name} {spec}"
        self.seen.append((where, [_copy(self._whole(leaf)) for leaf in leaves]))

    def gradients(self) -> None:
        """Writes every gradient down, None included, and which of them share memory with each other or the caller."""
        held = [(f"{name}.grad", p.grad) for name, p in self.model.named_parameters()]
        for name, grad in held:
            self.look(name, grad)
        grads = [(name, grad) for name, grad in held if grad is not None]
        others = [*((n, p) for n, p in self.model.named_parameters()), *self._given]
        shared = [(a, b) for (a, x), (b, y) in combinations(grads, 2) if _share(x, y)]
        shared += [(a, b) for a, x in grads for b, y in others if _share(x, y)]
        self.seen.append(("shared memory", set(shared)))

    def state(self) -> None:
        """Writes parameters, buffers and the names of the state dict down."""
        for name, parameter in self.model.named_parameters():
            self.look(f"parameter {name}, trained {parameter.requires_grad}", parameter)
        for name, buffer in self.model.named_buffers():
            self.look(f"buffer {name}", buffer)
        self.look("state_dict", " ".join(self.model.state_dict()))
        for name in self._attributes:  # a parallel module need not have them
            self.look(f"attribute {name}", getattr(self.model, name, ABSENT))

    def optimizer(self, kind: str) -> torch.optim.Optimizer:
        """An optimizer of the model's parameters."""
        made: torch.optim.Optimizer = OPTIMIZERS[kind](self.model.parameters())
        return made

    def backward(self, retain_graph: bool = False) -> None:
        """One call whose result goes backward by itself, with gradients that the caller gives and keeps."""
        args, kwargs = self.batch()
        result = tree_leaves(self._call(args, kwargs))
        leaves = [leaf for leaf in result if isinstance(leaf, torch.Tensor) and _flows(leaf)]
        given = [self._like(_coefficients(leaf.shape, leaf.dtype), leaf) for leaf in leaves]
        torch.autograd.backward(leaves, given, retain_graph=retain_graph)
        self._given += [("given", grad) for grad in given]
        self.look("given", given)

    def leaf(self, result: Any) -> torch.Tensor:
        """The first floating-point tensor of a result."""
        return next(t for t in tree_leaves(result) if isinstance(t, torch.Tensor) and t.is_floating_point())

    def repeated(self, result: Any) -> list[torch.Tensor]:
        """The first floating-point tensor of a result as often as it is in there. Views of it come back as copies
        (docs/autograd.md), which do not follow what is written into it.
        """
        first = self.leaf(result)
        return [t for t in tree_leaves(result) if t is first]

    def whole(self, value: Any) -> Any:
        """The same with tensors as one process has them."""
        return tree_map(self._whole, value)

    def other(self, value: Any) -> Any:
        """An argument of another value, if it is a number, of another length, or of another type."""
        if not isinstance(value, torch.Tensor):
            return value + 1 if isinstance(value, int | float) else value
        return value[1:] if value.dim() and len(value) > 2 else value.to(torch.float16)

    def retyped(self, value: Any) -> Any:
        """A number that is equal, but of another type or sign."""
        if value == 0 and isinstance(value, float):
            return -value
        return {bool: int, int: float, float: float}.get(type(value), lambda v: v)(value)

    def requiring(self, value: Any) -> Any:
        """An argument that wants a gradient."""
        floating = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.clone().requires_grad_() if floating else value

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.model(*args, **kwargs)

    def _like(self, whole: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
        return whole

    def _whole(self, value: Any) -> Any:
        return value


class ShardedSession(Session):
    """The parallel module of one rank. Arguments are cut for it, as a user would; its results are DTensors."""

    def __init__(self, names: Any, model: nn.Module, original: nn.Module, plan: ShardingPlan, mesh: DeviceMesh) -> None:
        super().__init__(names, model)
        self._attributes = _attributes(original)
        self._original, self._plan, self._mesh = original, plan, mesh
        self._gives_dtensors = names.SEED % 5 == 1  # shards otherwise

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves, spec = tree_flatten((args, kwargs))
        names = input_names(self._original, args, kwargs)
        given = {name: leaf for name, leaf in zip(names, leaves) if isinstance(leaf, torch.Tensor)}
        wanted = [entry.name for entry in self._plan.inputs]
        if all(name in given for name in wanted):
            shards = autoshard.shard_inputs(self._plan, self._mesh, *(given[name] for name in wanted))
            given |= dict(zip(wanted, self._placed(shards) if self._gives_dtensors else shards))
        args, kwargs = tree_unflatten([given.get(name, leaf) for name, leaf in zip(names, leaves)], spec)
        # what ranks change between calls is changed on all of them: they have one capture, which knows one model
        dist.barrier()
        result = self.model(*args, **kwargs)
        dist.barrier()
        return result

    def _placed(self, shards: Sequence[torch.Tensor]) -> list[DTensor]:
        """The shards of a batch as DTensors."""
        pairs = zip(self._plan.inputs, shards, strict=True)
        return [as_dtensor(shard, entry.shape, entry.layout, self._mesh) for entry, shard in pairs]

    def _like(self, whole: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
        if not isinstance(leaf, DTensor):
            return whole
        everywhere = DTensor.from_local(whole, self._mesh, [Replicate()] * self._mesh.ndim)
        return everywhere.redistribute(placements=leaf.placements)

    def _whole(self, value: Any) -> Any:
        return value.full_tensor() if isinstance(value, DTensor) else value


def _attributes(model: nn.Module) -> list[str]:
    """The names of what a program keeps in attributes beside parameters, buffers and modules."""
    return [name for name in vars(model) if name[:1] == "a" and name[1:].isdecimal()]


def _flows(leaf: torch.Tensor) -> bool:
    return leaf.requires_grad and (leaf.is_floating_point() or leaf.is_complex())


def _coefficients(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Fixed numbers between -1 and 1, all different."""
    return torch.arange(1, shape.numel() + 1, dtype=torch.float64).mul(2.3).cos().reshape(shape).to(dtype)


def _weighted(leaf: torch.Tensor) -> torch.Tensor:
    real = torch.view_as_real(leaf) if leaf.is_complex() else leaf
    return (real.double() * _coefficients(real.shape, torch.float64)).sum()


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _share(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether a write into one may reach the other. Gradients that travel together lie one behind the other."""
    (start, end), (other_start, other_end) = (_range(t) for t in (x, y))
    return start < other_end and other_start < end


def _range(x: torch.Tensor) -> tuple[int, int]:
    """The addresses from the first byte of a tensor to behind its last."""
    x = x.detach().to_local() if isinstance(x, DTensor) else x.detach()
    if not x.numel():
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride()))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()
