"""Steps of autoshard against torch's own schemes of the same name, rotated in one run on 4 gloo ranks.

    python benchmarks/step.py                            # on one host
    python benchmarks/step.py --model gpt2               # another model than the demo's: gpt2 or moe
    python benchmarks/step.py --profile profile.yaml     # the optimum on the prices of this machine, as calibrated
    python benchmarks/two_hosts.py --rate 200mbit -- benchmarks/step.py --profile between-hosts.yaml

A step is forward, backward and AdamW's step of the demo Llama (examples/llama.py), or of a GPT-2 or a mixture of
experts of about its size, which torch has DDP and FSDP2 for: its tensor parallelism cuts neither fused projections nor
experts. In every round each contender takes one step, begun together, and the slowest rank's seconds count; a ratio is
that of two contenders of one round. Each round has an order of its own, drawn alike on all ranks: in a fixed one who
follows a step that leaves much behind, in caches and heap, is always the same. The table has the medians of both and of
their ratios, with quartiles. ``optimum`` is the plan without constraints on dp=2,tp=2, against each of torch's.
``autoshard calibrate --mesh dp=2,tp=2`` makes its profile; without one it is made for the prices of another machine, on
which no link is slow.

``--fused`` gives all of them AdamW's fused kernel. Without it torch steps one parameter after the other on a CPU.

Must: no ratio above 1.05, and the optimum at most 1.00 of torch's best. Exit code 1 where that is missed on one host.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import autoshard
from autoshard.constraints.baselines import baseline
from autoshard.mesh import Mesh
from autoshard.plans.schedule import BUCKET
from examples.gpt2 import GPT2, GPT2Config
from examples.llama import Attention, Llama, apply_rope, demo
from examples.moe import MoEConfig, MoEDecoder

RANKS, ROUNDS, WARM = 4, 60, 3
BATCH, SEQUENCE = 8, 128
MOST, MOST_OF_OPTIMUM = 1.05, 1.00
MESHES = {"ddp": "dp=4", "fsdp": "dp=4", "tp": "tp=4", "sp": "tp=4", "fsdp+tp": "dp=2,tp=2"}
SCHEMES = {"llama": tuple(MESHES), "gpt2": ("ddp", "fsdp"), "moe": ("ddp", "fsdp")}
OPTIMUM, OPTIMUM_MESH = "optimum", "dp=2,tp=2"

VERDICT = "AUTOSHARD_STEP_MISSED"
"""Names, in the environment, the file that the first rank makes where a ratio is not as it must be."""

Step = Callable[[], object]


class LocalHeads(Attention):
    """Attention over the heads of one rank: tensor parallelism by hand changes the model for that."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """(B, T, C) to (B, T, C)."""
        batch, sequence, _ = x.shape
        q, k, v = (linear(x).view(batch, sequence, -1, self.head_dim) for linear in (self.wq, self.wk, self.wv))
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        q, k, v = q.transpose(1, 2), self._repeat(k).transpose(1, 2), self._repeat(v).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        output: Tensor = self.wo(mixed.transpose(1, 2).reshape(batch, sequence, -1))
        return output


def _tensor(model: Llama, mesh: DeviceMesh, *, sequence: bool = False) -> nn.Module:
    """Megatron's plan for the blocks; all outside of them is whole on every rank.

    With ``sequence`` norms and residuals have a part of the sequence between the embedding, whose vocabulary is cut,
    and the logits, as in torch's tutorial on tensor parallelism.
    """
    between = Shard(1) if sequence else Replicate()
    attention = PrepareModuleInput(input_layouts=(between, None, None), desired_input_layouts=(Replicate(), None, None))
    feed_forward = PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(Replicate(),))
    if sequence:
        outside: dict[str, ParallelStyle] = {
            "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        }
        parallelize_module(model, mesh, outside)
    for block in model.layers:
        columns = ("attention.wq", "attention.wk", "attention.wv", "feed_forward.w1", "feed_forward.w3")
        plan: dict[str, ParallelStyle] = {"attention": attention, "feed_forward": feed_forward}
        plan |= {name: ColwiseParallel() for name in columns}
        plan |= {name: RowwiseParallel(output_layouts=between) for name in ("attention.wo", "feed_forward.w2")}
        if sequence:
            plan |= {name: SequenceParallel() for name in ("attention_norm", "ffn_norm")}
        parallelize_module(block, mesh, plan)
        block.attention.__class__ = LocalHeads
        block.attention.n_heads //= mesh.size()
        block.attention.n_kv_heads //= mesh.size()
    return model


def _fsdp(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for layer in model.h if isinstance(model, GPT2) else model.layers:  # type: ignore[union-attr]
        fully_shard(layer, mesh=mesh)  # type: ignore[arg-type]
    fully_shard(model, mesh=mesh)
    return model


def torchs(scheme: str, model: nn.Module, mesh: DeviceMesh) -> tuple[nn.Module, DeviceMesh | None]:
    """The model under torch's own scheme, and the mesh axis along which ranks have rows of their own."""
    if scheme == "ddp":
        return DistributedDataParallel(model, process_group=mesh.get_group(0)), mesh
    if scheme == "fsdp":
        return _fsdp(model, mesh), mesh
    assert isinstance(model, Llama)
    if scheme in ("tp", "sp"):
        return _tensor(model, mesh, sequence=scheme == "sp"), None
    return _fsdp(_tensor(model, mesh["tp"]), mesh["dp"]), mesh["dp"]  # type: ignore[arg-type]


