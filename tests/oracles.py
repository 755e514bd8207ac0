"""Independent oracles: what a layout means, what a captured graph computes, and ranks that run in lock step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from itertools import combinations, product
from typing import Any

import torch
from torch import Tensor

from autoshard.capture import CapturedGraph, Node, Ref, TensorMeta, map_refs
from autoshard.layout import Layout, Placement
from autoshard.mesh import Mesh
from autoshard.ops import run_local
from autoshard.strategies import Strategy

aten = torch.ops.aten
Coordinate = tuple[int, ...]
_COMBINE: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda parts: parts.sum(0),
    "max": lambda parts: parts.amax(0),
    "min": lambda parts: parts.amin(0),
}


class Eager:
    """Runs operators at once."""

    def call(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        return op(*args, **kwargs)

    def value(self, x: Tensor) -> Tensor:
        return x


def shards_of(whole: Tensor, layout: Layout, mesh: Mesh, generator: torch.Generator) -> dict[Coordinate, Tensor]:
    """What every rank holds of a tensor, by the definition of R, S and P: axis after axis, in mesh order."""
    return dict(_split(whole, layout.placements, mesh.shape, generator))


def whole_of(shards: dict[Coordinate, Tensor], layout: Layout, mesh: Mesh) -> Tensor:
    """The tensor that the ranks hold together; replicas must agree."""
    return _assemble(shards, layout.placements, mesh.shape)


def chunks(whole: Tensor, parts: int, dim: int) -> list[Tensor]:
    """``torch.chunk`` with the empty chunks that it leaves out."""
    cut = list(torch.chunk(whole, parts, dim))
    return [*cut, *[whole.narrow(dim, 0, 0)] * (parts - len(cut))]


def cuts(whole: Tensor, ranks: int, placement: Placement) -> list[Tensor]:
    """What each rank holds of a dim that is cut, or of each of its parts, which are of equal or other proportions."""
    if not placement.parts:
        return chunks(whole, ranks, placement.dim)
    unit = whole.shape[placement.dim] // sum(placement.parts)
    parts = torch.split(whole, [unit * part for part in placement.parts], placement.dim)
    return [torch.cat(held, placement.dim) for held in zip(*(chunks(part, ranks, placement.dim) for part in parts))]


def close(a: Tensor, b: Tensor) -> bool:
    """Equal shape and dtype, and values up to the rounding of float64 beside the largest one.

    Infinities and NaN stand where they are expected.
    """
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not (a.dtype.is_floating_point or a.dtype.is_complex) or not a.numel():
        return torch.equal(a, b)
    finite = b.isfinite()
    special = [t[~finite] for t in (a, b)]
    if not torch.equal(finite, a.isfinite()) or not torch.allclose(*special, equal_nan=True):
        return False
    a, b = a[finite], b[finite]
    return not b.numel() or float((a - b).abs().max()) <= 1e-9 * float(b.abs().max()) + 1e-12


def _split(
    whole: Tensor, placements: tuple[Placement, ...], sizes: tuple[int, ...], generator: torch.Generator
) -> Iterator[tuple[Coordinate, Tensor]]:
    if not placements:
        yield (), whole.contiguous()
        return
    first, parts = placements[0], sizes[0]
    if first.kind == "R":
        same = list(_split(whole, placements[1:], sizes[1:], generator))
        pieces = [same] * parts
    else:
        cut = cuts(whole, parts, first) if first.kind == "S" else _addends(whole, parts, generator)
        pieces = [list(_split(piece, placements[1:], sizes[1:], generator)) for piece in cut]
    for i, piece in enumerate(pieces):
        yield from (((i, *rest), shard) for rest, shard in piece)


def _addends(whole: Tensor, parts: int, generator: torch.Generator) -> list[Tensor]:
    if whole.dtype is torch.bool:
        raise TypeError("booleans have no partial sums")
    noise = torch.randn((parts - 1, *whole.shape), generator=generator, dtype=torch.float64)
    finite = whole[whole.isfinite()]
    largest = float(finite.abs().max()) if finite.numel() else 0.0
    # of the size of the values, so that what cancels takes no digits from them
    scale = 4 * (largest or 1.0) if whole.dtype.is_floating_point else 4 * max(largest, 1.0)
    addends = list((noise * scale).to(whole.dtype))
    return [*addends, whole - sum(addends)]


def _assemble(shards: dict[Coordinate, Tensor], placements: tuple[Placement, ...], sizes: tuple[int, ...]) -> Tensor:
    if not placements:
        return shards[()]
    first = placements[0]
    pieces = []
    for i in range(sizes[0]):
        inner = {rest: shard for (head, *tail), shard in shards.items() if head == i for rest in [tuple(tail)]}
        pieces.append(_assemble(inner, placements[1:], sizes[1:]))
    if first.kind == "R":
        assert all(close(piece, pieces[0]) for piece in pieces), "replicas differ"
        return pieces[0]
    if first.kind == "S":
        if first.parts:
            return _joined_in_parts(pieces, first)
        joined = torch.cat(pieces, first.dim)
        expected = [chunk.shape for chunk in chunks(joined, sizes[0], first.dim)]
        assert [piece.shape for piece in pieces] == expected, "blocks of other sizes than torch.chunk's"
        return joined
    return _COMBINE[first.reduce](torch.stack(pieces)).to(pieces[0].dtype)


def _joined_in_parts(held: list[Tensor], placement: Placement) -> Tensor:
    unit = held[0].shape[placement.dim] // sum(placement.parts)
    apart = [torch.split(piece, [unit * part for part in placement.parts], placement.dim) for piece in held]
    return torch.cat([piece for part in zip(*apart) for piece in part], placement.dim)


def interpret(
    graph: CapturedGraph, leaves: dict[str, Tensor], widen: bool = False
) -> dict[tuple[int, int], Tensor | None]:
    """Every tensor of a graph, by (node, output), from the values of its parameters, buffers, inputs and tangents.

    ``widen`` computes in float64 whatever precision the graph asks for.
    """
    values: dict[tuple[int, int], Tensor | None] = {}
    for i, node in enumerate(graph.nodes):
        if node.kind != "operator":
            values[i, 0] = leaves[node.name]
            continue
        results = run_node(wide(node) if widen else node, lambda ref: values[ref.node, ref.output])
        values.update({(i, k): result for k, result in enumerate(results)})
    return values


def run_node(node: Node, value_of: Callable[[Ref], Any]) -> tuple[Any, ...]:
    """The results of an operator on whole tensors; strides are no part of a graph, so a view is a reshape."""
    assert node.op is not None
    op = aten.reshape.default if node.op in (aten.view.default, aten._unsafe_view.default) else node.op
    kwargs = {key: map_refs(value, value_of) for key, value in node.kwargs}
    result = op(*map_refs(node.args, value_of), **kwargs)
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


def wide(node: Node) -> Node:
    """The operator with float64 and complex128 in place of the floating and complex dtypes of arguments and results."""
    outputs = tuple(None if m is None else TensorMeta(m.shape, _wide(m.dtype)) for m in node.outputs)
    return Node(node.name, node.kind, node.phase, outputs, node.op, _wide(node.args), _wide(node.kwargs), node.source)


def _wide(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return torch.complex128 if value.is_complex else torch.float64 if value.is_floating_point else value
    return tuple(_wide(item) for item in value) if type(value) is tuple else value


def strategy_error(
    node: Node, values: list[Tensor], expected: list[Tensor | None], strategy: Strategy, mesh: Mesh
) -> str:
    """Why a strategy of an operator is wrong, or an empty text: its local form runs on every rank's shards."""
    generator = torch.Generator().manual_seed(0)
    try:
        shards = [shards_of(value, layout, mesh, generator) for value, layout in zip(values, strategy.inputs)]
    except TypeError as error:
        return str(error)
    metas = tuple(TensorMeta(tuple(value.shape), value.dtype) for value in values)
    results: dict[Coordinate, tuple[Any, ...]] = {}
    for at in mesh.coordinates():
        mine = tuple(shard[at] for shard in shards)
        try:
            local = run_local(Eager(), node, mine, metas, strategy.inputs, strategy.outputs, mesh, at)
        except Exception as error:
            return f"rank {at}: {error}"
        results[at] = tuple(local) if isinstance(local, (tuple, list)) else (local,)
    for k, (layout, whole) in enumerate(zip(strategy.outputs, expected)):
        if layout is None or whole is None:
            continue
        try:
            found = whole_of({at: result[k] for at, result in results.items()}, layout, mesh)
        except (AssertionError, RuntimeError) as error:
            return f"result {k}: {error}"
        if not close(found, whole):
            return f"result {k}: other values"
    return ""


