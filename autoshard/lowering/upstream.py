"""Results that other results are computed from, and what a caller wants to know of their gradients.

To autograd a step is one operation, whose results know nothing of each other. In a model that gives ``(hidden,
head(hidden))``, the gradient of ``hidden`` includes what comes back through the head. The parameters get the right
gradients either way; but a hook on ``hidden``, its ``.grad`` after ``retain_grad()``, and ``torch.autograd.grad(loss,
hidden)`` would miss a part. So such results are linked, and a backward that would tell too little is refused.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from ..capture import CapturedGraph, Ref, SameTensor
from ..errors import BackwardError
from .adapter import hooks_of, will_run


def upstream(graph: CapturedGraph, results: Iterable[int]) -> dict[int, tuple[int, ...]]:
    """For each of these results that is computed from others of them, the numbers of those; earlier ones first."""
    sources = {k: _source(graph, k) for k in results}
    order = sorted(sources, key=lambda k: (sources[k].node, _is_copy(graph, k), k))
    found: dict[int, tuple[int, ...]] = {}
    for position, k in enumerate(order):
        reached = _ancestors(graph, sources[k])
        if others := tuple(j for j in order[:position] if sources[j] in reached):
            found[k] = others
    return found


class Linked:
    """The results of one step, each an autograd node of its own where others are computed from it or it from others.

    Args:
        upstream: see :func:`upstream`.
    """

    def __init__(self, upstream: Mapping[int, tuple[int, ...]]) -> None:
        self._upstream = upstream
        self._hooks: dict[int, Any] = {}
        self._results: dict[int, weakref.ref[torch.Tensor]] = {}

    def link(self, results: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
        """The results of the step, linked; those that no gradient can reach stay as they are."""
        if not self._upstream:
            return tuple(results)
        linked = list(results)
        stub = torch.zeros((), requires_grad=True).clone()
        for j in dict.fromkeys(j for k, others in self._upstream.items() for j in (*others, k)):
            result = linked[j]
            if result is not None and result.requires_grad:
                sources = (linked[i] for i in self._upstream.get(j, ()))
                made = _Result.apply(self, j, stub, result, *(s for s in sources if s is not None))
                made.register_hook(_nothing)  # torch makes the list of hooks with the first one
                self._hooks[j], self._results[j] = hooks_of(made), weakref.ref(made)
                linked[j] = made
        return tuple(linked)

    def check(self, k: int, is_selective: bool) -> None:
        """Checks, as a backward comes to result ``k``, that nobody waits for the gradient of one upstream.

        Args:
            is_selective: whether it is one for some tensors' gradients only.

        Raises:
            BackwardError: somebody does.
        """
        for j in self._upstream.get(k, ()):
            if j not in self._results:
                continue
            result = self._results[j]()
            if len(self._hooks[j]) > 1:
                why = "has a hook"
            elif result is not None and result.retains_grad:
                why = "retains its gradient (retain_grad)"
            elif is_selective and result is not None and will_run(result):
                why = (
                    "may be among the tensors whose gradients torch.autograd.grad, or backward(inputs=...), is to give"
                )
            else:
                continue
            raise BackwardError(
                f"result {j} of the module {why}, and result {k}, which this backward goes through, is computed from "
                f"it within the module: the part of the gradient that comes through result {k} does not get there. Use "
                f"backward() for the gradients of parameters; to look at those of result {j}, drop result {k} from the "
                f"loss, or compute it outside of the module"
            )


def _source(graph: CapturedGraph, result: int) -> Ref:
    """The tensor that a result is; where it is a copy because it shares memory with another, what is copied."""
    ref = graph.outputs[result]
    assert ref is not None
    return graph.nodes[ref.node].inputs[0] if _is_copy(graph, result) else ref


def _is_copy(graph: CapturedGraph, result: int) -> bool:
    constant = graph.constants[result]
    return isinstance(constant, SameTensor) and constant.is_copy


def _ancestors(graph: CapturedGraph, ref: Ref) -> set[Ref]:
    """A tensor and all that it is computed from."""
    found, todo = {ref}, [ref]
    while todo:
        for source in graph.nodes[todo.pop().node].inputs:
            if source not in found:
                found.add(source)
                todo.append(source)
    return found


def _nothing(gradient: torch.Tensor) -> None:
    pass


class _Result(torch.autograd.Function):
    """A result of a step, in the same memory. Takes also the results that it is computed from: autograd then comes
    here before it comes to them; and a stub that nobody knows of, to which only a backward for all tensors goes on.
    """

    @staticmethod
    def forward(
        ctx: Any, linked: Linked, number: int, stub: torch.Tensor, result: torch.Tensor, *sources: torch.Tensor
    ) -> torch.Tensor:
        ctx.linked, ctx.number, ctx.stub, ctx.sources = linked, number, stub, len(sources)
        ctx.set_materialize_grads(False)
        return result.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if gradient is not None:
            ctx.linked.check(ctx.number, is_selective=not will_run(ctx.stub))
        return (None, None, None, gradient, *(None,) * ctx.sources)
