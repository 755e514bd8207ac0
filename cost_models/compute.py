"""Seconds of an operation on one device: a roofline over a launch cost.

::

    seconds = launch_s + max(flops / (peak_flops_per_s[dtype] * compute_efficiency[kind]),
                             bytes / (memory_bandwidth_bytes_per_s * memory_efficiency[kind]))

The launch is added, not taken as a floor: on a CPU the dispatch and the loop run one after the other, and on a GPU a
small kernel takes its fixed time plus the time of its bytes. It also keeps the cost strictly monotone, so that two ways
to run a tiny operation are never tied by accident. Views, and operations that neither compute nor move, are free.

Source: S. Williams, A. Waterman, D. Patterson, "Roofline: an insightful visual performance model for multicore
architectures", CACM 52(4), 2009; the added launch is the alpha of an alpha-beta model (assumed).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

import numpy as np

from .amounts import Amount, require_amount
from .errors import ProfileError, nearest

OpKind: TypeAlias = Literal[
    "matmul",
    "attention",
    "convolution",
    "normalization",
    "softmax",
    "reduction",
    "pointwise",
    "indexing",
    "copy",
    "view",
]
OP_KINDS: tuple[str, ...] = get_args(OpKind)

Dtype: TypeAlias = Literal["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8"]
_NO_PEAK_OF_ITS_OWN = frozenset(
    "bool uint8 int8 uint16 int16 uint32 int32 uint64 int64 complex32 complex64 complex128".split()
)


@dataclass(frozen=True)
class Compute:
    """The constants of one device.

    Invariants (checked where a profile file is read): rates are finite and positive, efficiencies in (0, 1], both
    efficiency tables have a ``default``, ``peak_flops_per_s`` has ``float32``.

    Attributes:
        peak_flops_per_s: by dtype, dense, of the unit that multiplies matrices.
        compute_efficiency: by kind, the share of the peak that is reached; ``default`` where a kind is not named.
        memory_efficiency: by kind, the share of the memory bandwidth that is reached; ``default`` likewise.
    """

    launch_s: float
    memory_bandwidth_bytes_per_s: float
    peak_flops_per_s: Mapping[str, float] = field(hash=False)
    compute_efficiency: Mapping[str, float] = field(hash=False)
    memory_efficiency: Mapping[str, float] = field(hash=False)

    def op_s(self, dtype: str, flops: Amount, bytes_moved: Amount, kind: str) -> Amount:
        """Seconds of one operation (formula above); arrays give arrays.

        Raises:
            ProfileError: a dtype without a peak in the profile.
            ValueError: an unknown kind, or an amount that is negative or not finite.
        """
        if kind not in OP_KINDS:
            raise ValueError(
                f"unknown kind of operation {kind!r}; the kinds are {', '.join(OP_KINDS)}{nearest(kind, OP_KINDS)}"
            )
        require_amount("flops", flops)
        require_amount("bytes_moved", bytes_moved)
        if kind == "view":
            return (flops + bytes_moved) * 0.0
        compute_s = flops / (self._peak(dtype) * _of(self.compute_efficiency, kind))
        memory_s = bytes_moved / (self.memory_bandwidth_bytes_per_s * _of(self.memory_efficiency, kind))
        if isinstance(compute_s, np.ndarray) or isinstance(memory_s, np.ndarray):
            seconds = np.maximum(compute_s, memory_s)
            return np.where(seconds > 0, self.launch_s + seconds, 0.0)
        busy_s = max(compute_s, memory_s)
        return self.launch_s + busy_s if busy_s > 0 else 0.0

    def _peak(self, dtype: str) -> float:
        """Integers, booleans and complex numbers without an entry run at the rate of ``float32``."""
        name = dtype.removeprefix("torch.")
        if name in self.peak_flops_per_s:
            return self.peak_flops_per_s[name]
        if name in _NO_PEAK_OF_ITS_OWN:
            return self.peak_flops_per_s["float32"]
        raise ProfileError(
            f"no peak rate for dtype {dtype!r}; compute.peak_flops_per_s of this profile has "
            f"{', '.join(self.peak_flops_per_s)}{nearest(name, self.peak_flops_per_s)}"
        )


def _of(efficiency: Mapping[str, float], kind: str) -> float:
    return efficiency.get(kind, efficiency["default"])
