"""Many ranks in one process: a thread for each, and a process group of torch whose collectives are copies in memory.

Everything above the group is what a job runs: DeviceMesh, DTensor, functional collectives, autograd. The group refuses
what gloo refuses (16-bit integers, an all-to-all of complex numbers), and it compares what the ranks ask of it: ranks
that ask for different collectives hang or send garbage in a real job, and fail here.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future, _set_thread_isolation_mode
from torch.futures import Future
from torch.testing._internal.distributed.multi_threaded_pg import ThreadLocalWorld

BACKEND = "in-memory"


class RanksDiffer(Exception):
    """The ranks of a group asked for different collectives at the same time."""


class PeerFailed(Exception):
    """Another rank raised an exception, so that a collective never came about."""


class _Meeting:
    """Where the ranks of one group meet: each brings what it has, one does the work for all."""

    def __init__(self, size: int, timeout_s: float) -> None:
        self._barrier = threading.Barrier(size)
        self._timeout_s = timeout_s
        self._brought: list[Any] = [None] * size
        self._failure: BaseException | None = None

    def exchange(self, rank: int, kind: tuple[Any, ...], tensors: Any, work: Callable[[list[Any]], None]) -> None:
        self._brought[rank] = kind, tensors
        if self._wait() == 0:
            self._failure = None
            try:
                kinds = [kind for kind, _ in self._brought]
                if any(other != kinds[0] for other in kinds):
                    raise RanksDiffer(f"the ranks of one group ask for different collectives: {kinds}")
                with torch.no_grad():
                    work([tensors for _, tensors in self._brought])
            except BaseException as error:  # every rank raises it
                self._failure = error
        self._wait()
        if self._failure is not None:
            raise self._failure

    def abort(self) -> None:
        self._barrier.abort()

    def _wait(self) -> int:
        try:
            return self._barrier.wait(self._timeout_s)
        except threading.BrokenBarrierError:
            raise PeerFailed("another rank failed or did not come to a collective") from None


class Job:
    """The groups of one run of all ranks, by name."""

    def __init__(self, world: int, timeout_s: float) -> None:
        self.world, self.timeout_s = world, timeout_s
        self._lock = threading.Lock()
        self._meetings: dict[str, _Meeting] = {}
        self._failed = False

    def meeting(self, name: str, size: int) -> _Meeting:
        with self._lock:
            made = self._meetings.setdefault(name, _Meeting(size, self.timeout_s))
            if self._failed:
                made.abort()
            return made

    def fail(self) -> None:
        """Ends the waiting of every rank in every group, now and later."""
        with self._lock:
            self._failed = True
            for meeting in self._meetings.values():
                meeting.abort()


class _Group(dist.ProcessGroup):
    """One rank's side of a group."""

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self._rank, self._size = rank, size
        self._job: Job = _here.job
        self._meeting: _Meeting | None = None

    def size(self) -> int:
        return self._size

    def getBackendName(self) -> str:
        return BACKEND

    @property
    def pg_name(self) -> str:
        return str(dist.distributed_c10d._world.pg_names[self])

    @property
    def group_name(self) -> str:
        return self.pg_name

    def _exchange(
        self, kind: str, like: torch.Tensor, tensors: Any, work: Callable[[list[Any]], None], *of: Any
    ) -> Any:
        if like.dtype in _REFUSED or (kind == "all_to_all" and like.dtype.is_complex):
            raise RuntimeError("Invalid scalar type")  # as gloo says it
        if self._meeting is None:  # the name is known only once the group is made; it says which ranks are in
            ranks = tuple(sorted(dist.distributed_c10d._world.pg_group_ranks[self]))
            self._meeting = self._job.meeting(f"{self.pg_name} {ranks}", self._size)
        key = (kind, like.dtype, tuple(like.shape), *map(str, of))
        self._meeting.exchange(self._rank, key, tensors, work)
        done: Future[Any] = Future()
        done.set_result(tensors)
        return _create_work_from_future(done)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        root = opts.rootRank

        def work(brought: list[list[torch.Tensor]]) -> None:
            for rank, copies in enumerate(brought):
                if rank != root:
                    for copy, source in zip(copies, brought[root]):
                        copy.detach().copy_(source)

        return self._exchange("broadcast", tensors[0], tensors, work, root)

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        reduce = opts.reduceOp.op

        def work(brought: list[list[torch.Tensor]]) -> None:
            for copies in zip(*brought):
                combined = _combined([copy.detach() for copy in copies], reduce)
                for copy in copies:
                    copy.detach().copy_(combined)

        return self._exchange("all_reduce", tensors[0], tensors, work, reduce)

    def all_gather_single(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> Any:
        def work(brought: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
            for whole, _ in brought:
                for block, (_, part) in zip(whole.detach().chunk(self._size), brought):
                    block.copy_(part.reshape(block.shape))

        return self._exchange("all_gather", source, (output, source), work)

    def reduce_scatter_single(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> Any:
        reduce = opts.reduceOp.op

        def work(brought: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
            combined = _combined([whole.detach() for _, whole in brought], reduce)
            for block, (part, _) in zip(combined.chunk(self._size), brought):
                part.detach().copy_(block.reshape(part.shape))

        return self._exchange("reduce_scatter", source, (output, source), work, reduce)

    def all_to_all_single(
        self, output: torch.Tensor, source: torch.Tensor, taken: Any = None, given: Any = None, opts: Any = None
    ) -> Any:
        def work(brought: list[tuple[torch.Tensor, torch.Tensor, list[int], list[int]]]) -> None:
            pieces = [piece.split(sizes or len(piece) // self._size) for _, piece, _, sizes in brought]
            for rank, (whole, *_) in enumerate(brought):
                whole.detach().copy_(torch.cat([sent[rank] for sent in pieces]))

        return self._exchange("all_to_all", source, (output, source, taken, given), work)

    def allgather(self, outputs: list[list[torch.Tensor]], sources: list[torch.Tensor], opts: Any = None) -> Any:
        def work(brought: list[tuple[list[torch.Tensor], torch.Tensor]]) -> None:
            for parts, _ in brought:
                for part, (_, source) in zip(parts, brought):
                    part.detach().copy_(source)

        return self._exchange("all_gather", sources[0], (outputs[0], sources[0]), work)

    def scatter(self, outputs: list[torch.Tensor], sources: list[list[torch.Tensor]], opts: Any = None) -> Any:
        root = opts.rootRank

        def work(brought: list[tuple[torch.Tensor, list[list[torch.Tensor]]]]) -> None:
            for (part, _), source in zip(brought, brought[root][1][0]):
                part.detach().copy_(source)

        return self._exchange("scatter", outputs[0], (outputs[0], sources), work, root)

    def barrier(self, opts: Any = None) -> Any:
        return self._exchange("barrier", torch.ones(()), (), lambda brought: None)

    def all_gather_single_coalesced(self, outputs: Any, sources: Any, opts: Any = None) -> Any:
        return [self.all_gather_single(*pair) for pair in zip(outputs, sources, strict=True)][-1]

    def reduce_scatter_single_coalesced(self, outputs: Any, sources: Any, opts: Any = None) -> Any:
        return [self.reduce_scatter_single(*pair, opts) for pair in zip(outputs, sources, strict=True)][-1]

    # the names of 2.11 and 2.12
    _allgather_base, allgather_into_tensor_coalesced = all_gather_single, all_gather_single_coalesced
    _reduce_scatter_base, reduce_scatter_tensor_coalesced = reduce_scatter_single, reduce_scatter_single_coalesced
    alltoall_base, allreduce_coalesced = all_to_all_single, allreduce


_REFUSED = {torch.int16, torch.uint16}
_REDUCE = {
    dist.ReduceOp.SUM: lambda stacked: stacked.sum(0, dtype=stacked.dtype),
    dist.ReduceOp.MAX: lambda stacked: stacked.amax(0),
    dist.ReduceOp.MIN: lambda stacked: stacked.amin(0),
}


def _combined(tensors: list[torch.Tensor], reduce: Any) -> torch.Tensor:
    """The sum, maximum or minimum; of booleans as bytes, as the backends of torch have it."""
    stacked = torch.stack(tensors)
    if stacked.dtype is torch.bool:
        return _REDUCE[reduce](stacked.view(torch.uint8)).view(torch.bool)
    return _REDUCE[reduce](stacked)


class _Here(threading.local):
    job: Job


_here = _Here()
dist.Backend.register_backend(BACKEND, lambda *args: _Group(*args), devices=["cpu"])


def run_ranks(world: int, function: Callable[[int], Any], timeout_s: float = 60.0) -> list[Any]:
    """Calls a function of the rank on every rank at once.

    Returns:
        What each rank returned, or the exception that it raised. Where a rank fails, the others get
        :class:`PeerFailed` at their next collective.
    """
    job = Job(world, timeout_s)
    store = dist.HashStore()
    results: list[Any] = [None] * world

    def one(rank: int) -> None:
        _here.job = job
        try:
            with torch.autograd.set_multithreading_enabled(False):
                dist.init_process_group(BACKEND, rank=rank, world_size=world, store=store)
                try:
                    results[rank] = function(rank)
                finally:
                    dist.destroy_process_group()
        except BaseException as error:
            results[rank] = error
            job.fail()

    with _a_world_for_each_thread():
        threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return results


class _World(ThreadLocalWorld):
    """Torch 2.11 asks its world for ``comms``, which that for threads lacks. There are never any."""

    comms: ClassVar[list[Any]] = []


@contextmanager
def _a_world_for_each_thread() -> Iterator[None]:
    """As torch's own tests with threads do it (MultiThreadedTestCase)."""
    before, hook = dist.distributed_c10d._world, sys.excepthook
    dist.distributed_c10d._world = _World()
    _set_thread_isolation_mode(True)
    try:
        yield
    finally:
        _set_thread_isolation_mode(False)
        dist.distributed_c10d._world = before
        sys.excepthook = hook  # each group that is made puts its rank in front of what is printed
