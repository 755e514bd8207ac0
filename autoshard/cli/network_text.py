"""What the axes of a plan's mesh run on, in a sentence; the plan names its hardware profile and holds none of it."""

from __future__ import annotations

from collections.abc import Iterator

from cost_models import PRESETS, Hosts, Profile, ProfileError, Topology, load_profile

from ..plans import ShardingPlan


def network_lines(plan: ShardingPlan, hardware: str | None = None) -> tuple[str, ...]:
    """Sentences on the link of each axis, read off the profile that the plan was priced with: ``hardware``, a name or a
    file, or the one known by the name that the plan has; one that says so where that is not at hand.

    Raises:
        ProfileError: ``hardware`` cannot be read, or has no such mesh.
    """
    missing = "What its axes run on is not known here: the profile is not at hand; give --hardware FILE."
    if hardware is None and plan.hardware not in PRESETS:
        return (missing,)
    try:
        profile = load_profile(hardware or plan.hardware)
        topology = profile.topology(plan.mesh.axes, plan.mesh.shape)
    except ProfileError:
        if hardware is not None:
            raise
        return (missing,)
    lines = [f"Its axes: {'; '.join(_axes(topology, profile))}.", "Ranks count with the last axis fastest."]
    if profile.fingerprint != plan.hardware_fingerprint:
        lines.append(f"The plan was priced with another version of {profile.name} than this.")
    return tuple(lines)


def _axes(topology: Topology, profile: Profile) -> Iterator[str]:
    network = profile.network
    for axis, size, route in zip(topology.axes, topology.shape, topology.routes):
        if size == 1:
            yield f"{axis} has one rank"
        elif route.levels:
            levels = " and ".join(f"{link.name} ({_rate(link.bandwidth_bytes_per_s)})" for _, link in route.levels)
            yield f"{axis} inside and across hosts, on {levels}"
        elif not isinstance(network, Hosts):
            yield f"{axis} on {route.link.name}, {_rate(route.link.bandwidth_bytes_per_s)}, as measured"
        else:
            place = "across hosts" if route.link == network.inter_host else "inside a host"
            of = f" of {network.devices_per_host}" if network.devices_per_host and place == "inside a host" else ""
            yield f"{axis} {place}{of}, on {route.link.name}, {_rate(route.link.bandwidth_bytes_per_s)}"


def _rate(bytes_per_s: float) -> str:
    """``450 GB/s``, per device and direction."""
    return f"{bytes_per_s / 1e9:.3g} GB/s a device"
