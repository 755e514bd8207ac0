"""What a forward does besides computing: buffers become results of the graph, all else is refused with its line."""

from __future__ import annotations

import collections
import inspect
import itertools
import sys
import threading
import types
from collections.abc import Callable
from functools import lru_cache
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import autoshard
from autoshard.capture import CapturedGraph, capture
from autoshard.errors import CaptureError

COUNT = 0
ITEMS: list[int] = []
TENSOR = torch.ones(4)
SIZE = 4


class Stateful(nn.Module):
    """A linear layer in the company of everything that a forward might change; ``body`` is the forward."""

    def __init__(self, body: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.body = body
        self.linear = nn.Linear(SIZE, SIZE)
        self.register_buffer("ema", torch.zeros(SIZE))
        self.register_buffer("other", torch.ones(SIZE))
        self.register_buffer("absent", None)
        self.linear.register_buffer("seen", torch.zeros(SIZE))
        self.number = 0
        self.table: dict[str, int] = {}
        self.ordered: dict[str, int] = collections.OrderedDict()
        self.items = [1.0]
        self.counter = itertools.count()
        self.config = type("Config", (), {"scale": 1.0})()
        self.plain = torch.arange(float(SIZE))
        self.view = self.ema[:]
        self.trained = torch.ones(SIZE, requires_grad=True)
        self.listed = list(torch.ones(2, SIZE))
        self.two = {"a": [1], "b": [2]}
        self.array = np.ones(SIZE, dtype=np.float32)

    def forward(self, x: Any) -> Any:
        return self.body(self, x)


def example() -> Tensor:
    return torch.randn(3, SIZE, generator=torch.Generator().manual_seed(0))


def captured(body: Callable[[Any, Any], Any], x: Any = None) -> CapturedGraph:
    return capture(Stateful(body), (example() if x is None else x,))


def refused(body: Callable[[Any, Any], Any], x: Any = None) -> str:
    """The error, which names the line of the body that is marked."""
    with pytest.raises(CaptureError) as caught:
        captured(body, x)
    lines, first = inspect.getsourcelines(body)
    marked = [first + k for k, line in enumerate(lines) if "# culprit" in line]
    assert all(f"{__file__}:{number}" in str(caught.value) for number in marked), caught.value
    return str(caught.value)


def attribute(m: Any, x: Tensor) -> Tensor:
    m.number += 1  # culprit
    return m.linear(x) / m.number


def nested_attribute(m: Any, x: Tensor) -> Tensor:
    m.config.scale *= 2  # culprit
    return m.linear(x) * m.config.scale


def deleted(m: Any, x: Tensor) -> Tensor:
    del m.number  # culprit
    return m.linear(x)


def class_attribute(m: Any, x: Tensor) -> Tensor:
    type(m).number = 3  # culprit
    return m.linear(x)


def append(m: Any, x: Tensor) -> Tensor:
    m.items.append(2.0)  # culprit
    return m.linear(x)


def entry(m: Any, x: Tensor) -> Tensor:
    m.table["a"] = 3  # culprit
    return m.linear(x)


def ordered_entry(m: Any, x: Tensor) -> Tensor:
    m.ordered["a"] = 3  # culprit
    return m.linear(x)


def global_number(m: Any, x: Tensor) -> Tensor:
    global COUNT
    COUNT += 1  # culprit
    return m.linear(x) * COUNT


def global_list(m: Any, x: Tensor) -> Tensor:
    ITEMS.append(1)  # culprit
    return m.linear(x)


def iterator(m: Any, x: Tensor) -> Tensor:
    return m.linear(x) * next(m.counter)  # culprit


def mode(m: Any, x: Tensor) -> Tensor:
    m.linear.eval()  # culprit
    return m.linear(x)


def gradient(m: Any, x: Tensor) -> Tensor:
    m.linear.weight.grad = None  # culprit
    return m.linear(x)


def mark_on_argument(m: Any, x: Tensor) -> Tensor:
    x.mark = 3  # type: ignore[attr-defined]  # culprit
    return m.linear(x)


def new_buffer(m: Any, x: Tensor) -> Tensor:
    m.register_buffer("fresh", x.mean(0))  # culprit
    return m.linear(x)


def no_buffer(m: Any, x: Tensor) -> Tensor:
    del m.ema  # culprit
    return m.linear(x)


def order_of_a_dict(m: Any, x: Tensor) -> Tensor:
    kept = m.two.pop("a")
    m.two["a"] = kept  # culprit
    return m.linear(x)


def two_values_of_a_dict(m: Any, x: Tensor) -> Tensor:
    m.two["a"], m.two["b"] = m.two["b"], m.two["a"]  # culprit
    return m.linear(x)


def attribute_for_a_call(m: Any, x: Tensor) -> Tensor:
    return torch.func.functional_call(m.linear, {"extra": x[0]}, (x,))  # culprit


CHANGES = [
    attribute, nested_attribute, deleted, class_attribute, append, entry, ordered_entry, global_number,
    global_list, iterator, mode, gradient, mark_on_argument, new_buffer, no_buffer, order_of_a_dict,
    two_values_of_a_dict, attribute_for_a_call,
]  # fmt: skip


UNTRACED = {class_attribute: "2.13", iterator: "2.12"}
"""What dynamo does not trace before some torch."""


@pytest.mark.parametrize("body", CHANGES, ids=lambda body: body.__name__)
def test_a_change_of_python_state_is_refused_with_its_line(body: Callable[[Any, Any], Any]) -> None:
    said = refused(body)
    assert ("graph breaks" if torch.__version__ < UNTRACED.get(body, "2.11") else "the forward changes") in said
    assert COUNT == 0 and ITEMS == []


def test_what_is_changed_and_restored_within_a_forward_is_no_change() -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        m.number = 5
        y = m.linear(x) * m.number
        m.number = 0
        return y

    assert captured(body).mutations == ()


def pop(m: Any, batch: Any) -> Tensor:
    return m.linear(batch.pop("x"))


def add(m: Any, batch: Any) -> Tensor:
    batch["y"] = 3
    return m.linear(batch["x"])


def replace(m: Any, batch: Any) -> Tensor:
    batch["x"] = batch["x"] * 2
    return m.linear(batch["x"])


@pytest.mark.parametrize("body", [pop, add, replace], ids=lambda body: body.__name__)
def test_a_change_of_the_containers_of_a_call_is_refused(body: Callable[[Any, Any], Any]) -> None:
    assert "changes a list or dict that it is called with" in refused(body, {"x": example(), "n": 3})


def test_a_copy_of_a_container_may_be_changed() -> None:
    def body(m: Any, batch: Any) -> Tensor:
        batch = dict(batch, y=1)
        return pop(m, batch) * batch["n"]

    assert len(captured(body, {"x": example(), "n": 3}).nodes) > 3


def no_gradients(m: Any, x: Tensor) -> Tensor:
    torch.set_grad_enabled(False)
    return m.linear(x)


def default_dtype(m: Any, x: Tensor) -> Tensor:
    torch.set_default_dtype(torch.float64)
    return m.linear(x)


@pytest.mark.parametrize(("body", "text"), [(no_gradients, "gradients switched"), (default_dtype, "default dtype")])
def test_a_mode_of_torch_that_is_left_set_is_refused_and_does_not_stay(body: Any, text: str) -> None:
    assert text in refused(body)
    assert torch.is_grad_enabled() and torch.get_default_dtype() is torch.float32


def to_argument(m: Any, x: Tensor) -> Tensor:
    x.mul_(2)  # culprit
    return m.linear(x)


def to_a_view_of_an_argument(m: Any, x: Tensor) -> Tensor:
    x[0] = 1  # culprit
    return m.linear(x)


def with_gradient(m: Any, x: Tensor) -> Tensor:
    m.ema.mul_(0.9).add_(m.linear(x).mean(0))  # culprit
    return m.linear(x)


def within_checkpoint(m: Any, x: Tensor) -> Tensor:
    def inner(y: Tensor) -> Tensor:
        m.ema.add_(y.detach().mean(0))  # culprit
        return m.linear(y).relu()

    return checkpoint(inner, x * m.linear.bias, use_reentrant=False)


def behind_checkpoint(m: Any, x: Tensor) -> Tensor:
    made = checkpoint(lambda y: (m.linear(y) * (m.ema + 1)).tanh(), x * m.linear.bias, use_reentrant=False)
    m.ema.add_(1)  # culprit
    return made


class Noting(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seen: Tensor) -> Tensor:
        ctx.save_for_backward(seen)
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.saved_tensors[0].add_(gradient.mean(0))
        return 2 * gradient, None


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_variables
        return cast(Tensor, 2 * x * gradient)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # which dynamo does
def test_an_older_name_of_what_a_backward_saved() -> None:
    graph = captured(lambda m, x: Squared.apply(m.linear(x)))
    assert [name for name, _ in graph.gradients] == ["linear.weight", "linear.bias"]


def in_a_backward(m: Any, x: Tensor) -> Tensor:
    return cast(Tensor, Noting.apply(m.linear(x), m.ema))


def in_forward_and_backward(m: Any, x: Tensor) -> Tensor:
    m.ema.mul_(0.9)
    return in_a_backward(m, x)


def in_a_hook(m: Any, x: Tensor) -> Tensor:
    made: Tensor = m.linear(x)
    made.register_hook(lambda gradient: [m.ema.add_(gradient.mean(0)), None][1])
    return made


WRITES = [
    (to_argument, "writes into its argument x", "x = x.clone()"),
    (to_a_view_of_an_argument, "writes into its argument x", "x = x.clone()"),
    (with_gradient, "writes into the buffer ema what carries a gradient", "detach"),
    (within_checkpoint, "writes into the buffer ema", "out of the checkpoint"),
    (behind_checkpoint, "writes into ema", "give it a copy"),
    (in_a_backward, "writes into the buffer ema", "outside of the step"),
    (in_forward_and_backward, "writes into the buffer ema", "outside of the step"),
    (in_a_hook, "writes into the buffer ema", "outside of the step"),
]


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # which dynamo does
@pytest.mark.parametrize(("body", "what", "remedy"), WRITES, ids=[body.__name__ for body, *_ in WRITES])
def test_a_write_in_place_that_shards_cannot_repeat_is_refused(body: Any, what: str, remedy: str) -> None:
    text = refused(body)
    assert what in text and remedy in text


def test_a_checkpoint_may_write_buffers_where_nothing_goes_backward() -> None:
    with torch.no_grad():
        assert [name for name, _ in captured(within_checkpoint).mutations] == ["ema"]


def from_view(m: Any, x: Tensor) -> Tensor:
    return m.linear(x) * m.view  # culprit


def from_trained(m: Any, x: Tensor) -> Tensor:
    return m.linear(x) * m.trained  # culprit


def from_list_of_views(m: Any, x: Tensor) -> Tensor:
    return m.linear(x) * m.listed[0]  # culprit


def from_global(m: Any, x: Tensor) -> Tensor:
    return m.linear(x) * TENSOR  # culprit


def from_array(m: Any, x: Tensor) -> Tensor:
    return m.linear(x) * torch.from_numpy(m.array)  # culprit


def from_default(m: Any, x: Tensor, y: Tensor = TENSOR) -> Tensor:
    return m.linear(x) * y  # culprit


@pytest.mark.parametrize(
    "body",
    [from_view, from_trained, from_list_of_views, from_global, from_array, from_default],
    ids=lambda body: body.__name__,
)
def test_a_tensor_that_is_no_parameter_buffer_or_argument_is_refused(body: Callable[[Any, Any], Any]) -> None:
    if body is from_array and torch.__version__ < "2.12":  # where dynamo fails of itself, and knows no line
        with pytest.raises(CaptureError):
            captured(body)
    else:
        assert "register_buffer" in refused(body)


def test_a_tensor_in_a_plain_attribute_becomes_a_buffer_that_checkpoints_leave_out() -> None:
    model = Stateful(lambda m, x: m.linear(x) * m.plain)
    plain, kept = model.plain, list(model.state_dict())
    graph = capture(model, (example(),))
    assert [node.name for _, node in graph.of_kind("buffer")] == ["plain"]
    assert model.plain is plain and list(model.state_dict()) == kept and "plain" in dict(model.named_buffers())
    assert {"view", "trained"}.isdisjoint(dict(model.named_buffers()))


def test_a_tensor_that_several_modules_have_is_one_buffer() -> None:
    model = Stateful(lambda m, x: m.plain + m.linear(x) * m.linear.table)
    model.linear.table = table = model.plain
    kept = list(model.state_dict())
    (buffer,) = (node.name for _, node in capture(model, (example(),)).of_kind("buffer"))
    assert buffer in ("plain", "linear.table")
    assert model.linear.table is table is model.plain and list(model.state_dict()) == kept
    assert {"plain", "linear.table"} <= dict(model.named_buffers(remove_duplicate=False)).keys()


def test_a_tensor_that_a_call_leaves_with_several_modules_is_no_buffer() -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        m.plain = m.linear.kept = x.amax(0)
        return m.linear(x)

    model = Stateful(body)
    model(example())
    assert not capture(model, (example(),)).replaced
    assert model.plain is model.linear.kept and {"plain", "linear.kept"}.isdisjoint(dict(model.named_buffers()))


def test_a_plain_attribute_that_the_forward_replaces_is_a_buffer_that_the_step_replaces() -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        m.plain = 0.9 * m.plain + x.detach().mean(0)
        return m.linear(x)

    assert [name for name, _ in captured(body).mutations] == ["plain"]


def test_a_tensor_from_a_closure_is_refused() -> None:
    closed = torch.ones(SIZE)

    def body(m: Any, x: Tensor) -> Tensor:
        return m.linear(x) * closed  # culprit

    assert "register_buffer" in refused(body)


def ema(m: Any, x: Tensor) -> Tensor:
    m.ema = 0.9 * m.ema + 0.1 * x.mean(0)
    return m.linear(x).sum() + m.ema.sum()


def only_written(m: Any, x: Tensor) -> Tensor:
    m.linear.seen = x.amax(0)
    return m.linear(x)


def old_and_new(m: Any, x: Tensor) -> Tensor:
    old, m.ema = m.ema, m.ema * 2 + 1
    return m.linear(x) * old + m.ema


def twice(m: Any, x: Tensor) -> Tensor:
    m.ema = m.ema + 1
    m.ema = m.ema * x.mean(0)
    return m.linear(x)


def by_name(m: Any, x: Tensor) -> Tensor:
    for name in ("ema", "other"):
        setattr(m, name, getattr(m, name) + x.mean(0))
    return m.linear(x)


def under_no_grad(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        m.ema = m.linear(x).mean(0)
    return m.linear(x)


def through_the_table(m: Any, x: Tensor) -> Tensor:
    m._buffers["ema"] = m.ema + 1
    return m.linear(x)


REPLACED = {ema: {"ema"}, only_written: {"linear.seen"}, old_and_new: {"ema"}, twice: {"ema"}} | {
    by_name: {"ema", "other"}, under_no_grad: {"ema"}, through_the_table: {"ema"},
}  # fmt: skip


@pytest.mark.parametrize("body", REPLACED, ids=lambda body: body.__name__)
def test_a_buffer_that_is_replaced_is_a_mutation_whether_it_was_read_or_not(body: Callable[[Any, Any], Any]) -> None:
    graph = captured(body)
    assert graph.replaced == {name for name, _ in graph.mutations} == REPLACED[body]
    assert {node.name for _, node in graph.of_kind("buffer")} >= REPLACED[body]


def test_a_buffer_that_is_written_in_place_is_a_mutation_and_stays_the_tensor_it_is() -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        m.ema = m.ema.mul_(0.9)
        m.other.view(2, 2)[0] = x.mean()
        return m.linear(x)

    graph = captured(body)
    assert {name for name, _ in graph.mutations} == {"ema", "other"} and not graph.replaced


def other_shape(m: Any, x: Tensor) -> Tensor:
    m.ema = x.clone()  # culprit
    return m.linear(x)


def other_dtype(m: Any, x: Tensor) -> Tensor:
    m.ema = x.mean(0).double()  # culprit
    return m.linear(x)


def from_none(m: Any, x: Tensor) -> Tensor:
    m.absent = x.mean(0)  # culprit
    return m.linear(x)


def to_none(m: Any, x: Tensor) -> Tensor:
    m.ema = None
    return m.linear(x)


def by_a_gradient(m: Any, x: Tensor) -> Tensor:
    m.ema = m.linear(x).mean(0)  # culprit
    return m.linear(x)


def by_a_view_of_an_argument(m: Any, x: Tensor) -> Tensor:
    m.ema = x[0]  # culprit
    return m.linear(x)


def by_a_result(m: Any, x: Tensor) -> Tensor:
    m.ema = m.linear(x).mean(0).detach()  # culprit
    return m.ema


def by_each_other(m: Any, x: Tensor) -> Tensor:
    m.ema, m.other = m.other, m.ema
    return m.linear(x)


def both_ways(m: Any, x: Tensor) -> Tensor:
    m.ema.mul_(2)
    m.ema = m.ema + 1
    return m.linear(x)


def tied(m: Any, x: Tensor) -> Tensor:
    m.linear.seen = m.linear.seen + 1  # culprit
    return m.linear(x)


NOT_REPLACED = [
    (other_shape, "final shape and dtype"),
    (other_dtype, "becomes torch.float64[4]"),
    (from_none, "None before or after"),
    (to_none, "None before or after"),
    (by_a_gradient, "carries a gradient"),
    (by_a_view_of_an_argument, "shares memory"),
    (by_a_result, "shares memory"),
    (by_each_other, "shares memory"),
    (both_ways, "do one of the two"),
]


@pytest.mark.parametrize(("body", "text"), NOT_REPLACED, ids=[body.__name__ for body, _ in NOT_REPLACED])
def test_a_buffer_that_cannot_be_replaced_is_refused(body: Callable[[Any, Any], Any], text: str) -> None:
    if body is from_none and torch.__version__ < "2.12":  # as from_array
        with pytest.raises(CaptureError):
            captured(body)
    else:
        assert text in refused(body)


def test_a_buffer_known_by_two_names_is_not_replaced_under_one() -> None:
    model = Stateful(tied)
    model.other = model.linear.seen
    with pytest.raises(CaptureError, match=r"linear\.seen .*, which is also other|other .*, which is also linear.seen"):
        capture(model, (example(),))


def test_memory_read_by_strides_is_refused() -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        return m.linear(x).as_strided((3, 2), (4, 1))  # culprit

    assert "as_strided" in refused(body)


def test_an_operator_that_raises_for_some_data_is_refused() -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        return torch.linalg.lu_factor(m.linear.weight + x.sum())[0]  # culprit

    assert "torch.linalg.lu_factor_ex" in refused(body)


LOCK = threading.Lock()


def test_what_only_the_first_call_sets_up_is_set_up_before() -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        if m.number == 0:
            m.number, m.config.scale = 3, 2.0
        return m.linear(x) * m.number * m.config.scale

    model, x = Stateful(body), example()
    graph = capture(model, (x,))
    assert (model.number, model.config.scale) == (3, 2.0)
    assert graph.fingerprint == capture(model, (x,)).fingerprint


@lru_cache
def steps(length: int) -> Tensor:
    return torch.arange(float(length))


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning")
def test_the_first_call_may_find_tensors_that_a_function_keeps_of_calls_before() -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        if m.number == 0:
            m.number = 3
        return m.linear(x) * steps(x.shape[-1]) * m.number

    x = example()
    Stateful(body)(x)
    assert capture(Stateful(body), (x,)).fingerprint == capture(Stateful(body), (x,)).fingerprint


def test_the_first_call_may_go_by_numbers_of_representative_arguments() -> None:
    class Sized(Stateful):
        def forward(self, x: Tensor, sizes: Tensor) -> Any:  # type: ignore[override]
            if self.number == 0:
                with LOCK:
                    self.number = 1
            sizes = torch.tensor([size // 2 for size in sizes]).tolist()
            return torch.stack([part.sum() for part in self.linear(x).split(sizes)])

    x, sizes = example(), autoshard.representative(torch.tensor([2, 4]))
    model = Sized(lambda m, x: x)
    graph = capture(model, (x, sizes))
    assert model.number == 1
    assert graph.fingerprint == capture(model, (x, sizes)).fingerprint


def test_hooks_that_the_first_call_puts_on_under_a_lock_are_part_of_the_step() -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        if m.number == 0:
            with LOCK:
                m.linear.register_forward_hook(lambda module, args, result: result.exp())
                m.number = 1
        return m.linear(x)

    assert any(node.op is torch.ops.aten.exp.default for node in capture(Stateful(body), (example(),)).nodes)


@pytest.mark.parametrize("kept", ["number", "tensor"])
def test_a_model_that_every_call_changes_is_refused_and_left_as_it_was(kept: str) -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        if m.number == 0:
            m.number = 1
        if kept == "number":
            m.number += 1
        else:
            m.last = m.linear(x).detach() + (0.0 if m.last is None else m.last)
        return m.linear(x)

    model = Stateful(body)
    model.last = None
    with pytest.raises(CaptureError, match="the forward changes"):
        capture(model, (example(),))
    assert model.number == 0 and model.last is None and not model.linear._forward_hooks


def test_a_first_call_may_fill_what_every_call_fills() -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        m.number = 1
        m.ema.mul_(0.9).add_(x.mean(0))
        return m.linear(x) * m.ema

    assert [name for name, _ in captured(body).mutations] == ["ema"]


def test_a_cache_that_is_emptied_and_was_empty_is_no_change() -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        m.table.clear()
        return m.linear(x)

    assert captured(body).fingerprint == captured(lambda m, x: m.linear(x)).fingerprint


def test_what_a_library_notes_of_tensors_at_its_first_call_is_none_of_the_models(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # as einops does in _backends.get_backend
    seen: dict[type, str] = {}

    def rearrange(x: Any, pattern: str) -> Any:
        if type(x) not in seen:
            seen[type(x)] = "torch"
        return x * len(seen[type(x)])

    monkeypatch.setitem(sys.modules, "einops", types.SimpleNamespace(rearrange=rearrange))
    graph = captured(lambda m, x: rearrange(m.linear(x), "a b -> a b") * rearrange(m.linear.bias, "a -> a"))
    assert sum(node.op is torch.ops.aten.mul.Tensor and node.phase == "forward" for node in graph.nodes) == 3


def test_what_stands_in_the_way_behind_the_first_call_is_what_is_said() -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        if m.number == 0:
            m.number = 1
        return m.linear(x).as_strided((3, 2), (4, 1))  # culprit

    model = Stateful(body)
    with pytest.raises(CaptureError, match="as_strided"):
        capture(model, (example(),))
    assert model.number == 0


class Doubled(torch.overrides.TorchFunctionMode):
    """Doubles what products with weights give."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.nn.functional.linear else result


def test_a_mode_that_a_forward_enters_for_a_while_is_no_change() -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        with Doubled():
            x = m.linear(x)
        return m.linear(x)

    graph = capture(Stateful(body), (example(),))
    names = [node.name for _, node in graph.of_kind("operator") if node.phase == "forward"]
    assert names == ["linear/t", "linear/addmm", "linear/mul", "linear/t.1", "linear/addmm.1"]


def test_a_set_that_has_what_it_had_is_no_change() -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        m.names.add("linear")
        m.kept = m.kept
        return m.linear(x) * m.kept

    model = Stateful(body)
    model.names = {"linear"}
    model.kept = nn.Buffer(torch.ones(SIZE), persistent=False)
    assert not capture(model, (example(),)).mutations
    model.names = {"other"}
    with pytest.raises(CaptureError, match=r"model\.names"):
        capture(model, (example(),))


def another_number(m: Any, x: Tensor) -> Tensor:
    made: Tensor = m.linear(x) * m.table["scale"]
    m.table["scale"] = m.table["other"]  # culprit
    return made


def another_module(m: Any, x: Tensor) -> Tensor:
    made: Tensor = m.used(x)
    m.used = m.linear  # culprit
    return made


@pytest.mark.parametrize("body", [another_number, another_module], ids=lambda body: body.__name__)
def test_what_the_first_call_reads_and_puts_elsewhere_is_a_change(body: Callable[[Any, Any], Any]) -> None:
    """Behind that call, every other one puts the same in its own place."""

    def model() -> Stateful:
        made = Stateful(body)
        made.table = {"scale": torch.ones(SIZE), "other": torch.zeros(SIZE)}  # type: ignore[dict-item]
        made.used = nn.Linear(SIZE, SIZE)
        return made

    with pytest.raises(CaptureError, match=r"the forward changes model\..*# culprit"):
        capture(model(), (example(),))
    called = model()
    called(example())
    assert not capture(called, (example(),)).mutations


def from_numbers(m: Any, x: Tensor) -> Tensor:
    if m.number == 0:
        m.number = int(x.max())  # culprit
    return m.linear(x) * 2


def from_a_tensor(m: Any, x: Tensor) -> Tensor:
    if m.number == 0:
        m.number, m.kept = 1, x.mean(0)  # culprit
    return m.linear(x)


def into_a_buffer(m: Any, x: Tensor) -> Tensor:
    if m.number == 0:
        m.number = 1  # culprit
        m.ema.copy_(x.mean(0))
    return m.linear(x) * m.ema


def into_a_view_of_a_parameter(m: Any, x: Tensor) -> Tensor:
    if m.number == 0:
        m.number = 1  # culprit
        m.linear.weight.data[0] = x.mean(0)
    return m.linear(x)


def in_place_of_a_buffer(m: Any, x: Tensor) -> Tensor:
    m.ema = x.mean(0) if m.number == 0 else 0.9 * m.ema + 0.1 * x.mean(0)
    m.number = 1  # culprit
    return m.linear(x) * m.ema


def in_place_of_no_buffer(m: Any, x: Tensor) -> Tensor:
    if m.number == 0:
        m.number = 1  # culprit
        m.absent = torch.ones(SIZE)
    return m.linear(x) * m.absent


FILLING = (into_a_buffer, into_a_view_of_a_parameter, in_place_of_a_buffer, in_place_of_no_buffer)
NOT_IN_ADVANCE = [
    (from_numbers, "looks at numbers of a tensor"),
    (from_a_tensor, "leaves a tensor behind"),
    *((body, "fills parameters or buffers") for body in FILLING),
]


@pytest.mark.parametrize(("body", "reason"), NOT_IN_ADVANCE, ids=[body.__name__ for body, _ in NOT_IN_ADVANCE])
def test_why_the_first_call_cannot_be_made_in_advance_is_said(body: Callable[[Any, Any], Any], reason: str) -> None:
    said = refused(body)
    assert "the forward changes model." in said
    assert "Its first call could not be made in advance, on tensors without memory: " in said and reason in said
    assert said.endswith("call it once before planning") and "aten" not in said
    model = Stateful(body)
    model(example() + 10)
    assert len(capture(model, (example(),)).nodes) > 3


class SetsUp(nn.Module):
    """Fills in what kind it is at its first call, as classifiers of transformers do; its norm fills at every call."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.kind = nn.BatchNorm1d(SIZE), ""

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        if not self.kind:
            self.kind = "single" if x.shape[1] == 1 else "multiple"
        return x.square().mean()


def test_a_first_call_that_sets_something_up_may_fill_what_every_call_fills() -> None:
    model = SetsUp()
    graph = capture(model, (example(),))
    assert model.kind == "multiple" and "norm.running_mean" in dict(graph.mutations)
    assert torch.equal(model.norm.running_mean, torch.zeros(SIZE))
