"""Fits constants of links to measured collectives, as the profiles have them (``docs/validation.md``).

    python benchmarks/published_links.py collectives.csv

Least squares of the logarithms of predicted over measured seconds, one constant after the other by factors that shrink,
from NCCL's own tables on. What the host takes to issue a collective is fitted beside them, as it is in what was
measured and in no link. Rates of kinds are not fitted here: they are bus bandwidths of large buffers over the wire's.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cost_models import Algorithm, Hosts, Link, Profile, load_profile
from published_collectives import ISSUE_OF_FITS_S, SMALL_BYTES, Point, points_of, seconds
from published_rows import CannotBuild, read_rows

Constants = Mapping[str, float]

NCCL_BETWEEN = {
    "ring LL": (6.6e-6, 2.7e-6),
    "ring LL128": (14e-6, 4.0e-6),
    "tree LL": (6.8e-6, 5.0e-6),
    "tree LL128": (14e-6, 8.5e-6),
}
"""Seconds of a launch and of a hop over a network: NCCL commit b6475625, src/graph/tuning.cc, baseLat and hwLat."""

NCCL_SIMPLE_S = 8.4e-6
"""The launch of the protocol at the full rate, from the same table."""

STEPS = (1.5, 1.2, 1.08, 1.03, 1.01)


@dataclass(frozen=True)
class Fit:
    """Constants that are fitted together.

    Attributes:
        profile: of the machine that was measured.
        change: the machine's hosts with these constants.
        first: where the search starts; seconds, but for factors and shares. ``issue`` and ``issue_of_fits`` are the
            host's, and held where they are not named.
        belongs: whether a point is one of those that they are fitted to.
    """

    what: str
    profile: str
    change: Callable[[Hosts, Constants], Hosts]
    first: Constants
    belongs: Callable[[Point], bool]


def between_hosts(hosts: Hosts, constants: Constants) -> Hosts:
    """What starts, and waits for, a collective between hosts: NCCL's tables, later by ``start``, times factors."""
    link = _between(hosts)
    hops = {"ring": constants["ring"], "tree": constants["tree"]}
    others = [(other, *NCCL_BETWEEN[other.name]) for other in link.alternatives]
    link = replace(
        link,
        launch_s=NCCL_SIMPLE_S + constants["start"],
        hop_inside_s=constants["inside"],
        alternatives=tuple(
            replace(other, launch_s=launch_s + constants["start"], latency_s=hop_s * hops[other.hops])
            for other, launch_s, hop_s in others
        ),
    )
    return replace(hosts, inter_host=link)


def at_the_full_rate(hosts: Hosts, constants: Constants) -> Hosts:
    """A hop between hosts at the full rate."""
    return replace(hosts, inter_host=replace(_between(hosts), latency_s=constants["hop"]))


def through_the_switch(hosts: Hosts, constants: Constants) -> Hosts:
    """Reductions in the switch."""
    switch = Algorithm("NVLink SHARP", "switch", constants["launch"], 0.0, min(1.0, constants["share"]))
    return _inside(hosts, switch, hosts.intra_host.latency_s)


def of_a100(hosts: Hosts, constants: Constants) -> Hosts:
    """Hops and shares of the rate of the protocols in a host of A100."""
    quick, middle = hosts.intra_host.alternatives
    quick = replace(quick, bandwidth_share=min(1.0, constants["LL share"]))
    share = min(1.0, constants["LL128 share"])
    hosts = _inside(hosts, quick, constants["hop"])
    return _inside(hosts, replace(middle, latency_s=constants["LL128 hop"], bandwidth_share=share), constants["hop"])


FITS = (
    Fit(
        "latencies between hosts",
        "h100-500w-hbm2e",
        between_hosts,
        {"start": 15e-6, "ring": 1.0, "tree": 1.0, "inside": 2e-6, "issue": 25e-6, "issue_of_fits": 145e-6},
        lambda point: point.size_bytes <= SMALL_BYTES,
    ),
    Fit(
        "between hosts at the full rate",
        "h100-500w-hbm2e",
        at_the_full_rate,
        {"hop": 14e-6},
        lambda point: point.size_bytes > SMALL_BYTES and point.hosts > 1 and point.kind != "all_to_all",
    ),
    Fit(
        "inside a host",
        "dgx-a100",
        of_a100,
        {"hop": 10e-6, "LL share": 0.25, "LL128 hop": 1.9e-6, "LL128 share": 0.92, "issue": 26e-6},
        lambda point: point.hosts == 1,
    ),
    *(
        Fit(
            "reductions in the switch",
            name,
            through_the_switch,
            {"launch": 31e-6, "share": 0.7, "issue": 26e-6},
            lambda point: point.hosts == 1 and point.ranks_of_host == 8 and point.kind == "all_reduce",
        )
        for name in ("dgx-h200", "dgx-b200")
    ),
)


def fitted(fit: Fit, points: Sequence[Point]) -> dict[str, float]:
    """The constants of a fit."""
    profile = load_profile(fit.profile)
    constants, points = dict(fit.first), [p for p in points if p.profile == fit.profile and fit.belongs(p)]
    least = loss(fit, profile, constants, points)
    for step in STEPS:
        moved = True
        while moved:
            moved = False
            for name in constants:
                for factor in (step, 1 / step):
                    tried = constants | {name: constants[name] * factor}
                    if (found := loss(fit, profile, tried, points)) < least - 1e-9:
                        least, constants, moved = found, tried, True
    return constants


def loss(fit: Fit, profile: Profile, constants: Constants, points: Sequence[Point]) -> float:
    """The sum of the squares of the logarithms of predicted over measured seconds."""
    assert isinstance(profile.network, Hosts)
    changed = replace(profile, network=fit.change(profile.network, constants))
    total = 0.0
    for point in points:
        name = "issue_of_fits" if point.issue_s == ISSUE_OF_FITS_S else "issue"
        issue_s = constants.get(name, point.issue_s) if point.issue_s else 0.0
        price_s = seconds(changed, point.kind, point.hosts, point.ranks_of_host, point.size_bytes)
        total += math.log((price_s + issue_s) / point.took_s) ** 2
    return total


def _between(hosts: Hosts) -> Link:
    assert hosts.inter_host is not None
    return hosts.inter_host


def _inside(hosts: Hosts, algorithm: Algorithm, latency_s: float) -> Hosts:
    others = [other for other in hosts.intra_host.alternatives if other.name != algorithm.name]
    link = replace(hosts.intra_host, latency_s=latency_s, alternatives=(*others, algorithm))
    return replace(hosts, intra_host=link)


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="measured collectives, with the columns of docs/validation.md")
    points = list[Point]()
    for row in read_rows(parser.parse_args(given).data):
        try:
            points += points_of(row)
        except CannotBuild:  # named by benchmarks/published.py --collectives
            continue
    for fit in FITS:
        shown = (f"{k} {v * 1e6:.3g} us" if v < 1e-2 else f"{k} {v:.3g}" for k, v in fitted(fit, points).items())
        print(f"{fit.profile}, {fit.what}: {', '.join(shown)}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