def built(name: str) -> nn.Module:
    """A model over bytes with the weights that it has in every process."""
    if name == "llama":
        return demo()[0]
    model: GPT2 | MoEDecoder
    if name == "gpt2":
        model = GPT2(GPT2Config(n_layers=4, d_model=256, n_heads=8, max_sequence=SEQUENCE))
    else:
        model = MoEDecoder(MoEConfig(n_layers=4, d_model=256, n_heads=8, d_ffn=384, max_sequence=SEQUENCE))
    model.init_weights(seed=0)
    return model


def _batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens, targets = (torch.randint(0, 256, (BATCH, SEQUENCE), generator=generator) for _ in range(2))
    return tokens, targets


def _step(module: nn.Module, arguments: tuple[Tensor, ...], fused: bool) -> Step:
    by_kind: dict[type, list[nn.Parameter]] = {}
    for parameter in module.parameters():  # parallelize_module leaves some plain; a kernel takes one kind
        by_kind.setdefault(type(parameter), []).append(parameter)
    optimizer = torch.optim.AdamW([{"params": group} for group in by_kind.values()], lr=1e-4, fused=fused)

    def step() -> None:
        module(*arguments).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def contenders(
    name: str, schemes: list[str], bucket: str, fused: bool, profile: str | None = None
) -> dict[tuple[str, str], Step]:
    """A step of each, by scheme and whose it is; ``profile`` has the prices of the optimum."""
    made: dict[tuple[str, str], Step] = {}
    for scheme in (*schemes, OPTIMUM):
        axes = Mesh.parse(MESHES.get(scheme, OPTIMUM_MESH))
        mesh = init_device_mesh("cpu", axes.shape, mesh_dim_names=axes.axes)
        options: dict[str, Any] = {} if profile is None else {"hardware": profile}
        if scheme != OPTIMUM:
            options = {"constraints": baseline(scheme, axes).constraints(axes)}
        ours = autoshard.auto_parallelize(built(name), mesh, _batch(), bucket=bucket, **options)
        made[scheme, "autoshard"] = _step(ours, autoshard.shard_inputs(ours.plan, mesh, *_batch()), fused)
        if scheme != OPTIMUM:
            theirs, data = torchs(scheme, built(name), mesh)
            rows = _batch()
            if data is not None:
                rows = tuple(x.chunk(data.size())[data.get_local_rank()] for x in rows)  # type: ignore[assignment]
            made[scheme, "torch"] = _step(theirs, rows, fused)
    return made


