"""Operators with parameters, tables and indices of their own: as functions that write statements."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .templates import mask
from .writer import Unsuited, Writer, made

Writes = Callable[[Writer], object]


def matmul(w: Writer) -> None:
    x = w.tensor(lambda t: t.dim() >= 1 and t.dtype == w.dtype)
    w.let(f"{x} @ {w.parameter((w.value(x).shape[-1], w.length()))}")


def linear(w: Writer) -> None:
    x = w.tensor(lambda t: t.dim() >= 1 and t.dtype == w.dtype)
    out, columns = w.length(), w.value(x).shape[-1]
    bias = f", {w.parameter((out,))}" if w.chance(60) else ""
    w.let(f"F.linear({x}, {w.parameter((out, columns))}{bias})")


def addmm(w: Writer) -> None:
    x = w.tensor(lambda t: t.dim() == 2 and t.dtype == w.dtype)
    rows, columns = w.value(x).shape
    out = w.length()
    bias = w.parameter(w.pick(((out,), (rows, out), (1, out), (rows, 1))))
    factors = w.pick(("", ", beta=0.5", ", alpha=2.0", ", beta=0.5, alpha=-1.0"))
    w.let(f"torch.addmm({bias}, {x}, {w.parameter((columns, out))}{factors})")


def batched(w: Writer) -> None:
    x = w.tensor(lambda t: t.dim() == 3 and t.dtype == w.dtype)
    b, _, columns = w.value(x).shape
    product = w.pick(("torch.bmm(", "torch.einsum('bij,bjk->bik', ", "torch.einsum('bij,bjk->ik', "))
    w.let(f"{product}{x}, {w.parameter((b, columns, w.length()))})")


def embedding(w: Writer) -> None:
    rows = w.integer(2, 7)
    shape = w.shape(1, 2)
    whole = w.names(lambda t: t.dtype is torch.int64 and t.dim() > 0 and t.numel() > 0)
    there = [name for name in whole if 0 <= w.value(name).min() and w.value(name).max() < rows]
    # other batches have other numbers
    tokens = f"({w.pick(there)} % {rows})" if there and w.chance(60) else w.argument(shape, torch.int64, rows)
    table = w.parameter((rows, w.length()))
    padding = f", padding_idx={w.integer(0, rows - 1)}" if w.chance(20) else ""
    w.let(w.pick((f"F.embedding({tokens}, {table}{padding})", f"{table}[{tokens}]")))


def layer_norm(w: Writer) -> None:
    x = w.tensor(lambda t: t.dim() >= 1 and t.dtype == w.dtype)
    shape = tuple(w.value(x).shape[-w.integer(1, min(2, w.value(x).dim())) :])
    weight = w.parameter(shape)
    bias = f", {w.parameter(shape)}" if w.chance(50) else ""
    w.let(f"F.layer_norm({x}, {shape}, {weight}{bias})" if w.chance(70) else f"F.rms_norm({x}, {shape}, {weight})")


def convolution(w: Writer) -> None:
    x = w.tensor(lambda t: 3 <= t.dim() <= 4 and t.dtype == w.dtype)
    value = w.value(x)
    spatial, channels = value.dim() - 2, value.shape[1]
    groups = w.pick(tuple(g for g in (1, 1, 2, 3, channels) if g and channels % g == 0))
    out = groups * w.integer(1, 3)
    kernel = tuple(w.integer(1, 3) for _ in range(spatial))
    options = f"stride={w.integer(1, 2)}, padding={w.integer(0, 2)}, dilation={w.integer(1, 2)}, groups={groups}"
    if w.chance(25):
        weight = w.parameter((channels, out // groups, *kernel))
        w.let(f"F.conv_transpose{spatial}d({x}, {weight}, {options.replace(', dilation=2', '')})")
        return
    bias = f"{w.parameter((out,))}, " if w.chance(50) else ""
    name = "" if bias else "bias=None, "
    w.let(f"F.conv{spatial}d({x}, {w.parameter((out, channels // groups, *kernel))}, {name}{bias}{options})")


def attention(w: Writer) -> None:
    x = w.tensor(lambda t: t.dim() >= 3 and t.dtype == w.dtype and not t.is_complex())
    value = w.value(x)
    size, inner = value.shape[-1], w.length()
    q, k, v = (w.let(f"{x} @ {w.parameter((size, inner))}") for _ in range(3))
    length = value.shape[-2]
    kind = w.pick(("none", "causal", "bool", "window", "bias", "by hand"))
    if kind == "by hand":
        scores = w.let(f"{q} @ {k}.mT / {inner} ** 0.5")
        w.let(f"torch.softmax({scores}.masked_fill({mask(w, scores)}, float('-inf')), -1) @ {v}")
        return
    extra = {
        "none": "",
        "causal": ", is_causal=True",
        "bool": f", attn_mask=torch.ones({length}, {length}, dtype=torch.bool).tril()",
        "window": f", attn_mask=torch.ones({length}, {length}, dtype=torch.bool).tril().triu(-{w.integer(1, 9)})",
        "bias": f", attn_mask={w.parameter((length, length))}" if kind == "bias" else "",
    }[kind]
    w.let(f"F.scaled_dot_product_attention({q}, {k}, {v}{extra})")


def cross_entropy(w: Writer) -> None:
    x = w.tensor(lambda t: t.dim() >= 2 and t.is_floating_point() and 0 not in t.shape)
    shape = w.value(x).shape
    flat = w.chance(40)
    classes = shape[-1] if flat else shape[1]
    wanted = shape[:-1].numel() if flat else (shape[0], *shape[2:])
    target = w.argument((wanted,) if isinstance(wanted, int) else wanted, torch.int64, classes)
    weight = f", weight={w.buffer((classes,))}.abs()" if w.chance(15) else ""
    options = w.pick(("", "", ", reduction='sum'", ", reduction='none'", ", ignore_index=0", ", label_smoothing=0.1"))
    logits = f"{x}.reshape(-1, {classes})" if flat else x
    w.let(f"F.cross_entropy({logits}, {target}{weight}{options})")


def indexed(w: Writer) -> None:
    """Gathers, scatters and index operators, with an index that is given or held."""
    x = w.tensor(lambda t: t.dim() >= 1 and t.dtype == w.dtype)
    value = w.value(x)
    dim = w.integer(0, value.dim() - 1)
    size = value.shape[dim]
    count = w.length()
    index = w.argument((count,), torch.int64, max(size, 1)) if w.chance(70) else w.buffer((count,), torch.int64)
    if index.startswith("self."):
        index = f"({index} % {max(size, 1)})"
    whole = f"({x}.detach().abs() * 3).long() % {max(size, 1)}"
    if w.chance(30):
        whole = w.argument(tuple(value.shape), torch.int64, max(size, 1))
    holes = {
        "x": x,
        "dim": dim,
        "index": index,
        "whole": whole,
        "rows": w.parameter((*value.shape[:dim], count, *value.shape[dim + 1 :])),
        "before": ":, " * dim,
        "size": max(size, 1),
        "first": max(value.shape[0], 1),
        "least": min(count, size),
        "dtype": w.dtype,
    }
    w.let(w.pick(INDEXED).format(**holes))


INDEXED = (
    "{x}.index_select({dim}, {index})",
    "{x}[{before}{index}]",
    "torch.gather({x}, {dim}, {whole})",
    "{x}.index_add({dim}, {index}, {rows})",
    "{x}.index_add({dim}, {index}, {rows}, alpha=2)",
    "{x}.index_copy({dim}, torch.arange({least}), {rows}.narrow({dim}, 0, {least}))",
    "{x}.index_fill({dim}, {index}, 0.5)",
    "torch.scatter({x}, {dim}, {whole}, 0.7)",
    "torch.scatter_add({x}, {dim}, {whole}, {x})",
    "torch.scatter_reduce({x}, {dim}, {whole}, {x}, 'sum')",
    "torch.scatter_reduce({x}, {dim}, {whole}, {x}, 'amax')",
    "torch.scatter_reduce({x}, {dim}, {whole}, {x}, 'mean', include_self=False)",
    "torch.take({x}, {whole})",
    "torch.index_put({x}, ({index} % {first},), torch.full((), 0.3, dtype={dtype}))",
    "torch.index_put({x}, ({index} % {first},), torch.ones((), dtype={dtype}), accumulate=True)",
    "F.one_hot({index}, {size}).to({dtype}) @ {x}",
    "torch.select_scatter({x}, {x}.select({dim}, 0) * 2, {dim}, -1)",
    "torch.slice_scatter({x}, {x}.narrow({dim}, 0, 1), {dim}, {size} - 1)",
    "torch.diagonal_scatter({x}, {x}.diagonal() * 2)",
    "torch.bincount({index}, minlength={size})",
    "{index}.unsqueeze(-1) == torch.arange({size})",
)

MODULES = (
    "nn.Linear({last}, {out})",
    "nn.Linear({last}, {out}, bias=False)",
    "nn.LayerNorm({last})",
    "nn.RMSNorm({last})",
    "nn.Sequential(nn.Linear({last}, {out}), nn.GELU(), nn.Linear({out}, {last}))",
    "nn.Sequential(nn.LayerNorm({last}), nn.Linear({last}, {out}), nn.ReLU(), nn.Dropout(0.0))",
    "nn.Bilinear({last}, {last}, {out})",
    "nn.PReLU()",
    "nn.BatchNorm1d({second})",
    "nn.BatchNorm1d({second}, affine=False, momentum=None)",
    "nn.BatchNorm2d({second})",
    "nn.GroupNorm(1, {second})",
    "nn.InstanceNorm1d({second}, affine=True, track_running_stats=True)",
    "nn.Conv1d({second}, {out}, 3, padding=1)",
    "nn.Conv2d({second}, {out}, 3, padding=1)",
    "nn.ModuleList([nn.Linear({last}, {last}) for _ in range(2)])",
    "nn.ParameterList([torch.ones({last}), torch.zeros({last})])",
    "nn.utils.parametrizations.weight_norm(nn.Linear({last}, {out}))",
    "nn.utils.parametrizations.spectral_norm(nn.Linear({last}, {out}))",
    "nn.MultiheadAttention({last}, 1, batch_first=True)",
    "nn.TransformerEncoderLayer({last}, 1, 4, dropout=0.0, batch_first=True)",
)


def module(w: Writer) -> None:
    """A module of torch's library, new or called again."""
    x = w.tensor(lambda t: t.dim() >= 2 and t.dtype == w.dtype)
    value = w.value(x)
    if w.modules and w.chance(30):
        name = w.pick(w.modules)
    else:
        text = w.pick(MODULES)
        for hole, size in (("{last}", value.shape[-1]), ("{second}", value.shape[1]), ("{out}", w.length())):
            text = text.replace(hole, str(size))
        name = w.module(text)
    kind = type(w.value(name)).__name__
    call = {
        "ModuleList": f"sum(layer({x}) for layer in {name})",
        "ParameterList": f"{x} * {name}[0] + {name}[1]",
        "Bilinear": f"{name}({x}, {x})",
        "MultiheadAttention": f"{name}({x}, {x}, {x}{w.pick(('', ', need_weights=False'))})[0]",
    }.get(kind, f"{name}({x})")
    w.let(call)


