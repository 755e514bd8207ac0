"""Conditions that only decide whether an error is raised (``if ids.max() >= size: raise ValueError(...)``)."""

from __future__ import annotations

import dis
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from torch._dynamo.variables.ctx_manager import GenericContextWrappingVariable, WithExitFunctionVariable

_LEAVING = {"RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE"}
_ALWAYS = {"JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT", "JUMP_ABSOLUTE"}
_JUMPS = frozenset(dis.hasjrel + dis.hasjabs)
_WRITES = ("STORE_", "DELETE_", "YIELD_", "SEND", "IMPORT_")


def without_error(
    code: Sequence[Any], place: Mapping[Any, int], jump: Any, behind: int, frames: Sequence[Any]
) -> bool | None:
    """Whether a conditional jump is taken where no error is raised; None where it decides something else, too.

    Args:
        code: the instructions of a function.
        place: the place of each.
        jump: the jump, one of them.
        behind: the place of what comes where it is not taken.
        frames: what is being run: the function, and those that called it. What one of them may catch is no mere error.
    """
    if not all(_lets_through(frame) for frame in frames):
        return None
    target, depth = place[jump.target], _depth(frames[0])
    if _raises(code, place, behind, depth) or _only_asks(code, place, behind, target, depth):
        return True
    return False if _raises(code, place, target, depth) else None


def _lets_through(frame: Any) -> bool:
    """Whether an error that is raised where a function is run leaves it, past what it has entered by ``with``."""
    code, place, depth = frame.instructions, frame.indexof, _depth(frame)
    entered = [each.ctx for each in frame.stack if isinstance(each, WithExitFunctionVariable)]
    handler = _handler(frame.current_instruction, place, code, depth)
    return all(_is_left(context, frame.output.side_effects) for context in entered) and (
        handler is None or _raises(code, place, handler, depth)
    )


def _is_left(context: Any, side_effects: Any) -> bool:
    """Whether an error leaves a ``with``: one of torch's, of a generator that lets it through, or of a class whose
    ``__exit__`` returns nothing. ``contextlib.suppress`` may keep it.
    """
    if not isinstance(context, GenericContextWrappingVariable):
        return True
    if side_effects.has_pending_mutation_of_attr(context, "gen"):
        return _lets_through(side_effects.load_attr(context, "gen").inline_tracer)
    code = getattr(type(context.cm_obj).__exit__, "__code__", None)
    if code is None:
        return False
    steps = list(dis.get_instructions(code))
    returned = [before.argval for before, each in pairwise(steps) if each.opname == "RETURN_VALUE"]
    returned += [each.argval for each in steps if each.opname == "RETURN_CONST"]
    return all(value is None or value is False for value in returned)


def _depth(frame: Any) -> int:
    """How much of a function's stack there is up to the last ``with`` that it has entered."""
    places = [k for k, each in enumerate(frame.stack) if isinstance(each, WithExitFunctionVariable)]
    return max(places, default=-1) + 1


def _handler(each: Any, place: Mapping[Any, int], code: Sequence[Any], depth: int) -> int | None:
    """Where Python goes on if an instruction raises an error; None where the function ends, or a ``with`` that was
    entered before.
    """
    entry = each.exn_tab_entry
    if entry is None:
        return None
    handler = place[entry.target]
    is_with = any(each.opname == "WITH_EXCEPT_START" for each in code[handler : handler + 2])
    return None if is_with and entry.depth <= depth else handler


def _raises(code: Sequence[Any], place: Mapping[Any, int], start: int, depth: int) -> bool:
    """Whether all ways from an instruction on end in an error, which nothing there catches for good."""
    seen, ahead = set[int](), [start]
    while ahead:
        here = ahead.pop()
        if here in seen:
            continue
        seen.add(here)
        each = code[here]
        if each.opname.startswith(("RETURN_", "YIELD_")):
            return False
        handler = _handler(each, place, code, depth)
        ahead.extend([] if handler is None else [handler])
        ahead.extend(_after(code, place, here))
    return True


def _only_asks(code: Sequence[Any], place: Mapping[Any, int], start: int, otherwise: int, depth: int) -> bool:
    """Whether what follows is a further condition (of ``a and b``), writes nothing down, and raises an error or goes on
    at ``otherwise``.
    """
    for here in range(start, len(code)):
        each = code[here]
        if each.opname in _LEAVING or each.opname.startswith(_WRITES):
            return False
        if each.opcode not in _JUMPS:
            continue
        ways = list(_after(code, place, here))
        if len(ways) != 2 or otherwise not in ways:
            return False
        ways.remove(otherwise)
        return _raises(code, place, ways[0], depth) or _only_asks(code, place, ways[0], otherwise, depth)
    return False


def _after(code: Sequence[Any], place: Mapping[Any, int], here: int) -> Iterator[int]:
    """Where Python may go on after an instruction."""
    each = code[here]
    if each.target is not None and each.opcode in _JUMPS:
        yield place[each.target]
    if each.opname not in _LEAVING and each.opname not in _ALWAYS:
        yield here + 1
