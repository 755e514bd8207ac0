"""What runs on one CUDA device, against what is predicted of it and what torch does by itself.

    python benchmarks/gpu.py attention                    # autoshard's attention against float64, and torch's kernels
    python benchmarks/gpu.py models                       # whole steps against the model's own, on a mesh of one
    python benchmarks/gpu.py rank --plan plan.yaml        # one rank of a plan for many devices

``rank`` is rank 0 of a fake process group of the plan's size, whose collectives move nothing: what its kernels take is
the plan's compute, and what torch's allocator counts is the plan's memory. The plan is one of ``--model``, by default
of ``autoshard plan examples/llama.py:llama3_8b --mesh dp=8,tp=8 --hardware dgx-h100 -o plan.yaml``; no solver is needed
to run it. ``--device cpu`` goes through the same code without a GPU (with ``--model examples/llama.py:demo``), but for
kernels and sizes that a CPU does not have.

Every table is printed, and with ``--json FILE`` written. Times are medians: of phases by the device's own events, of
whole steps and kernels by the host, which waits for each.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# the root in the place of this folder, where solver.py would be found as the package
sys.path[:] = [str(ROOT), *(path for path in sys.path if Path(path).resolve() != Path(__file__).resolve().parent)]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

import autoshard  # noqa: E402
from autoshard.capture.operators.attention import attention, attention_backward  # noqa: E402
from autoshard.capture.operators.cuda_attention import kernel_for  # noqa: E402
from autoshard.cli.model_factory import load_factory  # noqa: E402

ROUNDS, WARM = 10, 3
KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
HALF, SINGLE, DOUBLE = torch.bfloat16, torch.float32, torch.float64

# batch, heads of queries, heads of keys, queries, keys, size of q and k, size of v, causal, with a bias, dtype
CASES = (
    (2, 4, 4, 64, 64, 64, 64, True, False, HALF),
    (2, 4, 4, 77, 77, 64, 64, True, False, HALF),
    (2, 4, 4, 77, 100, 64, 64, True, False, HALF),
    (2, 4, 4, 100, 77, 64, 64, False, False, HALF),
    (2, 8, 2, 77, 77, 64, 64, True, False, HALF),
    (2, 8, 2, 77, 100, 64, 64, True, False, HALF),
    (2, 8, 2, 77, 77, 64, 64, False, True, HALF),
    (2, 4, 4, 77, 101, 64, 64, False, True, HALF),
    (2, 4, 4, 64, 64, 36, 36, True, False, HALF),
    (2, 4, 4, 64, 64, 36, 36, False, True, HALF),
    (2, 4, 4, 64, 64, 192, 128, True, False, HALF),
    (2, 4, 4, 64, 64, 256, 256, True, False, HALF),
    (2, 4, 4, 64, 64, 320, 320, True, False, HALF),
    (2, 4, 4, 1, 33, 128, 128, False, False, HALF),
    (2, 4, 4, 77, 77, 64, 64, True, False, torch.float16),
    (2, 4, 4, 77, 77, 64, 64, True, False, SINGLE),
    (2, 8, 2, 77, 77, 20, 20, False, True, SINGLE),
    (2, 8, 2, 77, 100, 20, 20, True, False, DOUBLE),
    (2, 4, 4, 9, 7, 20, 12, False, True, DOUBLE),
)
TOLERANCE = {HALF: 2e-2, torch.float16: 4e-3, SINGLE: 2e-5, DOUBLE: 1e-12}
SPEEDS = (
    ("Llama-3-8B, one sequence of 8,192", 1, 32, 8192, 128),
    ("Llama-3-8B on 8x8", 16, 4, 8192, 128),
    ("GPT-2", 8, 12, 1024, 64),
)
MODELS = (
    ("examples/llama.py:demo", 2e-5),
    ("examples/gpt2.py:tiny", 2e-5),
    ("examples/vit.py:tiny", 2e-5),
    ("examples/moe.py:tiny", 2e-5),
    ("benchmarks/gpu.py:norms", 2e-5),
    ("examples/gpt2.py:gpt2", 2e-5),
)


class Norms(nn.Module):
    """Norms that keep statistics for their backward, which CUDA does in float32 whatever the dtype of the numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 32, 3, padding=1)
        self.batch, self.group, self.layer = nn.BatchNorm2d(32), nn.GroupNorm(4, 32), nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(self.group(self.batch(self.conv(x))))
        return (x * x.roll(1, -1)).float().tanh().mean()


