"""Which local variables are read from an instruction on, against a walk over all ways through a function."""

from __future__ import annotations

import dis
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch._dynamo.bytecode_transformation import Instruction, cleaned_instructions, get_indexof

from autoshard.capture.dynamo.ways import read_later


def straight(a: int, b: int) -> int:
    c = a + b
    a = c * 2
    return a + b


def branched(a: int, b: int) -> int:
    if a > b:
        c = a
    else:
        c = b
        b = 0
    return c + b


def looped(values: list[int], start: int) -> int:
    total, last = start, 0
    for value in values:
        if value == 3:
            continue
        twice = value * 2
        total += twice
        last = value
    return total + last


def nested(rows: list[list[int]]) -> list[int]:
    found = []
    for row in rows:
        while row:
            each = row.pop()
            if each < 0:
                break
            found.append(each)
        else:
            found.append(0)
    return found


def guarded(a: int, b: int) -> int:
    try:
        c = a // b
    except ZeroDivisionError:
        c = a
    finally:
        b = 1
    return c + b


def enclosing(a: int, b: int) -> Callable[[], int]:
    def inner() -> int:
        return b

    c = a
    b = c + 1
    return inner


def managed(values: list[int], lock: Any) -> int:
    total = 0
    for value in values:
        with lock:
            twice = value * 2
        total += twice
    return total


def test_what_a_with_makes_is_not_read_before_it() -> None:
    """As no ``with`` keeps an error from going on."""
    code = cleaned_instructions(managed.__code__)
    found = read_later(code, get_indexof(code))
    (turn,) = [k for k, each in enumerate(code) if each.opname == "FOR_ITER"]
    assert found[turn] == {"total", "lock"}


@pytest.mark.parametrize("function", [straight, branched, looped, nested, guarded, enclosing])
def test_a_variable_is_read_later_where_some_way_reads_it_before_it_is_written(function: Any) -> None:
    code = cleaned_instructions(function.__code__)
    place = get_indexof(code)
    shared = {*function.__code__.co_cellvars, *function.__code__.co_freevars}
    found = read_later(code, place)
    assert any(found) and not all(names == found[0] for names in found)
    for start, names in enumerate(found):
        assert names - shared == _read_on_some_way(code, place, start) - shared, code[start]
        assert shared <= names


def _read_on_some_way(code: list[Instruction], place: dict[Any, int], start: int) -> set[str]:
    """Follows every way, with what was written on it."""
    read, seen, waiting = set(), set(), [(start, frozenset[str]())]
    while waiting:
        state = waiting.pop()
        if state in seen:
            continue
        seen.add(state)
        at, written = state
        each = code[at]
        if each.opcode in dis.haslocal:
            if each.opname.startswith("STORE"):
                # an exception may leave before it is written
                waiting += [(to, written) for to in _if_it_fails(each, place)]
                written |= {each.argval}
            elif each.argval not in written:
                read.add(each.argval)
        waiting += [(to, written) for to in (*_if_it_fails(each, place), *_next(code, place, at))]
    return read


def _if_it_fails(each: Instruction, place: dict[Any, int]) -> Iterator[int]:
    if each.exn_tab_entry is not None:
        yield place[each.exn_tab_entry.target]


def _next(code: list[Instruction], place: dict[Any, int], at: int) -> Iterator[int]:
    name = code[at].opname
    if code[at].target is not None:
        yield place[code[at].target]
    if not name.startswith(("RETURN", "RAISE", "RERAISE", "JUMP_FORWARD", "JUMP_BACKWARD")):
        yield at + 1
