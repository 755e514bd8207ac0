"""Measured collectives held against the links of the profiles: by machine, collective, and ranks in how many hosts."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np

from cost_models import Profile, load_profile
from cost_models.collective_kinds import COLLECTIVE_KINDS
from published_rows import CannotBuild, Row, read_rows

LARGE_BYTES = 1 << 30
"""Of the fits, which give a latency and the rate of large messages, it is the seconds of so many bytes that count."""

MACHINES = (("H100 SXM", "dgx-h100"), ("H200 SXM", "dgx-h200"), ("A100", "dgx-a100"))
"""Which profile a machine is held against, by how the name of its GPU begins; others are left out."""


def seconds(profile: Profile, kind: str, hosts: int, ranks_of_host: int, size_bytes: float) -> float:
    """Predicted seconds of a collective of so many ranks in each of so many hosts; others do the same beside it."""
    width = profile.entries()["devices_per_host"]
    side_by_side = width // ranks_of_host
    order = np.arange(hosts * ranks_of_host * side_by_side).reshape(hosts, ranks_of_host, side_by_side)
    ranks = [int(rank) for rank in order.transpose(2, 0, 1).reshape(-1)]
    topology = profile.topology(("beside", "group"), (side_by_side, hosts * ranks_of_host), ranks)
    return topology.collective_s(kind, 1, float(size_bytes))


def report(path: Path) -> int:
    """Prints the errors, by machine and collective, and how many rows were left out for which reason; the exit code."""
    errors: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    left_out = Counter[str]()
    for row in read_rows(path):
        try:
            for key, error in _errors(row):
                errors[key].append(error)
        except CannotBuild as reason:
            left_out[str(reason)] += 1
    head = "points  median |median|   worst"
    print(f"{'profile':10} {'collective':15} {'ranks and sizes':34} {head}")
    for (name, kind, where), found in sorted(errors.items()):
        middle, typical = statistics.median(found), statistics.median(map(abs, found))
        worst = max(found, key=abs)
        print(f"{name:10} {kind:15} {where:34} {len(found):6} {middle:+7.0%} {typical:8.0%} {worst:+7.0%}")
    print("\nLeft out")
    for reason, count in left_out.most_common():
        print(f"  {count:4} rows: {reason}")
    return 0


def _errors(row: Row) -> list[tuple[tuple[str, str, str], float]]:
    gpu = row.text("gpu")
    name = next((name for start, name in MACHINES if gpu.startswith(start)), None)
    if name is None or "PCIe" in gpu:
        raise CannotBuild(f"no profile of {gpu.partition(' (')[0] or 'a GPU that is not stated'}")
    hosts, ranks = row.whole("nodes"), row.whole("gpus")
    if ranks % hosts or 8 % (ranks // hosts):
        raise CannotBuild(f"{ranks} ranks on {hosts} hosts do not fill hosts of 8")
    size_bytes, took_s = _measured(row, ranks)
    size = "from 64 MiB" if size_bytes >= 1 << 26 else "1 to 64 MiB" if size_bytes >= 1 << 20 else "below 1 MiB"
    spread = "one host" if hosts == 1 else f"hosts of {ranks // hosts}"
    kinds = [kind.partition(" (")[0].strip() for kind in row.text("collective").split("/")]
    if unknown := [kind for kind in kinds if kind not in COLLECTIVE_KINDS]:
        raise CannotBuild(f"no price of the collective {unknown[0]!r}")
    profile = load_profile(name)
    return [
        ((name, kind, f"{spread}, {size}"), seconds(profile, kind, hosts, ranks // hosts, size_bytes) / took_s - 1)
        for kind in kinds
    ]


def _measured(row: Row, ranks: int) -> tuple[float, float]:
    """Bytes and seconds of a row.

    Raises:
        CannotBuild: it does not say them.
    """
    if peak := row.number("peak_algbw_gbs"):
        return LARGE_BYTES, (row.number("latency_us") or 0.0) * 1e-6 + LARGE_BYTES / (peak * 1e9)
    size_bytes = row.number("size_bytes")
    if not size_bytes:
        raise CannotBuild("the size is not stated")
    if microseconds := row.number("time_us"):
        return size_bytes, microseconds * 1e-6
    if rate := row.number("algbw_gbs"):
        return size_bytes, size_bytes / (rate * 1e9)
    if rate := row.number("busbw_gbs"):
        passes = 2 if row.text("collective") == "all_reduce" else 1
        return size_bytes, passes * (ranks - 1) / ranks * size_bytes / (rate * 1e9)
    raise CannotBuild("neither time nor rate is stated")