def checkpointed(w: Writer) -> None:
    x = w.tensor(lambda t: t.dim() >= 1 and t.dtype == w.dtype)
    table = w.parameter((w.value(x).shape[-1], w.length()))
    w.let(f"checkpoint(lambda t: torch.tanh(t @ {table}) * 2, {x}, use_reentrant=False)")


def several(w: Writer) -> None:
    """Operators with several results, some of which may be left."""
    x = w.tensor(lambda t: t.dim() >= 1 and t.is_floating_point())
    dim = w.dim(x)
    a, b = w.fresh("v"), w.fresh("v")
    w.say(w.pick((
        f"{a}, {b} = {x}.max({dim})",
        f"{a}, {b} = {x}.sort({dim})",
        f"{a}, {b} = {x}.topk(1, {dim})",
        f"{a}, {b} = torch.var_mean({x}, {dim}, correction=0)",
        f"{a}, {b} = torch.std_mean({x}, {dim}, correction=0)",
        f"{a}, {b} = {x}.chunk(2, {dim})",
        f"{a}, {b} = torch.aminmax({x}, dim={dim})",
        f"{a}, {b} = {x}.cummax({dim})",
        f"{a}, {b} = torch.frexp({x}.detach())",
        f"{a}, {b} = {x}.split([1, {w.value(x).shape[dim] - 1}], {dim})",
    )))  # fmt: skip
    if w.world.get(b) is not None and b not in w.locals:
        w.locals.append(b)


