"""The mesh as a value: axis names and sizes. Torch-free; a ``DeviceMesh`` is made from it only where processes run."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product

from .errors import MeshError

_AXIS = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
MAX_RANKS = 1 << 20


@dataclass(frozen=True)
class Mesh:
    """Named axes of a device mesh, slowest-varying rank first.

    Invariants (checked): at least one axis, distinct identifier names, sizes from 1, at most ``MAX_RANKS`` ranks.

    >>> Mesh.parse("dp=2,tp=4").size
    8

    Raises:
        MeshError: an invariant does not hold.
    """

    axes: tuple[str, ...]
    shape: tuple[int, ...]

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

    @classmethod
    def parse(cls, text: str) -> Mesh:
        """Reads ``dp=2,tp=4``.

        Raises:
            MeshError: the text is not a comma-separated list of ``axis=size``.
        """
        entries = [entry.strip() for entry in text.split(",")]
        pairs = [entry.partition("=") for entry in entries]
        if not all(sep and size.strip().isdecimal() and len(size.strip()) < 9 for _, sep, size in pairs):
            raise MeshError(f"cannot read the mesh {text!r}; write axis=size for each axis, for example dp=2,tp=4")
        return cls(tuple(name.strip() for name, _, _ in pairs), tuple(int(size) for _, _, size in pairs))

    @classmethod
    def of(cls, mesh: Mesh | str | Mapping[str, int]) -> Mesh:
        """A mesh from any of the three ways to write one: itself, ``"dp=2,tp=2"`` or ``{"dp": 2, "tp": 2}``."""
        if isinstance(mesh, Mesh):
            return mesh
        if isinstance(mesh, str):
            return cls.parse(mesh)
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

    def index(self, axis: str) -> int:
        """The position of an axis.

        Raises:
            MeshError: the mesh has no such axis.
        """
        if axis not in self.axes:
            raise MeshError(f"unknown mesh axis {axis!r}; the mesh {self} has {', '.join(self.axes)}")
        return self.axes.index(axis)

    def coordinates(self) -> Iterator[tuple[int, ...]]:
        """The coordinate of every rank, in rank order (the last axis varies fastest)."""
        return product(*(range(size) for size in self.shape))
