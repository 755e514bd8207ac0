"""Published training runs: a row of a table of them, as the model, the mesh and the constraints that it was run with.

Columns are those of ``docs/validation.md``. What a row does not say, and no public source does, makes it one that
cannot be built: :class:`CannotBuild` says why.
"""

from __future__ import annotations

import math
import re
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from autoshard.mesh import Mesh
from published_models import Sizes, build
from published_rows import CannotBuild, Row, read_rows

__all__ = ["CannotBuild", "Run", "read_runs"]

PEAK = {"dgx-a100": 312e12, "a100-40": 312e12, "dgx-b200": 2250e12}
"""Dense bfloat16 FLOP/s (data sheets), over which the MFU is counted; 989e12 on the others, H100 and H200."""

NAMES = {
    **dict.fromkeys(("dp_replicate", "dp_rep", "replicate", "rep", "hsdp_replicate"), "rep"),
    **dict.fromkeys(("dp_shard", "fsdp", "shard", "hsdp_shard"), "fsdp"),
    **dict.fromkeys(("dp", "ddp", "data"), "dp"),
    **dict.fromkeys(("cp", "context"), "cp"),
    **dict.fromkeys(("tp", "mp", "tensor"), "tp"),
}
"""Axes of a row's mesh, and what they are called in ours, the outermost first."""

WITHOUT_A_SCHEME = (
    (r"ulysses|ring attention", "that sequence parallelism"),
    (r"offload", "offloading"),
    (r"\bEP\b|expert|\bMoE\b", "experts"),
    (r"\bPP\b|pipeline|1f1b|interleav", "a pipeline"),
)
"""What schemes may say that there is nothing for here, and what it is called."""

Software = Literal["fsdp1", "fsdp2", "simplefsdp", "megatron", "ddp"]


