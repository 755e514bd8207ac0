"""Calls of a parallel module: what the plan was made for gives what the model gives, anything else is refused."""

from __future__ import annotations

import functools
import sys
from collections import UserDict
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import autoshard
from autoshard.errors import InputError, PlanMismatchError

from ..one_process import one_rank
from .sessions import full

Pair = tuple[nn.Module, nn.Module]


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    with one_rank() as mesh:
        yield mesh


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def made(mesh: DeviceMesh, model: nn.Module, *args: Any, **kwargs: Any) -> Pair:
    """The parallel module, and the model as it was."""
    return autoshard.auto_parallelize(deepcopy(model), mesh, args, kwargs), model


def same(pair: Pair, *args: Any, **kwargs: Any) -> bool:
    """Whether a call gives the same with both."""
    ours, theirs = (module(*args, **kwargs) for module in pair)
    return torch.equal(full(ours), theirs)


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(numbers(4, 4))


class Loss(Linear):
    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return (tokens @ self.weight - targets).square().mean()


class Scaled(Loss):
    k = 2.0

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return super().forward(tokens, targets) * self.k


class Options(Linear):
    def forward(self, x: Tensor, mask: Tensor | None = None, scale: float = 1.0, *, double: bool = False) -> Tensor:
        y = x @ self.weight * scale * (2 if double else 1)
        return (y if mask is None else y * mask).sum()


class Packed(Linear):
    def forward(self, x: Tensor, *rest: Tensor, **named: Tensor) -> Tensor:
        for factor in (*rest, *named.values()):
            x = x @ self.weight * factor
        return x.sum()


X, Y, Z = (numbers(3, 4, seed=k) for k in range(3))


def test_a_plan_for_one_tensor_given_twice_is_a_plan_for_two_tensors(mesh: DeviceMesh) -> None:
    pair = made(mesh, Loss(), X, X)
    assert same(pair, X, Y) and same(pair, Y, Y) and same(pair, targets=X, tokens=Z) and same(pair, X, X.view(3, 4))
    by_keyword = made(mesh, Loss(), tokens=X, targets=X)
    assert same(by_keyword, X, Y) and same(by_keyword, tokens=Z, targets=X)


def test_a_model_is_planned_and_parallelized_with_one_capture(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = sys.modules["autoshard.capture.capture"]
    captured, modes = home._captured, []  # type: ignore[attr-defined]

    def counted(model: nn.Module, *rest: Any) -> Any:
        modes.append(model.training)
        return captured(model, *rest)

    monkeypatch.setattr(home, "_captured", counted)
    model: Any = Scaled()
    pair = made(mesh, model, X, Y)
    assert same(pair, X, Y) and modes == [True]
    pair[0].k = 3.0
    with pytest.raises(PlanMismatchError):  # the one capture has the conditions that calls are held against
        pair[0](X, Y)
    made(mesh, model, X, Y)
    assert modes == [True, True]


class Typed(Linear):
    def forward(self, x: Tensor, dtype: torch.dtype = torch.float32, shift: complex = 0j) -> Tensor:
        return ((x @ self.weight).to(dtype) + shift).abs().sum()


def test_an_argument_may_be_of_any_type_that_the_graph_takes_for_a_constant(mesh: DeviceMesh) -> None:
    pair = made(mesh, Typed(), X, torch.float64, shift=2j)
    assert same(pair, X, torch.float64, 2j) and same(pair, Y, dtype=torch.float64, shift=2j)
    for others in ((X, torch.float32, 2j), (X, torch.float64, 3j), (X,)):
        with pytest.raises(InputError, match="when the model was captured and is"):
            pair[0](*others)


def test_defaults_and_keywords_are_the_call_that_forward_sees(mesh: DeviceMesh) -> None:
    pair = made(mesh, Options(), X)
    assert same(pair, Y) and same(pair, x=Y) and same(pair, Y, None, 1.0) and same(pair, Y, double=False)
    masked = made(mesh, Options(), X, scale=2.0, mask=Y)
    assert same(masked, Y, X, 2.0) and same(masked, mask=Z, x=Y, scale=2.0)


REFUSED: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "an option": ((X,), {"double": True}, "double was False when the model was captured and is True now"),
    "an unknown name": ((X,), {"nonsense": 3}, "unexpected keyword argument 'nonsense'"),
    "too many": ((X, None, 1.0, True), {}, "too many positional arguments"),
    "too few": ((), {}, "missing a required argument: 'x'"),
    "a tensor for None": ((X, Y), {}, "mask was None when the model was captured and is a tensor"),
    "an int for a float": ((X,), {"scale": 1}, "scale was 1.0 when the model was captured and is 1 now"),
    "a tensor for a float": ((X,), {"scale": torch.tensor(1.0)}, "is a tensor of shape [] now"),
    "a list for a tensor": (([X],), {}, "without x and with x.0; the plan was made for the tensors x"),
    "another dtype": ((X.double(),), {}, "x has dtype torch.float64; the plan was made for float32"),
    "another device": ((X.to("meta"),), {}, "x is on meta, and this rank runs on cpu"),
    "a sparse tensor": ((X.to_sparse(),), {}, "layout torch.sparse_coo; pass a plain dense tensor"),
    "a gradient": ((X.clone().requires_grad_(),), {}, "detach it"),
}


