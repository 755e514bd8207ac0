"""Conditions that only decide whether an error is raised (``if ids.max() >= size: raise ValueError(...)``)."""

from __future__ import annotations

import dis
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

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
    if any(_may_catch(frame.current_instruction, frame.instructions, frame.indexof) for frame in frames):
        return None
    target = place[jump.target]
    if _raises(code, place, behind) or _only_asks(code, place, behind, target):
        return True
    return False if _raises(code, place, target) else None


def _may_catch(each: Any, code: Sequence[Any], place: Mapping[Any, int]) -> bool:
    """Whether an instruction stands in a ``try``; a ``with`` lets errors through."""
    if each.exn_tab_entry is None:
        return False
    handler = place[each.exn_tab_entry.target]
    return all(each.opname != "WITH_EXCEPT_START" for each in code[handler : handler + 2])


def _raises(code: Sequence[Any], place: Mapping[Any, int], start: int) -> bool:
    """Whether all ways from an instruction on end in an error, which nothing there catches."""
    seen, ahead = set[int](), [start]
    while ahead:
        here = ahead.pop()
        if here in seen:
            continue
        seen.add(here)
        each = code[here]
        if each.opname.startswith(("RETURN_", "YIELD_")) or _may_catch(each, code, place):
            return False
        ahead.extend(_after(code, place, here))
    return True


def _only_asks(code: Sequence[Any], place: Mapping[Any, int], start: int, otherwise: int) -> bool:
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
        return _raises(code, place, ways[0]) or _only_asks(code, place, ways[0], otherwise)
    return False


def _after(code: Sequence[Any], place: Mapping[Any, int], here: int) -> Iterator[int]:
    """Where Python may go on after an instruction."""
    each = code[here]
    if each.target is not None and each.opcode in _JUMPS:
        yield place[each.target]
    if each.opname not in _LEAVING and each.opname not in _ALWAYS:
        yield here + 1
