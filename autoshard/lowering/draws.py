"""Random numbers: which seed each operator of a forward draws under, on each rank.

A module counts its forwards, and each draws under a seed of its own: the seed of the job and the number of forwards
before it, added up. How operators draw under it is said once, when the module is made (:data:`Random`):

* ``per-shard``: every operator starts anew, under a seed that follows from that of the forward, its place among the
  random operators of the captured graph, and where this rank's block of its result begins. Ranks that hold the same
  block draw the same, all others draw others.
* ``as-one-process``: operators draw one after the other, as in one process that called ``torch.manual_seed`` with the
  seed of the forward. What is cut is drawn whole on every rank, from a tensor that lies in memory as one process has
  it, and the rank keeps its block.

Random operators run in the forward alone, and what they give is kept for the backward: nothing is drawn twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from hashlib import blake2b
from typing import Literal, get_args

import torch
from torch import fx
from torch.distributed.device_mesh import DeviceMesh

from ..capture import Node, TensorMeta
from ..errors import InputError
from ..layout import Layout, R, local_range
from ..ops import run_local
from ..plans import OperatorEntry
from ..redistribution.execution import Shard
from .adapter import default_generator, device_of
from .agree import is_same_everywhere, seed_of_first_rank
from .emitter import GraphEmitter

Random = Literal["per-shard", "as-one-process"]

aten = torch.ops.aten

_SEEDS = 1 << 63
_FORWARD: ContextVar[tuple[int, torch.Generator]] = ContextVar("the seed of the forward that runs, and its generator")


def check_random(random: str) -> None:
    """Checks how random numbers are to be drawn.

    Raises:
        InputError: it is none of the ways there are.
    """
    if random not in get_args(Random):
        raise InputError(f"random={random!r} is no way to draw numbers; choose {' or '.join(get_args(Random))}")


class Draws:
    """Under which seed the forwards of a module draw, one after the other.

    At first the seed is that which ``torch.manual_seed`` was given on the first rank of the mesh.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._seed, self._step = seed_of_first_rank(mesh), 0

    def seed(self, seed: int, step: int) -> None:
        """From here on the forwards draw as those of a job with a seed, of which so many have drawn.

        Raises:
            InputError: other ranks say another seed or step.
        """
        if not is_same_everywhere((seed % _SEEDS, step), self._mesh):
            raise InputError(
                f"this rank seeds the module with {seed} for step {step}, another rank with something else; replicas "
                "would draw different numbers: say the same on all ranks"
            )
        self._seed, self._step = seed, step

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Inside, one forward draws; the job's own generator is afterwards as it was."""
        generator = default_generator(device_of(self._mesh))
        before, seed = generator.get_state(), (self._seed + self._step) % _SEEDS
        token = _FORWARD.set((seed, generator))
        generator.manual_seed(seed)
        try:
            yield
        finally:
            _FORWARD.reset(token)
            generator.set_state(before)
        self._step += 1


def start_drawing(stream: str) -> None:
    """What stands in a local graph before an operator that draws by itself: seeds it by its stream."""
    seed, generator = _FORWARD.get()
    digest = blake2b(f"{seed} {stream}".encode(), digest_size=8).digest()
    generator.manual_seed(int.from_bytes(digest, "big") % _SEEDS)


def stream_of(number: int, shard: Shard, layout: Layout) -> str:
    """What tells the draws of one operator on one block from all others of a forward.

    Args:
        number: that of the operator among the random ones of its graph.
        shard, layout: of its result.
    """
    begins = (start for start, _ in _blocks(shard, layout))
    return f"{number}: {', '.join(map(str, begins))}"


def draw_whole(
    emitter: GraphEmitter,
    node: Node,
    values: Sequence[fx.Node],
    metas: tuple[TensorMeta, ...],
    entry: OperatorEntry,
    shard: Shard,
    device: torch.device,
) -> list[fx.Node | None]:
    """Adds a random operator that draws as in one process: it runs on whole tensors, of which this rank's blocks have
    their values, and the blocks of its results are kept. Not every operator could: what it draws for an element must
    not depend on the values of others.

    Args:
        shard: the mesh and where this rank stands in it.
    """
    mesh, coordinate = shard.mesh, shard.coordinate
    whole = Layout((R,) * mesh.ndim)
    taken = tuple(
        _widened(emitter, value, order, _blocks(Shard(meta.shape, mesh, coordinate), layout), meta.shape)
        for value, order, meta, layout in zip(values, node.orders, metas, entry.inputs, strict=True)
    )
    wholes = (whole,) * len(taken), tuple(None if layout is None else whole for layout in entry.outputs)
    if node.op is aten.bernoulli.p:
        # captured of a ``bernoulli_``, which draws in the order of its memory; this form does in that of its dims
        made = emitter.call(aten.bernoulli_.float, emitter.call(aten.clone.default, taken[0]), *node.args[1:])
    else:
        made = run_local(emitter, node, taken, metas, *wholes, mesh, coordinate, device)
    results: list[fx.Node | None] = []
    for result, meta, layout in zip(emitter.results(made, node.outputs), node.outputs, entry.outputs):
        if result is not None and meta is not None and layout is not None:
            result = _block_of(emitter, result, _blocks(Shard(meta.shape, mesh, coordinate), layout), meta.shape)
        results.append(result)
    return results


def _blocks(shard: Shard, layout: Layout) -> list[tuple[int, int]]:
    """``[start, stop)`` of this rank's block of every dim."""
    dims = enumerate(shard.shape)
    return [local_range(size, layout, dim, shard.mesh, shard.coordinate) for dim, size in dims]


def _widened(
    emitter: GraphEmitter,
    value: fx.Node,
    order: tuple[int, ...],
    blocks: Sequence[tuple[int, int]],
    shape: tuple[int, ...],
) -> fx.Node:
    """The whole tensor with zeros around a block, its dims in an order in memory, the outermost first."""
    around = [(start, size - stop) for (start, stop), size in zip(blocks, shape)]
    if any(map(any, around)):
        # torch wants the last dim first
        value = emitter.call(aten.constant_pad_nd.default, value, [n for pair in reversed(around) for n in pair])
    if order == tuple(range(len(shape))):
        return emitter.call(aten.contiguous.default, value)
    value = emitter.call(aten.contiguous.default, emitter.call(aten.permute.default, value, order))
    return emitter.call(aten.permute.default, value, tuple(order.index(dim) for dim in range(len(order))))


def _block_of(
    emitter: GraphEmitter, whole: fx.Node, blocks: Sequence[tuple[int, int]], shape: tuple[int, ...]
) -> fx.Node:
    """A block in memory of its own, so that the whole can go."""
    block = whole
    for dim, ((start, stop), size) in enumerate(zip(blocks, shape)):
        if stop - start < size:
            block = emitter.call(aten.slice.Tensor, block, dim, start, stop)
    if block is whole:
        return whole
    return emitter.call(aten.clone.default, block, memory_format=torch.contiguous_format)
