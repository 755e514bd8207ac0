"""Results that are there once somebody reads them: what they are made of is on its way until then.

Such a tensor is one like any other, without dims and with its place in autograd, but of a class that looks at what it
is given to. Whatever may read its value makes it first, and it is a plain tensor from then on; to go backward from it
reads nothing. As the backward ends it is made in any case.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from .adapter import ASKED, without_torch_function
from .emitter import LocalGraph
from .failure import Failures

_READ_NOTHING = frozenset(
    {
        torch.Tensor.backward,
        torch.autograd.grad,
        torch.ones_like,  # the gradient that a backward begins with
        torch.Tensor.dim,
        torch.Tensor.size,
        torch.Tensor.numel,
        *ASKED,
    }
)


class Unread(torch.Tensor):
    """A result that is not made yet (:meth:`Pending.show`)."""

    _pending: Pending

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in _READ_NOTHING:
            _finish(args, kwargs)
        with without_torch_function():
            return func(*args, **(kwargs or {}))


@partial(torch.compiler.disable, reason="a result of a parallel module is waited for here")
def _finish(args: Sequence[Any], kwargs: dict[str, Any] | None) -> None:
    for leaf in tree_leaves((args, kwargs)):
        if type(leaf) is Unread:
            leaf._pending.finish()


class Pending:
    """What makes the results of one step that nobody has read.

    ``places`` is where they will be. Until then there is no number: who gets at one all the same sees that.

    Args:
        later: makes them of ``given``.
        failures: told where that breaks off, as another rank has ended.
    """

    def __init__(self, later: LocalGraph, given: list[torch.Tensor], failures: Failures) -> None:
        self._later, self._given, self._failures = later, given, failures
        likes = (value for value in later.values if value is not None)
        self.places = [torch.full((), math.nan, dtype=like.dtype, device=like.device) for like in likes]
        self._shown: list[weakref.ref[torch.Tensor]] = []
        self._is_begun = False
        self._broken: Exception | None = None

    def show(self, results: Iterable[torch.Tensor | None]) -> None:
        """Makes tensors in these places, which the caller is to get, unread ones."""
        for result in results:
            if result is not None:
                result.__class__ = Unread
                result._pending = self  # type: ignore[attr-defined]
                self._shown.append(weakref.ref(result))

    def finish(self) -> None:
        """Waits, and makes the results, once.

        Raises:
            JobError: another rank has ended.
        """
        if self._broken is not None:
            raise self._broken
        if self._is_begun:
            return
        try:
            with self._failures.telling("the forward", anew=False):
                self._make()
        except Exception as error:
            self._broken = error
            raise

    def _make(self) -> None:
        self._is_begun = True
        given, self._given = self._given, []
        with torch.no_grad(), torch.autocast(self.places[0].device.type, enabled=False), without_torch_function():
            for place, value in zip(self.places, self._later(given), strict=True):
                place.copy_(value)
            for shown in self._shown:
                if (result := shown()) is not None:
                    result.__class__ = torch.Tensor
                    del result._pending  # type: ignore[attr-defined]

    def __del__(self) -> None:
        """What is on its way arrives, also where nobody reads the results: torch keeps it until it was waited for."""
        if not self._is_begun:
            with suppress(Exception):  # the job has ended, or this interpreter ends
                self._make()
