"""The kernels that a calibration times: one or two of each kind that profiles price, called as lowered graphs do."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import cycle
from typing import Any

import torch
from torch.optim.adamw import adamw

from cost_models.optimizers import ADAMW
from cost_models.samples import KernelPoint, RowPoint

from .job import Job

aten = torch.ops.aten

Shape = tuple[int, ...]
DTYPES = ("float32", "bfloat16", "float16", "float64")
SMALLEST_WIDTH = 64
SMALLEST_BYTES, LARGEST_BYTES = 1 << 12, 1 << 30
IMAGE_CHANNELS = 64
IMAGE_WIDTHS = (16, 32, 64, 128, 256)
COLUMNS = 1024
PERIOD = 4093  # a prime: no two rows of a matrix are alike
HEAD = 64

COLD_BYTES = {"cpu": 32 << 20}
COLD_BYTES_ELSEWHERE = 128 << 20
"""What a kernel goes through before it comes back to the same numbers, by device: in a step, what it reads was made
some operators before, and parameters a step before. On a CPU all ranks of a host together exceed its cache so; an H100
has 50 MB of L2 (NVIDIA H100 Tensor Core GPU Architecture, 2022).
"""

MOST_SETS = 64
"""Of inputs that a kernel is run on in turn: small ones are in some cache whatever one does."""


@dataclass(frozen=True)
class Kernel:
    """A kernel that can be timed, and how much work it does.

    Attributes:
        kind: of operation, as profiles name it.
        inputs: the tensors for a shape, made by ``make(shape)``.
        flops, moved: of a shape: floating-point operations, and numbers read and written.
    """

    kind: str
    call: Callable[..., Any]
    inputs: Callable[[Shape, Callable[..., torch.Tensor]], tuple[Any, ...]]
    flops: Callable[[Shape], float]
    moved: Callable[[Shape], float]


def _one(shape: Shape, make: Callable[..., torch.Tensor]) -> tuple[Any, ...]:
    return (make(shape),)


def _size(shape: Shape) -> float:
    return float(math.prod(shape))


def _causal_flops(shape: Shape) -> float:
    """Two products of 2 B H T T D, half of them masked. Source: Dao 2023, FlashAttention-2, section 4.1."""
    batch, heads, tokens, width = shape
    return 2.0 * batch * heads * tokens * tokens * width


def _adamw_step(parameter: torch.Tensor, gradient: torch.Tensor, *state: torch.Tensor) -> None:
    """The step of AdamW over one tensor, as torch takes it for DTensors, with the defaults of ``torch.optim.AdamW``."""
    average, square, count = ([each] for each in state)
    constants: dict[str, Any] = {"beta1": 0.9, "beta2": 0.999, "lr": 1e-3, "weight_decay": 1e-2, "eps": 1e-8}
    flags: dict[str, Any] = {"foreach": False, "fused": False, "amsgrad": False, "maximize": False}
    adamw([parameter], [gradient], average, square, [], count, **flags, **constants)


def _adamw_state(shape: Shape, make: Callable[..., torch.Tensor]) -> tuple[Any, ...]:
    """What the step changes is memory of its own; the average of squares is none that is below zero."""
    parameter, average, square = (make(shape).clone() for _ in range(3))
    return parameter, make(shape), average, square.square_(), torch.zeros(())


KERNELS = {
    "mm": Kernel(
        "matmul",
        aten.mm.default,
        lambda s, make: (make((s[0], s[1])), make((s[1], s[2]))),
        lambda s: 2.0 * math.prod(s),
        lambda s: s[0] * s[1] + s[1] * s[2] + s[0] * s[2],
    ),
    "attention": Kernel(
        "attention",
        lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True),
        lambda s, make: (make(s), make(s), make(s)),
        _causal_flops,
        lambda s: 4 * _size(s),
    ),
    "conv2d": Kernel(
        "convolution",
        lambda x, w: aten.convolution.default(x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1),
        lambda s, make: (make(s), make((s[1], s[1], 3, 3))),
        lambda s: 2.0 * 9 * s[1] * _size(s),
        lambda s: 2 * _size(s) + 9 * s[1] * s[1],
    ),
    "add": Kernel("pointwise", aten.add.Tensor, lambda s, make: (make(s), make(s)), _size, lambda s: 3 * _size(s)),
    "silu": Kernel("pointwise", aten.silu.default, _one, _size, lambda s: 2 * _size(s)),
    "sum": Kernel("reduction", lambda x: aten.sum.dim_IntList(x, [-1]), _one, _size, lambda s: _size(s) + s[0]),
    "softmax": Kernel("softmax", lambda x: aten._softmax.default(x, -1, False), _one, _size, lambda s: 2 * _size(s)),
    "layer_norm": Kernel(
        "normalization",
        lambda x: aten.native_layer_norm.default(x, [x.shape[-1]], None, None, 1e-5),
        _one,
        _size,
        lambda s: 2 * _size(s) + 2 * s[0],
    ),
    "embedding": Kernel(
        "indexing",
        lambda table, rows: aten.embedding.default(table, rows),
        lambda s, make: (make(s), torch.randperm(s[0]).to(make((1,)).device)),
        lambda s: 0.0,
        lambda s: 2 * _size(s),
    ),
    "cat": Kernel(
        "copy",
        lambda a, b: aten.cat.default([a, b], 1),
        lambda s, make: (make((s[0], s[1] // 2)), make((s[0], s[1] // 2))),
        lambda s: 0.0,
        lambda s: 2 * _size(s),
    ),
    "adamw": Kernel("optimizer", _adamw_step, _adamw_state, lambda s: 0.0, lambda s: sum(ADAMW) * _size(s)),
}

STREAMS = ("add", "silu", "sum", "softmax", "layer_norm", "embedding", "cat", "adamw")


def kernel_points(max_width: int, max_bytes: int) -> list[KernelPoint]:
    """Kernels of every kind, the smaller sizes first: square products in every dtype, streams of bytes for the others.

    Every second size is held out of the fit: it lies between two that are fitted.
    """
    return [
        *(_point("mm", dtype, (n, n, n), held_out) for n, held_out in _widths(max_width) for dtype in DTYPES),
        *(_point("attention", "float32", (1, 4, n, HEAD), held_out) for n, held_out in _widths(max_width)),
        *(_point("conv2d", "float32", (1, IMAGE_CHANNELS, n, n), False) for n in IMAGE_WIDTHS if n <= max_width // 4),
        *_streams(max_bytes),
    ]


def _widths(largest: int) -> Iterator[tuple[int, bool]]:
    width = SMALLEST_WIDTH
    while width <= largest:
        yield width, False
        if width * 3 // 2 <= largest:
            yield width * 3 // 2, True
        width *= 2


def _streams(max_bytes: int) -> Iterator[KernelPoint]:
    volume, held_out = SMALLEST_BYTES, False
    while volume <= min(max_bytes, LARGEST_BYTES):
        for name in STREAMS:
            for dtype in DTYPES if name == "add" and not held_out else DTYPES[:1]:
                itemsize = getattr(torch, dtype).itemsize
                yield _point(name, dtype, (max(volume // itemsize // COLUMNS, 1), COLUMNS), held_out)
        volume, held_out = volume * 2, not held_out


def _point(name: str, dtype: str, shape: Shape, held_out: bool) -> KernelPoint:
    kernel, itemsize = KERNELS[name], getattr(torch, dtype).itemsize
    return KernelPoint(
        kernel.kind, name, dtype, shape, kernel.flops(shape), float(kernel.moved(shape) * itemsize), held_out
    )


def kernel(job: Job, point: KernelPoint) -> Callable[[], object]:
    """Runs the kernel of a point on this rank's device, each time on other numbers."""
    found, pool = KERNELS[point.name], _pool(getattr(torch, point.dtype), job.device)
    at, made = 0, 0

    def make(shape: Shape) -> torch.Tensor:
        nonlocal at, made
        count = math.prod(shape)
        made += count
        if count > pool.numel():
            return _numbers(shape, pool.dtype, job.device)
        at = 0 if at + count > pool.numel() else at
        at += count
        return pool[at - count : at].view(shape)

    first = found.inputs(point.shape, make)
    sets = pool.numel() // made
    others = (found.inputs(point.shape, make) for _ in range(min(sets, MOST_SETS) - 1))
    turns = cycle([first, *others])
    call = found.call
    return lambda: call(*next(turns))