@pytest.fixture(scope="module")
def options(mesh: DeviceMesh) -> Pair:
    return made(mesh, Options(), X)


@pytest.mark.parametrize("what", REFUSED)
def test_what_the_capture_never_saw_is_refused(options: Pair, what: str) -> None:
    args, kwargs, text = REFUSED[what]
    with pytest.raises(InputError) as caught:
        options[0](*args, **kwargs)
    assert text in str(caught.value)
    assert same(options, Y)


class Marked(torch.Tensor):
    """A tensor with a meaning of its own."""


def test_a_tensor_of_a_class_of_its_own_is_refused(options: Pair) -> None:
    with pytest.raises(InputError, match="x is a Marked"):
        options[0](X.as_subclass(Marked))


def test_a_dtensor_of_another_mesh_or_layout_is_refused(options: Pair, mesh: DeviceMesh) -> None:
    def placed(on: DeviceMesh, placement: Any) -> Tensor:
        return DTensor.from_local(X, on, [placement], run_check=False)

    assert same((options[0], lambda x: options[1](full(x))), placed(mesh, Replicate()))
    with pytest.raises(InputError, match="redistribute it first"):
        options[0](placed(mesh, Shard(0)))
    with pytest.raises(InputError, match="the module runs on"):
        options[0](placed(init_device_mesh("cpu", (1,), mesh_dim_names=("other",)), Replicate()))


LAYOUTS = {
    "transposed": numbers(4, 3).t(),
    "expanded": numbers(1, 4).expand(3, 4),
    "strided": numbers(6, 8)[::2, ::2],
    "a parameter": nn.Parameter(X, requires_grad=False),
}


@pytest.mark.parametrize("what", LAYOUTS)
def test_any_strides_will_do(options: Pair, what: str) -> None:
    assert same(options, LAYOUTS[what])


def test_complex_and_bool_inputs_and_lazy_conjugates(mesh: DeviceMesh) -> None:
    class Mixed(Linear):
        def forward(self, z: Tensor, chosen: Tensor) -> Tensor:
            return (z.real @ self.weight * torch.where(chosen, z.imag, 2 * z.imag)).sum()

    z, chosen = torch.complex(X, Y), X > 0
    pair = made(mesh, Mixed(), z, chosen)
    assert same(pair, z.conj(), ~chosen) and same(pair, torch.complex(Y, X), chosen)
    assert same(pair, torch.view_as_complex(torch.stack([X, z.conj().imag], -1)), chosen)


def test_packed_arguments_are_matched_by_place_and_name(mesh: DeviceMesh) -> None:
    pair = made(mesh, Packed(), X, Y, Z, a=X, b=Y)
    assert [entry.name for entry in pair[0].plan.inputs] == ["x", "rest.0", "rest.1", "a", "b"]
    assert same(pair, Z, X, Y, a=Y, b=Z)
    for args, kwargs, text in [((X, Y), {"a": X, "b": Y}, "without rest.1"), ((X, Y, Z), {"b": Y, "a": X}, "order")]:
        with pytest.raises(InputError, match=text):
            pair[0](*args, **kwargs)


def test_a_dict_is_read_in_the_order_of_the_capture_or_not_at_all(mesh: DeviceMesh) -> None:
    class Rows(Linear):
        def forward(self, batch: dict[str, Tensor]) -> Tensor:
            return (torch.cat(list(batch.values())) @ self.weight).cumsum(0).sum()

    pair = made(mesh, Rows(), {"a": X, "b": Y})
    assert same(pair, {"a": Y, "b": Z})
    with pytest.raises(InputError, match=r"batch\.a, batch\.b in this order"):
        pair[0]({"b": X, "a": Y})


