"""Seconds of an operation on one device: a roofline over a launch cost.

::

    seconds = issue_s + launch_s + max(flops / (peak_flops_per_s[dtype] * compute_efficiency[kind](flops)),
                                       bytes / (memory_bandwidth_bytes_per_s * memory_efficiency[kind](bytes)))

An efficiency is one share of the peak, or knots of (amount, share): small kernels do not fill the machine. Between two
knots the *seconds* are straight, below the first and beyond the last the share is theirs; so seconds are continuous and
never fall with more work, whatever the shares.

The launch is added, not taken as a floor: on a CPU the dispatch and the loop run one after the other, and on a GPU a
small kernel takes its fixed time plus the time of its bytes. It also keeps the cost strictly monotone, so that two ways
to run a tiny operation are never tied by accident. Operations that neither compute nor move are free.

``launch_s`` is what a kernel takes beside its work where it runs again and again. In a step each operator is another
than the one before, and so is the code that the host runs to issue it: ``issue_s`` is what that adds where the device
waits for its host, as a CPU does. Views have it alone.

Source: S. Williams, A. Waterman, D. Patterson, "Roofline: an insightful visual performance model for multicore
architectures", CACM 52(4), 2009; the added launch is the alpha of an alpha-beta model (assumed).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, TypeAlias

import numpy as np

from .amounts import Amount, require_amount
from .curve import Curve, Knots
from .errors import ProfileError
from .kernel_kinds import OP_KINDS
from .spelling import did_you_mean

Dtype: TypeAlias = Literal["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8"]
_NO_PEAK_OF_ITS_OWN = frozenset(
    "bool uint8 int8 uint16 int16 uint32 int32 uint64 int64 complex32 complex64 complex128".split()
)


@dataclass(frozen=True)
class Efficiency:
    """A share of a peak that depends on the amount of work.

    Invariants (checked where a profile file is read): amounts rise strictly from above 0, shares are in (0, 1], and
    ``amount / share`` never falls.
    """

    knots: Knots

    def full_rate(self, amount: Amount) -> Amount:
        """The amount that would take as long at the full rate: ``amount / share``."""
        return self._curve(amount)

    @cached_property
    def _curve(self) -> Curve:
        return Curve.of_efficiency(self.knots)


Shares: TypeAlias = Mapping[str, float | Efficiency]


@dataclass(frozen=True)
class Compute:
    """The constants of one device.

    Invariants (checked where a profile file is read): rates are finite and positive, efficiencies in (0, 1], both
    efficiency tables have a ``default``, ``peak_flops_per_s`` has ``float32``.

    Attributes:
        peak_flops_per_s: by dtype, dense, of the unit that multiplies matrices.
        compute_efficiency: by kind, the share of the peak that is reached, over flops; ``default`` where a kind is not
            named. ``kind/dtype`` (``matmul/bfloat16``) goes before ``kind``.
        memory_efficiency: likewise of the memory bandwidth, over bytes.
        issue_s: of each operator of a step, views included; 0 where the host runs ahead of its device.
        optimizer_launch_s: the launch of a measured step of an optimizer over one tensor, which is several kernels and
            what the host does between them; 0 where none was measured.
    """

    launch_s: float
    memory_bandwidth_bytes_per_s: float
    peak_flops_per_s: Mapping[str, float] = field(hash=False)
    compute_efficiency: Shares = field(hash=False)
    memory_efficiency: Shares = field(hash=False)
    issue_s: float = 0.0
    optimizer_launch_s: float = 0.0

    def op_s(self, dtype: str, flops: Amount, bytes_moved: Amount, kind: str) -> Amount:
        """Seconds of one operation (formula above); arrays give arrays.

        Raises:
            ProfileError: a dtype without a peak in the profile.
            ValueError: an unknown kind, or an amount that is negative or not finite.
        """
        if kind not in OP_KINDS:
            raise ValueError(
                f"unknown kind of operation {kind!r}; the kinds are {', '.join(OP_KINDS)}{did_you_mean(kind, OP_KINDS)}"
            )
        require_amount("flops", flops)
        require_amount("bytes_moved", bytes_moved)
        if kind == "view":
            return (flops + bytes_moved) * 0.0 + self.issue_s
        dtype = dtype.removeprefix("torch.")
        compute_s = _busy_s(flops, self.peak(dtype), _of(self.compute_efficiency, kind, dtype))
        memory_s = _busy_s(bytes_moved, self.memory_bandwidth_bytes_per_s, _of(self.memory_efficiency, kind, dtype))
        launch_s = self.issue_s + ((kind == "optimizer" and self.optimizer_launch_s) or self.launch_s)
        if isinstance(compute_s, np.ndarray) or isinstance(memory_s, np.ndarray):
            seconds = np.maximum(compute_s, memory_s)
            return np.where(seconds > 0, launch_s + seconds, 0.0)
        busy_s = max(compute_s, memory_s)
        return launch_s + busy_s if busy_s > 0 else 0.0

    def entries(self) -> dict[str, Any]:
        """As a profile file spells it."""
        return {
            "launch_s": self.launch_s,
            **({"issue_s": self.issue_s} if self.issue_s else {}),
            **({"optimizer_launch_s": self.optimizer_launch_s} if self.optimizer_launch_s else {}),
            "memory_bandwidth_bytes_per_s": self.memory_bandwidth_bytes_per_s,
            "peak_flops_per_s": dict(self.peak_flops_per_s),
            "compute_efficiency": _spelled(self.compute_efficiency),
            "memory_efficiency": _spelled(self.memory_efficiency),
        }

    def peak(self, dtype: str) -> float:
        """The peak in flops per second; integers, booleans and complex numbers without one of their own run at that of
        ``float32``.

        Raises:
            ProfileError: a dtype without a peak in the profile.
        """
        dtype = dtype.removeprefix("torch.")
        if dtype in self.peak_flops_per_s:
            return self.peak_flops_per_s[dtype]
        if dtype in _NO_PEAK_OF_ITS_OWN:
            return self.peak_flops_per_s["float32"]
        raise ProfileError(
            f"no peak rate for dtype {dtype!r}; compute.peak_flops_per_s of this profile has "
            f"{', '.join(self.peak_flops_per_s)}{did_you_mean(dtype, self.peak_flops_per_s)}"
        )


def _of(shares: Shares, kind: str, dtype: str) -> float | Efficiency:
    for name in (f"{kind}/{dtype}", kind):
        if name in shares:
            return shares[name]
    return shares["default"]


def _busy_s(amount: Amount, peak: float, share: float | Efficiency) -> Amount:
    return share.full_rate(amount) / peak if isinstance(share, Efficiency) else amount / (peak * share)


def _spelled(shares: Shares) -> dict[str, Any]:
    return {
        kind: [list(knot) for knot in share.knots] if isinstance(share, Efficiency) else share
        for kind, share in shares.items()
    }
