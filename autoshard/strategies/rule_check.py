"""The numeric check of a rule: split the inputs as it says, run the local form on each shard, put the results together
as it says, and compare with the operator on the whole tensors. A rule that fails is not offered to the solver.

An operator is tried in small forms, with three kinds of random tensors on 2 ranks and with one on 3. Where its
arguments carry lengths it is tried as it is, on the ranks of its axis, if its tensors are not too large for that.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch

from ..capture import Node, TensorMeta
from ..layout import Layout, Placement, S, block, local_ranges
from ..mesh import Mesh
from ..ops import Form, Rule, carries_lengths, has, known, run_local, small, small_in_parts, widened
from .sample_inputs import KINDS, Kind, apply, sample

# the ranks of the small trials, and the kinds of tensors on them
_SMALL: tuple[tuple[int, tuple[Kind, ...]], ...] = ((2, KINDS), (3, ("ties",)))
# a rule that only one trial can judge may hold by luck
_LEAST = 2
# elements of the tensors of an operator that is tried at its real size, and ranks of its axis
LARGEST_REAL = 1 << 16
_MOST_RANKS = 16

# ``values``: infinities and NaN must stand where they are expected. ``finite values``: what is not finite need only be
# so; of addends of either sign, an infinite factor or a zero divisor makes NaN where the whole is infinite.
Compare = Literal["values", "finite values", "shapes"]


class _Eager:
    def call(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        return op(*args, **kwargs)

    def value(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Check:
    """The trials that every rule of one operator along one axis must pass.

    Args:
        node: the operator, at its real size.
        inputs: shape and dtype of its tensors.
        parts: the number of ranks of the axis.
    """

    def __init__(self, node: Node, inputs: tuple[TensorMeta, ...], parts: int) -> None:
        self._node, self._inputs, self._parts = node, inputs, parts

    def holds(self, rule: Rule) -> bool:
        """Whether a rule gives the right numbers in every trial that cuts dims as the rule cuts the real ones."""
        with _plain_numbers():
            fit = [trial for trial in self._trials if self._fits(rule, trial)]
            return sum(trial.tells for trial in fit) >= _LEAST and all(trial.passes(rule) for trial in fit)

    def holds_of_any(self, rule: Rule) -> bool:
        """Whether a rule with dims that are cut in parts gives the right numbers: that without parts does, and so does
        one that deals out the indices of these dims in turn, wherever a trial has enough of them. So it matters not
        which of them a rank has.
        """
        with _plain_numbers():
            found = [(trial, dealt) for trial in self._trials if (dealt := _dealt_out(rule, trial))]
            fit = [(trial, dealt) for trial, dealt in found if self._fits(dealt, trial)]
            return sum(trial.tells for trial, _ in fit) >= _LEAST and all(trial.passes(dealt) for trial, dealt in fit)

    def holds_in_parts(self, rule: Rule) -> bool:
        """Whether an operator that takes a dim apart, or joins one, gives the right numbers under a rule that cuts the
        dim in parts; tried with parts of these proportions.
        """
        with _plain_numbers():
            forms = [(small_in_parts(self._node, self._inputs, rule, ranks), ranks) for ranks in (2, 3)]
            found = [trial for form, ranks in forms if form for trial in _trials(self._node, form, ranks, KINDS)]
            return sum(trial.tells for trial in found) >= _LEAST and all(trial.passes(rule) for trial in found)

    @property
    def can_try(self) -> bool:
        """Whether the operator runs on random tensors at all, at a size that can be afforded."""
        with _plain_numbers():
            return bool(self._trials)

    @cached_property
    def _trials(self) -> tuple[Trial, ...]:
        if carries_lengths(self._node) and self._is_affordable:
            return self._real
        found: list[Trial] = []
        for ranks, kinds in _SMALL:
            form = small(self._node, self._inputs, self._parts, ranks)
            found += _trials(self._node, form, ranks, kinds) if form else []
        enough = sum(trial.tells for trial in found) >= _LEAST
        return tuple(found) if enough or not self._is_affordable else self._real

    @property
    def _real(self) -> tuple[Trial, ...]:
        return tuple(_trials(self._node, widened(self._node, self._inputs), self._parts, KINDS))

    @property
    def _is_affordable(self) -> bool:
        metas = (*self._inputs, *(meta for meta in self._node.outputs if meta))
        elements = sum(torch.Size(meta.shape).numel() for meta in metas)
        return elements <= LARGEST_REAL and self._parts <= _MOST_RANKS

    def _fits(self, rule: Rule, trial: Trial) -> bool:
        """Whether the dims that a rule cuts are cut in a trial as they are: evenly or not, and for every rank."""
        real = (*self._inputs, *self._node.outputs)
        tried = (*trial.inputs, *trial.node.outputs)
        for placement, meta, form in zip((*rule.inputs, *rule.outputs), real, tried):
            if placement is None or placement.kind != "S":
                continue
            assert meta is not None and form is not None
            if placement.dim >= len(meta.shape):
                return False
            size, small_size = meta.shape[placement.dim], form.shape[placement.dim]
            if (size % self._parts == 0) != (small_size % trial.ranks == 0):
                return False
            if not _covers(small_size, trial.ranks):
                return False
        return True


@dataclass(frozen=True, eq=False)
class Trial:
    """An operator with tensors to split and what it gives on the whole of them.

    ``node`` has the shapes of these results.
    """

    node: Node
    inputs: tuple[TensorMeta, ...]
    ranks: int
    values: tuple[torch.Tensor, ...]
    expected: tuple[torch.Tensor | None, ...]

    @cached_property
    def tells(self) -> bool:
        """Whether the results can tell a right rule from a wrong one; one that is all NaN cannot."""
        results = () if has(self.node, "uninitialised") else self.expected
        return not any(t is not None and t.numel() and bool(t.isnan().all()) for t in results)

    def passes(self, rule: Rule) -> bool:
        """Whether the shards put together are the expected results; not where the operator rejects the shards."""
        try:
            results = self._run(rule)
        except Exception:  # torch operators raise anything
            return False
        compare = _how_to_compare(self.node, rule)
        may_lose_nan = has(self.node, "shift")
        return all(
            agrees([result[k] for result in results], placement, whole, compare, may_lose_nan)
            for k, (placement, whole) in enumerate(zip(rule.outputs, self.expected))
            if placement is not None and whole is not None
        )

    def _run(self, rule: Rule) -> list[tuple[Any, ...]]:
        generator = torch.Generator().manual_seed(1)
        mesh = Mesh(("axis",), (self.ranks,))
        before = tuple(Layout((p,)) for p in rule.inputs)
        after = tuple(None if p is None else Layout((p,)) for p in rule.outputs)
        shards = [split(tensor, p, self.ranks, generator) for tensor, p in zip(self.values, rule.inputs)]
        results = []
        for rank in range(self.ranks):
            mine = tuple(s[rank] for s in shards)
            local = run_local(_Eager(), self.node, mine, self.inputs, before, after, mesh, (rank,))
            results.append(tuple(local) if isinstance(local, (tuple, list)) else (local,))
        return results


def _dealt_out(rule: Rule, trial: Trial) -> Rule | None:
    """A rule whose dims that are cut in parts have one index of every part on each rank; None where a rank would have
    only one, so that it would be like any other.
    """

    def dealt(placement: Placement | None, meta: TensorMeta | None) -> Placement | None:
        if placement is None or meta is None or not placement.parts:
            return placement
        return S(placement.dim, (1,) * (meta.shape[placement.dim] // trial.ranks))

    inputs = tuple(dealt(p, m) for p, m in zip(rule.inputs, trial.inputs))
    outputs = tuple(dealt(p, m) for p, m in zip(rule.outputs, trial.node.outputs))
    pairs = zip((*rule.inputs, *rule.outputs), (*inputs, *outputs), (*trial.inputs, *trial.node.outputs))
    cut = [(after, meta) for before, after, meta in pairs if before and before.parts and after and meta]
    if not all(after.parts and meta.shape[after.dim] % trial.ranks == 0 for after, meta in cut):
        return None
    return Rule(tuple(p for p in inputs if p), outputs)


def _trials(real: Node, form: Form, ranks: int, kinds: tuple[Kind, ...]) -> Iterator[Trial]:
    """A trial for each kind of tensors that the operator accepts."""
    return (trial for kind in kinds if (trial := _trial(real, form, ranks, kind)))


def _trial(real: Node, form: Form, ranks: int, kind: Kind) -> Trial | None:
    node, inputs = form
    assert node.op is not None
    generator = torch.Generator().manual_seed(0)
    values = sample(inputs, kind, generator, torch.Tag.pointwise in node.op.tags)
    try:
        values = meant(node, values) if (meant := known(node.op).meant) else values
        expected = apply(node, values)
    except Exception:  # torch operators raise anything
        return None
    outputs = tuple(None if t is None else TensorMeta(tuple(t.shape), t.dtype) for t in expected)
    if [m and len(m.shape) for m in outputs] != [m and len(m.shape) for m in real.outputs]:
        return None
    return Trial(replace(node, outputs=outputs), inputs, ranks, values, expected)


@contextmanager
def _plain_numbers() -> Iterator[None]:
    """No recording of gradients, and one thread: small tensors wait for others longer than they are worked on."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            yield
    finally:
        torch.set_num_threads(threads)


