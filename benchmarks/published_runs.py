"""Published training runs: a row of a table of them, as the model, the mesh and the constraints that it was run with.

Columns are those of ``docs/validation.md``. What a row does not say, and no public source does, makes it one that
cannot be built: :class:`CannotBuild` says why.
"""

from __future__ import annotations

import csv
import math
import re
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from autoshard.mesh import Mesh
from examples import gpt2, llama

PEAK = {"H100": 989e12, "H200": 989e12, "A100": 312e12}
"""Dense bfloat16 FLOP/s (data sheets), over which the MFU is counted."""

NAMES = {"dp_replicate": "rep", "dp_shard": "fsdp", "dp": "dp", "tp": "tp"}
"""Axes of a row's mesh, and what they are called in ours."""

AS_MARKED_BY_TORCHTITAN = ("wq/mm", "wv/mm", "w1/mm", "w2/mm")
"""Every second product of a block, from the first on: what torchtitan's policy ``op`` keeps, with the core attention
(``_apply_ac_to_transformer_block`` in ``torchtitan/models/llama/parallelize_llama.py``, December 2024).
"""


class CannotBuild(Exception):
    """A row that is not predicted, and why."""


class CoreAttention(gpt2.Attention):
    """Attention written out, as in Megatron before flash attention: two products, and a softmax and dropout between.

    Megatron scales and masks in the kernel of its softmax, so that neither stands here: this is a model of what is
    computed, whose numbers mean nothing. Queries, keys and values have a matrix each, so that heads can be cut.
    """

    def __init__(self, config: gpt2.GPT2Config) -> None:
        super().__init__(config)
        del self.c_attn
        self.q, self.k, self.v = (nn.Linear(config.d_model, config.d_model, dtype=config.dtype) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) to (B, T, C)."""
        batch, sequence, width = x.shape
        heads = (batch, sequence, self.n_heads, width // self.n_heads)
        q, k, v = (linear(x).view(heads).permute(2, 0, 1, 3) for linear in (self.q, self.k, self.v))
        weights = torch.softmax(q @ k.transpose(-1, -2), dim=-1)  # (H, B, T, T): heads first, so that they can be cut
        mixed = nn.functional.dropout(weights, self.dropout, self.training) @ v
        output: Tensor = self.c_proj(mixed.permute(1, 2, 0, 3).reshape(batch, sequence, width))
        return output


@dataclass(frozen=True)
class Run:
    """One row; ``row`` has its cells as they are written."""

    row: dict[str, str]

    @property
    def name(self) -> str:
        return self.row["id"]

    @cached_property
    def source(self) -> str:
        """Who published it, in a word: what the id begins with."""
        return self.name.partition("-")[0]

    @property
    def published_s(self) -> float | None:
        """The step time, as published or else as derived from the throughput."""
        return _number(self.row["step_s"]) or _number(self.row["step_s_derived"])

    @property
    def published_bytes(self) -> float | None:
        """The memory of one rank."""
        gib = _number(self.row["memory_gib"])
        return gib and gib * 2**30

    @property
    def hardware(self) -> str:
        """The profile of its machine.

        Raises:
            CannotBuild: there is none.
        """
        gpu = self.row["gpu"]
        if "H100" in gpu:
            if "HBM2e" in gpu or "96GB" in gpu:
                return "h100-500w-hbm2e"
            return "h100-mosaicml" if self.source == "mpt" else "dgx-h100"
        if "H200" in gpu:
            return "dgx-h200"
        if "A100" in gpu:
            return "a100-40" if "40GB" in gpu else "dgx-a100"
        raise CannotBuild(f"no profile of {gpu}")

    @property
    def mesh(self) -> Mesh:
        """Its axes of more than one rank, the outermost first.

        Raises:
            CannotBuild: it has a pipeline, context parallelism, or another axis that has no scheme here.
        """
        sizes = {axis: int(size) for axis, size in re.findall(r"(\w+)\s*=\s*(\d+)", self.row["mesh"])}
        unknown = [f"{axis}={size}" for axis, size in sizes.items() if axis not in NAMES and size > 1]
        if unknown or int(self.row["pp"] or 1) > 1:
            raise CannotBuild(f"the mesh has {', '.join(unknown) or 'a pipeline'}")
        kept = [axis for axis in NAMES if sizes.get(axis, 1) > 1]
        mesh = Mesh(tuple(NAMES[axis] for axis in kept), tuple(sizes[axis] for axis in kept))
        if mesh.size != int(self.row["gpus"]):
            raise CannotBuild(f"the mesh {mesh} does not make {self.row['gpus']} GPUs")
        return mesh

    @property
    def constraints(self) -> tuple[str, ...]:
        """The scheme of each axis, and what is computed again.

        Raises:
            CannotBuild: a scheme that there is not here.
        """
        scheme, axes = self.row["scheme"], self.mesh.axes
        for other in ("AsyncTP", "SHARD_GRAD_OP", "HYBRID", "distributed optimizer"):
            if other in scheme and not ("HYBRID" in other and "rep" in axes):
                raise CannotBuild(f"{other} has no scheme")
        # torchtitan's tensor parallelism always cuts the sequence between layers
        tensor = "sp" if "SP)" in scheme or "+SP" in scheme or scheme.startswith("FSDP2+TP") else "tp"
        schemes = {"rep": "ddp", "dp": "ddp", "fsdp": "fsdp", "tp": tensor}
        return (*(f"family {axis}={schemes[axis]}" for axis in axes), *self._again())

    def _again(self) -> tuple[str, ...]:
        said = self.row["recompute"]
        if said.startswith("none"):
            return ()
        if said.startswith("full"):
            return ("recomputation full",)
        if "layer" in said:  # every second one
            return ("checkpoint layers.*[13579]",)
        if "op" in said:
            keeps = (f"keep *.{name}" for name in AS_MARKED_BY_TORCHTITAN)
            return ("checkpoint layers.*", "keep *.attention/attention", *keeps)
        if said.startswith("selective"):
            return ("recomputation selective",)
        raise CannotBuild(f"recomputation is {said}")

    @property
    def precision(self) -> dict[str, str]:
        """The arguments of ``autoshard.plan`` that say in which dtypes it computes and reduces, and steps.

        Raises:
            CannotBuild: float8.
        """
        dtype = self.row["dtype"].lower()
        if "8" in dtype.replace("bf16", ""):
            raise CannotBuild("it computes in float8")
        if dtype.startswith("mixed fp16"):  # Megatron: the model in 16 bits, the optimizer holds the master weights
            return {"optimizer": "adamw-master-weights"}
        reduced = "bfloat16" if "pure" in dtype else "float32"  # Composer: PURE reduces in bfloat16, DEFAULT does not
        return {"param_dtype": "bfloat16", "reduce_dtype": reduced}

    @property
    def accumulated(self) -> int:
        """How many forwards and backwards make a step."""
        return int(self.row["grad_accum"] or 1)

    @property
    def compiled(self) -> bool:
        """Whether a compiler fused its small operators."""
        return self.row["compile"].startswith("yes")

    @property
    def is_one_layer(self) -> bool:
        """Whether the figure is of one layer, without embedding, loss and optimizer."""
        return "ONE" in self.row["model"]

    @property
    def batch(self) -> tuple[int, int]:
        """Sequences of one forward over all ranks, and tokens of each.

        Raises:
            CannotBuild: the row does not say the micro-batch.
        """
        if not self.row["local_batch"]:
            raise CannotBuild("the micro-batch is not stated")
        data = math.prod(size for axis, size in zip(self.mesh.axes, self.mesh.shape) if axis != "tp")
        return int(self.row["local_batch"]) * data, int(self.row["seq"])

    def model(self, layers: int) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
        """The model with so many layers and its arguments, on the meta device.

        Raises:
            CannotBuild: of another architecture than Llama, MPT or GPT.
        """
        shape, model = self.batch, self.row["model"]
        with torch.device("meta"):
            tokens, targets = (torch.empty(shape, dtype=torch.int64) for _ in range(2))
            if model.startswith("Llama"):
                return self._llama(layers), (tokens, targets)
            if model.startswith(("MPT", "GPT")) and self._int("ffn") == 4 * self._int("d_model"):
                return self._gpt(layers), (tokens, targets)
        raise CannotBuild(f"no layout of {model}")

    @property
    def mfu_flops(self) -> float:
        """FLOPs of a step as published MFUs count them: 6 N a token, and attention without the causal half."""
        width, layers, ffn = (self._int(name) for name in ("d_model", "layers", "ffn"))
        kv = width * self._int("kv_heads") // self._int("heads")
        matrices = 3 if self.row["model"].startswith("Llama") else 2
        size = layers * (2 * width * width + 2 * width * kv + matrices * width * ffn) + self._int("vocab") * width
        size = int(_number(self.row["params"]) or size)
        batch, sequence = self.batch
        return (6 * size + 12 * layers * width * sequence) * batch * sequence * self.accumulated

    @property
    def peak_flops_per_s(self) -> float:
        """Of all its devices together."""
        return next(peak for name, peak in PEAK.items() if name in self.row["gpu"]) * int(self.row["gpus"])

    def _int(self, column: str) -> int:
        return int(self.row[column])

    def _llama(self, layers: int) -> nn.Module:
        return llama.Llama(
            llama.LlamaConfig(
                vocab_size=self._int("vocab"),
                n_layers=layers,
                d_model=self._int("d_model"),
                n_heads=self._int("heads"),
                n_kv_heads=self._int("kv_heads"),
                d_ffn=self._int("ffn"),
                max_sequence=self._int("seq"),
            )
        )

    def _gpt(self, layers: int) -> nn.Module:
        megatron = self.row["model"].startswith("GPT")
        config = gpt2.GPT2Config(
            vocab_size=self._int("vocab"),
            n_layers=layers,
            d_model=self._int("d_model"),
            n_heads=self._int("heads"),
            max_sequence=self._int("seq"),
            dropout=0.1 if megatron else 0.0,
            dtype=torch.float16 if megatron else torch.float32,
        )
        model = gpt2.GPT2(config)
        if megatron:
            for block in model.h:
                block.attn = CoreAttention(config)
            return model
        for module in model.modules():
            if isinstance(module, nn.Linear | nn.LayerNorm):
                module.bias = None  # MPT has none (no_bias: true)
        return model


def read_runs(path: Path) -> list[Run]:
    """All rows of a file."""
    with path.open(newline="") as file:
        return [Run(row) for row in csv.DictReader(file)]


def _number(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:
        return None
