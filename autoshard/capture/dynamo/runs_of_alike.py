"""``itertools.groupby`` as Python that dynamo follows, number by number.

Dynamo has one of its own, which takes no key but by its name, asks each number for what it is, and forgets that a group
is gone once the next one is asked for.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast
from unittest.mock import patch

from torch._dynamo.variables import UserFunctionVariable
from torch._dynamo.variables.iter import ItertoolsVariable


@contextmanager
def runs_of_alike() -> Iterator[None]:
    """Has ``itertools.groupby`` be :func:`groups`."""
    call = ItertoolsVariable.call_function

    def of_groups(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if self.value is itertools.groupby:
            return UserFunctionVariable(cast(Any, groups)).call_function(tx, args, kwargs)
        return call(self, tx, args, kwargs)

    with patch.object(ItertoolsVariable, "call_function", of_groups):
        yield


def groups(iterable: Iterable[Any], key: Callable[[Any], Any] | None = None) -> Iterator[tuple[Any, Iterator[Any]]]:
    """What ``itertools.groupby`` gives, as Python's documentation writes it."""
    iterator = iter(iterable)
    value = at = None
    is_over = False

    def group(its_key: Any) -> Iterator[Any]:
        nonlocal value, at, is_over
        yield value
        for value in iterator:
            at = value if key is None else key(value)
            if at != its_key:
                return
            yield value
        is_over = True

    for value in iterator:
        at = value if key is None else key(value)
        break
    else:
        return
    while not is_over:
        its_key = at
        one = group(its_key)
        yield its_key, one
        if at == its_key:
            for _ in one:
                pass
