"""What capture runs in the place of recurrent modules, bags, attention of several heads or without a kernel, and of
picking from rows, gives what torch gives.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

from autoshard.capture import capture
from autoshard.capture.taken_apart.attention_parts import attention_in_parts, attention_of_views
from autoshard.capture.taken_apart.bags import can_be_added_up, embedding_bag
from autoshard.capture.taken_apart.multihead import multihead_attention
from autoshard.capture.taken_apart.recurrent import RECURRENT
from autoshard.capture.taken_apart.row_numbers import by_position, part, write_by_position
from autoshard.capture.taken_apart.take_apart import mean_of_all, take_apart

KINDS = {
    torch.lstm: lambda **options: nn.LSTM(4, 6, **options),
    torch.gru: lambda **options: nn.GRU(4, 6, **options),
    torch.rnn_tanh: lambda **options: nn.RNN(4, 6, **options),
    torch.rnn_relu: lambda **options: nn.RNN(4, 6, nonlinearity="relu", **options),
}


OPTIONS: tuple[dict[str, Any], ...] = (
    {"batch_first": True},
    {"bias": False},
    {"num_layers": 2, "bidirectional": True},
)
CASES = [*product(KINDS, OPTIONS), (torch.lstm, {"proj_size": 3})]


@pytest.mark.parametrize(("function", "options"), CASES, ids=lambda value: getattr(value, "__name__", str(value)))
@pytest.mark.filterwarnings("ignore:LSTM with projections")
def test_a_recurrent_module_with_its_gradients(function: Any, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    module = KINDS[function](**options).double()
    x = torch.randn(2, 5, 4, dtype=torch.float64, requires_grad=True)
    rows = 2 if module.batch_first else 5
    count = module.num_layers * (2 if module.bidirectional else 1)
    start: Any = torch.randn(count, rows, options.get("proj_size", 6), dtype=torch.float64, requires_grad=True)
    if function is torch.lstm:
        start = (start, torch.randn(count, rows, 6, dtype=torch.float64, requires_grad=True))
    output, last = module(x, start)
    expected = (output, *(last if isinstance(last, tuple) else (last,)))
    shape = (module.bias, module.num_layers, 0.0, True, module.bidirectional, module.batch_first)
    results = RECURRENT[function](x, start, module._flat_weights, *shape)
    torch.testing.assert_close(results, expected)
    trained = [x, *(start if isinstance(start, tuple) else (start,)), *module.parameters()]
    grads = [torch.autograd.grad(sum(each.sin().sum() for each in all_of), trained) for all_of in (results, expected)]
    torch.testing.assert_close(*grads)


def test_a_graph_does_not_grow_with_the_steps_of_a_recurrent_module() -> None:
    module = nn.LSTM(4, 6, 2, bidirectional=True)
    assert len(capture(module, (torch.randn(3, 2, 4),)).nodes) == len(capture(module, (torch.randn(300, 2, 4),)).nodes)


@pytest.mark.parametrize("padding_idx", [None, 5, -1])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_of_one_length(mode: str, padding_idx: int | None) -> None:
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(12, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    bags = torch.randint(0, 12, (6, 4), generator=generator)
    bags[0], bags[1], bags[2, 1] = 5, 11, 5
    weights = torch.rand(6, 4, generator=generator, dtype=torch.float64) if mode == "sum" else None
    options: dict[str, Any] = {"mode": mode, "padding_idx": padding_idx, "per_sample_weights": weights}
    results = [function(input=bags, weight=table, **options) for function in (embedding_bag, F.embedding_bag)]
    torch.testing.assert_close(*results)
    torch.testing.assert_close(*(torch.autograd.grad(result.square().sum(), table)[0] for result in results))


@pytest.mark.parametrize("padding_idx", [None, 5, -1])
@pytest.mark.parametrize("includes_last", [False, True])
@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_bags_that_start_at_offsets(mode: str, includes_last: bool, padding_idx: int | None) -> None:
    """Bags of 3, 0, 2, 1, 18 and 0 rows, and one of rows that are left out alone."""
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(12, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    rows = torch.randint(0, 12, (24,), generator=generator)
    rows[3:5], rows[5] = 5, 11
    offsets = torch.tensor([0, 3, 3, 5, 6, 24] + [24] * includes_last)
    weights = torch.rand(24, generator=generator, dtype=torch.float64) if mode == "sum" else None
    options: dict[str, Any] = {"mode": mode, "padding_idx": padding_idx, "per_sample_weights": weights}
    options |= {"offsets": offsets, "include_last_offset": includes_last}
    assert can_be_added_up(input=rows, weight=table, **options)
    assert not can_be_added_up(input=rows, weight=table, **options | {"mode": "max"})
    results = [function(input=rows, weight=table, **options) for function in (embedding_bag, F.embedding_bag)]
    torch.testing.assert_close(*results)
    torch.testing.assert_close(*(torch.autograd.grad(result.square().sum(), table)[0] for result in results))


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize(
    ("masks", "dtype"),
    [("", None), ("causal", None), *product(("steps", "heads", "rows", "both"), (torch.bool, torch.float64))],
)
@pytest.mark.parametrize("keys", ["own", "others", "of other sizes"])
def test_attention_of_several_heads(keys: str, masks: str, dtype: torch.dtype | None, average: bool) -> None:
    torch.manual_seed(0)
    sizes = {"kdim": 5, "vdim": 7} if keys == "of other sizes" else {}
    module = nn.MultiheadAttention(8, 2, bias=keys != "others", **sizes).double()
    query = torch.randn(4, 3, 8, dtype=torch.float64)
    given = (
        (query, *(torch.randn(6, 3, size, dtype=torch.float64) for size in sizes.values())) if sizes else (query,) * 3
    )
    if keys == "others":
        given = (query, *(torch.randn(6, 3, 8, dtype=torch.float64),) * 2)
    steps = len(given[1])

    def mask(*shape: int) -> torch.Tensor:
        hidden = torch.rand(*shape) < 0.3
        hidden[..., 0] = False
        return (
            hidden if dtype is torch.bool else torch.randn(*shape, dtype=torch.float64).masked_fill(hidden, -torch.inf)
        )

    options: dict[str, Any] = {"need_weights": masks in ("heads", "both"), "average_attn_weights": average}
    if masks in ("steps", "both"):
        options["attn_mask"] = mask(4, steps)
    elif masks == "heads":
        options["attn_mask"] = mask(6, 4, steps)
    elif masks == "causal":
        options |= {"attn_mask": torch.ones(4, steps).triu(1).bool(), "is_causal": True}
    if masks in ("rows", "both"):
        options["key_padding_mask"] = mask(3, steps)

    seen: list[Any] = []

    def both(*args: Any, **kwargs: Any) -> Any:
        seen.append(multihead_attention(*args, **kwargs))
        return theirs(*args, **kwargs)

    theirs = F.multi_head_attention_forward
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "multi_head_attention_forward", both)
        expected = module(*given, **options)
    torch.testing.assert_close(seen, [expected])


@pytest.mark.parametrize(
    ("ours", "theirs"), [(multihead_attention, F.multi_head_attention_forward), (embedding_bag, F.embedding_bag)]
)
def test_what_stands_for_a_function_takes_its_arguments_by_their_names(ours: Any, theirs: Any) -> None:
    """So callers may name them: pooling by attention, as CLIP has it, names all."""
    assert list(inspect.signature(ours).parameters) == list(inspect.signature(theirs).parameters)


def _heads(
    dtype: torch.dtype = torch.float64, keys: int = 2, values: int = 3, rows: tuple[int, int, int] = (2, 2, 2)
) -> list[torch.Tensor]:
    """Queries of 2 rows, 2 heads and 4 steps, keys and values of 6."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(rows[0], 2, 4, 3), (rows[1], keys, 6, 3), (rows[2], keys, 6, values)]
    return [torch.randn(*shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def _learned(dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(1, 2, 4, 6, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()


def _hidden() -> torch.Tensor:
    """A mask by which the first query sees no key."""
    seen = torch.ones(4, 6, dtype=torch.bool).tril(1)
    seen[0] = False
    return seen


WITHOUT_KERNEL: dict[str, tuple[Any, dict[str, Any], bool]] = {
    "a learned mask": (_heads, {"attn_mask": _learned()}, True),
    "dropped": (_heads, {"dropout_p": 0.3}, True),
    "dropped, causal": (_heads, {"dropout_p": 0.3, "is_causal": True}, True),
    "dropped, masked": (_heads, {"dropout_p": 0.3, "attn_mask": _hidden()}, True),
    "short values": (lambda: _heads(values=2), {"scale": 0.3}, True),
    "fewer heads": (lambda: _heads(keys=1), {"attn_mask": _learned(), "enable_gqa": True}, True),
    "dropped, one head": (lambda: _heads(keys=1), {"dropout_p": 0.3}, True),
    "short values, one head": (lambda: _heads(keys=1, values=2), {}, True),
    "dropped, queries of one row": (lambda: _heads(rows=(1, 2, 2)), {"dropout_p": 0.3}, True),
    "short values, keys of one row": (lambda: _heads(values=2, rows=(2, 1, 2)), {}, True),
    "below zero": (_heads, {"attn_mask": _learned(), "scale": -0.3}, True),
    "bfloat16": (lambda: _heads(torch.bfloat16), {"attn_mask": _learned(torch.bfloat16)}, True),
    "a mask": (_heads, {"attn_mask": _hidden()}, False),
    "plain": (_heads, {}, False),
}


@pytest.mark.parametrize("name", WITHOUT_KERNEL)
def test_attention_without_a_kernel(name: str) -> None:
    make, options, is_taken_apart = WITHOUT_KERNEL[name]
    given, taken = make(), []

    def backend(module: torch.fx.GraphModule, given: Any) -> Any:
        take_apart(module)
        taken.append(any(node.target is attention_in_parts for node in module.graph.nodes))
        return module

    def seen(function: Any) -> tuple[torch.Tensor, ...]:
        torch.manual_seed(0)
        found = function(*given, **options)
        wanted = [*given, *(value for value in options.values() if getattr(value, "requires_grad", False))]
        return (found, *torch.autograd.grad(found.square().sum(), wanted))

    torch._dynamo.reset()
    expected = seen(F.scaled_dot_product_attention)
    compiled = torch.compile(lambda *args, **of: F.scaled_dot_product_attention(*args, **of), backend=backend)
    torch.testing.assert_close(seen(compiled), expected)
    assert taken == [is_taken_apart]
    torch.testing.assert_close(seen(attention_in_parts), expected)


class OfViews(nn.Module):
    def __init__(self, keys: torch.Tensor, options: dict[str, Any]) -> None:
        super().__init__()
        self.keys, self.options = nn.Parameter(keys.detach()), options
        self.register_buffer("mask", options.get("attn_mask"))

    def forward(self, q: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        options = self.options | {"attn_mask": self.mask}
        return F.scaled_dot_product_attention(q, self.keys, v, **options)


@pytest.mark.parametrize("name", ["", "is_causal", "attn_mask", "enable_gqa"])
@pytest.mark.parametrize(("keys", "rows"), [(1, (2, 2, 2)), (2, (1, 2, 2)), (2, (2, 1, 1)), (1, (1, 2, 2))], ids=str)
def test_attention_to_one_head_or_of_one_row_runs_in_a_kernel_that_keeps_the_heads(
    keys: int, rows: tuple[int, int, int], name: str
) -> None:
    """Torch multiplies batches of matrices, of which no block is some heads of several rows."""
    options: dict[str, Any] = {name: _hidden() if name == "attn_mask" else True} if name else {}
    q, k, v = _heads(keys=keys, rows=rows)
    wanted = F.scaled_dot_product_attention(q, k, v, **options)
    torch.testing.assert_close(attention_of_views(q, k, v, **options), wanted)
    names = [str(node.op) for node in capture(OfViews(k, options), (q.detach(), v.detach())).nodes]
    assert "autoshard.attention.default" in names and not any("bmm" in name for name in names)


def test_attention_without_a_kernel_is_cast_as_torch_casts_it() -> None:
    given, mask = _heads(torch.float32), _learned(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = (f(*given, mask) for f in (attention_in_parts, F.scaled_dot_product_attention))
    assert found.dtype is torch.bfloat16
    assert torch.equal(found, expected)


class Transposed(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.transpose(1, -1)


ARANGE = torch.arange


def _added_to(rows: torch.Tensor) -> torch.Tensor:
    rows.view(-1, 1)[:2].add_(1)
    return rows


PICKED = {
    "a mask of padding": (lambda x, i: x[ARANGE(4)[:, None, None], ARANGE(5)], True),
    "in another order": (lambda x, i: x[ARANGE(4), ARANGE(5).unsqueeze(1) + 0], True),
    "the last of each row": (lambda x, i: x[ARANGE(4), i], True),
    "the last of each row, all of it": (lambda x, i: x[ARANGE(4), i, :], True),
    "all rows, all of them": (lambda x, i: x[ARANGE(4)[:, None], ARANGE(5), ...], True),
    "part of the last of each row": (lambda x, i: x[ARANGE(4), i, 1:], False),
    "several of each row": (lambda x, i: x[ARANGE(4)[:, None], torch.stack([i, i - 1, -1 - i], 1)], True),
    "one of all rows": (lambda x, i: x[ARANGE(4)[None], i[:2, None]], True),
    "not all rows": (lambda x, i: x[ARANGE(3), i[:3]], False),
    "one step of each row": (lambda x, i: x.transpose(0, 1)[3, ARANGE(4), i - 2], True),
    "one feature of the last of each row": (lambda x, i: x[ARANGE(4), i, -1], True),
    "several by a view": (lambda x, i: x[ARANGE(4).view([4, 1]).repeat([1, 2]), torch.stack([i, i - 1], 1), :], True),
    "several by a copy": (lambda x, i: x[ARANGE(4).reshape(-1, 1).contiguous().to(x.device), i[:, None]], True),
    "several, expanded": (lambda x, i: x[ARANGE(4)[:, None].expand(-1, 3), i[:3].expand(4, 3)], True),
    "several, as others are": (
        lambda x, i: x[(r := ARANGE(4)[:, None]).expand_as(i[None] + 0 * r), i.expand(4, 4)],
        True,
    ),
    "several in a row": (lambda x, i: x[ARANGE(4).repeat_interleave(3), torch.cat([i, i - 1, -1 - i])], True),
    "several, each in turn": (lambda x, i: x[ARANGE(4).repeat(3), torch.cat([i, i - 1, -1 - i])], False),
    "of a grid": (lambda x, i: x[torch.meshgrid(ARANGE(4), ARANGE(4), indexing="ij")[0], i.expand(4, 4)], True),
    "rows behind": (lambda x, i: x.transpose(0, 1)[i - 2, ARANGE(4)], True),
    "rows behind, of pairs": (lambda x, i: x.permute(1, 2, 0)[i[:3, None], ARANGE(3).view(3, 1), ARANGE(4)], True),
    "one of each pair": (lambda x, i: x[ARANGE(4)[:, None], ARANGE(5)[None], i[:, None] % 3], True),
    "one of each first pair": (lambda x, i: x[ARANGE(4)[:, None], ARANGE(3)[None], i[:, None] % 3], True),
    "one of each pair, turned": (lambda x, i: x[ARANGE(4)[None], ARANGE(5)[:, None], i % 3], True),
    "the first of all": (lambda x, i: x[ARANGE(4), ARANGE(3)[:, None]], True),
    "the first ones of each": (lambda x, i: x[ARANGE(4), ARANGE(4)], True),
    "rows that were written into": (lambda x, i: x[_added_to(ARANGE(4)), i], False),
    "rows by two": (lambda x, i: x[ARANGE(2).repeat_interleave(2), i], False),
    "one of two": (lambda x, i: x[ARANGE(4), i, i % 3], False),
    "a step of all rows": (lambda x, i: x.transpose(0, 1)[3, ARANGE(4)], False),
    "other rows": (lambda x, i: x[ARANGE(4) + -1, i], False),
    "rows by a parameter": (lambda x, i: x[i - 1, i], False),
    "a mask": (lambda x, i: x[x[..., 0] > 0, 0], False),
}


@pytest.mark.parametrize("name", PICKED)
def test_picking_from_rows(name: str) -> None:
    torch.manual_seed(0)
    function, is_taken_apart = PICKED[name]
    x, i = torch.randn(4, 5, 3, dtype=torch.float64, requires_grad=True), torch.tensor([0, 3, 2, 4])
    taken: list[bool] = []

    def backend(module: torch.fx.GraphModule, given: Any) -> Any:
        take_apart(module)
        taken.append(any(node.target is by_position for node in module.graph.nodes))
        return module

    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        found = torch.compile(function, backend=backend, fullgraph=True, dynamic=False)(x, i)
    expected = function(x, i)
    torch.testing.assert_close(found, expected)
    weights = torch.randn(expected.shape, dtype=torch.float64)
    torch.testing.assert_close(*(torch.autograd.grad((y * weights).sum(), x)[0] for y in (found, expected)))
    assert taken == [is_taken_apart]


def _mapped(function: Callable[..., torch.Tensor], *sizes: int) -> torch.Tensor:
    for k in reversed(range(len(sizes))):
        function = torch.vmap(function, tuple(0 if j == k else None for j in range(len(sizes))))
    if torch.compiler.is_compiling():
        return function(*map(ARANGE, sizes))
    with TransformGetItemToIndex():  # without dynamo a number of a map can be no index by itself
        return function(*map(ARANGE, sizes))


MAPPED: dict[str, tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], bool]] = {
    "two words of a row": (lambda x, i: _mapped(lambda b, q, k: (x[b, q] == x[b, k]) & (k <= q), 4, 5, 5), True),
    "words in front of rows": (lambda x, i: _mapped(lambda q, k, b: x[b, q] - x[b, k] * 2, 5, 5, 4), True),
    "all of one row": (lambda x, i: _mapped(lambda b, q: x[b] * q, 4, 5), True),
    "a row twice": (lambda x, i: _mapped(lambda b, q: x[b, b] * q, 4, 5), False),
    "not all words": (lambda x, i: _mapped(lambda b, q: x[b, q], 4, 3), False),
    "rows by numbers": (lambda x, i: _mapped(lambda b, q: x[i[b], q], 4, 5), False),
    "of what is mapped": (lambda x, i: _mapped(lambda b, q: (x * b)[b, q], 4, 5), False),
}
"""What a map over all rows picks from them, and whether it picks from none any more."""


@pytest.mark.parametrize("name", MAPPED)
def test_picking_from_rows_that_are_mapped(name: str) -> None:
    function, is_taken_apart = MAPPED[name]
    x, i = torch.arange(20).view(4, 5) % 3, torch.tensor([0, 3, 2, 1])
    left: list[bool] = []

    def backend(module: torch.fx.GraphModule, given: Any) -> Any:
        take_apart(module)
        left.append(any(node.target is operator.getitem for node in module.graph.nodes))
        return module

    torch._dynamo.reset()
    found = torch.compile(function, backend=backend, fullgraph=True, dynamic=False)(x, i)
    assert torch.equal(found, function(x, i)) and left == [not is_taken_apart]


def _written_behind(x: torch.Tensor) -> torch.Tensor:
    made = x.mT.clone(memory_format=torch.preserve_format)
    rows = [each.reshape(-1, 3) for each in made]
    made.mul_(2)
    return torch.cat(rows)


def _written_copies(x: torch.Tensor) -> torch.Tensor:
    rows = [each.reshape(-1, 3) for each in x.mT.flip(0).mT.contiguous().mT]
    rows[1].mul_(2)
    return torch.cat(rows)


JOINED: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], bool]] = {
    "a list of rows": (lambda x: torch.cat(list(x)), True),
    "a stack of rows": (lambda x: torch.stack(list(x), dim=0), True),
    "a stack of rows without a dim": (lambda x: torch.stack(x.unbind()), True),
    "pieces": (lambda x: torch.cat(x.split(3)), True),
    "pieces of their lengths": (lambda x: torch.concat(torch.split(x, [1, 3])), True),
    "a stack of pieces": (lambda x: torch.stack(torch.chunk(x, 2, dim=0)), True),
    "pieces of another dim": (lambda x: torch.cat(x[..., :2].split(1, 2)), True),
    "slices": (lambda x: torch.cat([x[:1], x[1:3], x[3:]]), True),
    "with nothing": (lambda x: torch.cat([torch.tensor([], dtype=x.dtype), x], dim=-2), True),
    "with none of its columns": (lambda x: torch.cat([x, x[..., :0]], -1), False),
    "with nothing of another dtype": (lambda x: torch.cat([torch.tensor([]), x.float().half()]), False),
    "one alone": (lambda x: torch.cat([x], 1), True),
    "rows as lists": (lambda x: torch.cat([each.view(-1, 3) for each in x]), True),
    "rows with a dim of their own": (
        lambda x: torch.cat([x[k].unsqueeze(0).contiguous() for k in range(len(x))]),
        True,
    ),
    "rows as one": (lambda x: torch.cat([each.flatten() for each in x.split([1, 3])]), True),
    "rows of what lies otherwise": (lambda x: torch.stack([each.reshape(3, 5) for each in x.mT.flip(0)]), True),
    "rows that are turned": (lambda x: torch.cat([each.mT.reshape(-1, 5) for each in x]), False),
    "rows in other words": (lambda x: torch.cat([each.view(torch.int64) for each in x]), False),
    "rows of other shapes": (lambda x: torch.cat([x[0].flatten(), x[1:].reshape(-1)]), True),
    "copies of what is written into": (_written_behind, False),
    "copies that are written into": (_written_copies, False),
    "the last first": (lambda x: torch.cat([x[2:], x[:2]]), False),
    "not all": (lambda x: torch.stack([x[0], x[1], x[2]]), False),
    "one twice": (lambda x: torch.cat([x[:2], x[1:]]), False),
    "every other": (lambda x: torch.cat([x[::2], x[1::2]]), False),
    "along another dim": (lambda x: torch.cat(list(x), 1), False),
    "of two": (lambda x: torch.cat([x[:2], (x + 1)[2:]]), False),
    "words": (lambda x: torch.cat([x[:, :2], x[:, 3:]]), False),
}
"""How a batch is taken apart and joined."""


@pytest.mark.parametrize("name", JOINED)
def test_a_batch_that_is_taken_apart_and_joined_again_stays_one(name: str) -> None:
    x, (joined, is_one) = torch.randn(4, 5, 3, dtype=torch.float64), JOINED[name]
    expected, rewritten = joined(x), []

    def backend(module: torch.fx.GraphModule, given: Any) -> Any:
        take_apart(module)
        rewritten.append(not any(node.target in (torch.cat, torch.concat, torch.stack) for node in module.graph.nodes))
        return module

    torch._dynamo.reset()
    found = torch.compile(joined, backend=backend, fullgraph=True, dynamic=False)(x)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert rewritten == [is_one] and found.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


def _attended(
    x: torch.Tensor,
    lengths: tuple[int, ...] = (2, 2, 2),
    order: Callable[[Any], Any] = list,
    after: Callable[[torch.Tensor], torch.Tensor] = lambda y: y.transpose(1, 2).contiguous(),
    dim: int = 1,
    **options: Any,
) -> torch.Tensor:
    """Attention of pieces of a row (1, heads, steps, features), each to itself."""
    pieces = zip(*(torch.split(part, list(lengths), dim=2) for part in (x, x.flip(1), x.tanh())), strict=True)
    return torch.cat(order([after(F.scaled_dot_product_attention(*each, **options)) for each in pieces]), dim)


def _attended_under_modes(x: torch.Tensor) -> torch.Tensor:
    pieces = [part.chunk(3, 2) for part in (x, x.flip(1), x.tanh())]
    parts = [F.scaled_dot_product_attention(*(part[k] for part in pieces)) for k in (0, 1)]
    with torch.no_grad():
        parts += [F.scaled_dot_product_attention(*(part[2] for part in pieces))]
    return torch.cat(parts, 2)


def _written_between(x: torch.Tensor) -> torch.Tensor:
    written = x.detach().clone()
    pieces = written.chunk(3, 2)
    parts = [F.scaled_dot_product_attention(each, each, each) for each in pieces[:2]]
    written.mul_(2)
    return x * torch.cat([*parts, F.scaled_dot_product_attention(pieces[2], pieces[2], pieces[2])], 2)


PIECES: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], bool]] = {
    "pictures": (_attended, True),
    "causal, by chunks, in one row": (
        lambda x: torch.cat(
            [F.scaled_dot_product_attention(each, each, each, is_causal=True, scale=0.3) for each in x.chunk(3, 2)], 2
        ),
        True,
    ),
    "as a batch": (lambda x: _attended(x, dim=0), True),
    "seen in one row": (lambda x: _attended(x, after=lambda y: y, dim=2).view(1, -1), True),
    "features beside each other": (lambda x: _attended(x, dim=-1), True),
    "of two lengths": (lambda x: _attended(x, (2, 1, 3)), False),
    "the last first": (lambda x: _attended(x, order=lambda parts: parts[::-1]), False),
    "not all": (lambda x: _attended(x, order=lambda parts: parts[1:]), False),
    "one twice": (lambda x: _attended(x, order=lambda parts: [*parts, parts[0]]), False),
    "read beside": (lambda x: _attended(x, order=lambda parts: [parts[0] * parts[1].sum(), *parts[1:]]), False),
    "of a shape that they have": (
        lambda x: _attended(x, after=lambda y: y.reshape(1, -1, 2, 2).transpose(1, 2).contiguous()),
        True,
    ),
    "of another shape": (lambda x: _attended(x, after=lambda y: y.reshape(1, 2, -1, 2).transpose(1, 2)), False),
    "computed with": (lambda x: _attended(x, after=torch.tanh), False),
    "moved to the front": (lambda x: _attended(x, after=lambda y: y.transpose(0, 1)), False),
    "masked": (lambda x: _attended(x, attn_mask=torch.ones(2, 2).tril()), False),
    "pieces of rows": (lambda x: _attended(x.view(3, 1, 6, 2)), False),
    "under a mode": (_attended_under_modes, False),
    "written into between": (_written_between, False),
}
"""How attention of pieces is joined, and whether it becomes that of a batch."""