def constant(w: Writer) -> None:
    """A tensor made in the forward."""
    n, m = w.length(), w.length()
    w.let(w.pick((
        f"torch.arange({n})",
        f"torch.arange({n}, dtype={w.dtype}) * 0.1",
        f"torch.arange(1, {n + 3}, 2)",
        f"torch.zeros({n}, {m}, dtype={w.dtype})",
        f"torch.ones({m}, dtype={w.dtype})",
        f"torch.full(({n}, {m}), 0.25, dtype={w.dtype})",
        f"torch.eye({n}, {m}, dtype={w.dtype})",
        f"torch.ones({n}, {n}, dtype=torch.bool).triu(1)",
        f"torch.linspace(-1, 1, {n}, dtype=torch.float64)",
        "torch.tensor(2.5, dtype=torch.float64)",
        "torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)",
        f"torch.outer(torch.arange({n}), torch.arange({m})).to({w.dtype})",
    )))  # fmt: skip


def tied(w: Writer) -> None:
    """A parameter that has a second name."""
    p = w.pick(w.parameters)
    name = w.fresh("self.p")
    w.prepare(f"{name} = {p}")
    w.parameters.append(name)
    w.let(f"{p} * {name}")


def annotated(w: Writer) -> None:
    """A tensor whose layout the model itself decides."""
    x = w.floating()
    layout = w.pick(("a:R", *(f"a:S({d})" for d in range(w.value(x).dim()))))
    w.let(f'autoshard.constrain({x}, "{layout}")')


