"""The constants of what connects two devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

from .amounts import Amount

CollectiveKind: TypeAlias = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]
COLLECTIVE_KINDS: tuple[str, ...] = get_args(CollectiveKind)


@dataclass(frozen=True)
class Link:
    """What connects a device to its neighbour on an axis. Rates are per device and direction.

    Invariants (checked where a profile file is read): times are finite and not negative, the bandwidth is finite and
    positive, efficiencies are in (0, 1], and ``efficiency["all_reduce"] <= 2 * efficiency["reduce_scatter"]``, so that
    an all-reduce never costs less than the reduce-scatter inside it.

    Attributes:
        latency_s: seconds of each hop.
        bandwidth_bytes_per_s: nominal rate; a collective reaches ``efficiency[kind]`` of it (1 where not named).
        launch_s: fixed seconds of one collective, however many ranks and bytes.
        reduce_scatter_as_all_reduce: the library runs a reduce-scatter as an all-reduce and keeps a slice (gloo does).
    """

    name: str
    latency_s: float
    bandwidth_bytes_per_s: float
    launch_s: float = 0.0
    efficiency: Mapping[str, float] = field(default_factory=dict, hash=False)
    reduce_scatter_as_all_reduce: bool = False

    def transfer_s(self, kind: str, wire_bytes: Amount) -> Amount:
        """Seconds to move ``wire_bytes`` over the link in a collective of this kind, latency apart.

        The one place that turns a bandwidth into seconds: a rate that depends on the size belongs here.
        """
        return wire_bytes / self._rate(kind)

    def slower_of(self, other: Link) -> Link:
        """The worse of two links in every constant, so never cheaper than either of them."""
        bandwidth = min(self.bandwidth_bytes_per_s, other.bandwidth_bytes_per_s)
        return Link(
            name=f"{self.name} + {other.name}",
            latency_s=max(self.latency_s, other.latency_s),
            bandwidth_bytes_per_s=bandwidth,
            launch_s=max(self.launch_s, other.launch_s),
            efficiency={kind: min(self._rate(kind), other._rate(kind)) / bandwidth for kind in COLLECTIVE_KINDS},
            reduce_scatter_as_all_reduce=self.reduce_scatter_as_all_reduce or other.reduce_scatter_as_all_reduce,
        )

    def _rate(self, kind: str) -> float:
        return self.bandwidth_bytes_per_s * self.efficiency.get(kind, 1.0)
