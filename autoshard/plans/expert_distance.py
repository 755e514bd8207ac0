"""How far a plan is from the best plan that experts make by hand, part by part: the value that a plan carries.

A *part* of a step is what one block of the model (``layers.*``, all layers together; ``tok_embeddings``) takes in one
*role*: it computes, moves parameters and their gradients, or sends activations. The parts of a plan add up to its step,
so the differences between the parts of two plans add up to the distance between them.
:mod:`autoshard.plans.expert_attribution` works them out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from .natural_order import starred

Role = Literal["computation", "parameters", "activations", "copies", "optimizer"]
ROLES: tuple[Role, ...] = get_args(Role)

SENT: tuple[Role, ...] = ("parameters", "activations", "copies")
"""The roles whose parts add up to the communication of a step; copies are those within a rank."""

OTHERS = "(others)"
"""The block of the part into which small differences of a role are put together; no module has such a name."""

MOST_PARTS = 16
"""How many parts are told apart, beside the others of each role."""

MOST_TENSORS = 48
"""Of how many tensors it is said what becomes of them."""

MOST_OF_PART = 6
"""Of how many of one part."""

MOST_TEXT = 400
"""Letters of what a plan does with a tensor."""


@dataclass(frozen=True)
class PartDifference:
    """A part of the step that takes another time in the plan (``ours_s``) than in the expert's (``theirs_s``).

    ``block`` is empty for what belongs to no module of the model, the optimizer's step for example.
    """

    block: str
    role: Role
    ours_s: float
    theirs_s: float

    @property
    def saved_s(self) -> float:
        """How much less the plan takes; below 0 where it takes more."""
        return self.theirs_s - self.ours_s


@dataclass(frozen=True)
class TensorDifference:
    """A parameter, an operator or its result that takes another time: ``tensor`` has ``*`` for the numbers of layers,
    and stands for those of all. ``ours`` and ``theirs`` say what the plans do with it.
    """

    tensor: str
    role: Role
    ours_s: float
    theirs_s: float
    ours: str
    theirs: str

    @property
    def saved_s(self) -> float:
        """How much less the plan takes; below 0 where it takes more."""
        return self.theirs_s - self.ours_s


@dataclass(frozen=True)
class ExpertDistance:
    """The best plan of the experts, and where another plan differs from it, the largest saving first.

    Attributes:
        expert: the name of the baseline, such as ``fsdp+tp``.
        cost_ns: what its plan costs by the objective, in which experts' plans are compared.
        compute_s, communication_s, optimizer_s: what its plan's step takes.
        peak_bytes: what its plan holds at most on the fullest rank.
        parts: all differences; with them the times of the expert's plan become those of the plan.
        tensors: those that differ most, of each part.
    """

    expert: str
    cost_ns: int
    compute_s: float
    communication_s: float
    optimizer_s: float
    peak_bytes: int
    parts: tuple[PartDifference, ...] = ()
    tensors: tuple[TensorDifference, ...] = ()

    @property
    def step_s(self) -> float:
        """Seconds of the expert's step if nothing overlapped."""
        return self.compute_s + self.communication_s + self.optimizer_s

    def saved_s(self, roles: Iterable[Role] = ROLES) -> float:
        """How much less the parts of some roles take."""
        return math.fsum(part.saved_s for part in self.parts if part.role in roles)

    def earning(self, most: int) -> tuple[PartDifference, ...]:
        """The parts that save most, the largest saving first; none that costs more."""
        return tuple(part for part in self.parts[:most] if part.saved_s > 0)

    def within(self, part: PartDifference) -> tuple[TensorDifference, ...]:
        """The tensors of a part, in their order."""
        return tuple(t for t in self.tensors if (block_of(t.tensor), t.role) == (part.block, part.role))

    def part(self, block: str, role: Role) -> PartDifference | None:
        """The difference in a part; None where there is none, or a small one."""
        return next((part for part in self.parts if (part.block, part.role) == (block, role)), None)

    def tensor(self, name: str, role: Role) -> TensorDifference | None:
        """The difference of a tensor; None where it is not one of those that differ most."""
        return next((t for t in self.tensors if (t.tensor, t.role) == (starred(name), role)), None)


def block_of(name: str) -> str:
    """The block of the model that a parameter, an operator or its result belongs to: its layers, or an outer module.

    >>> block_of("layers.3.attention.wq/mm"), block_of("layers.*.norm.weight"), block_of("head.weight")
    ('layers.*', 'layers.*', 'head')
    """
    path, slash, _ = name.partition("/")
    module = (path if slash else path.rpartition(".")[0]).split(".")
    numbers = [k for k, part in enumerate(module) if part == "*" or part.isdecimal()]
    return starred(".".join(module[: numbers[0] + 1 if numbers else 1]) + "/").removesuffix("/")