def timed(steps: dict[tuple[str, str], Step], rounds: int) -> dict[tuple[str, str], list[float]]:
    """Seconds of the slowest rank, by contender and round; each round has an order of its own."""
    times: dict[tuple[str, str], list[float]] = {key: [] for key in steps}
    for number in range(-WARM, rounds):
        for key in random.Random(WARM + number).sample(list(steps), len(steps)):
            dist.barrier()
            started_s = time.perf_counter()
            steps[key]()
            seconds = torch.tensor(time.perf_counter() - started_s)
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            if number >= 0:
                times[key].append(float(seconds))
    return times


def report(times: dict[tuple[str, str], list[float]], console: Console) -> bool:
    """Prints the table; whether every ratio is as it must be."""
    theirs = [key for key in times if key[1] == "torch"]
    best = min(theirs, key=lambda key: statistics.median(times[key]))
    pairs = [((scheme, "autoshard"), (scheme, "torch")) for scheme, _ in theirs]
    pairs += [((OPTIMUM, "autoshard"), key) for key in theirs]
    table = Table(title=f"Steps of {RANKS} ranks, {len(times[best])} rounds")
    for heading in ("autoshard", "torch", "ms", "torch's ms", "ratio", "quartiles", ""):
        table.add_column(heading, justify="left" if heading in ("autoshard", "torch", "") else "right")
    fine = True
    for ours, other in pairs:
        ratios = [a / b for a, b in zip(times[ours], times[other])]
        low, middle, high = statistics.quantiles(ratios, n=4)
        is_optimum = ours[0] == OPTIMUM
        most = MOST_OF_OPTIMUM if is_optimum else MOST
        counts = not is_optimum or other == best
        fine &= middle <= most or not counts
        verdict = f"at most {most:.2f}: {'yes' if middle <= most else 'no'}" if counts else ""
        milliseconds = (f"{statistics.median(times[key]) * 1e3:.0f}" for key in (ours, other))
        table.add_row(ours[0], other[0], *milliseconds, f"{middle:.2f}", f"{low:.2f} to {high:.2f}", verdict)
    console.print(table)
    return fine


def work(name: str, schemes: list[str], rounds: int, bucket: str, fused: bool, profile: str | None) -> NoReturn:
    """One rank; the first one prints, and leaves a mark where a ratio is not as it must be."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=600))
    times = timed(contenders(name, schemes, bucket, fused, profile), rounds)
    fine = dist.get_rank() != 0 or report(times, Console(width=None if sys.stdout.isatty() else 140))
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    if not fine and VERDICT in os.environ:
        Path(os.environ[VERDICT]).touch()
    os._exit(0)  # interpreters with gloo threads sometimes abort as they end


def main() -> int:
    """Reads the arguments; starts the ranks, or is one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="steps of each that are timed")
    parser.add_argument("--scheme", action="append", choices=MESHES, help="which to race; may be repeated")
    parser.add_argument("--bucket", default=BUCKET, help="of autoshard's plans (default: %(default)s)")
    parser.add_argument("--fused", action="store_true", help="AdamW's fused kernel, for all")
    parser.add_argument("--model", choices=SCHEMES, default="llama")
    parser.add_argument("--profile", help="a hardware profile, made by autoshard calibrate on dp=2,tp=2")
    arguments = parser.parse_args()
    if unfit := set(arguments.scheme or ()) - set(SCHEMES[arguments.model]):
        parser.error(f"torch has no {', '.join(sorted(unfit))} of its own for {arguments.model}")
    if "RANK" in os.environ:
        schemes = arguments.scheme or list(SCHEMES[arguments.model])
        work(arguments.model, schemes, arguments.rounds, arguments.bucket, arguments.fused, arguments.profile)
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS))
    with tempfile.TemporaryDirectory() as folder:
        missed = Path(folder) / "missed"
        environment = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"} | os.environ | {VERDICT: str(missed)}
        done = subprocess.run([*torchrun, __file__, *sys.argv[1:]], env=environment, check=False)
        return done.returncode or int(missed.exists())


if __name__ == "__main__":
    sys.exit(main())
