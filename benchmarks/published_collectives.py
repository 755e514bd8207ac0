"""Measured collectives held against the links of the profiles, by size and by the number of hosts.

A time that was measured around one call, on a device that had nothing else to do, holds what the host takes to issue
it: :data:`ISSUE_S`. In a step the host runs ahead, so no link has it; it is added to what is compared.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cost_models import Profile, load_profile
from cost_models.collective_kinds import COLLECTIVE_KINDS
from published_rows import CannotBuild, Row, read_rows

LARGE_BYTES = 1 << 30
SMALL_BYTES = 1 << 12
"""Of the fits, which give a latency and the rate of large messages, it is the seconds of so many bytes that count."""

ISSUE_S = 26e-6
"""Seconds of issuing a collective, of all series. Fitted to each apart, on 8 GPUs of a host: 20 us (H200, torch), 27
(A100, nccl-tests; H100, all-to-alls of torch) and 33 (B200, torch).
"""

ISSUE_OF_FITS_S = 151e-6
"""The same of the fits whose note says that their latency includes the launch, all-to-alls apart: fitted to them. They
state 152 to 174 us inside a host, of 2 GPUs as of 8.
"""

MACHINES = (("H100 SXM", "dgx-h100"), ("H200 SXM", "dgx-h200"), ("A100", "dgx-a100"), ("B200", "dgx-b200"))
"""Which profile a machine is held against, by how the name of its GPU begins; others are left out."""

WITHOUT_SWITCH = {"dgx-h100": "h100-500w-hbm2e"}
"""The profile of the same hosts where the switch does not reduce."""

NOT_CHOSEN = ("NVLS_ENABLE=0", "NVLS off", "forced")
"""In the column ``algo``: not what the library chooses by itself, which is what a profile prices."""


@dataclass(frozen=True)
class Point:
    """A collective that was measured.

    Attributes:
        profile: whose links it is held against.
        ranks_of_host: how many ranks each of ``hosts`` has.
        took_s: measured seconds.
        issue_s: of them the host's, which no link has.
    """

    profile: str
    kind: str
    hosts: int
    ranks_of_host: int
    size_bytes: float
    took_s: float
    issue_s: float

    @property
    def error(self) -> float:
        """Of the price and the host's part, relative to what was measured."""
        price_s = seconds(load_profile(self.profile), self.kind, self.hosts, self.ranks_of_host, self.size_bytes)
        return (price_s + self.issue_s) / self.took_s - 1


def seconds(profile: Profile, kind: str, hosts: int, ranks_of_host: int, size_bytes: float) -> float:
    """Predicted seconds of a collective of so many ranks in each of so many hosts; others do the same beside it."""
    width = profile.entries()["devices_per_host"]
    side_by_side = width // ranks_of_host if width % ranks_of_host == 0 else 1
    order = np.arange(hosts * ranks_of_host * side_by_side).reshape(hosts, ranks_of_host, side_by_side)
    ranks = [int(rank) for rank in order.transpose(2, 0, 1).reshape(-1)]
    topology = profile.topology(("beside", "group"), (side_by_side, hosts * ranks_of_host), ranks)
    return topology.collective_s(kind, 1, float(size_bytes))


def report(path: Path) -> int:
    """Prints the errors by size and by hosts, and how many rows were left out for which reason; the exit code."""
    points, left_out = list[Point](), Counter[str]()
    for row in read_rows(path):
        try:
            points += points_of(row)
        except CannotBuild as reason:
            left_out[str(reason)] += 1
    by_size, by_hosts = defaultdict(list), defaultdict(list)
    for point in points:
        where = "one host" if point.hosts == 1 else "several hosts"
        by_size[point.profile, point.kind, where, *_decade(point.size_bytes)].append(point.error)
        if point.hosts > 1:
            size = "small" if point.size_bytes <= SMALL_BYTES else "large"
            by_hosts[point.profile, point.kind, point.hosts, size].append(point.error)
    _print("profile, collective and size", {_line(*key): found for key, found in sorted(by_size.items())})
    hosts = {f"{a:16} {b:15} {n:3} hosts, {size}": found for (a, b, n, size), found in sorted(by_hosts.items())}
    _print("profile, collective and hosts", hosts)
    print("\nLeft out")
    for reason, count in left_out.most_common():
        print(f"  {count:4} rows: {reason}")
    return 0