def _covers(size: int, parts: int) -> bool:
    """Whether every one of ``parts`` ranks has an index of a dim, or the dim none."""
    return size == 0 or block(size, parts, parts - 1)[0] < size


def _how_to_compare(node: Node, rule: Rule) -> Compare:
    if has(node, "uninitialised"):
        return "shapes"
    return "finite values" if any(p.kind == "P" for p in rule.inputs) else "values"


def split(tensor: torch.Tensor, placement: Placement, ranks: int, generator: torch.Generator) -> list[torch.Tensor]:
    """The shards of a tensor along one axis; addends of either sign for P(sum).

    Raises:
        ValueError: the tensor cannot be a partial sum (booleans), or the placement is another partial.
    """
    if placement.kind == "R":
        return [tensor] * ranks
    if placement.kind == "S":
        return [_held_of(tensor, placement, ranks, r) for r in range(ranks)]
    if placement.reduce != "sum" or tensor.dtype is torch.bool:
        raise ValueError(f"{tensor.dtype} cannot be split as {placement}")
    dtype = torch.complex128 if tensor.dtype.is_complex else torch.float64
    addends = [
        torch.randn(tensor.shape, generator=generator, dtype=dtype).mul(4).to(tensor.dtype) for _ in range(ranks - 1)
    ]
    return [*addends, tensor - sum(addends)]


