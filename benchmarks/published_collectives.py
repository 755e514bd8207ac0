"""Measured collectives held against the links of the profiles: by machine, collective, and ranks in how many hosts."""

from __future__ import annotations

import csv
import statistics
from collections import defaultdict
from pathlib import Path

import numpy as np

from cost_models import Profile, load_profile

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
    """Prints the errors, by machine and collective; the exit code."""
    errors: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            for key, error in _errors(row):
                errors[key].append(error)
    head = "points  median |median|   worst"
    print(f"{'profile':10} {'collective':15} {'ranks and sizes':34} {head}")
    for (name, kind, where), found in sorted(errors.items()):
        middle, typical = statistics.median(found), statistics.median(map(abs, found))
        worst = max(found, key=abs)
        print(f"{name:10} {kind:15} {where:34} {len(found):6} {middle:+7.0%} {typical:8.0%} {worst:+7.0%}")
    return 0


def _errors(row: dict[str, str]) -> list[tuple[tuple[str, str, str], float]]:
    name = next((name for start, name in MACHINES if row["gpu"].startswith(start)), None)
    hosts, ranks = int(row["nodes"]), int(row["gpus"])
    found = _measured(row)
    if name is None or found is None or 8 % (ranks // hosts) or "PCIe" in row["gpu"]:
        return []
    size_bytes, took_s = found
    size = "from 64 MiB" if size_bytes >= 1 << 26 else "1 to 64 MiB" if size_bytes >= 1 << 20 else "below 1 MiB"
    spread = "one host" if hosts == 1 else f"hosts of {ranks // hosts}"
    kinds = [kind.partition(" (")[0] for kind in row["collective"].split(" / ")]
    profile = load_profile(name)
    return [
        ((name, kind, f"{spread}, {size}"), seconds(profile, kind, hosts, ranks // hosts, size_bytes) / took_s - 1)
        for kind in kinds
    ]


def _measured(row: dict[str, str]) -> tuple[float, float] | None:
    """Bytes and seconds of a row; None where it does not say them."""
    if row["peak_algbw_gbs"]:
        latency_s = float(row["latency_us"]) * 1e-6
        return LARGE_BYTES, latency_s + LARGE_BYTES / (float(row["peak_algbw_gbs"]) * 1e9)
    if not row["size_bytes"].isdigit():
        return None
    size_bytes, ranks = float(row["size_bytes"]), int(row["gpus"])
    if row["time_us"]:
        return size_bytes, float(row["time_us"]) * 1e-6
    passes = 2 if row["collective"] == "all_reduce" else 1
    if row["algbw_gbs"]:
        return size_bytes, size_bytes / (float(row["algbw_gbs"]) * 1e9)
    if row["busbw_gbs"]:
        return size_bytes, passes * (ranks - 1) / ranks * size_bytes / (float(row["busbw_gbs"]) * 1e9)
    return None