@pytest.mark.parametrize("name", PIECES)
def test_attention_of_equal_pieces_is_that_of_a_batch(name: str) -> None:
    attended, is_batch = PIECES[name]
    x, rewritten = torch.randn(1, 3, 6, 2, dtype=torch.float64, requires_grad=True), []
    expected = attended(x)

    def backend(module: torch.fx.GraphModule, given: Any) -> Any:
        take_apart(module)
        rewritten.append(sum(node.target is F.scaled_dot_product_attention for node in module.graph.nodes) == 1)
        return module

    torch._dynamo.reset()
    found = torch.compile(attended, backend=backend, fullgraph=True, dynamic=False)(x)
    torch.testing.assert_close(found, expected)
    weight = torch.randn_like(expected)
    grads = [torch.autograd.grad((each * weight).sum(), x)[0] for each in (found, expected)]
    torch.testing.assert_close(*grads)
    assert rewritten == [is_batch]


WRITTEN: dict[str, tuple[Callable[..., tuple[Any, Any]], bool]] = {
    "one of each row": (lambda i, v: ((ARANGE(4), i), v[:, 0]), True),
    "a number": (lambda i, v: ((ARANGE(4), i), 2.0), True),
    "several of each row": (lambda i, v: ((ARANGE(4)[:, None], torch.stack([i, 4 - i, -1 - i], 1)[:, :2]), v), True),
    "rows behind": (lambda i, v: ((ARANGE(4)[None], i[None] - 5), v[:1, 0]), True),
    "one of each row, all of it": (lambda i, v: ((ARANGE(4), i, slice(None)), v[:, 0]), True),
    "one feature of one of each row": (lambda i, v: ((ARANGE(4), i, 2), v[:, 0, 0]), True),
    "several of each row in a row": (
        lambda i, v: ((ARANGE(4).repeat_interleave(2), torch.cat([i, i])), v.flatten(0, 1)),
        True,
    ),
    "the first ones of each row": (lambda i, v: ((ARANGE(4)[:, None], ARANGE(2)), v), True),
    "one of each row, in a row": (lambda i, v: ((ARANGE(4), i), v[:, 0][None, None]), True),
    "everything": (lambda i, v: ((ARANGE(4)[:, None], ARANGE(5)), v[0, 0]), False),
    "not all rows": (lambda i, v: ((ARANGE(3), i[:3]), v[:3, 0]), False),
    "a slice": (lambda i, v: ((slice(None), 2), v[:, 0]), False),
}
"""Where what is written."""