class LockStep:
    """Runs one function per rank, each in a thread; collectives meet at a barrier and exchange through memory.

    ``sent`` collects (kind, axes, elements of the larger buffer) of every collective of the first rank.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.sent: list[tuple[str, int, int]] = []
        self._barrier = threading.Barrier(mesh.size, timeout=30)
        self._board: dict[Coordinate, Tensor] = {}

    def run(self, job: Callable[[Any, Coordinate], Any]) -> dict[Coordinate, Any]:
        """``job(emitter, coordinate)`` on every rank."""
        results: dict[Coordinate, Any] = {}
        failures: list[BaseException] = []

        def one(at: Coordinate) -> None:
            try:
                results[at] = job(_Rank(self, at), at)
            except BaseException as error:
                failures.append(error)
                self._barrier.abort()

        threads = [threading.Thread(target=one, args=(at,)) for at in self.mesh.coordinates()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise next((e for e in failures if not isinstance(e, threading.BrokenBarrierError)), failures[0])
        return results

    def meet(self, at: Coordinate, axes: tuple[int, ...], x: Tensor) -> list[Tensor]:
        """What every rank of a group along axes brought, in rank order."""
        self._board[at] = x
        self._barrier.wait()
        arrived = [self._board[other] for other in self.group(at, axes)]
        self._barrier.wait()
        assert len({tuple(y.shape) for y in arrived}) == 1, "a collective on tensors of different shapes"
        assert all(y.is_contiguous() for y in arrived), "a collective on a tensor that is not contiguous"
        return arrived

    def group(self, at: Coordinate, axes: tuple[int, ...]) -> list[Coordinate]:
        """The ranks that differ from one in these axes alone, and itself, in rank order."""
        others = set(range(self.mesh.ndim)) - set(axes)
        return [other for other in self.mesh.coordinates() if all(other[axis] == at[axis] for axis in others)]


class _Rank(Eager):
    """The emitter of one rank."""

    def __init__(self, world: LockStep, at: Coordinate) -> None:
        self._world, self._at = world, at

    def _meet(self, kind: str, x: Tensor, axes: tuple[int, ...]) -> list[Tensor]:
        arrived = self._world.meet(self._at, axes, x)
        if not any(self._at):
            self._world.sent.append((kind, axes, x.numel() * (len(arrived) if kind == "all_gather" else 1)))
        return arrived

    def all_gather(self, x: Tensor, axes: tuple[int, ...]) -> Tensor:
        return torch.cat(self._meet("all_gather", x, axes), 0)

    def all_reduce(self, x: Tensor, axes: tuple[int, ...], reduce: str) -> Tensor:
        return _COMBINE[reduce](torch.stack(self._meet("all_reduce", x, axes)))

    def reduce_scatter(self, x: Tensor, axes: tuple[int, ...], reduce: str) -> Tensor:
        arrived = self._meet("reduce_scatter", x, axes)
        return self._mine(_COMBINE[reduce](torch.stack(arrived)), axes)

    def all_to_all(self, x: Tensor, axes: tuple[int, ...]) -> Tensor:
        return torch.cat([self._mine(y, axes) for y in self._meet("all_to_all", x, axes)], 0)

    def _mine(self, x: Tensor, axes: tuple[int, ...]) -> Tensor:
        group = self._world.group(self._at, axes)
        assert x.shape[0] % len(group) == 0, "gloo has no uneven scatter"
        width, mine = x.shape[0] // len(group), group.index(self._at)
        return x[mine * width : (mine + 1) * width]


def all_layouts(placements: list[Placement], mesh: Mesh) -> list[Layout]:
    """Every combination of placements over the axes of a mesh."""
    return [Layout(combination) for combination in product(placements, repeat=mesh.ndim)]


def groups_of(mesh: Mesh) -> dict[str, str]:
    """A name for the process group along each axis of a mesh, and along each combination of axes."""
    every = (axes for count in range(1, mesh.ndim + 1) for axes in combinations(range(mesh.ndim), count))
    return {mesh.named(axes): f"along {mesh.named(axes)}" for axes in every}
