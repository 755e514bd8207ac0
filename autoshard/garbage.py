"""How often Python looks for garbage in cycles while a model is planned or lowered.

A search looks at every container that was made since the one before, now and then at all there are. A graph of 16,000
operators is millions of them that are all in use, so that a search finds nothing and takes the longer the deeper the
model is. With 300,000 in the place of 700, ``autoshard plan`` of Llama-3-8B on 8x8 took a sixth less, of Llama-3-70B a
fifth; with RARELY in the place of 300,000 both and Llama-3-8B under 10 GiB, which is solved many times, take another
tenth less, and 24 to 31 MiB more memory: the last 798 MiB (``benchmarks/plan.py``, on a shared machine).
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

RARELY = 2_000_000
"""Containers made, less those freed, from one search to the next; Python's own is 700."""


@contextmanager
def seldom_collected() -> Iterator[None]:
    """Inside, Python searches for garbage in cycles once in RARELY containers; not at all or more seldom where that is
    set already. Objects in no cycle are freed at once, as ever.
    """
    before = gc.get_threshold()
    if 0 < before[0] < RARELY:
        gc.set_threshold(RARELY, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


@contextmanager
def at_the_end_of_the_process() -> Iterator[None]:
    """What is there when this ends is no more looked through: it goes with the process.

    Python would search all of it twice more, once as it goes on as before and once as it ends: of Llama-3-8B and 70B
    on 8x8 that was 0.9 to 2.3 of the 8.4 to 12.3 CPU seconds that ``autoshard plan`` takes from start to end.
    """
    try:
        yield
    finally:
        gc.freeze()
