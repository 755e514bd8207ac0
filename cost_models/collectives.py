"""Seconds of a collective on one link, and of one that runs level by level over several.

On one link: the alpha-beta model. A collective is one or two passes; in a ring of ``n`` ranks a pass takes ``n - 1``
hops, in a tree ``ceil(log2 n)``, and either sends ``(n - 1) / n`` of the buffer from each rank::

    seconds = launch_s + passes * hops * latency_s + transfer_s(wire_bytes)

    kind             passes   wire_bytes              size_bytes
    all_gather       1        (n - 1) / n * size      the gathered output
    reduce_scatter   1        (n - 1) / n * size      the full input
    all_reduce       2        2 (n - 1) / n * size    the buffer (a reduce-scatter, then an all-gather)
    all_to_all       1        (n - 1) / n * size      the buffer (n - 1 messages, one to each peer)
    broadcast        1        size                    the buffer (passed on in chunks, so each rank sends it once)

Where a link lists other algorithms the fastest one counts. Trees stand for NCCL's double binary trees (all-reduce,
broadcast) and its PAT (all-gather, reduce-scatter); an all-to-all has none. Where the switch reduces (NVLink SHARP), an
all-reduce is one hop in which each rank sends the buffer once, so that it takes as long on any number of ranks; a
reduce-scatter may take it, too.

Level by level (hierarchical), ``k`` ranks on the fast level and ``m`` on the slow one, a buffer of B bytes: an
all-gather gathers B / k on the slow level and then B on the fast one; a reduce-scatter is the same backwards; an
all-reduce is a reduce-scatter of B on the fast level, an all-reduce of B / k on the slow one and an all-gather of B on
the fast one; an all-to-all and a broadcast move B on each level.

Where levels have wires of their own the buffer may be cut into chunks, of which one is on each level at a time, as in
NCCL's rings over several network cards: with C chunks of which each takes ``t_l`` seconds on level ``l``,
``sum t_l + (C - 1) max t_l``. The number of chunks (1, 2, 4 .. 64) that takes least counts. All but all-reduces are one
ring then, without trees, which waits for ``k - 1`` hops in each of ``m`` hosts: the levels count those of one host, and
the other ``(k - 1) (m - 1)`` take ``hop_inside_s`` of the link between hosts each, once.

Laws (held by tests): zero bytes and a single rank cost nothing; never less for more bytes or more ranks; on one link an
all-reduce costs at least a reduce-scatter; a link ``c`` times slower costs ``c`` times as much. Through several ranks
of each host a small all-reduce costs less than a reduce-scatter, as was measured: trees against a ring of all ranks.

Source: hops, bytes and the least over algorithms and protocols as in NCCL's own model (``src/graph/tuning.cc``:
``nsteps`` is n-1, for all-reduce 2(n-1), trees 2 log2 n) and nccl-tests ``doc/PERFORMANCE.md`` (bus bandwidth factors
(n-1)/n, all-reduce 2(n-1)/n, all-to-all (n-1)/n, broadcast 1); R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of
Collective Communication Operations in MPICH", IJHPCA 19(1), 2005; trees: P. Sanders, J. Speck, J. L. Traff, "Two-tree
algorithms for full bandwidth broadcast, reduction and scan", Parallel Computing 35(12), 2009; level by level: M. Cho et
al., "BlueConnect: decomposing all-reduce for deep learning on heterogeneous network hierarchy", MLSys 2019.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import reduce

import numpy as np

from .amounts import Amount, require_amount
from .collective_kinds import COLLECTIVE_KINDS
from .link import Algorithm, Hops, Link
from .spelling import did_you_mean

_PASSES = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2, "all_to_all": 1, "broadcast": 1}

_OFFERED: dict[Hops, Collection[str]] = {
    "ring": _PASSES,
    "tree": [kind for kind in _PASSES if kind != "all_to_all"],
    "switch": ("all_reduce", "reduce_scatter"),
}
"""The kinds that an algorithm is for."""

_CHUNKS = tuple(1 << power for power in range(7))

Levels = tuple[tuple[int, Link], ...]


def wire_bytes(kind: str, ranks: int, size_bytes: Amount) -> Amount:
    """The bytes that each rank sends (table above)."""
    return size_bytes if kind == "broadcast" else _PASSES[kind] * (ranks - 1) / ranks * size_bytes


def collective_s(kind: str, ranks: int, size_bytes: Amount, link: Link) -> Amount:
    """Seconds of one collective among ``ranks`` neighbours on ``link`` (formula above).

    ``size_bytes`` is the larger of a rank's input and output buffer; an array of sizes gives an array of seconds.

    Raises:
        ValueError: an unknown kind, or a size that is negative or not finite.
    """
    if kind not in _PASSES:
        known = ", ".join(COLLECTIVE_KINDS)
        raise ValueError(f"unknown collective {kind!r}; the kinds are {known}{did_you_mean(kind, COLLECTIVE_KINDS)}")
    require_amount("size_bytes", size_bytes)
    if kind == "reduce_scatter" and link.reduce_scatter_as_all_reduce:
        kind = "all_reduce"
    if ranks == 1:
        return size_bytes * 0.0
    passes, transfer_s = _PASSES[kind], link.transfer_s(kind, wire_bytes(kind, ranks, size_bytes))
    seconds = link.start_s(kind) + passes * (ranks - 1) * link.latency_s + transfer_s
    for other in _alternatives(kind, link):
        if other.hops == "switch":
            start_s, sending_s = other.launch_s + other.latency_s, link.transfer_s("all_reduce", size_bytes)
        else:
            hops = ranks - 1 if other.hops == "ring" else (ranks - 1).bit_length()
            start_s, sending_s = other.launch_s + passes * hops * other.latency_s, transfer_s
        seconds = _least(seconds, start_s + sending_s / other.bandwidth_share)
    if isinstance(size_bytes, np.ndarray):
        return np.where(size_bytes > 0, seconds, 0.0)
    return seconds if size_bytes > 0 else 0.0


def leveled_s(kind: str, size_bytes: Amount, levels: Levels, at_once: bool = False) -> Amount:
    """Seconds of one collective that runs level by level, the fastest level first; where levels can be ``at_once``, in
    as many chunks as take least (rules above).

    Raises:
        ValueError: an unknown kind, or a size that is negative or not finite.
    """
    if not at_once:
        return _in_chunks(kind, size_bytes, levels, 1)
    waited_s = 0.0
    if kind != "all_reduce":
        levels, waited_s = _as_one_ring(levels)
    seconds = reduce(_least, (_in_chunks(kind, size_bytes, levels, chunks) for chunks in _CHUNKS))
    if isinstance(size_bytes, np.ndarray):
        return np.where(size_bytes > 0, seconds + waited_s, 0.0)
    return seconds + waited_s if size_bytes > 0 else 0.0


def _as_one_ring(levels: Levels) -> tuple[Levels, float]:
    """The levels without trees between hosts, and the seconds of the hops inside hosts that levels do not count: a ring
    through all ranks has ``k - 1`` in each of the ``m`` hosts.
    """
    (ranks, fast), (hosts, slow) = levels
    rings = tuple(other for other in slow.alternatives if other.hops != "tree")
    return ((ranks, fast), (hosts, replace(slow, alternatives=rings))), (ranks - 1) * (hosts - 1) * slow.hop_inside_s


def _in_chunks(kind: str, size_bytes: Amount, levels: Levels, chunks: int) -> Amount:
    parts = _by_level(kind, size_bytes / chunks, levels)
    together = reduce(lambda one, other: one + other, parts)
    return together + (chunks - 1) * reduce(_most, parts)


def _by_level(kind: str, size_bytes: Amount, levels: Levels) -> list[Amount]:
    """The seconds of each level, the fastest first."""
    (ranks, link), *slower = levels
    if not slower:
        return [collective_s(kind, ranks, size_bytes, link)]
    if kind in ("all_to_all", "broadcast"):
        return [collective_s(kind, ranks, size_bytes, link), *_by_level(kind, size_bytes, tuple(slower))]
    inside = ("reduce_scatter", "all_gather") if kind == "all_reduce" else (kind,)
    own = reduce(lambda one, other: one + other, (collective_s(part, ranks, size_bytes, link) for part in inside))
    return [own, *_by_level(kind, size_bytes / ranks, tuple(slower))]


def _alternatives(kind: str, link: Link) -> list[Algorithm]:
    if kind in link.curves:
        return []
    return [other for other in link.alternatives if kind in _OFFERED[other.hops]]


def _least(one: Amount, other: Amount) -> Amount:
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return np.minimum(one, other)
    return min(one, other)


def _most(one: Amount, other: Amount) -> Amount:
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return np.maximum(one, other)
    return max(one, other)
