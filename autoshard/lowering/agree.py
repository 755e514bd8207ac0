"""What the ranks of a mesh agree on: that they are about to run the same, one text, one seed; and which one each is.

A stage is something that every rank does. It ends well on all ranks or on none: a rank that fails raises its own error
and says so on the board, and the others raise a :class:`~autoshard.errors.JobError` that quotes it.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from types import MappingProxyType

import torch
from torch.distributed.device_mesh import DeviceMesh

from ..errors import JobError
from ..progress import progress_line
from .adapter import broadcast, device_of, group_names, maximum, no_advice_on_flat_axes
from .board import Board, open_board, within
from .failure import STORE_S, failure_text, is_repeated, print_in_one_line
from .rank import Rank

NO_DETAILS: Mapping[str, Callable[[], str]] = MappingProxyType({})
ALIKE = "nothing"
"""What ranks ask of the first one that have what it has."""


@contextmanager
def agreed(board: Board, stage: str) -> Iterator[Callable[[str], None]]:
    """Ends a stage on all ranks alike. The first rank says on stderr what is going on, which the function given changes
    (:mod:`autoshard.progress`).

    Args:
        stage: what the ranks do inside, as errors say it (``capturing the model``). No two stages of one board have the
            same name.

    Raises:
        JobError: another rank failed inside, or did not come within the time that the job waits for its ranks.
        Exception: what was raised inside, on the rank that raised it.
    """
    board.put(f"{stage}/came/{board.rank}", "")
    try:
        with progress_line(stage) if board.is_first else nullcontext(lambda said: None) as say:
            yield say
    except BaseException as error:
        said = f"rank {board.rank} failed while {stage}: {failure_text(error)}"
        first = within(STORE_S, lambda: board.put_first(_verdict(stage), said), said)
        if is_repeated(said, first):
            print_in_one_line(error, said)
        raise
    board.put(f"{stage}/done/{board.rank}", "")
    if board.count(f"{stage}/done") == len(board.ranks):
        board.put(_verdict(stage), "")
    _wait(board, stage)


def _wait(board: Board, stage: str, key: str | None = None) -> str:
    """The text under a key, or the verdict that all is well, once it is there.

    Raises:
        JobError: another rank failed, or the text did not come in time.
    """
    verdict = _verdict(stage)
    found = board.wait(*(k for k in (verdict, key) if k is not None))
    if found is None:
        raise JobError(_missing(board, stage))
    if found[0] == verdict and found[1]:
        failed = JobError(found[1])
        print_in_one_line(failed, f"rank {board.rank} ends: {found[1]}")
        raise failed
    return found[1]


def _verdict(stage: str) -> str:
    return f"{stage}/verdict"


def _missing(board: Board, stage: str) -> str:
    """Which ranks were waited for in vain."""
    away = [rank for rank in board.ranks if board.get(f"{stage}/came/{rank}") is None]
    busy = [rank for rank in board.ranks if rank not in away and board.get(f"{stage}/done/{rank}") is None]
    said = [f"{_named(away)} did not come"] if away else []
    said += [f"{_named(busy)} did not get ready"] if busy and not away else []
    return (
        f"rank {board.rank} waited {board.timeout_s:g} s for the other ranks, {stage}: {' and '.join(said)}; look at "
        "what it printed, or give init_process_group a longer timeout"
    )


def _named(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def check_same(
    board: Board,
    stage: str,
    mine: Mapping[str, str],
    advice: Mapping[str, str],
    details: Mapping[str, Callable[[], str]] = NO_DETAILS,
    explain: Callable[[str, str], str] = lambda what, theirs: "",
) -> None:
    """Checks inside a stage that every rank has what the first one has.

    Args:
        mine: what this rank has, by what it is called.
        advice: what to do about each difference.
        details: further texts, which the first rank makes where another one differs in that.
        explain: for a rank that differs: how what it has differs from the first rank's text, in words.

    Raises:
        JobError: on a rank that differs from the first one.
    """
    said = f"{stage}/first"
    if board.is_first:
        board.put(said, json.dumps(dict(mine)))
        if details and len(board.ranks) > 1 and (asked := _wait(board, stage, f"{said}/asked")) in details:
            board.put(f"{said}/{asked}", _packed(details[asked]()))
        return
    theirs = json.loads(_wait(board, stage, said))
    for what, value in mine.items():
        if value != theirs[what]:
            detail = ""
            if what in details:
                board.put_first(f"{said}/asked", what)
                detail = _unpacked(_wait(board, stage, f"{said}/{what}"))
            here, there = f"rank {board.rank}", f"rank {board.ranks[0]}"
            raise JobError(
                f"{here} and {there} differ in the {what}: {value} on {here}, {theirs[what]} on {there}"
                + (f"; {explain(what, detail)}" if detail else "")
                + f"; {advice[what]}"
            )
    if details and board.count(f"{said}/alike") == len(board.ranks) - 1:
        board.put(f"{said}/asked", ALIKE)


def _packed(text: str) -> str:
    return base64.b85encode(zlib.compress(text.encode())).decode()


def _unpacked(text: str) -> str:
    return zlib.decompress(base64.b85decode(text)).decode()


def from_first_rank(
    mesh: DeviceMesh,
    make: Callable[[Callable[[str], None]], str],
    stage: str,
    meanwhile: Callable[[], object] = lambda: None,
) -> str:
    """The text that the first rank of a mesh makes, on every rank.

    Args:
        make: takes a function to be called with what is going on.
        meanwhile: what the other ranks do before they wait for it.

    Raises:
        Exception: on the first rank, what ``make`` raised.
        JobError: on the others, that it failed, and why.
    """
    board = open_board(mesh)
    with agreed(board, stage) as say:
        if board.is_first:
            board.put("text", _packed(make(say)))
        else:
            meanwhile()
    return _unpacked(board.get("text") or "")


def is_same_everywhere(numbers: Sequence[int], mesh: DeviceMesh) -> bool:
    """Whether all ranks of a mesh have the same numbers; every rank learns it. They must be equally many."""
    pairs = torch.tensor([(number, -number) for number in numbers], dtype=torch.int64, device=device_of(mesh))
    largest, smallest = maximum(pairs, mesh).unbind(1)
    return bool((largest == -smallest).all())


def seed_of_first_rank(mesh: DeviceMesh) -> int:
    """The seed of the job on the first rank of a mesh, on every rank; below 2 to the 63rd."""
    seed = torch.tensor([torch.initial_seed() % (1 << 63)], dtype=torch.int64, device=device_of(mesh))
    return int(broadcast(seed, mesh).item())


def bind(mesh: DeviceMesh, links: Sequence[str]) -> Rank:
    """Where this process stands in a mesh: its coordinate, its device, and the process group of each link, an axis or
    several (``dp+tp``). All ranks must call it, as groups of several axes may have to be made.
    """
    no_advice_on_flat_axes(mesh)
    return Rank(tuple(mesh.get_coordinate() or ()), device_of(mesh), group_names(mesh, links))
