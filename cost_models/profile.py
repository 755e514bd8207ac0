"""A machine as a value: its network, its device, its memory."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias, overload

from .amounts import Amount, Array
from .compute import Compute
from .errors import ProfileError
from .hosts import Hosts
from .measured import MeasuredMesh
from .provenance import Provenance
from .topology import Topology, mesh_ranks

VERSION = 2

Network: TypeAlias = Hosts | MeasuredMesh


@dataclass(frozen=True)
class Profile:
    """The constants of one kind of machine, read by ``load_profile``.

    Attributes:
        name: as the file states it.
        provenance: where the constants come from.
        memory_bytes: capacity of one device.
        allocator_margin: what the device's allocator reserves beyond the memory in use, as a share of that.
        contention: the share of its time that a collective costs a step although it runs beside computation, as both
            use the device; 1 where nothing is gained by running them side by side, or where that is not known.
        network: equal hosts, or one measured mesh.
        meeting_s: what a collective of a step takes beyond itself alone, as the ranks come to it one after the other
            where they share cores.
        bucket_copies: whether the copies count that take tensors into the buffer in which they travel together, and out
            of it again; not where constants were fitted to whole steps, which have them in all they do.
    """

    name: str
    provenance: Provenance
    memory_bytes: int
    compute: Compute
    network: Network
    allocator_margin: float = 0.0
    contention: float = 1.0
    meeting_s: float = 0.0
    bucket_copies: bool = False

    @cached_property
    def fingerprint(self) -> str:
        """``sha256:...`` of all that decides a price or a refusal, and of the name.

        Comments, formatting, the order of keys, the version of the file and the provenance are not part of it.
        """
        values = {key: value for key, value in self.entries().items() if key not in ("version", "provenance")}
        canonical = json.dumps(_as_floats(values), sort_keys=True, separators=(",", ":"), allow_nan=False)
        return f"sha256:{hashlib.sha256(canonical.encode()).hexdigest()}"

    def topology(self, axes: tuple[str, ...], shape: tuple[int, ...], ranks: Sequence[int] | None = None) -> Topology:
        """What each axis of a mesh runs on; the rules are those of :mod:`cost_models.hosts` and ``measured``.

        ``ranks`` is the rank at each position of the mesh, the last axis fastest (``HybridMesh.ranks`` gives one); by
        default they are counted through.

        Raises:
            ProfileError: the axes are malformed, the mesh needs more hosts than the profile knows how to connect, or it
                is not the mesh that the profile was measured on.
        """
        try:
            return self.network.topology(axes, mesh_ranks(axes, shape, ranks))
        except ProfileError as reason:
            raise ProfileError(f"hardware profile {self.name!r}: {reason}") from None

    def entries(self) -> dict[str, Any]:
        """The profile as its file spells it, canonically: no comments, no defaults, nothing inherited."""
        return {
            "version": VERSION,
            "name": self.name,
            "provenance": self.provenance.entries(),
            "memory_bytes": self.memory_bytes,
            **({"allocator_margin": self.allocator_margin} if self.allocator_margin else {}),
            **({"contention": self.contention} if self.contention != 1 else {}),
            **({"meeting_s": self.meeting_s} if self.meeting_s else {}),
            **({"bucket_copies": True} if self.bucket_copies else {}),
            "compute": self.compute.entries(),
            **self.network.entries(),
        }

    @overload
    def op_s(self, dtype: str, flops: float, bytes_moved: float, kind: str = ...) -> float: ...
    @overload
    def op_s(self, dtype: str, flops: float | Array, bytes_moved: Array, kind: str = ...) -> Array: ...
    @overload
    def op_s(self, dtype: str, flops: Array, bytes_moved: float | Array, kind: str = ...) -> Array: ...
    def op_s(self, dtype: str, flops: Amount, bytes_moved: Amount, kind: str = "pointwise") -> Amount:
        """Seconds of one operation on one device; the formula is that of :mod:`cost_models.compute`.

        ``dtype`` is torch's name of it (``"bfloat16"`` or ``"torch.bfloat16"``), ``flops`` counts a multiply-add as
        two, ``bytes_moved`` is what the operation reads and writes, ``kind`` is one of ``OP_KINDS``; arrays give
        arrays.

        Raises:
            ProfileError: a dtype without a peak in the profile.
            ValueError: an unknown kind, or an amount that is negative or not finite.
        """
        return self.compute.op_s(dtype, flops, bytes_moved, kind)

    @overload
    def copy_s(self, bytes_moved: float) -> float: ...
    @overload
    def copy_s(self, bytes_moved: Array) -> Array: ...
    def copy_s(self, bytes_moved: Amount) -> Amount:
        """Seconds of a local copy beside a collective: a gather on a dim other than 0, a slice, padding.

        ``bytes_moved`` counts what is read and what is written. The price is that of an operation of kind ``copy``
        without flops.

        Raises:
            ValueError: an amount that is negative or not finite.
        """
        return self.compute.op_s("float32", 0.0, bytes_moved, "copy")


def _as_floats(value: Any) -> Any:
    """Numbers as floats: 80 and 80.0 are the same value."""
    if isinstance(value, dict):
        return {str(key): _as_floats(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_as_floats(entry) for entry in value]
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value
