"""The numeric check of a rule: split the inputs as it says, run the local form on each shard, put the results together
as it says, and compare with the operator on the whole tensors. A rule that fails is not offered to the solver.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ..capture import Node, TensorMeta, is_random
from ..layout import Layout, Placement, block
from ..localize import run_local
from ..mesh import Mesh
from .rule import Rule
from .samples import apply, sample, small

# a small check on this many ranks; three where lengths are not divisible, so that blocks differ in size
_EVEN_PARTS, _UNEVEN_PARTS = 2, 3
_LARGEST_UNSHRUNK = 1 << 16


class _Eager:
    def call(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        return op(*args, **kwargs)


def rule_holds(node: Node, inputs: tuple[TensorMeta, ...], rule: Rule, parts: int) -> bool:
    """Whether a rule gives the right numbers on small tensors of the same kind.

    Args:
        parts: the number of ranks of the axis the rule is meant for. A length it does not divide is checked uneven.
    """
    if is_random(node):
        return False
    ranks = _EVEN_PARTS if _divides(rule, node, inputs, parts) else _UNEVEN_PARTS
    for candidate, metas in _candidates(node, inputs, parts, ranks):
        decided = [
            v for positive in (False, True) if (v := _verdict(candidate, metas, rule, ranks, positive)) is not None
        ]
        if decided:
            return all(decided)
    return False


def _candidates(node: Node, inputs: tuple[TensorMeta, ...], parts: int, ranks: int) -> list[Any]:
    unshrunk = sum(m.size_bytes for m in inputs) <= _LARGEST_UNSHRUNK
    return [small(node, inputs, parts, ranks), *([(node, inputs)] if unshrunk else [])]


def _divides(rule: Rule, node: Node, inputs: tuple[TensorMeta, ...], parts: int) -> bool:
    pairs = [*zip(rule.inputs, inputs), *zip(rule.outputs, node.outputs)]
    cuts = [meta.shape[p.dim] for p, meta in pairs if p is not None and meta is not None and p.kind == "S"]
    return all(size % parts == 0 for size in cuts)


def _verdict(node: Node, metas: tuple[TensorMeta, ...], rule: Rule, ranks: int, positive: bool) -> bool | None:
    """Whether one trial agrees, or None where the operator rejects these inputs or the rule's shards of them."""
    try:
        return _trial(node, metas, rule, ranks, positive)
    except Exception:  # torch operators raise anything
        return None


def _trial(node: Node, metas: tuple[TensorMeta, ...], rule: Rule, ranks: int, positive: bool) -> bool | None:
    """True or False, or None where the whole result is not finite and says nothing."""
    generator = torch.Generator().manual_seed(0)
    whole = sample(metas, positive, generator)
    expected = apply(node, whole)
    if not all(t is None or bool(torch.isfinite(t).all()) for t in expected):
        return None
    node = replace(node, outputs=tuple(None if t is None else TensorMeta(tuple(t.shape), t.dtype) for t in expected))
    mesh = Mesh(("axis",), (ranks,))
    before = tuple(Layout((p,)) for p in rule.inputs)
    after = tuple(None if p is None else Layout((p,)) for p in rule.outputs)
    shards = [split(tensor, p, ranks, generator) for tensor, p in zip(whole, rule.inputs)]
    results = []
    for rank in range(ranks):
        local = run_local(_Eager(), node, tuple(s[rank] for s in shards), metas, before, after, mesh, (rank,))
        results.append(tuple(local) if isinstance(local, (tuple, list)) else (local,))
    return all(
        agrees([result[k] for result in results], placement, expected[k])
        for k, placement in enumerate(rule.outputs)
        if placement is not None
    )


def split(tensor: torch.Tensor, placement: Placement, ranks: int, generator: torch.Generator) -> list[torch.Tensor]:
    """The shards of a tensor along one axis; addends of either sign for P(sum).

    Raises:
        ValueError: the tensor cannot be a partial sum (booleans), or the placement is another partial.
    """
    if placement.kind == "R":
        return [tensor] * ranks
    if placement.kind == "S":
        blocks = (block(tensor.shape[placement.dim], ranks, r) for r in range(ranks))
        return [tensor.narrow(placement.dim, lo, hi - lo).contiguous() for lo, hi in blocks]
    if placement.reduce != "sum" or tensor.dtype is torch.bool:
        raise ValueError(f"{tensor.dtype} cannot be split as {placement}")
    addends = [
        torch.randn(tensor.shape, generator=generator, dtype=torch.float64).mul(4).to(tensor.dtype)
        for _ in range(ranks - 1)
    ]
    return [*addends, tensor - sum(addends)]


def agrees(shards: list[torch.Tensor], placement: Placement, expected: torch.Tensor) -> bool:
    """Whether shards put together as a placement says give the expected tensor."""
    if placement.kind == "R":
        return all(_close(shard, expected) for shard in shards)
    if placement.kind == "S":
        blocks = [block(expected.shape[placement.dim], len(shards), r) for r in range(len(shards))]
        if any(shard.shape[placement.dim] != hi - lo for shard, (lo, hi) in zip(shards, blocks)):
            return False
        return _close(torch.cat(shards, placement.dim), expected)
    stacked = torch.stack(shards)
    combined = getattr(stacked, {"sum": "sum", "max": "amax", "min": "amin"}[placement.reduce])(0)
    return _close(combined.to(expected.dtype), expected)


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.allclose(a, b, rtol=1e-6, atol=1e-8) if a.dtype.is_floating_point else torch.equal(a, b)
