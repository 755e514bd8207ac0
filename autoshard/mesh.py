"""The mesh as a value: axis names, sizes and the order of ranks. A ``DeviceMesh`` is made from it where processes run.

Torch-free. Ranks fill the machine host by host, and a mesh counts them with its last axis fastest; a ``HybridMesh``
lays them out otherwise, so that chosen axes stay inside a host, or on chosen dimensions of a torus.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, product
from typing import Any

from cost_models.spelling import did_you_mean

from .errors import MeshError

_AXIS = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SIZES = re.compile(r"([0-9]{1,8})(?:x([0-9]{1,8}))?")
MAX_RANKS = 1 << 20
TOGETHER = "+"
"""Between the names of axes whose ranks form one group, as in profiles."""


@dataclass(frozen=True)
class Mesh:
    """Named axes of a device mesh, slowest-varying rank first.

    Invariants (checked): at least one axis, distinct identifier names, sizes from 1, at most ``MAX_RANKS`` ranks; an
    order, where there is one, names each rank once.

    Two meshes of the same axes and sizes are equal whatever their order: it decides prices, never a layout.

    Attributes:
        order: the rank at each position, the last axis fastest; empty where that is 0, 1, 2 and so on.

    >>> Mesh.parse("dp=2,tp=4").size
    8

    Raises:
        MeshError: an invariant does not hold.
    """

    axes: tuple[str, ...]
    shape: tuple[int, ...]
    order: tuple[int, ...] = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        if not self.axes or len(self.axes) != len(self.shape):
            raise MeshError(f"a mesh needs one size per axis, got axes {self.axes} and sizes {self.shape}")
        if len(set(self.axes)) != len(self.axes):
            raise MeshError(f"mesh axes must have distinct names, got {', '.join(self.axes)}")
        for axis, size in zip(self.axes, self.shape):
            if not _AXIS.fullmatch(axis):
                raise MeshError(f"mesh axis {axis!r} is not a name; use letters, digits and _")
            if not isinstance(size, int) or size < 1:
                raise MeshError(f"mesh axis {axis!r} has size {size!r}; it must be a whole number of at least 1")
        if math.prod(self.shape) > MAX_RANKS:
            raise MeshError(f"the mesh {self} has {math.prod(self.shape)} ranks; at most {MAX_RANKS} are supported")
        if self.order and sorted(self.order) != list(range(self.size)):
            raise MeshError(f"the order of the mesh {self} must name each of its {self.size} ranks once")
        if self.order == tuple(range(self.size)):
            object.__setattr__(self, "order", ())

    @classmethod
    def parse(cls, text: str) -> Mesh:
        """Reads ``dp=2,tp=4``; and ``tp=1x8,dp=8x1``, the :class:`HybridMesh` of outer and inner sizes.

        Raises:
            MeshError: the text is not a comma-separated list of ``axis=size``, or of ``axis=OUTERxINNER``.
        """
        pairs = [entry.partition("=") for entry in text.split(",")]
        found = [_SIZES.fullmatch(size.strip()) for _, _, size in pairs]
        sizes = [[int(each) for each in match.groups() if each] for match in found if match]
        if len(sizes) < len(pairs) or len({len(each) for each in sizes}) > 1:
            raise MeshError(
                f"cannot read the mesh {text!r}; write axis=size for each axis, for example dp=2,tp=4, or for each "
                "axis=OUTERxINNER, over so many hosts and so many ranks in each, for example tp=1x8,dp=8x1"
            )
        axes = tuple(name.strip() for name, _, _ in pairs)
        if len(sizes[0]) == 1:
            return cls(axes, tuple(size for (size,) in sizes))
        outer, inner = zip(*sizes, strict=True)
        return HybridMesh(axes=axes, outer=outer, inner=inner).mesh

    @classmethod
    def of(cls, mesh: Mesh | HybridMesh | str | Mapping[str, int]) -> Mesh:
        """A mesh from any of the ways to write one: a mesh, ``"dp=2,tp=2"`` or ``{"dp": 2, "tp": 2}``.

        Raises:
            MeshError: it is none of them, or cannot be read.
        """
        if isinstance(mesh, Mesh):
            return mesh
        if isinstance(mesh, HybridMesh):
            return mesh.mesh
        if isinstance(mesh, str):
            return cls.parse(mesh)
        if not isinstance(mesh, Mapping):
            raise MeshError(
                f"the mesh is {mesh!r:.40}, which does not name axes; write axes and sizes: 'dp=2,tp=2', or "
                "{'dp': 2, 'tp': 2}"
            )
        return cls(tuple(mesh), tuple(mesh.values()))

    def __str__(self) -> str:
        return ",".join(f"{axis}={size}" for axis, size in zip(self.axes, self.shape))

    @property
    def size(self) -> int:
        """The number of ranks."""
        return math.prod(self.shape)

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.axes)

    @property
    def ranks(self) -> Any:
        """The ranks as nested tuples in the shape of the mesh: ``DeviceMesh(device, mesh.ranks, ...)``."""
        return _nested(self.order or tuple(range(self.size)), self.shape)

    def index(self, axis: str) -> int:
        """The position of an axis.

        Raises:
            MeshError: the mesh has no such axis.
        """
        if axis not in self.axes:
            meant = did_you_mean(axis, self.axes)
            raise MeshError(f"unknown mesh axis {axis!r}; the mesh {self} has {', '.join(self.axes)}{meant}")
        return self.axes.index(axis)

    def indices(self, axes: str) -> tuple[int, ...]:
        """The positions of axes that are taken together: ``dp``, or ``dp+tp``.

        Raises:
            MeshError: the mesh has no such axis, or they do not stand in its order.
        """
        found = tuple(self.index(axis) for axis in axes.split(TOGETHER))
        if list(found) != sorted(set(found)):
            raise MeshError(f"the axes {axes!r} do not stand in the order of the mesh {self}, each once")
        return found

    def named(self, axes: Sequence[int]) -> str:
        """The name of axes that are taken together; the inverse of :meth:`indices`."""
        return TOGETHER.join(self.axes[axis] for axis in axes)

    def parts(self, axes: Sequence[int]) -> int:
        """How many ranks differ in these axes alone, each of them counted."""
        return math.prod(self.shape[axis] for axis in axes)

    def is_rising(self, axes: Sequence[int]) -> bool:
        """Whether ranks that differ in these axes alone rise in the order of the mesh: a process group counts its ranks
        so, and what is gathered or scattered over it lies so.
        """
        last: dict[tuple[int, ...], int] = {}
        for rank, at in zip(self.order, self.coordinates()):
            group = tuple(index for axis, index in enumerate(at) if axis not in axes)
            if rank < last.get(group, rank):
                return False
            last[group] = rank
        return True

    def coordinates(self) -> Iterator[tuple[int, ...]]:
        """The coordinate of every rank, in rank order (the last axis varies fastest)."""
        return product(*(range(size) for size in self.shape))


@dataclass(frozen=True, kw_only=True)
class HybridMesh:
    """A mesh over a fast inner network (a host, an NVLink domain, a TPU slice) and a slow outer one between them.

    Axis ``i`` has ``outer[i] * inner[i]`` ranks; of these, ``inner[i]`` in a row are in one host. On a torus each axis
    gets whole dimensions where its inner size allows, several where it can (their links add up), the axis of the most
    traffic first; else a stretch of a dimension.

    Invariants (checked): one inner and one outer size per axis, those of a mesh; the inner sizes multiply to the torus.

    Attributes:
        torus: the dimensions of the inner network, the last one counted fastest; empty for a switch.
        traffic: axes from the most traffic to the least; those not named follow from last to first.

    >>> HybridMesh(axes=("dp", "tp"), inner=(1, 2), outer=(2, 1)).ranks
    ((0, 1), (2, 3))
    >>> HybridMesh(axes=("tp", "dp"), inner=(2, 1), outer=(1, 2)).ranks
    ((0, 2), (1, 3))

    Raises:
        MeshError: an invariant does not hold, or no assignment to the dimensions of the torus was found.

    Source: the inner and outer shape per axis is the interface of ``torch_xla.distributed.spmd.HybridMesh`` and of
    JAX's ``mesh_utils.create_hybrid_device_mesh``; so is the preference for several whole dimensions.
    """

    axes: tuple[str, ...]
    inner: tuple[int, ...]
    outer: tuple[int, ...]
    torus: tuple[int, ...] = ()
    traffic: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for sizes in (self.inner, self.outer):
            Mesh(self.axes, sizes)  # checks itself
        unknown = [axis for axis in self.traffic if axis not in self.axes]
        if unknown:
            raise MeshError(f"traffic names {unknown[0]!r}; the axes are {', '.join(self.axes)}")
        if self.torus and math.prod(self.torus) != math.prod(self.inner):
            raise MeshError(
                f"the inner sizes {self.inner} have {math.prod(self.inner)} ranks, but a torus of {_by(self.torus)} "
                f"has {math.prod(self.torus)} devices"
            )
        if self.torus:
            self._digits_of_axes()

    @classmethod
    def fit(
        cls, mesh: Mesh | str | Mapping[str, int], host: int | Sequence[int], traffic: Sequence[str] = ()
    ) -> HybridMesh:
        """The hybrid mesh that keeps the axes of the most traffic inside hosts, as far as they fit.

        ``host`` is the number of devices of a host, or the dimensions of its torus.

        Raises:
            MeshError: the axes do not fill whole hosts.
        """
        plain = Mesh.of(mesh)
        torus = () if isinstance(host, int) else tuple(host)
        room = host if isinstance(host, int) else math.prod(torus)
        inner = dict.fromkeys(plain.axes, 1)
        for axis in _by_traffic(plain.axes, tuple(traffic)):
            inner[axis] = math.gcd(plain.shape[plain.index(axis)], room)
            room //= inner[axis]
        outer = tuple(size // inner[axis] for axis, size in zip(plain.axes, plain.shape))
        if room > 1 and (torus or math.prod(outer) > 1):
            raise MeshError(f"the mesh {plain} does not fill hosts of {host}; choose axis sizes that divide them")
        return cls(axes=plain.axes, inner=tuple(inner.values()), outer=outer, torus=torus, traffic=tuple(traffic))

    @property
    def mesh(self) -> Mesh:
        """The mesh with its order of ranks."""
        return Mesh(self.axes, tuple(o * i for o, i in zip(self.outer, self.inner)), self._order())

    @property
    def ranks(self) -> Any:
        """The ranks as nested tuples in the shape of the mesh: ``DeviceMesh(device, hybrid.ranks, ...)``."""
        return self.mesh.ranks

    def _order(self) -> tuple[int, ...]:
        places = self._places_in_host()
        shape = [o * i for o, i in zip(self.outer, self.inner)]
        order = []
        for position in product(*(range(size) for size in shape)):
            parts = [divmod(index, inner) for index, inner in zip(position, self.inner)]
            host = _ravel([outer for outer, _ in parts], self.outer)
            order.append(host * len(places) + places[_ravel([inner for _, inner in parts], self.inner)])
        return tuple(order)

    def _places_in_host(self) -> list[int]:
        """Of each inner position, counted with the last axis fastest: the device of the host."""
        if not self.torus:
            return list(range(math.prod(self.inner)))
        digits = self._digits_of_axes()
        places = []
        for position in product(*(range(size) for size in self.inner)):
            at = [0] * len(self.torus)
            for axis, index in zip(self.axes, position):
                for digit in reversed(digits[axis]):
                    index, value = divmod(index, digit.size)
                    at[digit.dim] += value * digit.stride
            places.append(_ravel(at, self.torus))
        return places

    def _digits_of_axes(self) -> dict[str, tuple[_Digit, ...]]:
        sizes = dict(zip(self.axes, self.inner))
        wanted = tuple((axis, sizes[axis]) for axis in _by_traffic(self.axes, self.traffic))
        free = tuple(_Digit(dim, size, 1) for dim, size in enumerate(self.torus) if size > 1)
        found = _assign(wanted, free)
        if found is None:
            inner = ", ".join(f"{axis}={size}" for axis, size in wanted)
            raise MeshError(
                f"the inner sizes {inner} cannot be laid on a torus of {_by(self.torus)}: each must be a product of "
                "dimensions, or divide one that is left; choose other sizes"
            )
        return found


@dataclass(frozen=True)
class _Digit:
    """A stretch of a torus dimension: ``size`` places, ``stride`` apart."""

    dim: int
    size: int
    stride: int


def _assign(wanted: tuple[tuple[str, int], ...], free: tuple[_Digit, ...]) -> dict[str, tuple[_Digit, ...]] | None:
    """The digits of each (axis, size), the first one served best, or None where they do not fit."""
    if not wanted:
        return {}
    (axis, size), *rest = wanted
    for taken, left in _choices(size, free):
        others = _assign(tuple(rest), left)
        if others is not None:
            return {axis: taken} | others
    return None


def _choices(size: int, free: tuple[_Digit, ...]) -> Iterator[tuple[tuple[_Digit, ...], tuple[_Digit, ...]]]:
    """Ways to take ``size`` places, best first: many whole digits, then whole digits and a stretch of another."""
    groups = [group for count in range(len(free), -1, -1) for group in combinations(free, count)]
    for group in groups:
        if math.prod(digit.size for digit in group) == size:
            yield group, tuple(digit for digit in free if digit not in group)
    for group in groups:
        rest, uneven = divmod(size, math.prod(digit.size for digit in group))
        for cut in reversed(free):
            if uneven or cut in group or rest < 2 or rest == cut.size or cut.size % rest:
                continue
            stretch = _Digit(cut.dim, rest, cut.stride)
            remainder = _Digit(cut.dim, cut.size // rest, cut.stride * rest)
            left = tuple(remainder if digit == cut else digit for digit in free if digit not in group)
            yield tuple(sorted((*group, stretch), key=lambda digit: (digit.dim, -digit.stride))), left


def _by_traffic(axes: tuple[str, ...], traffic: tuple[str, ...]) -> tuple[str, ...]:
    return (*traffic, *(axis for axis in reversed(axes) if axis not in traffic))


def _ravel(position: Sequence[int], shape: Sequence[int]) -> int:
    """The number of a position, the last coordinate fastest."""
    number = 0
    for index, size in zip(position, shape):
        number = number * size + index
    return number


def _nested(ranks: tuple[int, ...], shape: tuple[int, ...]) -> Any:
    if len(shape) == 1:
        return ranks
    step = len(ranks) // shape[0]
    return tuple(_nested(ranks[start : start + step], shape[1:]) for start in range(0, len(ranks), step))


def _by(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))
