"""The constants of what connects two devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from .amounts import Amount
from .collective_kinds import COLLECTIVE_KINDS
from .curve import Curve

Hops: TypeAlias = Literal["ring", "tree", "switch"]


@dataclass(frozen=True)
class Algorithm:
    """Another way in which a library runs collectives on a link; it takes the fastest.

    Attributes:
        hops: ``ring`` (n - 1 hops a pass), ``tree`` (log2 n hops a pass; never for an all_to_all) or ``switch`` (the
            switch reduces: one hop, and each rank sends the buffer once; for reductions alone).
        launch_s, latency_s: as of a link.
        bandwidth_share: the part of the link's rate that it reaches, above 0 and at most 1.
    """

    name: str
    hops: Hops
    launch_s: float
    latency_s: float
    bandwidth_share: float

    def slower_of(self, other: Algorithm) -> Algorithm:
        """The worse of two in every constant."""
        return Algorithm(
            name=self.name if self.name == other.name else f"{self.name} + {other.name}",
            hops=self.hops,
            launch_s=max(self.launch_s, other.launch_s),
            latency_s=max(self.latency_s, other.latency_s),
            bandwidth_share=min(self.bandwidth_share, other.bandwidth_share),
        )


@dataclass(frozen=True)
class Link:
    """What connects a device to its neighbour on an axis. Rates are per device and direction.

    Invariants (checked where a profile file is read): times are finite and not negative, the bandwidth is finite and
    positive, efficiencies are in (0, 1], curves rise; and an all-reduce never costs less than the reduce-scatter inside
    it: ``efficiency["all_reduce"] <= 2 * efficiency["reduce_scatter"]``, likewise for launches and curves.

    Attributes:
        latency_s: seconds of each hop.
        bandwidth_bytes_per_s: nominal rate; a collective reaches ``efficiency[kind]`` of it (1 where not named).
        launch_s: fixed seconds of one collective, however many ranks and bytes.
        launches_s: the fixed seconds of the kinds that differ from ``launch_s``.
        curves: by kind, seconds over the bytes that one rank sends, in place of bandwidth and efficiency; of a kind
            with a curve the alternatives are not asked (the curve is of what the library chose).
        alternatives: other algorithms that the library has for this link.
        hop_inside_s: of a link between hosts, seconds of each hop inside one of a ring that goes through several.
        reduce_scatter_as_all_reduce: the library runs a reduce-scatter as an all-reduce and keeps a slice (gloo does).
    """

    name: str
    latency_s: float
    bandwidth_bytes_per_s: float
    launch_s: float = 0.0
    efficiency: Mapping[str, float] = field(default_factory=dict, hash=False)
    launches_s: Mapping[str, float] = field(default_factory=dict, hash=False)
    curves: Mapping[str, Curve] = field(default_factory=dict, hash=False)
    alternatives: tuple[Algorithm, ...] = ()
    hop_inside_s: float = 0.0
    reduce_scatter_as_all_reduce: bool = False

    def start_s(self, kind: str) -> float:
        """Fixed seconds of one collective of this kind."""
        return self.launches_s.get(kind, self.launch_s)

    def transfer_s(self, kind: str, wire_bytes: Amount) -> Amount:
        """Seconds in which a rank sends ``wire_bytes`` in a collective of this kind, launch and latency apart.

        The one place that turns a bandwidth into seconds.
        """
        curve = self.curves.get(kind)
        return curve(wire_bytes) if curve else wire_bytes / self._rate(kind)

    def slower_of(self, other: Link) -> Link:
        """The worse of two links in every constant, so never cheaper than either of them."""
        bandwidth = min(self.bandwidth_bytes_per_s, other.bandwidth_bytes_per_s)
        return Link(
            name=f"{self.name} + {other.name}",
            latency_s=max(self.latency_s, other.latency_s),
            bandwidth_bytes_per_s=bandwidth,
            launch_s=max(self.launch_s, other.launch_s),
            efficiency={kind: min(self._rate(kind), other._rate(kind)) / bandwidth for kind in COLLECTIVE_KINDS},
            launches_s={
                kind: max(self.start_s(kind), other.start_s(kind))
                for kind in COLLECTIVE_KINDS
                if kind in self.launches_s or kind in other.launches_s
            },
            curves={
                kind: self._curve(kind).highest(other._curve(kind))
                for kind in COLLECTIVE_KINDS
                if kind in self.curves or kind in other.curves
            },
            alternatives=tuple(
                a.slower_of(b) for a in self.alternatives for b in other.alternatives if a.hops == b.hops
            ),
            hop_inside_s=max(self.hop_inside_s, other.hop_inside_s),
            reduce_scatter_as_all_reduce=self.reduce_scatter_as_all_reduce or other.reduce_scatter_as_all_reduce,
        )

    def scaled(self, factor: float) -> Link:
        """A link on which everything takes ``factor`` times as long."""
        return Link(
            name=self.name,
            latency_s=self.latency_s * factor,
            bandwidth_bytes_per_s=self.bandwidth_bytes_per_s / factor,
            launch_s=self.launch_s * factor,
            efficiency=self.efficiency,
            launches_s={kind: seconds * factor for kind, seconds in self.launches_s.items()},
            curves={kind: curve.scaled(factor) for kind, curve in self.curves.items()},
            alternatives=tuple(
                Algorithm(a.name, a.hops, a.launch_s * factor, a.latency_s * factor, a.bandwidth_share)
                for a in self.alternatives
            ),
            hop_inside_s=self.hop_inside_s * factor,
            reduce_scatter_as_all_reduce=self.reduce_scatter_as_all_reduce,
        )

    def entries(self) -> dict[str, Any]:
        """The link as a profile file spells it; what has its default is left out."""
        entries: dict[str, Any] = {
            "name": self.name,
            "launch_s": self.launch_s,
            "latency_s": self.latency_s,
            "bandwidth_bytes_per_s": self.bandwidth_bytes_per_s,
        }
        optional: dict[str, Any] = {
            "efficiency": dict(self.efficiency),
            "launches_s": dict(self.launches_s),
            "curves": {kind: [list(knot) for knot in curve.knots] for kind, curve in self.curves.items()},
            "alternatives": [vars(algorithm).copy() for algorithm in self.alternatives],
            "hop_inside_s": self.hop_inside_s,
            "reduce_scatter_as_all_reduce": self.reduce_scatter_as_all_reduce,
        }
        return entries | {name: value for name, value in optional.items() if value}

    def _rate(self, kind: str) -> float:
        return self.bandwidth_bytes_per_s * self.efficiency.get(kind, 1.0)

    def _curve(self, kind: str) -> Curve:
        return self.curves.get(kind) or Curve((), 1 / self._rate(kind))