def doubling(forward: Any) -> Any:
    """A decorator that treats an argument as its caller gives it."""

    @functools.wraps(forward)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(self, *args, **kwargs) * (2 if "scale" in kwargs else 1)

    return wrapper


class Decorated(Options):
    forward = doubling(Options.forward)


def partly() -> nn.Module:
    model = Options()
    model.forward = functools.partial(model.forward, scale=3.0)  # type: ignore[method-assign]
    return model


def test_a_decorated_forward_sees_the_call_as_it_is_written(mesh: DeviceMesh) -> None:
    pair = made(mesh, Decorated(), X, scale=1.0)
    assert [entry.name for entry in pair[0].plan.inputs] == ["x"] and same(pair, Y, scale=1.0)
    for args, kwargs in [((Y,), {}), ((Y, None, 1.0), {})]:
        with pytest.raises(InputError):
            pair[0](*args, **kwargs)


def test_a_forward_of_the_object_itself(mesh: DeviceMesh) -> None:
    pair = made(mesh, partly(), X)
    assert same(pair, Y) and same(pair, Y, scale=3.0)
    with pytest.raises(InputError, match=r"scale was 3\.0"):
        pair[0](Y, scale=1.0)


class Running(Linear):
    """Writes into a buffer in place, and another one anew."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.ones(4))
        self.register_buffer("last", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        self.total += x
        self.last = self.last * 2
        return (self.total * x * self.last) @ self.weight.sum(0)


def test_an_argument_in_the_memory_of_a_buffer_that_is_written_is_refused(mesh: DeviceMesh) -> None:
    parallel, reference = made(mesh, Running(), numbers(4))
    for argument in (parallel.total, parallel.total.view(2, 2).view(4)):
        with pytest.raises(InputError, match="x shares memory with the buffer total"):
            parallel(argument)
    assert same((parallel, reference), numbers(4))
    assert torch.equal(parallel(parallel.last), reference(reference.last))
    assert torch.equal(parallel(parallel.total.clone()), reference(reference.total.clone()))


def test_shard_inputs_cuts_plain_tensors_on_the_mesh_of_the_plan(mesh: DeviceMesh, options: Pair) -> None:
    plan = options[0].plan
    assert torch.equal(*autoshard.shard_inputs(plan, mesh, X), X)
    for value in (3, DTensor.from_local(X, mesh, [Replicate()], run_check=False), [X]):
        with pytest.raises(InputError, match="only plain tensors are cut"):
            autoshard.shard_inputs(plan, mesh, value)  # type: ignore[arg-type]
    with pytest.raises(PlanMismatchError, match="the plan was made for the mesh dp=1"):
        autoshard.shard_inputs(plan, init_device_mesh("cpu", (1,), mesh_dim_names=("other",)), X)


class ByName(Linear):
    """Has an attribute of the name of an argument, and arguments in containers."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x: Tensor, labels: list[dict[str, Tensor]], scale: Tensor, doubled: bool = False) -> Tensor:
        y = (x @ self.weight * scale * self.scale - labels[0]["low"] * labels[1]["high"]).square().mean()
        return y * 2 if doubled else y


def test_shard_inputs_cuts_the_arguments_of_a_call_by_name(mesh: DeviceMesh) -> None:
    labels = [{"low": numbers(3, 4, seed=1)}, {"high": numbers(3, 4, seed=2)}]
    call = {"x": X, "labels": labels, "scale": numbers(3, 4, seed=3), "doubled": True}
    parallel, reference = made(mesh, ByName(), **call)
    plan = autoshard.plan_of(parallel)
    for given in (call, dict(reversed(call.items())), UserDict(call)):
        sharded = autoshard.shard_inputs(plan, mesh, given)
        assert sharded.keys() == call.keys() and sharded["doubled"] is True
        assert torch.equal(full(parallel(**sharded)), reference(**call))
    without = {name: value for name, value in call.items() if name != "x"}
    for wrong, said in (
        (without, "has labels.0.low, labels.1.high, scale"),
        ({**call, "mask": X}, "scale, mask"),
        ({}, "what was given has no tensors"),
    ):
        with pytest.raises(InputError, match=rf"the plan has 4 inputs \(x, .*{said}$"):
            autoshard.shard_inputs(plan, mesh, wrong)
    with pytest.raises(InputError, match="the full batch is"):
        autoshard.shard_inputs(plan, mesh, {**call, "x": X[:1]})
