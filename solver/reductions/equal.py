"""Networks that say the same are said once, at a multiple of the price.

Networks are equal if they have the same vertices, arcs and prices, the same producer with the same map, the same
consumers with the same maps in each phase, and keep copies alike. Tied layers give such images. Exact because what is
cheapest for one of k is cheapest for each, so one network at k times the prices stands for all.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

from ..networks import Consumer, Network
from ..problem import IntArray, Problem, identity
from .reduction import Outcome, Pool, Reduced, Rerouting


def merge_equal_networks(problem: Problem) -> Outcome:
    """The problem with one network for each class of equal ones."""
    pool = Pool()
    classes: dict[Hashable, list[Network]] = {}
    keys = [_key(pool, network) for network in problem.networks]
    for key, network in zip(keys, problem.networks, strict=True):
        classes.setdefault(key, []).append(network)
    if len(classes) == len(problem.networks):
        return None
    place = {key: position for position, key in enumerate(classes)}
    times: dict[tuple[int, int], IntArray] = {}

    def merged(members: list[Network]) -> Network:
        first, count = members[0], len(members)
        key = id(pool(first.costs)), count
        if key not in times:
            times[key] = pool(first.costs) * count
        return replace(first, costs=times[key])

    networks = tuple(merged(members) for members in classes.values())
    way_back = Rerouting(
        [place[key] for key in keys], [identity(len(network.costs)) for network in problem.networks], len(networks)
    )
    return Reduced(replace(problem, networks=networks), way_back)


def _key(pool: Pool, network: Network) -> Hashable:
    def ends(consumers: tuple[Consumer, ...]) -> tuple[tuple[int, int], ...]:
        return tuple(sorted((node, id(pool(wants))) for node, wants in consumers))

    arrays = (network.tails, network.heads, network.costs, network.makes)
    phases = ends(network.forward), ends(network.backward)
    return (network.vertices, network.producer, network.kept, *phases, *(id(pool(array)) for array in arrays))