def _held_of(tensor: torch.Tensor, placement: Placement, ranks: int, rank: int) -> torch.Tensor:
    """What one rank holds of a tensor that is cut along an axis."""
    dim, mesh = placement.dim, Mesh(("axis",), (ranks,))
    ranges = local_ranges(tensor.shape[dim], Layout((placement,)), dim, mesh, (rank,))
    return torch.cat([tensor.narrow(dim, lo, hi - lo) for lo, hi in ranges], dim)


def agrees(
    shards: list[torch.Tensor],
    placement: Placement,
    expected: torch.Tensor,
    compare: Compare = "values",
    may_lose_nan: bool = False,
) -> bool:
    """Whether shards put together as a placement says give the expected tensor.

    Partial results must be what a collective can combine: no booleans as a sum (256 of them are none), no floating
    maximum (a NaN is lost or not by the order of the ranks), unless it may be lost.
    """
    if placement.kind == "R":
        return all(_close(shard, expected, compare) for shard in shards)
    if placement.kind == "S":
        held = [_held_of(expected, placement, len(shards), r) for r in range(len(shards))]
        return all(_close(shard, part, compare) for shard, part in zip(shards, held))
    uncombinable = expected.dtype is torch.bool if placement.reduce == "sum" else _is_inexact(expected) > may_lose_nan
    if uncombinable or any(shard.shape != expected.shape for shard in shards):
        return False
    combined = getattr(torch.stack(shards), {"sum": "sum", "max": "amax", "min": "amin"}[placement.reduce])(0)
    return _close(combined.to(expected.dtype), expected, compare)


def _close(a: torch.Tensor, b: torch.Tensor, compare: Compare) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if compare == "shapes":
        return True
    if not _is_inexact(a):
        return torch.equal(a, b)
    if compare == "finite values":
        finite = b.isfinite()
        a, b = a.where(finite, a.isfinite().to(a.dtype)), b.where(finite, 0.0)
    return torch.allclose(a, b, rtol=1e-6, atol=1e-8, equal_nan=True)


def _is_inexact(tensor: torch.Tensor) -> bool:
    return tensor.dtype.is_floating_point or tensor.dtype.is_complex