def norms() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Norms(), (torch.randn(8, 8, 16, 16),)


def main() -> None:
    """Runs one of the checks; exits with 1 where numbers are wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("attention", "models", "rank"))
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--plan", type=Path)
    parser.add_argument("--model", default="examples/llama.py:llama3_8b")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.what == "rank" and options.plan is None:
        parser.error("rank runs a plan: name one with --plan (how to make it is said above)")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA device here; --device cpu goes through the same code")
    torch.manual_seed(0)
    rows = {
        "attention": lambda: _attention(options.device),
        "models": lambda: _models(options.device),
        "rank": lambda: _rank(options.device, options.plan, options.model),
    }[options.what]()
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    sys.exit(any(row.get("wrong") for row in rows))


# ---- attention


def _attention(device: str) -> list[dict[str, Any]]:
    cases = [case for case in CASES if device == "cuda" or case[5] == case[6]]  # a CPU's kernel has one size of head
    rows = [_against_double(device, *case) for case in cases]
    _print("autoshard's attention against its products in float64; largest error by the largest number", rows)
    if device == "cuda":
        speeds = [_speeds(*case) for case in SPEEDS]
        _print("causal, bfloat16: ms forward and backward", speeds)
        rows += speeds
    return rows


def _against_double(
    device: str,
    batch: int,
    heads: int,
    groups: int,
    length: int,
    keys: int,
    size: int,
    out_size: int,
    is_causal: bool,
    with_bias: bool,
    dtype: torch.dtype,
) -> dict[str, Any]:
    """q, k, v as views of (B, T, H, D), as models make them."""
    shapes = ((heads, length, size), (groups, keys, size), (groups, keys, out_size), (heads, length, out_size))
    q, k, v, grad = (torch.randn(batch, n, h, d, device=device, dtype=dtype).transpose(1, 2) for h, n, d in shapes)
    bias = torch.randn(1, heads, length, keys, device=device, dtype=dtype) if with_bias else None
    row: dict[str, Any] = {
        "q": "x".join(map(str, q.shape)),
        "k": "x".join(map(str, k.shape)),
        "v": v.shape[-1],
        "causal": is_causal,
        "bias": with_bias,
        "dtype": str(dtype).removeprefix("torch."),
    }
    try:
        kernel = ""
        if device == "cuda":
            kernel = kernel_for(q, k, v, bias, is_causal, size**-0.5).name
        out, lse = attention(q, k, v, bias, is_causal, None)
        found = (out, *attention_backward(grad, q, k, v, out, lse, bias, is_causal, None))
        wide = [x.double().requires_grad_() for x in (q, k, v)]
        expected = _products(*wide, bias, is_causal)
        theirs = (expected, *torch.autograd.grad(expected, wide, grad.double()))
        error = max(float(((a - b).abs().max() / b.abs().max()).detach()) for a, b in zip(found, theirs))
        return row | {"kernel": kernel, "error": f"{error:.1e}", "wrong": not error < TOLERANCE[dtype]}
    except Exception as raised:
        return row | {"kernel": kernel, "error": f"{type(raised).__name__}: {raised}"[:300], "wrong": True}


def _products(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, is_causal: bool) -> Tensor:
    copies = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(copies, 1) for x in (k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if bias is not None:
        scores = scores + bias
    if is_causal:
        scores = scores.masked_fill(~torch.ones_like(scores, dtype=torch.bool).tril(), float("-inf"))
    return scores.softmax(-1) @ v


def _speeds(name: str, batch: int, heads: int, length: int, size: int) -> dict[str, Any]:
    q, k, v, grad = (
        torch.randn(batch, length, heads, size, device="cuda", dtype=HALF).transpose(1, 2) for _ in range(4)
    )
    row: dict[str, Any] = {"case": name}

    def ours() -> tuple[Callable[[], Any], Callable[[], Any]]:
        out, lse = attention(q, k, v, None, True, None)
        return (
            lambda: attention(q, k, v, None, True, None),
            lambda: attention_backward(grad, q, k, v, out, lse, None, True, None),
        )

    def theirs() -> tuple[Callable[[], Any], Callable[[], Any]]:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = nn.functional.scaled_dot_product_attention(*leaves, is_causal=True)
        return (
            lambda: nn.functional.scaled_dot_product_attention(*leaves, is_causal=True),
            lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True),
        )

    made = {"autoshard": ours, "torch": theirs, **dict.fromkeys(KERNELS, theirs)}
    for kernel, make in made.items():
        try:
            with sdpa_kernel(KERNELS[kernel]) if kernel in KERNELS else nullcontext():
                row[kernel] = " ".join(f"{_device_ms(run):.3f}" for run in make())
        except Exception as raised:
            row[kernel] = type(raised).__name__
    return row


# ---- models


def _models(device: str) -> list[dict[str, Any]]:
    dist.init_process_group("nccl" if device == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.backends.cuda.matmul.allow_tf32 = False
    rows = []
    for model, tolerance in MODELS:
        if device == "cpu" and model.endswith(":gpt2"):
            continue  # minutes
        for dtype in (SINGLE, HALF):
            row: dict[str, Any] = {"model": model, "dtype": str(dtype).removeprefix("torch.")}
            try:
                row |= _steps(device, model, dtype, tolerance if dtype is SINGLE else 5e-2)
            except Exception as raised:
                row |= {"loss": f"{type(raised).__name__}: {raised}"[:400], "wrong": True}
            rows.append(row)
            torch.cuda.empty_cache()
    _print("a step of the model on a mesh of one against the model's own: errors, ms, GiB of torch's allocator", rows)
    return rows


def _steps(device: str, name: str, dtype: torch.dtype, tolerance: float) -> dict[str, Any]:
    """Errors of the first step's loss and gradients; then ms of whole steps with AdamW."""
    model, args, kwargs = load_factory(name)
    assert not kwargs
    mesh = init_device_mesh(device, (1,), mesh_dim_names=("dp",))
    reference = _filled(copy.deepcopy(model), device).to(dtype)
    inputs = _inputs(args, device, dtype)
    ours = autoshard.auto_parallelize(copy.deepcopy(reference), mesh, inputs, hardware="dgx-h100", cache=False)
    given = autoshard.shard_inputs(ours.plan, mesh, *inputs)
    loss, expected = _loss(ours(*given)), _loss(reference(*inputs))
    loss.backward()
    expected.backward()
    gradients = dict(ours.named_parameters())
    errors = [
        float((_full(gradients[key].grad) - p.grad).abs().max() / p.grad.abs().max().clamp(min=1e-6))
        for key, p in reference.named_parameters()
        if p.grad is not None
    ]
    off = float(((_full(loss) - expected).abs() / expected.abs()).detach())
    row: dict[str, Any] = {"loss": f"{off:.1e}", "gradients": f"{max(errors):.1e}"}
    row["wrong"] = not (off < tolerance and max(errors) < 100 * tolerance)
    found = {}
    for who, module, batch in (("ours", ours, given), ("torch", reference, inputs)):
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-5)

        def step(module: nn.Module = module, batch: Any = batch, optimizer: Any = optimizer) -> None:
            _loss(module(*batch)).backward()
            optimizer.step()
            optimizer.zero_grad()

        found[who] = _device_ms(step)
        if device == "cuda":
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            step()
            torch.cuda.synchronize()
            row[f"peak {who}"] = f"{(torch.cuda.max_memory_allocated() - before) / 2**30:.3f}"
    row |= {"ours ms": f"{found['ours']:.2f}", "torch ms": f"{found['torch']:.2f}"}
    return row | {"ratio": f"{found['ours'] / found['torch']:.2f}"}


