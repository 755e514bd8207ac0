"""The model's modules as a tree, with what each computes and communicates."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from ...micro_batches import operator_runs
from ..plan import Redistribution, ShardingPlan
from ..text.folded_plan import FoldedPlan
from ..text.name_patterns import fold, format_pattern
from ..text.notation import format_path
from ..units import format_bytes, format_seconds
from .expensive import expense
from .redistribution_reasons import RedistributionReasons, what_runs

MAX_DEPTH = 16
"""Levels of the module tree; what is deeper stands in one name."""


@dataclass
class TreeMove:
    """The redistributions of one tensor; of a tensor of identical layers, those of all of them together. ``count`` and
    ``seconds`` are of a whole step.
    """

    tensor: str
    phase: str
    path: str
    steps: str
    why: str
    count: int
    seconds: float


@dataclass
class TreeNode:
    """A module of the model, by its path, with the predicted seconds of everything inside it."""

    name: str
    compute_s: float = 0.0
    communication_s: float = 0.0
    children: dict[str, TreeNode] = field(default_factory=dict)
    moves: list[TreeMove] = field(default_factory=list)

    @property
    def ordered(self) -> list[TreeNode]:
        """The modules inside, those that take longest first. A module with nothing but one module inside is skipped."""
        children = [child._joined() for child in self.children.values()]
        return sorted(children, key=lambda node: (-node.total_s, node.name))

    @property
    def total_s(self) -> float:
        """Computation and communication together."""
        return self.compute_s + self.communication_s

    @property
    def dearest_path(self) -> list[TreeNode]:
        """This module, the one inside it that takes longest, the one inside that, and so on."""
        inside = self.ordered
        return [self, *(inside[0].dearest_path if inside else [])]

    def _joined(self) -> TreeNode:
        if len(self.children) != 1 or self.moves:
            return self
        (child,) = self.children.values()
        if (child.compute_s, child.communication_s) != (self.compute_s, self.communication_s):
            return self
        return child._joined()


def module_tree(plan: ShardingPlan, folded: FoldedPlan) -> TreeNode:
    """The model's modules with their computation, and each redistribution at the module that made its tensor."""
    root = TreeNode(plan.model)
    modules: dict[str, list[int]] = defaultdict(list)
    for run in plan.execution:
        ns = operator_runs(run.name, plan.micro_batches) * run.predicted_ns
        modules[run.name.partition("/")[0]].append(ns)
    for line in fold([(name, sum(ns)) for name, ns in modules.items()]):
        path = _path(format_pattern(line.pattern, folded.repeats))
        for node in _nodes(root, path):
            node.compute_s += line.value * line.pattern.count / 1e9
    reasons = RedistributionReasons(plan, folded.repeats)
    tensors = {entry.name for entry in (*plan.parameters, *plan.buffers)}
    for moved in folded.redistributions:
        name, slash, role = format_pattern(moved.pattern, folded.repeats).partition("/")
        if not slash:
            held = moved.pattern.names()[0] in tensors
            name, role = (name.rpartition(".")[0], name.rpartition(".")[2]) if held else ("", name)
        entry, cost = moved.value, expense(plan, moved)
        nodes = _nodes(root, _path(name))
        for node in nodes:
            node.communication_s += cost.predicted_s
        nodes[-1].moves.append(
            TreeMove(
                role,
                entry.phase,
                format_path(entry.path, plan.mesh),
                steps_text(entry),
                reasons.of(moved),
                cost.count,
                cost.predicted_s,
            )
        )
    return root


def steps_text(entry: Redistribution) -> str:
    """The collectives of a redistribution with their bytes and times, and which of its steps run for it."""
    steps = [
        f"{c.kind} over {c.axis}, {format_bytes(c.size_bytes)}, {format_seconds(c.predicted_s)}"
        for c in entry.collectives
    ]
    return what_runs(entry, "; ".join(steps) or "local")


def _path(module: str) -> list[str]:
    parts = module.split(".") if module else []
    return parts if len(parts) <= MAX_DEPTH else [*parts[: MAX_DEPTH - 1], ".".join(parts[MAX_DEPTH - 1 :])]


def _nodes(root: TreeNode, path: Sequence[str]) -> list[TreeNode]:
    """The nodes on a path, made where they are missing."""
    nodes = [root]
    for depth, name in enumerate(path, start=1):
        nodes.append(nodes[-1].children.setdefault(name, TreeNode(".".join(path[:depth]))))
    return nodes
