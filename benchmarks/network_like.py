"""Redistribution as flow, measured: made-up networks of the size that a large model on a mesh has.

    python benchmarks/network_like.py                    # like Llama-3-8B on two axes of 8: some 35,000 arcs once tied
    python benchmarks/network_like.py --axes 3           # like the same on 2x4x8
    python benchmarks/network_like.py --write net.json.gz  # for `python -m solver net.json.gz`

It prints the size after every reduction, that of the integer program, and CPU seconds: machines are shared.

A training step of identical layers: operators in a chain with skips, forward and backward in mirror image; a backward
operator also reads what its forward operator made. A layout is a placement per mesh axis: replicated, cut along one of
three dims, or partial; a step changes one placement, at a price that goes with the size of the shard. An operator has a
strategy for each layout of its result. A pointwise one wants its inputs as it makes its result; a product needs them
whole where its result is cut along the last dim, and cut along that dim where its result is partial. Sizes and prices
are made up.
"""

from __future__ import annotations

import argparse
import sys
import time
from itertools import product
from pathlib import Path

# A neighbour of this file is called like the package that it needs: look for the package first.
sys.path[0] = str(Path(__file__).resolve().parents[1])

import numpy as np  # noqa: E402

from solver import BACKENDS, Consumer, Network, Node, Problem, solve  # noqa: E402
from solver.backends.integer_program import build  # noqa: E402
from solver.problem_file import write_problem  # noqa: E402
from solver.reductions import Chain, reduce  # noqa: E402

LAYERS = 32
OPERATORS = 110
CUTS = 3
REPLICATED, PARTIAL = 0, CUTS + 1
PRODUCT_SHARE = 0.4
PARTS = 8
SKIP_SHARE = 0.3


def network_like(axes: int, layers: int, seed: int) -> Problem:
    """The problem of a made-up training step; the same arguments give the same one."""
    rng = np.random.default_rng(seed)
    vertices = list(product(range(PARTIAL + 1), repeat=axes))
    tails, heads, prices = _steps(vertices)
    layer = _Layer(rng, vertices, prices)
    nodes: list[Node] = []
    networks: list[Network] = []
    for k in range(layers):
        first, after = k * 2 * OPERATORS, (k + 1) % layers * 2 * OPERATORS
        for i in range(2 * OPERATORS):
            nodes.append(Node(f"{k}.{i}", layer.costs[i]))
            ends = [(first + j if j < 2 * OPERATORS else after + j - 2 * OPERATORS, j) for j in layer.readers[i]]
            forward = tuple(Consumer(node, layer.wants[i, j]) for node, j in ends if i < OPERATORS > j)
            backward = tuple(Consumer(node, layer.wants[i, j]) for node, j in ends if not i < OPERATORS > j)
            arcs = tails, heads, layer.prices[i]
            networks.append(Network(f"{k}.{i}", len(vertices), *arcs, first + i, layer.makes, forward, backward))
    ties = tuple(tuple(range(i, len(nodes), 2 * OPERATORS)) for i in range(2 * OPERATORS)) if layers > 1 else ()
    return Problem(tuple(nodes), (), ties=ties, name="network-like", networks=tuple(networks))


class _Layer:
    """What the layers have in common: arrays by operator, so that all layers share them."""

    def __init__(self, rng: np.random.Generator, vertices: list[tuple[int, ...]], prices: np.ndarray) -> None:
        sizes = 2 ** rng.integers(4, 12, OPERATORS)
        place = {placements: v for v, placements in enumerate(vertices)}
        shares = np.array([PARTS ** placements.count(REPLICATED) for placements in vertices])
        products = rng.random(2 * OPERATORS) < PRODUCT_SHARE
        self.readers = {i: self._readers(rng, i) for i in range(2 * OPERATORS)}
        self.costs, self.prices = [], []
        self.makes = np.arange(len(vertices))
        self.wants: dict[tuple[int, int], np.ndarray] = {}
        for i in range(2 * OPERATORS):
            size = int(sizes[min(i, 2 * OPERATORS - 1 - i)])
            self.costs.append(40 * size * shares + rng.integers(0, 50, len(vertices)))
            self.prices.append(prices * size)
            for j in self.readers[i]:
                of = list(range(PARTIAL + 1))
                if products[j % len(products)]:
                    of[CUTS], of[PARTIAL] = REPLICATED, CUTS
                self.wants[i, j] = np.array([place[tuple(of[p] for p in placements)] for placements in vertices])

    @staticmethod
    def _readers(rng: np.random.Generator, i: int) -> list[int]:
        """The operators that read what operator i makes; those of the next layer count on."""
        readers = [i + 1]
        if rng.random() < SKIP_SHARE:
            readers.append(min(i + int(rng.integers(2, 6)), 2 * OPERATORS - 1))
        if i < OPERATORS - 1:
            readers.append(2 * OPERATORS - 1 - i)
        return sorted(set(readers))


def _steps(vertices: list[tuple[int, ...]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tails, heads and prices per unit of size: what gathers, reduces or exchanges a shard; cutting is free."""
    place = {placements: v for v, placements in enumerate(vertices)}
    arcs = []
    for before, axis, new in product(vertices, range(len(vertices[0])), range(PARTIAL)):
        old = before[axis]
        after = (*before[:axis], new, *before[axis + 1 :])
        if old == new:
            continue
        shards = sum(0 < placement <= CUTS for k, placement in enumerate(before) if k != axis)
        price = PARTS ** (len(before) - shards) if old != REPLICATED else 0
        arcs.append((place[before], place[after], price * (2 if (old, new) == (PARTIAL, REPLICATED) else 1)))
    tails, heads, prices = np.array(arcs, np.int64).T.copy()
    return tails, heads, prices


def measure(problem: Problem, backend: str, time_limit_s: float) -> None:
    """Prints sizes and CPU seconds."""
    started_s = time.process_time()
    chain = reduce(problem)
    assert isinstance(chain, Chain)
    reduced_s = time.process_time()
    program = build(chain.problem)
    built_s = time.process_time()
    for what, of in (("as made", problem), ("reduced", chain.problem)):
        print(f"{what:10}{len(of.nodes):8} nodes {of.strategies:9} strategies {of.arcs:9} arcs")
    print(f"{'program':10}{len(program.costs):8} variables {len(program.lower):9} rows")
    print(f"CPU        {reduced_s - started_s:8.2f} s reduce {built_s - reduced_s:8.2f} s build")
    solution = solve(problem, backend=backend, time_limit_s=time_limit_s)
    print(f"{backend:10} {time.process_time() - built_s:8.2f} s, {solution.status.name.lower()}")
    print(f"cost {solution.cost}   bound {solution.bound}   gap {solution.gap:.3g}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--axes", type=int, choices=(1, 2, 3), default=2, help="of the mesh (default: 2)")
    parser.add_argument("--layers", type=int, default=LAYERS, help=f"identical ones (default: {LAYERS})")
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    parser.add_argument("--backend", choices=list(BACKENDS), default="auto", help="default: auto")
    parser.add_argument("--time-limit", type=float, default=600.0, metavar="SECONDS", help="default: 600")
    parser.add_argument("--write", metavar="FILE", help="write the problem instead")
    options = parser.parse_args()
    problem = network_like(options.axes, options.layers, options.seed)
    if options.write:
        write_problem(problem, options.write)
    else:
        measure(problem, options.backend, options.time_limit)


if __name__ == "__main__":
    main()