def _filled(model: nn.Module, device: str) -> nn.Module:
    on_meta = any(p.is_meta for p in model.parameters())
    model = model.to_empty(device=device) if on_meta else model.to(device)
    if on_meta:
        model.init_weights(seed=0)  # type: ignore[operator]
    return model


def _inputs(args: tuple[Any, ...], device: str, dtype: torch.dtype) -> tuple[Any, ...]:
    """Tokens and classes below what all the models know; images as they come."""
    return tuple(
        torch.randn(x.shape, device=device, dtype=dtype)
        if x.is_floating_point()
        else torch.randint(0, 10, x.shape, device=device)
        for x in args
    )


def _loss(result: Any) -> Tensor:
    return result if isinstance(result, Tensor) else result[0]  # type: ignore[no-any-return]


def _full(value: Any) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


# ---- one rank of many


def _rank(device: str, plan_file: Path, name: str) -> list[dict[str, Any]]:
    plan = autoshard.read_plan(plan_file)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=plan.mesh.size)
    mesh = init_device_mesh(device, plan.mesh.shape, mesh_dim_names=plan.mesh.axes)
    model, args, _ = load_factory(name)
    began_s = time.perf_counter()
    module = autoshard.parallelize(model, plan, mesh)
    print(f"parallelize: {time.perf_counter() - began_s:.1f} s")
    with torch.no_grad():
        module.to_empty(device=device)
        for each in (*module.parameters(), *module.buffers()):
            local = each.to_local() if isinstance(each, DTensor) else each
            local.normal_(std=0.02) if local.is_floating_point() else local.zero_()
    inputs = autoshard.shard_inputs(plan, mesh, *_inputs(args, device, SINGLE))
    held = torch.cuda.memory_allocated() if device == "cuda" else 0
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-6)
    phases: dict[str, list[float]] = {"forward": [], "backward": [], "optimizer": [], "host": []}
    peaks: dict[str, int] = {}
    loss: list[Tensor] = []
    for _ in range(WARM + ROUNDS):
        began_s = time.perf_counter()
        measured = {
            "forward": _timed(device, lambda: loss.append(_loss(module(*inputs)))),
            "backward": _timed(device, lambda: loss.pop().backward()),
        }
        phases["host"].append((time.perf_counter() - began_s) * 1e3)  # until all of it is issued
        measured["optimizer"] = _timed(device, optimizer.step)
        for phase, (ms, peak) in measured.items():
            phases[phase].append(ms())
            peaks[phase] = peak()
        optimizer.zero_grad()
    took = {phase: statistics.median(values[WARM:]) for phase, values in phases.items()}
    kernels = _by_operator(device, lambda: _loss(module(*inputs)).backward())
    by_phase = {p: sum(e.predicted_ns for e in plan.execution if e.phase == p) / 1e6 for p in ("forward", "backward")}
    by_phase["optimizer"] = (plan.optimizer_s or 0.0) * 1e3
    assert plan.memory is not None
    rows: list[dict[str, Any]] = [
        {
            "phase": phase,
            "predicted ms": f"{by_phase[phase]:.2f}",
            "measured ms": f"{took[phase]:.2f}",
            "measured / predicted": f"{took[phase] / by_phase[phase]:.2f}",
        }
        for phase in by_phase
    ]
    _print(f"rank 0 of {plan.mesh}: kernels, without collectives", rows)
    print(f"the host issues forward and backward in {took['host']:.1f} ms (with events, waits excluded where it leads)")
    memory = [
        {
            "": "peak of the step",
            "predicted GiB": f"{plan.memory.peak.size_bytes / 2**30:.3f}",
            "measured GiB": f"{max(peaks.values()) / 2**30:.3f}",
            "where": f"{plan.memory.peak.phase} {plan.memory.peak.operator}; {max(peaks, key=lambda p: peaks[p])}",
        },
        *({"": phase, "measured GiB": f"{peak / 2**30:.3f}"} for phase, peak in peaks.items()),
        {"": "held before the first step", "measured GiB": f"{held / 2**30:.3f}"},
    ]
    if device == "cuda":
        memory.append({"": "reserved", "measured GiB": f"{torch.cuda.max_memory_reserved() / 2**30:.3f}"})
    _print("memory", memory)
    predicted = _predicted_kinds((e.name, e.predicted_ns) for e in plan.execution)
    kinds = [
        {
            "kind": kind,
            "predicted ms": f"{predicted.get(kind, 0.0):.2f}",
            "measured ms": f"{kernels.get(kind, 0.0):.2f}",
        }
        for kind in sorted({*predicted, *kernels}, key=lambda kind: -max(predicted.get(kind, 0), kernels.get(kind, 0)))
    ]
    _print("by operator, forward and backward", [row for row in kinds if row["predicted ms"] != row["measured ms"]])
    return [*rows, *memory, *kinds]