def _line(profile: str, kind: str, where: str, _: int, size: str) -> str:
    return f"{profile:16} {kind:15} {where:14} {size}"


def _decade(size_bytes: float) -> tuple[int, str]:
    """The power of ten below a size, and its name: ``100 kB to 1 MB``."""
    power = math.floor(math.log10(size_bytes))
    low, high = (f"{10 ** (k % 3)} {('B', 'kB', 'MB', 'GB', 'TB')[min(k // 3, 4)]}" for k in (power, power + 1))
    return power, f"{low} to {high}"


def _print(what: str, table: Mapping[str, list[float]]) -> None:
    print(f"\n{what:66} points  median |median|   worst")
    for name, found in table.items():
        middle, typical = statistics.median(found), statistics.median(map(abs, found))
        print(f"{name:66} {len(found):6} {middle:+7.0%} {typical:8.0%} {max(found, key=abs):+7.0%}")


def points_of(row: Row) -> list[Point]:
    """What a row says was measured: one point for each kind and size.

    Raises:
        CannotBuild: there is no profile of the machine, no price of the collective, or the row does not say enough.
    """
    gpu, algorithm = row.text("gpu"), row.text("algo")
    name = next((name for start, name in MACHINES if gpu.startswith(start)), None)
    if name is None or "PCIe" in gpu:
        raise CannotBuild(f"no profile of {gpu.partition(' (')[0] or 'a GPU that is not stated'}")
    if any(text in algorithm for text in NOT_CHOSEN):
        raise CannotBuild("an algorithm that the library was made to take")
    if "NVLSTree unavailable" in algorithm:
        name = WITHOUT_SWITCH.get(name, name)
    hosts, ranks = row.whole("nodes"), row.whole("gpus")
    if ranks % hosts or ranks > 8 * hosts or (hosts > 1 and 8 % (ranks // hosts)):
        raise CannotBuild(f"{ranks} ranks on {hosts} hosts do not fill hosts of 8")
    kinds = [kind.partition(" (")[0].strip() for kind in row.text("collective").split("/")]
    if unknown := [kind for kind in kinds if kind not in COLLECTIVE_KINDS]:
        raise CannotBuild(f"no price of the collective {unknown[0]!r}")
    return [
        Point(name, kind, hosts, ranks // hosts, size_bytes, took_s, _issue_s(row, kind))
        for kind in kinds
        for size_bytes, took_s in _measured(row, kind, ranks)
    ]


def _issue_s(row: Row, kind: str) -> float:
    """What of a row's times is the host's: nothing of a latency that was fitted to large messages."""
    if "launch" in row.text("note"):
        return ISSUE_S if kind == "all_to_all" else ISSUE_OF_FITS_S
    return 0.0 if row.number("peak_algbw_gbs") else ISSUE_S


def _measured(row: Row, kind: str, ranks: int) -> list[tuple[float, float]]:
    """Bytes and seconds of a row.

    Raises:
        CannotBuild: it does not say them.
    """
    if peak := row.number("peak_algbw_gbs"):
        latency_s = (row.number("latency_us") or 0.0) * 1e-6
        large = (float(LARGE_BYTES), latency_s + LARGE_BYTES / (peak * 1e9))
        of_small = latency_s > 0 and "launch" in row.text("note")  # else it is what large messages leave
        return [(float(SMALL_BYTES), latency_s), large] if of_small else [large]
    size_bytes = row.number("size_bytes")
    if not size_bytes:
        raise CannotBuild("the size is not stated")
    if microseconds := row.number("time_us"):
        return [(size_bytes, microseconds * 1e-6)]
    if rate := row.number("algbw_gbs"):
        return [(size_bytes, size_bytes / (rate * 1e9))]
    if rate := row.number("busbw_gbs"):
        passes = 2 if kind == "all_reduce" else 1
        return [(size_bytes, passes * (ranks - 1) / ranks * size_bytes / (rate * 1e9))]
    raise CannotBuild("neither time nor rate is stated")
