"""Small random problems for the laws: groups, networks, ties, fixed choices, absent pairs, memory tight and loose."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from solver import INFEASIBLE, NOWHERE, Base, Budget, Consumer, Edge, Group, Life, Load, Network, Node, Problem


def random_problem(seed: int) -> Problem:
    """A problem with at most a few thousand assignments; the same seed gives the same problem."""
    rng = random.Random(seed)
    kinds = _kinds(rng)
    nodes = tuple(_node(rng, index, size) for index, size in enumerate(kinds))
    edges: list[Edge] = []
    groups: list[Group] = []
    for _ in range(rng.randint(0, len(nodes) + 2)):
        if len(nodes) < 2:
            break
        if rng.random() < 0.4:
            _add_group(rng, nodes, edges, groups)
        else:
            u, v = rng.sample(range(len(nodes)), 2)
            edges.append(_edge(rng, nodes, u, v))
    if rng.random() < 0.3:
        nodes = _with_twin(rng, nodes, edges, groups)
        kinds = [len(node.costs) for node in nodes]
    ties = _ties(rng, kinds)
    networks = _networks(rng, kinds, ties) if rng.random() < 0.5 else ()
    fixed = {node: rng.randrange(kinds[node]) for node in range(len(nodes)) if rng.random() < 0.1}
    most = sum(int(node.usages.max()) for node in nodes if node.usages is not None)
    limit = None if rng.random() < 0.3 else rng.randint(most // 4, most + 1)
    price = rng.randint(0, 4) if limit is not None and rng.random() < 0.3 else None
    budgets = _budgets(rng, kinds) if price is None and rng.random() < 0.3 else ()
    offset = rng.randint(-5, 5)
    name = f"random {seed}"
    return Problem(nodes, tuple(edges), tuple(groups), ties, fixed, limit, name, offset, price, budgets, networks)


def random_networks(seed: int) -> Problem:
    """A problem of networks alone, without memory; the same seed gives the same problem."""
    rng = random.Random(seed)
    kinds = _kinds(rng)
    nodes = tuple(Node(f"n{k}", np.array([_cost(rng, 0.02) for _ in range(size)])) for k, size in enumerate(kinds))
    ties = _ties(rng, kinds)
    return Problem(nodes, (), ties=ties, networks=_networks(rng, kinds, ties))


def random_lives(seed: int) -> Problem:
    """A problem of a few networks whose copies hold memory, views among them, under a limit; without ties."""
    rng = random.Random(seed)
    kinds = [rng.choice([1, 2, 2, 3]) for _ in range(rng.randint(2, 4))]
    networks: list[Network] = []
    while len(networks) < rng.randint(1, 2):
        network = _small(rng, _network(rng, f"w{len(networks)}", kinds))
        network = _optional(rng, network, kinds)
        sizes = np.array([rng.randint(0, 9) for _ in range(network.vertices)], np.int64)
        lives = (_life(rng, network, rng.randint(0, 3)),)
        networks.append(replace(network, sizes=sizes, lives=lives, held=rng.random() < 0.3))
        late = len(network.forward) if network.backward else 0  # see solver.backends.holdings on views of the forward
        reads = [k for k, (at, until) in enumerate(lives[0].reads) if lives[0].made < until - 1 and at < until]
        reads = [k for k in reads if k >= late and network.consumers[k].wants.min() != NOWHERE]
        if reads and rng.random() < 0.7:
            networks.append(_view(rng, networks[-1], len(networks) - 1, rng.choice(reads), kinds))
    nodes = []
    for k, size in enumerate(kinds):
        lo = rng.randint(0, 4)
        load = Load((lo, lo + rng.randint(0, 4)), np.array([rng.randint(0, 4) for _ in range(size)]))
        nodes.append(Node(f"n{k}", np.array([_cost(rng, 0.02) for _ in range(size)]), further_loads=(load,)))
    limit = rng.randint(5, 25)
    price = rng.randint(0, 3) if rng.random() < 0.2 else None
    edges = tuple(_only_again(rng, networks))
    return Problem(tuple(nodes), edges, usage_limit=limit, usage_price=price, networks=tuple(networks))


def _only_again(rng: random.Random, networks: list[Network]) -> Iterator[Edge]:
    """Edges that let some consumers of the backward want a tensor only where it is made again."""
    for network in networks:
        for node, wants in () if network.again is None else network.backward:
            again = network.again
            assert again is not None
            if node != again.node and wants.min() == NOWHERE and rng.random() < 0.5:
                first, second = (again.wants != NOWHERE).astype(np.int64), (wants != NOWHERE).astype(np.int64)
                prices = np.array([[0, INFEASIBLE], [rng.choice([0, INFEASIBLE]), 0]], np.int64)
                ends = (again.node, node, first, second, prices)
                yield Edge(*ends) if rng.random() < 0.5 else Edge(node, again.node, second, first, prices.T.copy())


def _small(rng: random.Random, network: Network) -> Network:
    """The network on three vertices at most, with arcs that lead around."""
    count = min(network.vertices, 3)
    around = rng.sample(range(count), count)
    arcs = list(zip(around, around[1:] + around[:1], strict=True)) if count > 1 else []
    tails, heads = (np.array([arc[end] for arc in arcs], np.int64) for end in (0, 1))
    costs = np.array([rng.choice([0, rng.randint(1, 9)]) for _ in arcs], np.int64)
    network = network.between(lambda node, vertices: Consumer(node, vertices % count))
    return replace(network, vertices=count, tails=tails, heads=heads, costs=costs)


def _life(rng: random.Random, network: Network, made: int, base: Base | None = None) -> Life:
    middle = made + rng.randint(0, 4)
    forward = [(at, rng.randint(at, middle)) for at in (rng.randint(made, middle) for _ in network.forward)]
    again = None if network.again is None else max(middle, made + 1) + rng.randint(0, 1)
    middle = middle if again is None else again
    backward = [(at, at + rng.randint(0, 2)) for at in (rng.randint(middle, middle + 3) for _ in network.backward)]
    return Life(made, (*forward, *backward), base, again)


def _optional(rng: random.Random, network: Network, kinds: list[int]) -> Network:
    """The network, perhaps with one that makes it again, and with consumers of the backward that may want nothing."""

    def or_nowhere(end: Consumer) -> Consumer:
        return Consumer(end.node, np.array([NOWHERE if rng.random() < 0.4 else vertex for vertex in end.wants]))

    if rng.random() < 0.5:
        return network
    backward = tuple(or_nowhere(end) if rng.random() < 0.5 else end for end in network.backward)
    node = rng.randrange(len(kinds))
    again = or_nowhere(Consumer(node, _classes(rng, kinds[node], network.vertices))) if rng.random() < 0.7 else None
    return replace(network, backward=backward, again=again)


def _view(rng: random.Random, base: Network, number: int, consumer: int, kinds: list[int]) -> Network:
    """A network of what a consumer of another makes as a view, while it reads."""
    network = _network(rng, f"view of {number}", kinds)
    node = base.consumers[consumer].node
    makes = _classes(rng, kinds[node], network.vertices)
    network = _small(rng, replace(network, producer=node, makes=makes))
    sizes = np.array([rng.randint(0, 9) for _ in range(network.vertices)], np.int64)
    (life,) = base.lives
    at, until = life.reads[consumer]
    made = rng.randint(max(at, life.made + 1), until - 1)
    found = _life(rng, network, made, Base(number, 0, consumer))
    return _made_again(rng, replace(network, sizes=sizes, lives=(found,)), base, kinds)


def _made_again(rng: random.Random, view: Network, base: Network, kinds: list[int]) -> Network:
    """The view, perhaps made again by another consumer of what it looks at."""
    (life,), (of_base,) = view.lives, base.lives
    assert life.base is not None
    forward = life.reads[: len(view.forward)]
    first = max([life.made + 1, *(until for _, until in forward)])
    late = [
        k
        for k, (at, until) in enumerate(of_base.reads)
        if k >= len(base.forward) and k != life.base.consumer and first <= at < until
    ]
    if not late or rng.random() < 0.3:
        return view
    other = rng.choice(late)
    node, wants = base.consumers[other]
    makes = np.where(wants == NOWHERE, NOWHERE, _classes(rng, kinds[node], view.vertices))
    at = of_base.reads[other][0]
    backward = [(max(at, low), max(at, high)) for low, high in life.reads[len(view.forward) :]]
    life = Life(life.made, (*forward, *backward), life.base._replace(again=other), at)
    return replace(view, lives=(life,), again=Consumer(node, makes))


def _networks(rng: random.Random, sizes: list[int], ties: tuple[tuple[int, ...], ...]) -> tuple[Network, ...]:
    """A few networks, some of them with an image for every member of a tie, at a multiple of the price."""
    networks = []
    for index in range(rng.randint(1, 3)):
        network = _network(rng, f"w{index}", sizes)
        networks.append(network)
        for tie in ties:
            own = next((node for node, _ in network.ends if node in tie), None)
            if own is not None and rng.random() < 0.6:
                images = [_image(network, own, other) for other in tie if other != own]
                networks += [replace(image, costs=rng.choice([1, 1, 3]) * image.costs) for image in images]
    return tuple(networks)


def _network(rng: random.Random, name: str, sizes: list[int]) -> Network:
    vertices = rng.randint(1, 5)
    arcs = rng.randint(0, 6)
    tails, heads = (np.array(rng.choices(range(vertices), k=arcs), np.int64) for _ in range(2))
    costs = np.array([rng.choice([0, rng.randint(0, 9), rng.randint(1, 9)]) for _ in range(arcs)], np.int64)

    def at(node: int) -> Consumer:
        return Consumer(node, _classes(rng, sizes[node], vertices))

    producer = at(rng.randrange(len(sizes)))
    forward, backward = (
        tuple(at(node) for node in rng.choices(range(len(sizes)), k=rng.choice([0, 1, 1, 2, 3]))) for _ in range(2)
    )
    kept = rng.random() < 0.6
    return Network(name, vertices, tails, heads, costs, *producer, forward, backward, kept)


def _image(network: Network, node: int, other: int) -> Network:
    """The network with two nodes exchanged that have equally many strategies."""
    exchanged = {node: other, other: node}
    return network.between(lambda end, vertices: Consumer(exchanged.get(end, end), vertices))


def _budgets(rng: random.Random, sizes: list[int]) -> tuple[Budget, ...]:
    budgets = []
    for name in ("first", "second")[: rng.randint(1, 2)]:
        users = [node for node in range(len(sizes)) if rng.random() < 0.6]
        usages = {node: np.array([rng.randint(0, 9) for _ in range(sizes[node])]) for node in users}
        most = sum(int(units.max()) for units in usages.values())
        budgets.append(Budget(name, rng.randint(most // 3, most + 3), usages))
    return tuple(budgets)


def _kinds(rng: random.Random) -> list[int]:
    return [rng.choice([1, 2, 2, 3, 3, 4]) for _ in range(rng.randint(1, 6))]


def _node(rng: random.Random, index: int, size: int) -> Node:
    costs = np.array([_cost(rng, 0.05, negative=True) for _ in range(size)])
    if rng.random() < 0.2:
        return Node(f"n{index}", costs)
    lo = rng.randint(0, 4)
    return Node(f"n{index}", costs, np.array([rng.randint(0, 6) for _ in range(size)]), (lo, lo + rng.randint(0, 4)))


def _cost(rng: random.Random, absent: float, *, negative: bool = False) -> int:
    return INFEASIBLE if rng.random() < absent else rng.choice([0, 0, rng.randint(-6 if negative else 0, 9)])


def _matrix(rng: random.Random, shape: tuple[int, int], *, negative: bool) -> np.ndarray:
    absent = rng.choice([0.0, 0.0, 0.2, 0.5])
    kind = rng.random()
    if kind < 0.15:
        return np.add.outer(rng.choices(range(9), k=shape[0]), rng.choices(range(9), k=shape[1])).astype(np.int64)
    if kind < 0.3:
        return np.where(np.arange(shape[0])[:, None] == np.arange(shape[1])[None, :] % shape[0], 0, INFEASIBLE)
    return np.array([[_cost(rng, absent, negative=negative) for _ in range(shape[1])] for _ in range(shape[0])])


def _classes(rng: random.Random, size: int, count: int) -> np.ndarray:
    return np.array([rng.randrange(count) for _ in range(size)])


def _edge(rng: random.Random, nodes: tuple[Node, ...], u: int, v: int) -> Edge:
    sizes = len(nodes[u].costs), len(nodes[v].costs)
    if rng.random() < 0.5:
        return Edge.dense(u, v, _matrix(rng, sizes, negative=True))
    shape = rng.randint(1, 3), rng.randint(1, 3)
    costs = _matrix(rng, shape, negative=True)
    return Edge(u, v, _classes(rng, sizes[0], shape[0]), _classes(rng, sizes[1], shape[1]), costs)


def _add_group(rng: random.Random, nodes: tuple[Node, ...], edges: list[Edge], groups: list[Group]) -> None:
    u = rng.randrange(len(nodes))
    consumers = rng.choices([node for node in range(len(nodes)) if node != u], k=rng.randint(1, 3))
    shape = rng.randint(1, 3), rng.randint(1, 4)
    rows, costs = _classes(rng, len(nodes[u].costs), shape[0]), _matrix(rng, shape, negative=False)
    first = len(edges)
    edges += [Edge(u, v, rows, _classes(rng, len(nodes[v].costs), shape[1]), costs) for v in consumers]
    groups.append(Group(tuple(range(first, len(edges)))))


def _with_twin(rng: random.Random, nodes: tuple[Node, ...], edges: list[Edge], groups: list[Group]) -> tuple[Node, ...]:
    """One or two copies of a node with all that is around it, most of them without memory."""
    chosen = rng.randrange(len(nodes))
    node = nodes[chosen] if rng.random() < 0.3 else Node(nodes[chosen].name, nodes[chosen].costs)
    nodes = (*nodes[:chosen], node, *nodes[chosen + 1 :])
    group_of = {edge: index for index, group in enumerate(groups) for edge in group.edges}
    around = [index for index, edge in enumerate(edges) if chosen in (edge.u, edge.v)]
    for _ in range(rng.randint(1, 2) if len(nodes) < 6 else 1):
        own: dict[int, list[int]] = {}
        for index in around:
            edge = edges[index]
            u, v = (len(nodes) if end == chosen else end for end in (edge.u, edge.v))
            edges.append(Edge(u, v, edge.rows, edge.cols, edge.costs))
            if index in group_of and edge.v == chosen:
                group = groups[group_of[index]]
                groups[group_of[index]] = Group((*group.edges, len(edges) - 1))
            elif index in group_of:
                own.setdefault(group_of[index], []).append(len(edges) - 1)
        groups += [Group(tuple(members)) for members in own.values()]
        nodes = (*nodes, Node(f"n{len(nodes)}", node.costs, node.usages, node.interval))
    return nodes


def _ties(rng: random.Random, sizes: list[int]) -> tuple[tuple[int, ...], ...]:
    if rng.random() < 0.5:
        return ()
    size = rng.choice(sizes)
    same = [node for node, other in enumerate(sizes) if other == size and rng.random() < 0.7]
    return (tuple(same),) if same else ()
