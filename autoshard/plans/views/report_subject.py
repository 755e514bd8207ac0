"""A plan as the report shows it: what its sections are filled with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..exposure import Exposure
from ..plan import ShardingPlan
from ..text.folded_plan import FoldedPlan, fold_plan
from ..text.layout_preserving import preserves_layout
from ..text.name_patterns import format_pattern
from ..text.notation import format_path, format_strategy
from .axis_use import axis_lines, samples, tokens, unused_axes
from .expensive import by_expense
from .expert_words import expert_lines
from .lanes import LaneChart, layer_charts, step_chart
from .layer_map import LayerMap, layer_maps
from .memory_chart import MemoryChart, memory_chart
from .module_tree import TreeNode, module_tree, steps_text
from .redistribution_reasons import RedistributionReasons
from .report_values import copies_s
from .summary import PlanSummary, summarize


@dataclass(frozen=True)
class Move:
    """One of the most expensive redistributions, with those of identical layers; ``exposed_s`` is None where the order
    of execution is not known.
    """

    tensor: str
    phase: str
    path: str
    steps: str
    why: str
    links: tuple[str, ...]
    count: int
    predicted_s: float
    exposed_s: float | None


@dataclass(frozen=True)
class Subject:
    """A plan as the page shows it, under the name that it is shown by."""

    name: str
    plan: ShardingPlan
    summary: PlanSummary
    folded: FoldedPlan
    network: tuple[str, ...]
    exposure: Exposure | None

    @classmethod
    def of(cls, name: str, plan: ShardingPlan, network: Sequence[str] = ()) -> Subject:
        """A plan, with sentences on what its mesh runs on."""
        exposure = Exposure.of(plan) if plan.execution else None
        return cls(name, plan, summarize(plan), fold_plan(plan), tuple(network), exposure)

    @property
    def uses(self) -> tuple[str, ...]:
        """What each axis is for, in sentences."""
        return axis_lines(self.plan)

    @property
    def experts(self) -> tuple[str, ...]:
        """How far it is from the best plan of experts, in sentences; none where it was not held against them."""
        return expert_lines(self.plan)

    @property
    def warned(self) -> bool:
        """Whether the last of the sentences on axes is a warning."""
        return bool(unused_axes(self.plan))

    @property
    def samples(self) -> int | None:
        """Samples of a step."""
        return samples(self.plan)

    @property
    def tokens(self) -> int | None:
        """Tokens of a step."""
        return tokens(self.plan)

    @property
    def copies_s(self) -> float:
        """Communication that is no collective."""
        return copies_s(self.plan)

    @property
    def collectives_s(self) -> float:
        """Communication that is."""
        return self.plan.communication_s - self.copies_s

    @property
    def moves(self) -> list[Move]:
        """Redistributions by what they cost, all of them."""
        reasons = RedistributionReasons(self.plan, self.folded.repeats)
        exposed = None if self.exposure is None else self.exposure.by_redistribution
        moves = []
        for cost in by_expense(self.plan, self.folded):
            pattern, entry = cost.line.pattern, cost.line.value
            keys = [(name, entry.phase, entry.path) for name in pattern.names()] if exposed is not None else []
            moves.append(
                Move(
                    format_pattern(pattern, self.folded.repeats),
                    entry.phase,
                    format_path(entry.path, self.plan.mesh),
                    steps_text(entry),
                    reasons.of(cost.line),
                    tuple(dict.fromkeys(collective.axis for collective in entry.collectives)),
                    cost.count,
                    cost.predicted_s,
                    None if exposed is None else sum(exposed.get(key, 0.0) for key in keys),
                )
            )
        return moves

    @property
    def operators(self) -> list[tuple[str, str, str, int]]:
        """The operators that decide something: name, phase, strategy, how many."""
        return [
            (
                format_pattern(line.pattern, self.folded.repeats),
                line.value.phase,
                format_strategy(line.value, self.plan.mesh),
                line.pattern.count,
            )
            for line in self.folded.operators
            if not preserves_layout(line.value)
        ]

    @property
    def tree(self) -> TreeNode:
        """The model's modules."""
        return module_tree(self.plan, self.folded)

    @property
    def maps(self) -> list[LayerMap]:
        """The tensors of the model's layers."""
        return layer_maps(self.plan, self.folded)

    @property
    def zooms(self) -> list[LaneChart]:
        """A layer of each phase in lanes."""
        return [] if self.exposure is None else layer_charts(self.exposure)

    def lanes(self, longest_ns: int | None = None) -> LaneChart | None:
        """The step in lanes."""
        return None if self.exposure is None else step_chart(self.exposure, longest_ns)

    def memory(self, top: int | None = None) -> MemoryChart | None:
        """The course of memory."""
        return memory_chart(self.plan, top)