def _predicted_kinds(entries: Iterable[tuple[str, int]]) -> dict[str, float]:
    found: Counter[str] = Counter()
    for name, ns in entries:
        operator = name.rsplit("/", 1)[-1].removeprefix("again.").removeprefix("bwd.").split(".")[0]
        found[operator] += ns  # type: ignore[assignment]
    return {kind: ns / 1e6 for kind, ns in found.items()}


def _by_operator(device: str, run: Callable[[], object]) -> dict[str, float]:
    """Milliseconds of the device by the operator that starts a kernel, over one run."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] * (device == "cuda"))]) as seen:
        run()
        _wait(device)
    found: Counter[str] = Counter()
    for event in seen.key_averages():
        us = event.self_device_time_total if device == "cuda" else event.self_cpu_time_total
        if event.device_type == torch.autograd.DeviceType.CPU and us:
            found[event.key.removeprefix("aten::")] += us
    return {kind: us / 1e3 for kind, us in found.items()}


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _timed(device: str, run: Callable[[], object]) -> tuple[Callable[[], float], Callable[[], int]]:
    """Starts ``run``; gives what to ask, later, for its milliseconds on the device and its peak in bytes."""
    if device != "cuda":
        began_s = time.perf_counter()
        run()
        ms = (time.perf_counter() - began_s) * 1e3
        return lambda: ms, lambda: 0
    torch.cuda.reset_peak_memory_stats()
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    run()
    last.record()
    peak = torch.cuda.max_memory_allocated()

    def ms_of() -> float:
        last.synchronize()
        return first.elapsed_time(last)

    return ms_of, lambda: peak


def _device_ms(run: Callable[[], object]) -> float:
    """The median of runs, each waited for."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found = []
    for _ in range(WARM + ROUNDS):
        _wait(device)
        began_s = time.perf_counter()
        run()
        _wait(device)
        found.append((time.perf_counter() - began_s) * 1e3)
    return statistics.median(found[WARM:])


def _print(title: str, rows: list[dict[str, Any]]) -> None:
    columns = list(dict.fromkeys(key for row in rows for key in row if key != "wrong"))
    table = Table(*columns, title=title, title_justify="left")
    for row in rows:
        style = "red" if row.get("wrong") else ""
        table.add_row(*(str(row.get(column, "")) for column in columns), style=style)
    Console(width=200).print(table)
    for row in rows:
        if row.get("wrong"):
            print("WRONG", row)


if __name__ == "__main__":
    main()
