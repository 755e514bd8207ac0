"""Seconds of a collective on one link: the alpha-beta model of the ring algorithms.

A pass moves every rank's share once around the ring of ``n`` ranks: ``n - 1`` hops, ``(n - 1) / n`` of the buffer over
each rank's link. A collective is one or two passes::

    seconds = launch_s + passes * (n - 1) * latency_s + transfer_s(passes * (n - 1) / n * size_bytes)

    kind             passes   size_bytes
    all_gather       1        the gathered output
    reduce_scatter   1        the full input
    all_reduce       2        the buffer (a reduce-scatter, then an all-gather)
    all_to_all       1        the buffer (n - 1 messages, one to each peer)

Laws (held by tests): zero bytes and a single rank cost nothing; never less for more bytes or more ranks; an all-reduce
costs at least a reduce-scatter; a link ``c`` times slower costs ``c`` times as much.

Source: hops and bytes as in NCCL's own model (``src/graph/tuning.cc``: ``nsteps`` is n-1, for all-reduce 2(n-1)) and in
nccl-tests ``doc/PERFORMANCE.md`` (bus bandwidth factors (n-1)/n, all-reduce 2(n-1)/n, all-to-all (n-1)/n); R. Thakur,
R. Rabenseifner, W. Gropp, "Optimization of Collective Communication Operations in MPICH", IJHPCA 19(1), 2005.
"""

from __future__ import annotations

import numpy as np

from .amounts import Amount, require_amount
from .errors import nearest
from .link import COLLECTIVE_KINDS, Link

_PASSES = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2, "all_to_all": 1}


def collective_s(kind: str, ranks: int, size_bytes: Amount, link: Link) -> Amount:
    """Seconds of one collective among ``ranks`` neighbours on ``link`` (formula above).

    ``size_bytes`` is the larger of a rank's input and output buffer; an array of sizes gives an array of seconds.

    Raises:
        ValueError: an unknown kind, or a size that is negative or not finite.
    """
    if kind not in _PASSES:
        known = ", ".join(COLLECTIVE_KINDS)
        raise ValueError(f"unknown collective {kind!r}; the kinds are {known}{nearest(kind, COLLECTIVE_KINDS)}")
    require_amount("size_bytes", size_bytes)
    if kind == "reduce_scatter" and link.reduce_scatter_as_all_reduce:
        kind = "all_reduce"
    if ranks == 1:
        return size_bytes * 0.0
    hops = _PASSES[kind] * (ranks - 1)
    seconds = link.launch_s + hops * link.latency_s + link.transfer_s(kind, hops / ranks * size_bytes)
    if isinstance(size_bytes, np.ndarray):
        return np.where(size_bytes > 0, seconds, 0.0)
    return seconds if size_bytes > 0 else 0.0
