"""Notes that the ranks of a mesh leave for each other in the job's store: no collective, so none that can hang.

The store is the one that ``init_process_group`` made: torchrun's, a TCP server on rank 0, or a file. Reading and
writing it needs no other rank, so a rank can say why it failed before it ends, and the others can ask who is missing.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

from torch.distributed.device_mesh import DeviceMesh

from ..errors import JobError, MeshError
from .adapter import Store, job_store, rank_in_job, timeout_s

FIRST_S, LONGEST_S = 1e-3, 0.1
"""How long to wait between two looks at the store, at first and at last."""

_T = TypeVar("_T")


class Board:
    """The notes of the ranks of one mesh, for one module.

    ``rank`` is this rank, ``ranks`` are all of the mesh in mesh order, by their numbers in the job; ``timeout_s`` is
    how long the job waits for a rank that does not come.
    """

    def __init__(self, store: Store, prefix: str, rank: int, ranks: tuple[int, ...]) -> None:
        self._store, self._prefix = store, prefix
        self.rank, self.ranks = rank, ranks
        self.timeout_s = timeout_s(store)

    @property
    def is_first(self) -> bool:
        """Whether this rank is the first of the mesh."""
        return self.rank == self.ranks[0]

    def put(self, key: str, text: str) -> None:
        """Leaves a note, in the place of one that is there. Raises JobError, as all here, where the store is gone."""
        with _reached():
            self._store.set(self._prefix + key, text or " ")  # some stores take an empty note for none

    def put_first(self, key: str, text: str) -> str:
        """Leaves a note where none is; the note that is there then, which may be another rank's."""
        with _reached():
            return str(self._store.compare_set(self._prefix + key, "", text).decode())

    def get(self, key: str) -> str | None:
        """A note; None where there is none."""
        with _reached():
            if not self._store.check([self._prefix + key]):
                return None
            return str(self._store.get(self._prefix + key).decode()).strip()

    def count(self, key: str, more: int = 1) -> int:
        """Adds to a number that all ranks share; its new value."""
        with _reached():
            return int(self._store.add(self._prefix + key, more))

    def wait(self, *keys: str) -> tuple[str, str] | None:
        """The first of several notes that is there, with its key; None where none came within ``timeout_s``."""
        deadline_s, pause_s = time.monotonic() + self.timeout_s, FIRST_S
        while True:
            for key in keys:
                text = self.get(key)
                if text is not None:
                    return key, text
            if time.monotonic() > deadline_s:
                return None
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_S)

    def __deepcopy__(self, memo: dict[int, object]) -> Board:
        return self  # a copy of a module is called by the same ranks


def open_board(mesh: DeviceMesh) -> Board:
    """The board of the next thing that the ranks of a mesh do together: each rank's n-th call opens the same one.

    Raises:
        MeshError: this rank is not in the mesh.
        JobError: the job's store is gone.
    """
    ranks = tuple(int(rank) for rank in mesh.mesh.flatten().tolist())
    rank = rank_in_job()
    if rank not in ranks:
        raise MeshError(f"rank {rank} is not in the mesh of the ranks {ranks}; call autoshard on those alone")
    store, has_others = job_store()
    ranks = ranks if has_others else (rank,)
    mine = f"autoshard/{hashlib.sha256(repr(sorted(ranks)).encode()).hexdigest()[:16]}"
    with _reached():
        call = store.add(f"{mine}/calls/{rank}", 1)
    return Board(store, f"{mine}/{call}/", rank, ranks)


@contextmanager
def _reached() -> Iterator[None]:
    """Says what it means that a store fails: stores raise plain or torch's own ``RuntimeError``."""
    try:
        yield
    except RuntimeError as error:
        raise JobError(
            f"the job's store cannot be reached: the process that held it has ended, rank 0 or torchrun ({error})"
        ) from error


def within(seconds: float, work: Callable[[], _T], otherwise: _T) -> _T:
    """What ``work`` gives, or ``otherwise`` where it fails or takes longer: for a store that may be gone."""
    found = [otherwise]

    def run() -> None:
        with suppress(JobError):
            found[0] = work()

    thread = threading.Thread(target=run, daemon=True, name="autoshard store")
    thread.start()
    thread.join(seconds)
    return found[0]
