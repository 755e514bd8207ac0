"""What every rank of a job makes alike is made once: one rank captures and checks, the others read what it has kept.

On two cores, eight ranks that capture at the same time take as long as if they did so one after the other, and captures
and checks were two thirds of what ranks computed. Nothing is kept beyond a run: the next one captures its models anew.
"""

from __future__ import annotations

import fcntl
import functools
import os
from collections.abc import Callable
from typing import Any

from autoshard import api, apply
from autoshard.disk_cache import VARIABLE
from autoshard.planning import planner

_SHARED = ((api, "capture"), (apply, "capture"), (apply, "check_once"), (planner, "capture"))
"""None of these waits for another rank, and a rank that fails or dies in one gives its turn to the next."""


def take_turns(folder: str) -> None:
    """From now on this process captures and checks while no other with the same folder does, and reads what they have
    kept there.
    """
    os.environ[VARIABLE] = f"{folder}/cache"
    for module, name in _SHARED:
        setattr(module, name, _in_turn(getattr(module, name), f"{folder}/turn"))


def _in_turn(function: Callable[..., Any], path: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def waits(*args: Any, **kwargs: Any) -> Any:
        with open(path, "w") as turn:
            fcntl.flock(turn, fcntl.LOCK_EX)
            return function(*args, **kwargs)

    return waits