VIEWS: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    lambda x: aten.view.default(x, [-1]),
    lambda x: aten.transpose.int(x, 0, 1),
    lambda x: aten.reshape.default(x, [8, -1]),
    lambda x: aten.unsqueeze.default(x, 1),
    lambda x: aten.expand.default(x, list(x.shape)),
    lambda x: aten.slice.Tensor(x, 0, 0, 8),
)
"""Views as steps are full of them; not all alike, as each has code of its own that a cache forgets."""


def in_a_row(job: Job, point: RowPoint) -> Callable[[], object]:
    """Runs the kernels of a point one after the other on this rank's device, a view before each of the last of them; a
    collective behind them is not run.
    """
    calls = [kernel(job, each) for each in point.kernels]
    views = [VIEWS[k % len(VIEWS)] for k in range(point.views)]
    x = _numbers((16, COLUMNS), torch.float32, job.device)
    first = calls[: len(calls) - len(views)]
    pairs = list(zip(views, calls[len(first) :], strict=True))

    def run() -> None:
        for call in first:
            call()
        for view, call in pairs:
            view(x)
            call()

    return run


@cache
def _pool(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The numbers that kernels of a dtype read: made once, as it takes longer than a kernel does."""
    size = COLD_BYTES.get(device.type, COLD_BYTES_ELSEWHERE)
    return _numbers((size // dtype.itemsize,), dtype, device)


def _numbers(shape: Shape, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Normal numbers, a few thousand again and again: quick to make.

    Not all alike: GPUs multiply constant matrices faster than real ones. Source: H. He, "Strangely, Matrix
    Multiplications on GPUs Run Faster When Given 'Predictable' Data", 2024.
    """
    count = math.prod(shape)
    some = torch.randn(PERIOD, generator=torch.Generator().manual_seed(0)).to(device=device, dtype=dtype)
    return some.repeat(-(-count // PERIOD))[:count].view(shape)
