"""Gloo groups of one thread, for the tests: with the two that are torch's default, ranks crashed at times.

``ProcessGroupGloo::runLoop`` (torch 2.13) assigns the name of the collective that it has completed, a ``std::string``,
to the status of its group outside of the lock of the queue. Two threads that do so at the same time corrupt the heap
where names are too long to lie in the string itself. A script without autoshard failed in 4 of 24 runs under a malloc
that checks, and in none of 16 with one thread.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torch.distributed import ProcessGroupGloo, Store

_with_options = ProcessGroupGloo.__init__


def use_one_thread() -> None:
    """From now on groups of this process have one thread each. ``init_process_group`` and ``new_group`` ignore options
    for gloo, and torch asks whether backends are of this class: so the class itself makes other objects.
    """
    ProcessGroupGloo.__init__ = _of_one_thread  # type: ignore[method-assign]


def _of_one_thread(group: Any, store: Store, rank: int, size: int, timeout: timedelta) -> None:
    options = ProcessGroupGloo._Options()
    options._devices = [ProcessGroupGloo.create_device(interface="lo")]
    options._threads = 1
    options._timeout = timeout
    _with_options(group, store, rank, size, options)
