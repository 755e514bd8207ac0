"""Reads and writes whole problems: groups, networks, ties, fixed choices, budgets, several loads of a node.

    {"solver_problem": 3,                                     the version of the format; always the first member
     "name": text, "offset": integer,
     "usage_limit": integer or null, "usage_price": integer or null,
     "arrays": [[integers] ...],                              what the others name by its place in this list: @
     "nodes": [{"name": text, "costs": @, "loads": [{"interval": [lo, hi], "usages": @} ...]} ...],
     "edges": [{"u": node, "v": node, "rows": @, "cols": @, "costs": @ row by row, "shape": [R, C]} ...],
     "groups": [[edges] ...], "ties": [[nodes] ...], "fixed": [[node, strategy] ...],
     "budgets": [{"name": text, "limit": integer, "usages": [[node, @] ...]} ...],
     "networks": [{"name": text, "vertices": integer, "tails": @, "heads": @, "costs": @,
                   "producer": node, "makes": @, "forward": [[node, @] ...], "backward": [[node, @] ...],
                   "kept": true or false, "sizes": @ or null, "held": true or false,
                   "again": [node, @] or null,
                   "lives": [{"made": step, "reads": [[at, until] ...], "again": step or null,
                              "base": [network, life, consumer, consumer or null] or null} ...]} ...]}

Plain or gzipped JSON, all members present, none beside. Networks of version 1 have no sizes, held, lives and again;
those of version 2 no again, and bases of three numbers. A cost of
10^18 means forbidden or absent. Equal problems are written as equal bytes, and every array once however many share it.
`docs/solver_problem.schema.json` says the same to editors; what a schema cannot say (indices in range, arrays of one
length) is checked here and in `solver.problem`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from . import iopddl
from .documents import FormatError, parse_document, read_document, write_document
from .networks import Base, Consumer, Life, Network
from .problem import Budget, Edge, Group, IntArray, Load, Node, Problem, ProblemError

MARK = "solver_problem"
VERSION = 3

_LARGEST = int(np.iinfo(np.int64).max)

T = TypeVar("T")


def read_problem(path: str | Path) -> Problem:
    """The problem in the file, in this format or in the IOPDDL one.

    Raises:
        FormatError: the file is in neither format, or an entry breaks an invariant; with the path in the text.
        OSError: the file cannot be read.
    """
    return read_document(path, _in_either_format)


def parse_problem(text: str) -> Problem:
    """The problem in the text, in either format; raises FormatError."""
    return _in_either_format(parse_document(text))


def write_problem(problem: Problem, path: str | Path) -> None:
    """Writes the problem in this format, gzipped where the path ends in .gz."""
    write_document(path, dump_problem(problem))


def dump_problem(problem: Problem) -> str:
    """The text of the file: a line for each entry of a list."""
    members = (f"{json.dumps(key)}: {_lines(value)}" for key, value in _Writer().document(problem).items())
    return "{" + ",\n".join(members) + "}\n"


def _lines(value: Any) -> str:
    if not isinstance(value, list) or not value:
        return json.dumps(value)
    return "[\n" + ",\n".join(json.dumps(entry, separators=(",", ":")) for entry in value) + "]"


def _in_either_format(document: Any) -> Problem:
    if not isinstance(document, dict) or MARK not in document:
        return iopddl.problem_of(document)
    version = document[MARK]
    if version is True or version not in range(1, VERSION + 1):
        raise FormatError(f"{MARK} is {version!r}: this solver reads versions 1 to {VERSION}")
    return _Reader(document).problem()


class _Writer:
    """Collects the arrays in the order of their first use."""

    def __init__(self) -> None:
        self.arrays: list[list[int]] = []
        # Arrays are kept beside their places, so that no id is reused while the writer lives.
        self._by_id: dict[int, tuple[IntArray, int]] = {}
        self._by_content: dict[bytes, int] = {}

    def document(self, problem: Problem) -> dict[str, Any]:
        nodes = [self._node(node) for node in problem.nodes]
        edges = [self._edge(edge) for edge in problem.edges]
        budgets = [
            {"name": budget.name, "limit": budget.limit, "usages": self._by_node(sorted(budget.usages.items()))}
            for budget in problem.budgets
        ]
        networks = [self._network(network) for network in problem.networks]
        return {
            MARK: VERSION,
            "name": problem.name,
            "offset": problem.offset,
            "usage_limit": problem.usage_limit,
            "usage_price": problem.usage_price,
            "arrays": self.arrays,
            "nodes": nodes,
            "edges": edges,
            "groups": [list(group.edges) for group in problem.groups],
            "ties": [list(tie) for tie in problem.ties],
            "fixed": [list(pair) for pair in sorted(problem.fixed.items())],
            "budgets": budgets,
            "networks": networks,
        }

    def _node(self, node: Node) -> dict[str, Any]:
        loads = [{"interval": list(interval), "usages": self._place(usages)} for interval, usages in node.loads]
        return {"name": node.name, "costs": self._place(node.costs), "loads": loads}

    def _edge(self, edge: Edge) -> dict[str, Any]:
        places = {"rows": self._place(edge.rows), "cols": self._place(edge.cols), "costs": self._place(edge.costs)}
        return {"u": edge.u, "v": edge.v, **places, "shape": list(edge.costs.shape)}

    def _network(self, network: Network) -> dict[str, Any]:
        return {
            "name": network.name,
            "vertices": network.vertices,
            "tails": self._place(network.tails),
            "heads": self._place(network.heads),
            "costs": self._place(network.costs),
            "producer": network.producer,
            "makes": self._place(network.makes),
            "forward": self._by_node(network.forward),
            "backward": self._by_node(network.backward),
            "kept": network.kept,
            "sizes": None if network.sizes is None else self._place(network.sizes),
            "held": network.held,
            "again": None if network.again is None else self._by_node([network.again])[0],
            "lives": [self._life(life) for life in network.lives],
        }

    @staticmethod
    def _life(life: Life) -> dict[str, Any]:
        base = None if life.base is None else list(life.base)
        return {"made": life.made, "reads": [list(read) for read in life.reads], "again": life.again, "base": base}

    def _by_node(self, pairs: Any) -> list[list[int]]:
        return [[node, self._place(np.asarray(values, np.int64))] for node, values in pairs]

    def _place(self, array: IntArray) -> int:
        if id(array) not in self._by_id:
            flat = np.ascontiguousarray(array).ravel()
            place = self._by_content.setdefault(flat.tobytes(), len(self.arrays))
            if place == len(self.arrays):
                self.arrays.append(flat.tolist())
            self._by_id[id(array)] = (array, place)
        return self._by_id[id(array)][1]


class _Reader:
    """Takes a document apart; every error names the place, such as `networks[3].heads`."""

    def __init__(self, document: dict[str, Any]) -> None:
        self.document = document
        self.version = VERSION
        self.arrays: list[IntArray] = []
        self._matrices: dict[tuple[int, int, int], IntArray] = {}

    def problem(self) -> Problem:
        of = _Members(self.document)
        self.version = of.integer(MARK)
        self.arrays = of.rows("arrays")
        offset, name = of.integer("offset"), of.text("name")
        limit, price = (of.integer(key, or_null=True) for key in ("usage_limit", "usage_price"))
        nodes = of.each("nodes", self._node)
        edges = of.each("edges", self._edge)
        groups = tuple(Group(tuple(edges.tolist())) for edges in of.rows("groups"))
        ties = tuple(tuple(nodes.tolist()) for nodes in of.rows("ties"))
        fixed = dict(_pairs(of.rows("fixed"), "fixed", "[node, strategy]"))
        budgets = of.each("budgets", self._budget)
        networks = of.each("networks", self._network)
        of.end()
        return Problem(nodes, edges, groups, ties, fixed, limit, name, offset, price, budgets, networks)

    def _node(self, of: _Members) -> Node:
        return Node(of.text("name"), self._array(of, "costs"), further_loads=of.each("loads", self._load))

    def _load(self, of: _Members) -> Load:
        lo, hi = of.two("interval")
        if not 0 <= lo <= hi:
            raise FormatError(f"interval is [{lo}, {hi}]: expected 0 <= lo <= hi")
        return Load((lo, hi), self._array(of, "usages"))

    def _edge(self, of: _Members) -> Edge:
        rows, columns = of.two("shape")
        flat = self._array(of, "costs")
        if rows < 1 or columns < 1 or rows * columns != len(flat):
            raise FormatError(f"costs has {len(flat)} entries: expected {rows} x {columns}, its shape")
        key = id(flat), rows, columns
        costs = self._matrices.setdefault(key, flat.reshape(rows, columns))
        return Edge(of.integer("u"), of.integer("v"), self._array(of, "rows"), self._array(of, "cols"), costs)

    def _budget(self, of: _Members) -> Budget:
        return Budget(of.text("name"), of.integer("limit"), dict(self._by_node(of, "usages")))

    def _network(self, of: _Members) -> Network:
        return Network(
            of.text("name"),
            of.integer("vertices"),
            self._array(of, "tails"),
            self._array(of, "heads"),
            self._array(of, "costs"),
            of.integer("producer"),
            self._array(of, "makes"),
            tuple(Consumer(*pair) for pair in self._by_node(of, "forward")),
            tuple(Consumer(*pair) for pair in self._by_node(of, "backward")),
            of.boolean("kept"),
            *(self._memory(of) if self.version > 1 else ()),
        )

    def _memory(self, of: _Members) -> tuple[IntArray | None, tuple[Life, ...], bool, Consumer | None]:
        sizes = of.integer("sizes", or_null=True)
        again = of.numbers_or_null("again", 2) if self.version > 2 else None
        return (
            None if sizes is None else self._at(sizes, "sizes"),
            of.each("lives", self._life),
            of.boolean("held"),
            None if again is None else Consumer(again[0], self._at(again[1], "again")),
        )

    def _life(self, of: _Members) -> Life:
        reads = _pairs(of.rows("reads"), "reads", "[at, until]")
        is_late = self.version > 2
        base = of.numbers_or_null("base", 4 if is_late else 3, last_or_null=is_late)
        again = of.integer("again", or_null=True) if is_late else None
        return Life(of.integer("made"), tuple(reads), None if base is None else Base(*base), again)

    def _by_node(self, of: _Members, key: str) -> list[tuple[int, IntArray]]:
        pairs = _pairs(of.rows(key), key, "[node, array]")
        return [(node, self._at(place, f"{key}[{k}]")) for k, (node, place) in enumerate(pairs)]

    def _array(self, of: _Members, key: str) -> IntArray:
        return self._at(of.integer(key), key)

    def _at(self, place: int, where: str) -> IntArray:
        if not 0 <= place < len(self.arrays):
            raise FormatError(f"{where} names array {place}, but the arrays are 0 .. {len(self.arrays) - 1}")
        return self.arrays[place]


def _pairs(rows: list[IntArray], where: str, expected: str) -> list[tuple[int, int]]:
    for k, row in enumerate(rows):
        if len(row) != 2:
            raise FormatError(f"{where}[{k}] has {len(row)} numbers: expected {expected}")
    return [(int(first), int(second)) for first, second in rows]


class _Members:
    """The members of one object, each taken once and of its kind."""

    def __init__(self, members: Any) -> None:
        if not isinstance(members, dict):
            raise FormatError(f"expected an object, found {_shown(members)}")
        self.members = members
        self.taken: set[str] = set()

    def integer(self, key: str, *, or_null: bool = False) -> Any:
        value = self._take(key)
        if (value is None and or_null) or _is_integer(value):
            return value
        raise FormatError(f"{key} must be an integer that fits int64{' or null' * or_null}, found {_shown(value)}")

    def text(self, key: str) -> str:
        value = self._take(key)
        if not isinstance(value, str):
            raise FormatError(f"{key} must be text, found {_shown(value)}")
        return value

    def boolean(self, key: str) -> bool:
        value = self._take(key)
        if not isinstance(value, bool):
            raise FormatError(f"{key} must be true or false, found {_shown(value)}")
        return value

    def two(self, key: str) -> tuple[int, int]:
        value = self._take(key)
        if not (isinstance(value, list) and len(value) == 2 and all(map(_is_integer, value))):
            raise FormatError(f"{key} must be two integers, found {_shown(value)}")
        return value[0], value[1]

    def numbers_or_null(self, key: str, count: int, *, last_or_null: bool = False) -> list[Any] | None:
        """So many integers, of which the last may be null."""
        value = self._take(key)
        if value is None:
            return None
        if isinstance(value, list) and len(value) == count:
            integers = value[:-1] if last_or_null and value[-1] is None else value
            if all(map(_is_integer, integers)):
                return value
        last = " (the last or null)" * last_or_null
        raise FormatError(f"{key} must be {count} integers{last} or null, found {_shown(value)}")

    def rows(self, key: str) -> list[IntArray]:
        """Lists of integers. Inside lists of objects they arrive as lists, elsewhere as arrays."""
        value = self._take(key)
        if not isinstance(value, list):
            raise FormatError(f"{key} must be a list of lists of integers, found {_shown(value)}")
        for k, row in enumerate(value):
            if not isinstance(row, np.ndarray) and not (isinstance(row, list) and all(map(_is_integer, row))):
                raise FormatError(f"{key}[{k}] must be a list of integers, found {_shown(row)}")
        return [np.asarray(row, np.int64) for row in value]

    def each(self, key: str, make: Callable[[_Members], T]) -> tuple[T, ...]:
        """What `make` builds of every object in a list; errors get the place in front."""
        value = self._take(key)
        if not isinstance(value, list):
            raise FormatError(f"{key} must be a list of objects, found {_shown(value)}")
        return tuple(self._made(f"{key}[{k}]", entry, make) for k, entry in enumerate(value))

    def end(self) -> None:
        """No member may be left."""
        unknown = sorted(self.members.keys() - self.taken)
        if unknown:
            raise FormatError(f"unknown member {unknown[0]!r}: expected {', '.join(sorted(self.taken))}")

    def _take(self, key: str) -> Any:
        if key not in self.members:
            raise FormatError(f"member {key!r} is missing")
        self.taken.add(key)
        return self.members[key]

    @staticmethod
    def _made(where: str, entry: Any, make: Callable[[_Members], T]) -> T:
        try:
            members = _Members(entry)
            made = make(members)
            members.end()
            return made
        except ProblemError as error:
            raise FormatError(f"{where}: {error}") from None


def _shown(value: Any) -> str:
    return f"{value!r:.60}"


def _is_integer(value: Any) -> bool:
    return type(value) is int and abs(value) <= _LARGEST