@pytest.mark.parametrize("name", WRITTEN)
def test_writing_into_rows(name: str) -> None:
    torch.manual_seed(0)
    i, (where, is_taken_apart) = torch.tensor([0, 3, 2, 4]), WRITTEN[name]
    x, v = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((4, 5, 3), (4, 2, 3)))
    taken: list[bool] = []

    def backend(module: torch.fx.GraphModule, given: Any) -> Any:
        take_apart(module)
        taken.append(any(node.target is write_by_position for node in module.graph.nodes))
        return module

    def written(x: torch.Tensor, i: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        y = x * 1.0
        place, value = where(i, v)
        y[place] = value
        return y * x.detach()

    torch._dynamo.reset()
    found = torch.compile(written, backend=backend, fullgraph=True, dynamic=False)(x, i, v)
    expected = written(x, i, v)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    for y, z in zip(*(torch.autograd.grad(y.sum(), (x, v), materialize_grads=True) for y in (found, expected))):
        torch.testing.assert_close(y, z)
    assert taken == [is_taken_apart]


def test_what_was_picked_from_may_be_written_into() -> None:
    def written(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        y, rows = x * 1.0, ARANGE(4)
        y[rows, i] += 1.0
        y[rows[:, None], i[:, None]] *= y[rows[:, None], i[:, None]].tanh()
        picked = y[rows, i]
        y[:, 0] = 0.0
        return y * picked[:, None]

    def backend(module: torch.fx.GraphModule, given: Any) -> Any:
        take_apart(module)
        assert sum(node.target is by_position for node in module.graph.nodes) == 4
        return module

    torch.manual_seed(0)
    x, i = torch.randn(4, 5, 3, dtype=torch.float64, requires_grad=True), torch.tensor([0, 3, 2, 4])
    torch._dynamo.reset()
    found, expected = torch.compile(written, backend=backend, fullgraph=True, dynamic=False)(x, i), written(x, i)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    torch.testing.assert_close(*(torch.autograd.grad(y.sum(), x) for y in (found, expected)))


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # torch's own
def test_tangents_go_through_what_is_picked_from_rows() -> None:
    x, i = torch.randn(4, 5, 3, dtype=torch.float64), torch.tensor([0, 3, 2, 4])

    def picked(x: torch.Tensor) -> torch.Tensor:
        return by_position(x, (ARANGE(4), i), (0, None)).square()

    (found, expected) = (torch.func.jvp(f, (x,), (x + 1,))[1] for f in (picked, lambda x: x[ARANGE(4), i].square()))
    torch.testing.assert_close(found, expected)


RANGES = {
    "one": (lambda x: x[..., [-2], :], True),
    "the last ones": (lambda x: x[:, [-2, -1]], True),
    "some": (lambda x: x[[1, 2, 3]], True),
    "one beside a new dim": (lambda x: x[None, :, [2]], True),
    "in another order": (lambda x: x[:, [2, 1]], False),
    "from the end on": (lambda x: x[:, [-1, 0]], False),
    "twice": (lambda x: x[:, [1, 1]], False),
    "beside a number": (lambda x: x[0, :, [1, 2]], False),
    "at pairs": (lambda x: x[[0, 1], [1, 2]], False),
    "by truths": (lambda x: x[:, [True, False, True, False, True]], False),
}


@pytest.mark.parametrize("name", RANGES)
def test_numbers_in_a_row_are_a_range(name: str) -> None:
    function, is_range = RANGES[name]
    x, taken = torch.randn(4, 5, 3, dtype=torch.float64, requires_grad=True), []

    def backend(module: torch.fx.GraphModule, given: Any) -> Any:
        take_apart(module)
        taken.append(any(node.target is part for node in module.graph.nodes))
        return module

    def changed(x: torch.Tensor) -> torch.Tensor:
        picked = function(x * 1.0)
        return picked.mul_(2.0).square()  # what is picked is no view

    torch._dynamo.reset()
    found, expected = torch.compile(changed, backend=backend, fullgraph=True, dynamic=False)(x), changed(x)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    torch.testing.assert_close(*(torch.autograd.grad(y.sum(), x)[0] for y in (found, expected)))
    assert taken == [is_range]


@pytest.mark.parametrize(
    ("pool", "shape"),
    [
        (nn.AdaptiveAvgPool1d(1), (2, 3, 4)),
        (nn.AdaptiveAvgPool2d((1, 1)), (2, 3, 4, 5)),
        (nn.AdaptiveAvgPool3d(1), (2, 3, 4, 5, 2)),
    ],
)
def test_a_pool_of_everything_is_captured_however_the_picture_lies(pool: nn.Module, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape[0], *shape[2:], shape[1]).movedim(-1, 1)  # the channels last
    torch.testing.assert_close(mean_of_all(x, x.dim() - 2), pool(x))
    captured = capture(nn.Sequential(nn.Linear(shape[-1], shape[-1]), Transposed(), pool), (torch.randn(shape),))
    assert all("strided" not in str(node.op) for node in captured.nodes)
