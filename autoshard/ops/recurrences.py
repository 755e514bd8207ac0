"""All steps of a recurrent layer (:mod:`autoshard.capture.operators.recur`): rows of the batch by themselves. Each
step meets the whole state of the one before, so nothing else can be cut.
"""

from __future__ import annotations

from typing import Any

from ..capture import Node
from ..capture.operators.recur import CELLS
from ..layout import P_SUM, Layout, R, S
from .operator import Metas, Operator, Shape, enter
from .rule import Rule

_FORWARD = ("gates", "start", "weight", "bias", "projection", "within")
_BACKWARD = ("outputs grad", "last grad", "start", "weight", "projection", "within", "outputs", "kept")
_WHOLE = ("weight", "bias", "projection")
_KERNELS, _KERNELS_BACK = 12, 24
"""Kernels of a step, as they are counted in its formulas."""


def _taken(node: Node) -> list[str]:
    """Which tensors a node takes, in order: some are optional."""
    names = _FORWARD if len(node.args) == len(_FORWARD) + 2 else _BACKWARD
    return [name for name, given in zip(names, node.args) if given is not None]


def _rows(node: Node, inputs: Metas) -> list[Rule]:
    """The batch, dim 0 of all but weights; and addends of the gradients, in which the backward is linear."""
    taken = _taken(node)
    cut = tuple(R if name in _WHOLE else S(0) for name in taken)
    rules = [Rule(cut, (S(0),) * len(node.outputs))]
    if "last grad" in taken:
        rules.append(Rule(tuple(P_SUM if name.endswith("grad") else R for name in taken), (P_SUM, P_SUM)))
    return rules


def _small(node: Node, inputs: Metas, shapes: list[list[int]], length: dict[int, int]) -> tuple[Any, ...]:
    """Lengths of states and gates that belong together: two numbers, projected to three."""
    cell, size, taken = CELLS[node.args[-2]], 2, _taken(node)
    width = 3 if "projection" in taken else size
    lasts = {
        **dict.fromkeys(("gates", "bias"), cell.gates * size),
        **dict.fromkeys(("start", "last grad"), width + size * cell.has_memory),
        **dict.fromkeys(("outputs", "outputs grad", "weight"), width),
        **{"projection": size, "kept": cell.kept * size},
    }
    for name, shape in zip(taken, shapes):
        shape[-1] = lasts.get(name, shape[-1])
    if "projection" in taken:
        shapes[taken.index("projection")][0] = width
    shapes[taken.index("weight")][0] = cell.gates * size
    return node.args


def _flops(node: Node, inputs: list[Shape], outputs: list[Shape]) -> float:
    """Products of each step with the weight, and with the projection."""
    taken = dict(zip(_taken(node), inputs))
    rows, steps, _ = outputs[0]
    weights = [taken[name] for name in ("weight", "projection") if name in taken]
    return 2.0 * rows * steps * sum(into * out for out, into in weights)


def _kernels(node: Node, inputs: list[Shape], layouts: tuple[Layout, ...]) -> tuple[float, int]:
    """Kernels of all steps, one after the other."""
    steps = inputs[0][1]
    each = _KERNELS_BACK if "last grad" in _taken(node) else _KERNELS
    return 1.0, max(0, each * steps - 1)


_RECURRENT = Operator(rules=_rows, small=_small, kernel="matmul", flops=_flops, blocks=_kernels)
enter("recur recur_backward", _RECURRENT, namespace="autoshard")
