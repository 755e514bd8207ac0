"""Operators of the user's own: how they can be cut, and what they cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from cost_models.kernel_kinds import OP_KINDS, OpKind
from cost_models.spelling import did_you_mean

from ..capture import Node
from ..errors import InputError, LayoutError
from ..layout import Placement, parse_placement
from .operator import Local, Metas, Operator, Shape, enter, entries
from .rule import Rule

RulesOfShapes = Callable[[Sequence[Shape]], Sequence[str]]


def register_operator(
    name: str,
    rules: Sequence[str] | RulesOfShapes,
    *,
    kernel: OpKind = "pointwise",
    flops: Callable[[Sequence[Shape], Sequence[Shape]], float] | None = None,
    local: Local | None = None,
) -> None:
    """Says how an operator can be cut and what it costs. Call it wherever plans are made or applied, before that.

    Every rule is checked by numbers on small random tensors before the planner may use it; a wrong one is left out,
    with a warning if none is left. The backward of an operator is made of operators, each with rules of its own.

    >>> from autoshard import register_operator
    >>> register_operator("mylib::rms", ["S(0), R -> S(0)", "S(1), R -> S(1)"])  # doctest: +SKIP

    Args:
        name: as torch has it: ``mylib::rms`` for all overloads, ``mylib::rms.out`` for one.
        rules: what one mesh axis may do: a placement for each tensor argument in order, an arrow, and one for each
            tensor result (``-`` for one that is absent). Whole on every rank is always possible and need not be said; a
            rule that cuts a dim that a tensor does not have is left out. Where it depends on shapes, a function from
            the shapes of the tensor arguments to such rules.
        kernel: the kind of kernel that it is priced as, one of ``cost_models.OP_KINDS``.
        flops: floating-point operations on one rank, from the shapes of its shards of arguments and results; left out,
            one for each element of the largest result.
        local: what runs on the shards of a rank, if not the operator itself: takes a
            :class:`~autoshard.ops.operator.LocalCall`.

    Raises:
        InputError: torch has no such operator, autoshard knows it already, or a rule or a kind of kernel is none.
    """
    _check_is_there(name)
    if kernel not in OP_KINDS:
        raise InputError(f"{kernel!r} is no kind of kernel: {', '.join(OP_KINDS)}{did_you_mean(kernel, OP_KINDS)}")
    if not callable(rules):
        for text in rules:
            _parsed(name, text)

    def rules_of(node: Node, inputs: Metas) -> list[Rule]:
        texts = rules([meta.shape for meta in inputs]) if callable(rules) else rules
        found = (_fitting(name, text, node, inputs) for text in texts)
        return [rule for rule in found if rule is not None]

    def flops_of(node: Node, inputs: list[Shape], outputs: list[Shape]) -> float:
        assert flops is not None
        return float(flops(inputs, outputs))

    namespace, _, short = name.partition("::")
    entry = Operator(rules=rules_of, local=local, kernel=kernel, flops=flops_of if flops else None)
    try:
        enter(short, entry, namespace)
    except ValueError as error:
        raise InputError(str(error)) from None


def registered() -> dict[str, Operator]:
    """What was said of operators here, by their names; entries of autoshard's own are not among it."""
    return {name: entry for name, entry in entries().items() if is_registered(entry)}


def is_registered(entry: Operator) -> bool:
    """Whether an entry is one that was said here."""
    return getattr(entry.rules, "__module__", "") == __name__


def _check_is_there(name: str) -> None:
    namespace, _, rest = name.partition("::")
    short, _, overload = rest.partition(".")
    try:
        found = getattr(getattr(torch.ops, namespace), short)
        there = not overload or overload in found.overloads()
    except (AttributeError, RuntimeError):
        there = False
    if not rest or not there:
        raise InputError(
            f"torch has no operator {name!r}; write it as in mylib::rms, and define it first (torch.library.custom_op)"
        )


def _fitting(name: str, text: str, node: Node, inputs: Metas) -> Rule | None:
    rule = _parsed(name, text)
    for side, placements, count in (("takes", rule.inputs, len(inputs)), ("gives", rule.outputs, len(node.outputs))):
        if len(placements) != count:
            raise InputError(
                f"the rule {text!r} of {name} is of {len(placements)} tensors, but the operator {side} {count} at "
                f"{node.name}"
            )
    metas = (*inputs, *node.outputs)
    pairs = zip((*rule.inputs, *rule.outputs), metas)
    fits = all(p is None or meta is None or p.kind != "S" or p.dim < len(meta.shape) for p, meta in pairs)
    return rule if fits else None


def _parsed(name: str, text: str) -> Rule:
    before, arrow, after = text.partition("->")
    try:
        inputs = tuple(parse_placement(part) for part in before.split(",") if part.strip())
        outputs = tuple(_result(part) for part in after.split(","))
    except LayoutError as error:
        raise InputError(f"the rule {text!r} of {name}: {error}") from None
    if not arrow:
        raise InputError(f"the rule {text!r} of {name} has no arrow; write it as in 'S(0), R -> S(0)'")
    return Rule(inputs, outputs)


def _result(text: str) -> Placement | None:
    return None if text.strip() == "-" else parse_placement(text)
