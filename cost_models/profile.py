"""A machine as a value: its links, its device, its memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import overload

from .amounts import Amount, Array
from .compute import Compute
from .errors import ProfileError
from .link import Link
from .topology import Topology, place_axes


@dataclass(frozen=True)
class Profile:
    """The constants of one kind of machine, read by ``load_profile``.

    Attributes:
        name: as the file states it.
        provenance: where the constants come from, as the file states it.
        fingerprint: ``sha256:...`` of all that decides a price or a refusal, and of the name; comments, formatting, the
            order of keys and the provenance text are not part of it.
        devices_per_host: None where one host holds a mesh of any size.
        memory_bytes: capacity of one device.
        inter_host: None where the profile knows no second host.
    """

    name: str
    provenance: str
    fingerprint: str
    devices_per_host: int | None
    memory_bytes: int
    compute: Compute
    intra_host: Link
    inter_host: Link | None

    def topology(self, axes: tuple[str, ...], shape: tuple[int, ...]) -> Topology:
        """Which link each axis of a mesh runs on; the rule is that of :mod:`cost_models.topology`.

        Raises:
            ProfileError: the axes are malformed, or the mesh needs more hosts than the profile knows how to connect.
        """
        try:
            return place_axes(
                axes,
                shape,
                devices_per_host=self.devices_per_host,
                intra_host=self.intra_host,
                inter_host=self.inter_host,
            )
        except ProfileError as reason:
            raise ProfileError(f"hardware profile {self.name!r}: {reason}") from None

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
