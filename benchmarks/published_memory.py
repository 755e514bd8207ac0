"""What published software reserves on a GPU, from what our own execution of the same scheme has in use.

A plan's memory is that of what autoshard runs. Others hold more, by design, and each of it is written down:

- *Pools*. torch's allocator keeps a pool for each stream, and what one stream freed no other reuses
  (``c10/cuda/CUDACachingAllocator.cpp``, its first comment). FSDP gathers in streams of its own and keeps reduced
  gradients in another (``foreach_all_gather`` and ``foreach_reduce`` in
  ``torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py``; ``_init_streams`` in ``fsdp/_runtime_utils.py``), so
  what these pools held at their fullest stays reserved beside the peak of the computation.
- *FSDP2 copies*. A unit is gathered into one buffer, and copied out of it into its parameters; the buffer before is let
  go of behind the copy (``wait_for_unshard`` in ``_fsdp_param_group.py``). The largest two in a row are the root's and
  a layer's.
- *The root*. What no layer holds, embedding and head, is not freed from forward to backward (``_lazy_init`` in
  ``_fsdp_state.py``; FSDP1: ``_post_forward_reshard``). Our execution lets go of the embedding.
- *What a policy keeps*. torch's selective checkpointing keeps each result that the policy names
  (``_CachingTorchDispatchMode`` in ``torch/utils/checkpoint.py``): under torchtitan's also that of a block's last
  product, which no backward reads. A compiler that partitions the graph does not keep it, nor does a plan.
- *A compiled loss* holds logits and their gradient in 16 bits instead of three tensors in 32.
- *A loss cut by vocabulary* (torchtitan's, beside tensor parallelism) holds four tensors in 32 bits in its backward,
  ours three: logarithms, the gradient, their sum and its product (``_nll_loss_and_log_softmax_backward`` in
  ``torch/distributed/tensor/parallel/loss.py``).
- *Megatron* accumulates gradients in float32, which are there all the time: 18 bytes for a parameter, 6 and 12 / d
  where d ranks share the optimizer's state (``megatron/training/theoretical_memory_usage.py``).
- *Megatron* draws dropout again where it computes a layer again (``CheckpointFunction`` in
  ``megatron/core/tensor_parallel/random.py``); ours keeps what it drew.
- *DDP* copies gradients into buckets of as much memory (``gradient_as_bucket_view`` in its documentation).

The allocator's margin is that of the profile, on the pool of the computation alone. No number here is fitted.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

from autoshard.mesh import Mesh
from autoshard.plans import ShardingPlan
from autoshard.plans.memory_outcome import MemoryOutcome
from autoshard.plans.memory_outcome import reserved_bytes as with_margin
from autoshard.plans.plan import TensorEntry
from published_runs import Run

NARROW, WIDE = 2, 4
"""Bytes of a number in which it computes (16 bits), and of one in float32."""


def reserved_bytes(run: Run, plan: ShardingPlan) -> float:
    """What the allocator of a rank of the run reserves.

    Raises:
        ValueError: the plan does not say its memory.
    """
    if plan.memory is None:
        raise ValueError("the plan does not say what it needs in memory")
    held = _Held(run, plan, plan.memory)
    in_use, pools = {
        "fsdp1": held.fsdp1,
        "fsdp2": held.fsdp2,
        "simplefsdp": held.as_planned,
        "megatron": held.megatron,
        "ddp": held.ddp,
    }[run.software]()
    return with_margin(round(in_use), plan.memory.allocator_margin) + pools


@dataclass(frozen=True)
class _Held:
    run: Run
    plan: ShardingPlan
    memory: MemoryOutcome

    def as_planned(self) -> tuple[float, float]:
        """Bytes in use by what computes, at its fullest moment, and those of the pools of other streams."""
        return self._in_use, 0.0

    def fsdp2(self) -> tuple[float, float]:
        in_use = self._in_use - self._gradients_at_peak + self._more_of_root + self._kept_by_policy
        return in_use, self._gathered(self._root) + self._layer + self._shards(WIDE)

    def fsdp1(self) -> tuple[float, float]:
        """FSDP1 has no copy in the computation's pool: a unit is where it was gathered, two of them in flight, or all
        where they stay gathered.
        """
        in_use = self._in_use - self._gradients_at_peak + self._more_of_root
        wide = WIDE if self.run.precision.get("reduce_dtype") == "float32" else 0
        cast = wide / NARROW * max(self._gathered(self._root), self._layer)  # of the unit whose gradient is reduced
        gathered = self._gathered(self.plan.parameters) - self._gathered(self._root) if self.run.gathers_once else 0.0
        return in_use, max(gathered, self._layer) + cast + self._shards(WIDE)

    def megatron(self) -> tuple[float, float]:
        state = self.memory.optimizer_bytes
        in_use = self._in_use - self._gradients_at_peak + self._shards(WIDE) - self._drawn_again
        return in_use - state + state / self.run.ranks_of_a_state, 0.0

    def ddp(self) -> tuple[float, float]:
        return self._in_use - self._gradients_at_peak + 2 * self._shards(WIDE), 0.0

    @property
    def _in_use(self) -> float:
        """At the peak; with a compiled loss at what is then the fullest moment; with a loss that is cut by vocabulary
        the tensor that it holds beside ours.
        """
        peak = self.memory.peak.size_bytes
        wide = [tenant.size_bytes for tenant in self.memory.tenants if tenant.name.startswith("/")]
        if not wide or not self.memory.peak.operator.startswith("/"):
            return peak
        if not self.run.compiles_loss:
            return peak + (max(wide) if self.run.software == "fsdp2" and "tp" in self.plan.mesh.axes else 0)
        others = [point.size_bytes for point in self.memory.timeline if not point.operator.startswith("/")]
        return max(peak - sum(wide) + max(wide), *others)  # twice 16 bits are one of the tensors in 32

    @property
    def _gradients_at_peak(self) -> float:
        peak = self.memory.peak.size_bytes
        place = next((k for k, point in enumerate(self.memory.timeline) if point.size_bytes == peak), None)
        gradients = next((each for each in self.memory.kinds if each.kind == "gradient"), None)
        return 0.0 if place is None or gradients is None else gradients.size_bytes[place]

    @property
    def _more_of_root(self) -> float:
        """Of the root what our execution does not hold at the peak: all within the layers, else all but the head."""
        in_layers = re.match(r"(layers|h)\.\d+\.", self.memory.peak.operator)
        heads = [entry for entry in self._root if re.match(r"(output|lm_head|wte)\.weight$", entry.name)]
        return self._gathered(self._root) - (0.0 if in_layers else self._gathered(heads))

    @property
    def _kept_by_policy(self) -> float:
        if not self.run.recomputes_operators or self.run.partitioned:
            return 0.0
        rows, sequence = self.run.planned_batch
        data = math.prod(size for axis, size in zip(self.plan.mesh.axes, self.plan.mesh.shape) if axis != "tp")
        layers, width = self.run.row.whole("layers"), self.run.row.whole("d_model")
        return layers * rows * sequence / data * width * NARROW

    @property
    def _drawn_again(self) -> float:
        """Bytes of dropout in what is computed again: in all of a layer, or in its attention."""
        layers = {"recomputation full": r"h\.\*.*", "recomputation selective": r"h\.\*\.attn"}
        within = next((layers[each] for each in self.run.constraints if each in layers), "none")
        dropout = re.compile(rf"{within}/native_dropout(\.\d+)?")
        drawn = (each for each in self.memory.tenants if each.kind == "activation")
        return math.fsum(each.size_bytes for each in drawn if dropout.fullmatch(each.name))

    @property
    def _root(self) -> list[TensorEntry]:
        return [entry for entry in self.plan.parameters if not re.match(r"(layers|h)\.\d+\.", entry.name)]

    @property
    def _layer(self) -> float:
        return self._gathered(entry for entry in self.plan.parameters if re.match(r"(layers|h)\.0\.", entry.name))

    def _gathered(self, entries: Iterable[TensorEntry]) -> float:
        """Bytes of parameters gathered over all axes but that of tensor parallelism."""
        return NARROW * math.fsum(_size(entry, self.plan.mesh, ("tp",)) for entry in entries)

    def _shards(self, width: int) -> float:
        return shard_bytes(self.plan, width)


def shard_bytes(plan: ShardingPlan, width: int) -> float:
    """Bytes of a number for each parameter that a rank holds, where one takes so many."""
    return width * math.fsum(_size(entry, plan.mesh, plan.mesh.axes) for entry in plan.parameters)


def _size(entry: TensorEntry, mesh: Mesh, axes: Iterable[str]) -> float:
    """Elements of a parameter that is cut over some of the axes as it is stored."""
    cuts = (n for axis, n, placed in zip(mesh.axes, mesh.shape, entry.layout) if axis in axes and placed.kind == "S")
    return math.prod(entry.shape) / math.prod(cuts)
