"""Writes problems of the sizes of the IOPDDL contest's largest instances, all costs finite.

`python benchmarks/contest_like.py wide.json.gz` is like its largest graphs (65,000 nodes, up to 60 strategies),
`--shape mesh3d` like its 3-D meshes (180 strategies on thousands of nodes). Both are about 250 MB of JSON. Then
`python -m solver wide.json.gz --time-limit 240` solves one.

A training step: blocks of operators in a chain with skips, forward and then backward in mirror image. A parameter is
live throughout, an activation from its forward operator to its mirror image. A strategy lays a tensor out in one of a
few ways; an edge costs what one layout costs to become the other, with noise per pair of strategies. Sizes, prices and
the memory limit (a share of what the fastest strategies would use) are made up.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

# A neighbour of this file is called like the package that it needs: look for the package first.
sys.path[0] = str(Path(__file__).resolve().parents[1])

import numpy as np  # noqa: E402

from solver import Edge, Node, Problem  # noqa: E402
from solver.iopddl import write_problem  # noqa: E402


@dataclass(frozen=True)
class Shape:
    """How many nodes, which numbers of strategies they have and how often, and how many layouts there are."""

    nodes: int
    strategies: tuple[int, ...]
    shares: tuple[float, ...]
    layouts: int


SHAPES = {
    "wide": Shape(65_000, (1, 4, 9, 16, 36, 60), (0.1, 0.15, 0.25, 0.25, 0.2, 0.05), 9),
    "mesh3d": Shape(9_000, (1, 12, 27, 64, 180), (0.1, 0.3, 0.3, 0.15, 0.15), 27),
}
MEMORY_SHARE = 0.45
SKIP_SHARE = 0.3


def contest_like(shape: Shape, seed: int) -> Problem:
    """The problem of a made-up training step; the same shape and seed give the same one."""
    rng = np.random.default_rng(seed)
    half = shape.nodes // 2
    sizes = rng.choice(shape.strategies, half, p=shape.shares)
    sizes = np.concatenate([sizes, sizes[::-1]])
    layouts = [rng.integers(0, shape.layouts, size) for size in sizes]
    moves = rng.integers(1, 1000, (shape.layouts, shape.layouts)) * (1 - np.eye(shape.layouts, dtype=np.int64))
    bytes_of = 2 ** rng.integers(10, 24, half)
    nodes = tuple(_node(rng, k, half, int(sizes[k]), int(bytes_of[min(k, 2 * half - 1 - k)])) for k in range(2 * half))
    ends = [(k - 1, k) for k in range(1, 2 * half)]
    ends += [(k - int(rng.integers(2, 9)), k) for k in range(9, 2 * half) if rng.random() < SKIP_SHARE]
    ends += [(k, 2 * half - 1 - k) for k in range(0, half, 3) if k < half - 1]
    edges = []
    for u, v in ends:
        move = moves[np.ix_(layouts[u], layouts[v])]
        noise = rng.integers(0, 100, move.shape)
        edges.append(Edge.dense(u, v, move * int(bytes_of[min(u, 2 * half - 1 - u)] >> 10) + noise))
    return Problem(nodes, tuple(edges), usage_limit=_limit(nodes, 2 * half), name="contest-like")


def _node(rng: np.random.Generator, k: int, half: int, size: int, tensor: int) -> Node:
    """Faster strategies keep more: one that keeps a d-th of a tensor costs about d times the communication."""
    parts = 2 ** rng.integers(0, 6, size)
    costs = rng.integers(0, 1000, size) + parts * (tensor >> 12)
    if k % 4 == 0:
        interval = (0, 2 * half)
    else:
        interval = (k, 2 * half - 1 - k) if k < half else (k, min(2 * half, k + 5))
    return Node(str(k), costs, tensor // parts, interval if interval[0] < interval[1] else (0, 0))


def _limit(nodes: tuple[Node, ...], steps: int) -> int:
    changes = np.zeros(steps + 1, np.int64)
    for node in nodes:
        for (lo, hi), usages in node.loads:
            used = usages[node.costs.argmin()]
            changes[lo] += used
            changes[hi] -= used
    return int(MEMORY_SHARE * np.cumsum(changes).max())


def main() -> None:
    """Writes one problem."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("output", help="plain or gzipped (.gz) JSON")
    parser.add_argument("--shape", choices=SHAPES, default="wide")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    write_problem(contest_like(SHAPES[options.shape], options.seed), options.output)


if __name__ == "__main__":
    main()
