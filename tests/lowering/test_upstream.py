"""What a caller asks of the gradient of a result that other results are computed from is refused, not half answered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoshard.errors import BackwardError

from ..one_process import one_rank
from .sessions import both, differences, example, full

Asking = Callable[[nn.Module, Tensor, Tensor], list[Any]]


def backward(module: nn.Module, result: Tensor, loss: Tensor) -> list[Any]:
    loss.backward()
    return [p.grad for p in module.parameters()]


def hook(module: nn.Module, result: Tensor, loss: Tensor) -> list[Any]:
    result.register_hook(lambda gradient: gradient * 2)
    return backward(module, result, loss)


def retain(module: nn.Module, result: Tensor, loss: Tensor) -> list[Any]:
    result.retain_grad()
    return [*backward(module, result, loss), result.grad]


def ask(module: nn.Module, result: Tensor, loss: Tensor) -> list[Any]:
    return list(torch.autograd.grad(loss, result, allow_unused=True))


def ask_with_a_parameter(module: nn.Module, result: Tensor, loss: Tensor) -> list[Any]:
    return list(torch.autograd.grad(loss, [result, module.get_parameter("w")]))


def ask_backward(module: nn.Module, result: Tensor, loss: Tensor) -> list[Any]:
    loss.backward(inputs=[result])
    return [result.grad]


BODIES: dict[str, tuple[Callable[[Any, Tensor], tuple[Tensor, Tensor]], int]] = {
    "computed": (lambda m, x: ((y := x @ m.w), (y @ m.v).relu()), 0),
    "computed, returned first": (lambda m, x: ((y := x @ m.w).exp(), y), 1),
    "a view": (lambda m, x: ((y := x @ m.w), y[0]), 0),
    "a view, returned first": (lambda m, x: ((y := x @ m.w)[0], y), 1),
    "the same shape": (lambda m, x: ((y := x @ m.w), y.view_as(y)), 0),
    "a part": (lambda m, x: ((parts := (x @ m.w).split(2))[1], parts[1] * 2), 0),
}
"""Two results, and the number of the one that the other is computed from."""

ASKING: tuple[Asking, ...] = (hook, retain, ask, ask_with_a_parameter, ask_backward)


def of(module: nn.Module, number: int, asking: Asking, entering: slice = slice(None)) -> list[Any]:
    """What is found out about result ``number``, where some of the results enter the loss."""
    results = module(example())
    loss = sum((full(result).square().sum() for result in results[entering]), torch.zeros(()))
    return asking(module, results[number], loss)


@pytest.mark.parametrize("name", BODIES)
def test_half_a_gradient_is_refused(name: str) -> None:
    body, inner = BODIES[name]
    said = rf"result {inner} .* result {1 - inner}, .* is computed from it"
    with one_rank() as mesh:
        parallel, _ = both(body, mesh)
        for asking in ASKING:
            for entering in (
                slice(None),
                slice(1 - inner, 2 - inner),
            ):  # both enter the loss, or one
                with pytest.raises(BackwardError, match=said):
                    of(parallel, inner, asking, entering)


@pytest.mark.parametrize("name", BODIES)
def test_a_whole_gradient_is_that_of_the_model(name: str) -> None:
    body, inner = BODIES[name]
    with one_rank() as mesh:
        pair = both(body, mesh)
        for asking in (backward, *ASKING):
            asked = [(inner, slice(inner, inner + 1))]  # what is computed from it does not enter the loss
            asked += [(1 - inner, slice(None))] * (asking is not ask_with_a_parameter)  # nothing is computed from that
            asked += [(inner, slice(None))] * (asking is backward)
            for number, entering in asked:
                ours, theirs = (of(module, number, asking, entering) for module in pair)
                assert not list(differences(ours, theirs))


def test_results_that_know_nothing_of_each_other_are_asked_anything() -> None:
    def body(m: Any, x: Tensor) -> Any:
        return x @ m.w, x @ m.v

    with one_rank() as mesh:
        parallel, reference = both(body, mesh)
        for asking in ASKING:
            assert not list(differences(of(parallel, 0, asking), of(reference, 0, asking)))


def test_gradients_of_parameters_alone_are_given_once_the_result_is_let_go_of() -> None:
    body, inner = BODIES["computed"]
    found = []
    with one_rank() as mesh:
        for module in both(body, mesh):
            results = module(example())
            loss = full(results[1 - inner]).sum()
            del results
            found.append(list(torch.autograd.grad(loss, [module.get_parameter("w")])))
    assert not list(differences(*found))