def own_gradient(w: Writer) -> None:
    """A function with a backward of its own."""
    w.let(f"Reversed.apply({w.floating()})")


def cell(w: Writer) -> None:
    x = w.tensor(lambda t: t.dim() == 2 and t.dtype == w.dtype)
    size = w.value(x).shape[-1]
    kind = w.pick(("GRUCell", "RNNCell", "LSTMCell"))
    name = w.module(f"nn.{kind}({size}, {size})")
    w.let(f"{name}({x}, ({x}, {x}))[0]" if kind == "LSTMCell" else f"{name}({x}, {x})")


def mapped(w: Writer) -> None:
    x = w.floating(2)
    w.let(w.pick((f"torch.vmap(torch.sum)({x})", f"torch.vmap(lambda t: torch.softmax(t, -1))({x})")))


def cast(w: Writer) -> None:
    x = w.tensor(lambda t: t.is_floating_point())
    w.let(f"{x}.to(torch.{w.pick(('float32', 'bfloat16', 'float16', 'int64', 'int32', 'bool', 'float64'))})")


def new_argument(w: Writer) -> None:
    dtype = w.pick((w.dtype, w.dtype, torch.bool, torch.int64, torch.int32, torch.float32, torch.uint8, torch.int16))
    w.argument(w.shape(), dtype)


LAYERS: tuple[Writes, ...] = (
    matmul, matmul, linear, linear, addmm, batched, embedding, layer_norm, convolution, attention, cross_entropy,
    indexed, indexed, module, module, module, checkpointed, several, constant, cast, new_argument,
    tied, annotated, own_gradient, cell, mapped,
)  # fmt: skip

__all__ = ["LAYERS", "MODULES", "Unsuited", "Writes", "made"]