@dataclass(frozen=True)
class Run:
    """One row of a table."""

    row: Row

    @property
    def name(self) -> str:
        return self.row.text("id")

    @cached_property
    def source(self) -> str:
        """Who published it, in a word: what the id begins with."""
        return self.name.partition("-")[0]

    @property
    def published_s(self) -> float | None:
        """The step time as published, or derived: by the table, or here from the throughput or the MFU."""
        stated = self.row.number("step_s") or self.row.number("step_s_derived")
        if stated:
            return stated
        if rate := self.row.number("tps_per_gpu"):
            return math.prod(self.batch) * self.accumulated / (rate * self.devices)
        if mfu := self.row.number("mfu"):
            return self.mfu_flops / (self.peak_flops_per_s * mfu / 100)
        return None

    @property
    def published_bytes(self) -> float | None:
        """The memory of one rank."""
        gib = self.row.number("memory_gib")
        return gib and gib * 2**30

    @property
    def devices(self) -> int:
        """All GPUs of the run."""
        return self.row.whole("gpus")

    @property
    def hardware(self) -> str:
        """The profile of its machine.

        Raises:
            CannotBuild: there is none.
        """
        gpu = self.row.text("gpu").upper()
        found = re.search(r"(?<![A-WYZ])(A100|H100|H200|B200)(?!\d)", gpu)
        other = re.search(r"PCIE|NVL\b|BRIDGE", gpu)
        hosts_of = int(self.row.number("gpus_per_node") or 8)
        if not found or other:
            raise CannotBuild(f"no profile of {self.row.text('gpu') or 'a GPU that is not stated'}")
        if hosts_of != 8 and self.devices > hosts_of:
            raise CannotBuild(f"no profile of hosts of {hosts_of} GPUs")
        if found[1] == "H100":
            if "HBM2E" in gpu or re.search(r"96 ?GB", gpu):
                return "h100-500w-hbm2e"
            return "h100-mosaicml" if self.source == "mpt" else "dgx-h100"
        if found[1] == "A100":
            return "a100-40" if re.search(r"40 ?GB", gpu) else "dgx-a100"
        return f"dgx-{found[1].lower()}"

    @cached_property
    def mesh(self) -> Mesh:
        """Its axes of more than one rank, the outermost first. What axes of data a mesh leaves out has all GPUs that
        the others leave, and a hybrid scheme that does not say its axes shards inside hosts, as in torch.

        Raises:
            CannotBuild: it has a pipeline, experts, or another axis that has no scheme here.
        """
        said = re.findall(r"([A-Za-z_]+)\s*[=:]?\s*(\d+)", self.row.text("mesh"))
        if self.row.text("mesh") and not said:
            raise CannotBuild(f"the mesh is {self.row.text('mesh')!r}, which names no axis and its size")
        sizes = {axis.lower(): int(size) for axis, size in said}
        unknown = [f"{axis}={size}" for axis, size in sizes.items() if axis not in NAMES and size > 1]
        if unknown or self.row.whole("pp", 1) > 1:
            raise CannotBuild(f"the mesh has {', '.join(unknown) or 'a pipeline'}")
        ours = {NAMES[axis]: size for axis, size in sizes.items() if axis in NAMES}
        if not {"rep", "fsdp", "dp"} & ours.keys():
            if not ours and re.search(r"\b[TC]P\b|megatron", self.scheme, re.I):
                raise CannotBuild("the mesh is not stated")
            ours["dp"] = max(1, self.devices // math.prod(ours.values()))
        if re.search(r"hybrid|hsdp", self.scheme, re.I) and "rep" not in ours:
            data = math.prod(ours.pop(axis, 1) for axis in ("fsdp", "dp"))
            inside = max(1, 8 // math.prod(ours.values()))
            ours |= {"rep": max(1, data // inside), "fsdp": min(data, inside)}
        kept = [axis for axis in dict.fromkeys(NAMES.values()) if ours.get(axis, 1) > 1]
        if not kept:
            raise CannotBuild("it runs on one GPU: there is nothing to shard")
        mesh = Mesh(tuple(kept), tuple(ours[axis] for axis in kept))
        if mesh.size != self.devices:
            raise CannotBuild(f"the mesh {mesh} does not make {self.devices} GPUs")
        return mesh

    @property
    def planned_mesh(self) -> Mesh:
        """The mesh that is planned: all of it, or one replica where attention is written out and heads are cut. Then
        heads and batch are one dim of a product, of which one of both can be cut (decision 0012), and each replica is
        as the others but for the gradients that they reduce at the end of a step.
        """
        if not (self.writes_attention_out and {"tp", "dp"} == set(self.mesh.axes)):
            return self.mesh
        return Mesh(("tp",), (self.mesh.shape[self.mesh.axes.index("tp")],))

    @property
    def planned_batch(self) -> tuple[int, int]:
        """Sequences of one forward on the planned mesh, and tokens of each."""
        rows, sequence = self.batch
        return rows * self.planned_mesh.size // self.mesh.size, sequence

    @property
    def writes_attention_out(self) -> bool:
        """Whether attention is products and a softmax: flash attention came to Megatron with the H100."""
        return self.software == "megatron" and self.hardware in ("dgx-a100", "a100-40")

    @property
    def scheme(self) -> str:
        """What the row calls its scheme."""
        return self.row.text("scheme")

    @property
    def constraints(self) -> tuple[str, ...]:
        """The scheme of each axis, and what is computed again.

        Raises:
            CannotBuild: a scheme that there is not here.
        """
        for pattern, what in WITHOUT_A_SCHEME:
            if re.search(pattern, self.scheme, re.I):
                raise CannotBuild(f"{what} has no scheme here: {self.scheme}")
        # torchtitan's tensor parallelism always cuts the sequence between layers
        cut = re.search(r"(?<!no )(?<!without )(\bSP\b|sequence)|FSDP2 ?\+ ?TP", self.scheme, re.I)
        schemes = {"rep": "ddp", "fsdp": "fsdp", "cp": "cp", "tp": "sp" if cut else "tp"}
        if "dp" in self.mesh.axes:
            schemes["dp"] = self._scheme_of_data
        return (*(f"family {axis}={schemes[axis]}" for axis in self.planned_mesh.axes), *self._again())

    @property
    def _scheme_of_data(self) -> str:
        if re.search(r"[fh]sdp|zero-?[23]|shard", self.scheme, re.I):
            return "fsdp"
        if re.search(r"\bD?DP\b|data|megatron|zero-?1|distributed optimizer", self.scheme, re.I):
            return "ddp"
        raise CannotBuild(f"no scheme is called {self.scheme!r}" if self.scheme else "the scheme is not stated")

    def _again(self) -> tuple[str, ...]:
        said, sizes = self.row.text("recompute").lower(), Sizes.of(self.row)
        if re.match(r"(none|no|off|false)\b", said):
            return ()
        if re.match(r"(full|yes|true|on|block|every layer|each layer)\b", said):
            return ("recomputation full",)
        if "layer" in said:  # every second one
            return (f"checkpoint {sizes.blocks}.*[13579]",)
        if self.recomputes_operators:
            if not sizes.products:
                raise CannotBuild(f"recomputation is {said}, which is of Llama's layout")
            # torchtitan's policy keeps every second product of a block, from the first on, and the core attention
            # (_apply_ac_to_transformer_block in torchtitan/models/llama/parallelize_llama.py, December 2024)
            return (
                "checkpoint layers.*",
                "keep *.attention/attention",
                *(f"keep *.{p}/mm" for p in sizes.products[::2]),
            )
        if said.startswith("selective"):
            return ("recomputation selective",)
        raise CannotBuild(f"recomputation is {said!r}" if said else "recomputation is not stated")

    @property
    def recomputes_operators(self) -> bool:
        """Whether it is torchtitan's policy that keeps some operators of a block."""
        return bool(re.search(r"\bop(s|erators?)?\b", self.row.text("recompute").lower()))

    @property
    def is_asynchronous(self) -> bool:
        """Whether tensor parallelism moves its activations in pieces, while products run on others (AsyncTP)."""
        return bool(re.search(r"async\w*[ -]?tp", self.scheme, re.I))

    @property
    def gathers_once(self) -> bool:
        """Whether weights stay as they were gathered in the forward (``SHARD_GRAD_OP``, ZeRO-2)."""
        return bool(re.search(r"shard_grad_op|zero-?2\b", self.scheme, re.I))

    @property
    def ranks_of_a_state(self) -> int:
        """How many ranks of equal weights share the optimizer's state and step (Megatron's distributed optimizer)."""
        if not re.search(r"distributed optimizer|zero-?1\b", self.scheme, re.I):
            return 1
        return math.prod(size for axis, size in zip(self.mesh.axes, self.mesh.shape) if axis in ("dp", "rep"))

    @property
    def software(self) -> Software:
        """What ran it, as far as memory depends on it."""
        if "simplefsdp" in self.scheme.lower():
            return "simplefsdp"
        if re.search(r"megatron|distributed optimizer", self.scheme, re.I):
            return "megatron"
        if "fsdp" in self.mesh.axes or self._scheme_of_data == "fsdp":
            return "fsdp1" if re.search(r"fsdp1|full_shard|shard_grad_op|hybrid_shard", self.scheme, re.I) else "fsdp2"
        return "ddp"

    @property
    def precision(self) -> dict[str, str]:
        """The arguments of ``autoshard.plan`` that say in which dtypes it computes and reduces, and steps.

        Raises:
            CannotBuild: another than 16 bits.
        """
        dtype = self.row.text("dtype").lower()
        if re.search(r"fp8|float8|int8|e4m3|fp4", dtype) and not self.in_float8:
            raise CannotBuild(f"it computes in {dtype}, of which no rate is known")
        if not self.in_float8 and not re.search(r"bf16|bfloat16|fp16|float16", dtype):
            raise CannotBuild(f"it computes in {dtype}" if dtype else "the dtype is not stated")
        if self.software == "megatron":  # the model in 16 bits, the optimizer holds the master weights
            if re.search("fp16|float16", dtype.replace("bfloat16", "")):
                return {"optimizer": "adamw-master-weights"}
            return {"param_dtype": "bfloat16", "reduce_dtype": "float32", "optimizer": "adamw-master-weights"}
        reduced = "bfloat16" if "pure" in dtype else "float32"  # Composer: PURE reduces in bfloat16, DEFAULT does not
        return {"param_dtype": "bfloat16", "reduce_dtype": reduced}

    @property
    def in_float8(self) -> bool:
        """Whether products of layers are in float8 with one scale for a tensor, as torchao's are if nothing is said."""
        dtype = self.row.text("dtype").lower()
        return dtype.startswith("float8") and "row" not in dtype and self.compiled and self.software == "fsdp2"

    @cached_property
    def accumulated(self) -> int:
        """How many forwards and backwards make a step; where only the global batch is stated, what that takes."""
        whole, each = self.row.number("global_batch"), self.row.number("local_batch")
        if self.row.text("grad_accum") or not whole or not each:
            return self.row.whole("grad_accum", 1)
        return max(1, round(whole / (each * self._ranks_of_data)))

    @property
    def compiled(self) -> bool:
        """Whether a compiler fused its small operators."""
        return bool(re.match(r"(yes|true|inductor|torch\.compile)", self.row.text("compile").lower()))

    @property
    def partitioned(self) -> bool:
        """Whether forward and backward were made of one graph, so that what no backward reads is not kept."""
        return self.compiled or "aot" in self.row.text("compile").lower()

    @property
    def compiles_loss(self) -> bool:
        """Whether the loss was compiled: torchtitan does since its pull request 1033 of April 2025."""
        when = re.search(r"(20\d\d)-?(0[1-9]|1[0-2])", self.row.text("source"))
        return self.compiled and when is not None and (int(when[1]), int(when[2])) >= (2025, 4)

    @property
    def is_one_layer(self) -> bool:
        """Whether the figure is of one layer, without embedding, loss and optimizer."""
        return "ONE" in self.row.text("model")

    @property
    def _ranks_of_data(self) -> int:
        return math.prod(size for axis, size in zip(self.mesh.axes, self.mesh.shape) if axis not in ("cp", "tp"))

    @cached_property
    def batch(self) -> tuple[int, int]:
        """Sequences of one forward over all ranks, and tokens of each.

        Raises:
            CannotBuild: the row does not say the micro-batch.
        """
        whole, ranks = self.row.number("global_batch"), self._ranks_of_data
        if self.row.text("local_batch"):
            local = self.row.whole("local_batch")
        elif whole and self.row.text("grad_accum") and not whole % (ranks * self.row.whole("grad_accum")):
            local = int(whole) // (ranks * self.row.whole("grad_accum"))
        else:
            raise CannotBuild("the micro-batch is not stated")
        return local * ranks, self.row.whole("seq")

    def model(self, layers: int) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
        """The model with so many layers and its arguments, on the meta device.

        Raises:
            CannotBuild: of another architecture than those of :mod:`published_models`.
        """
        sizes = Sizes.of(self.row).having(layers)
        in_16_bits = self.precision.get("optimizer") == "adamw-master-weights"
        narrow = torch.float16 if "fp16" in self.row.text("dtype") else torch.bfloat16
        with torch.device("meta"):
            tokens, targets = (torch.empty(self.planned_batch, dtype=torch.int64) for _ in range(2))
            dtype = narrow if in_16_bits else torch.float32
            biases = "MPT" not in sizes.name.upper()
            return build(sizes, dtype, self.writes_attention_out, biases), (tokens, targets)

    def check(self) -> None:
        """Reads everything but the model.

        Raises:
            CannotBuild: the row cannot be built.
        """
        _ = (self.hardware, self.constraints, self.precision, self.batch, self.accumulated, self.mfu_flops)

    @property
    def mfu_flops(self) -> float:
        """FLOPs of a step as published MFUs count them: 6 N a token, and attention without the causal half."""
        sizes = Sizes.of(self.row)
        size = sizes.params or sizes.parameters(3 if sizes.layout == "llama" else 2, embeddings=1)
        batch, sequence = self.batch
        return (6 * size + 12 * sizes.layers * sizes.d_model * sequence) * batch * sequence * self.accumulated

    @property
    def peak_flops_per_s(self) -> float:
        """Of all its devices together."""
        return PEAK.get(self.hardware, 989e12) * self.devices


def read_runs(path: Path) -> list[Run]:
    """All rows of a file."""
    return [Run(row) for row in read_rows(path)]
