"""What the ranks of a mesh agree on: which one each is, one text, one seed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh

from ..errors import AutoshardError
from .adapter import broadcast, device_of, group_names, maximum
from .program import LocalProgram, Rank


def from_first_rank(mesh: DeviceMesh, make: Callable[[], str]) -> str:
    """The text that the first rank of a mesh makes, on every rank.

    Raises:
        Exception: on the first rank, what ``make`` raised.
        AutoshardError: on the others, that it failed, and why.
    """
    is_first = not any(mesh.get_coordinate() or ())
    text, failure = "", None
    if is_first:
        try:
            text = make()
        except Exception as error:  # every rank must learn of it before it is raised
            failure = error
    message = f"!{failure}" if failure else f"={text}"
    payload = message.encode() if is_first else b""
    device = device_of(mesh)
    length = int(broadcast(torch.tensor([len(payload)], dtype=torch.int64, device=device), mesh).item())
    buffer = torch.zeros(length, dtype=torch.uint8, device=device)
    if is_first:
        buffer.copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
    received = bytes(broadcast(buffer, mesh).tolist()).decode()
    if failure is not None:
        raise failure
    if received.startswith("!"):
        raise AutoshardError(f"the first rank of the mesh failed: {received[1:]}")
    return received[1:]


def is_same_everywhere(numbers: Sequence[int], mesh: DeviceMesh) -> bool:
    """Whether all ranks of a mesh have the same numbers; every rank learns it. They must be equally many."""
    pairs = torch.tensor([(number, -number) for number in numbers], dtype=torch.int64, device=device_of(mesh))
    largest, smallest = maximum(pairs, mesh).unbind(1)
    return bool((largest == -smallest).all())


def shared_seed(program: LocalProgram, mesh: DeviceMesh) -> int | None:
    """For a program that draws random numbers, a seed drawn by the first rank; None for any other."""
    if not program.is_random:
        return None
    return int(broadcast(torch.randint(1 << 62, (1,)).to(device_of(mesh)), mesh).item())


def bind(mesh: DeviceMesh) -> Rank:
    """This rank of a mesh."""
    return Rank(tuple(mesh.get_coordinate() or ()), device_of(mesh), group_names(mesh))
