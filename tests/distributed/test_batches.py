"""Who reads which samples, and losses outside of the model over plain targets: as one process."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import count
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

import autoshard
from autoshard.lowering.cuts import note_read, noted_read

from . import cases
from .harness import caught, run_ranks
from .parity import device_mesh_of, full

BATCH, LIMIT = 8, 1e-6
CUT = {  # how input and result are cut: into how many parts a batch is read
    ("dp:S(0) tp:S(0)", "dp:S(0) tp:S(0)"): 4,
    ("dp:S(0) tp:S(0)", "dp:S(0) tp:R"): 2,
    ("dp:S(0) tp:R", "dp:S(0) tp:S(2)"): 2,
    ("dp:S(0) tp:S(1)", "dp:S(0) tp:S(1)"): 2,
}


class Model(nn.Module):
    """Gives scores of every class, (B, T, 12)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.linear = nn.Embedding(64, 16), nn.Linear(16, 12)

    def forward(self, ids: Tensor) -> Tensor:
        return self.linear(self.embedding(ids))


class Endless(IterableDataset[int]):
    """Has no length."""

    def __iter__(self) -> Iterator[int]:
        return count()


def samples() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    ids = torch.arange(4 * BATCH * 6).view(4 * BATCH, 6) % 64  # a row tells which sample it is
    targets = torch.randint(12, ids.shape, generator=generator)
    targets[::3, 1:] = -100  # as padding is, of which ranks have unequal parts
    return TensorDataset(ids, targets)


def _trained(texts: list[str]) -> list[dict[str, Any]]:
    data, found = samples(), []
    for text in texts:
        plan = autoshard.parse_plan(text)
        mesh = device_mesh_of(plan)
        reference = Model()
        parallel: Any = autoshard.parallelize(Model(), plan, mesh)
        sampler = autoshard.sampler(plan, mesh, data, seed=5)
        loader = DataLoader(data, batch_size=BATCH // sampler.num_replicas, sampler=sampler)
        expected = DataLoader(data, batch_size=BATCH, sampler=DistributedSampler(data, 1, 0, seed=5))
        worst, rows = 0.0, []
        for (ids, targets), (all_ids, all_targets) in zip(loader, expected, strict=True):
            scores = parallel(*autoshard.shard_inputs(plan, mesh, ids))
            (cut,) = autoshard.shard_targets(plan, mesh, scores, targets)
            loss = F.cross_entropy(scores.flatten(0, 1), cut.flatten(), reduction="sum") / (cut != -100).sum()
            loss.backward()
            reference_loss = F.cross_entropy(reference(all_ids).flatten(0, 1), all_targets.flatten())
            reference_loss.backward()
            worst = max(worst, (full(loss) - reference_loss).abs().item())
            rows += ids[:, 0].tolist()
        pairs = zip(parallel.parameters(), reference.parameters(), strict=True)
        worst = max(worst, *((full(p.grad) - q.grad).abs().max().item() for p, q in pairs))
        (whole,) = autoshard.shard_targets(plan, mesh, scores, all_targets)
        assert torch.equal(full(whole), all_targets)  # of a full batch, too
        (rows_of_all,) = autoshard.shard_targets(plan, mesh, scores.flatten(0, 1), all_targets.flatten())
        assert torch.equal(rows_of_all.to_local(), whole.flatten().to_local())  # of a result cut in parts, too
        refused = [
            caught(partial(autoshard.shard_targets, plan, mesh, scores, targets[:1, :-1])),
            caught(partial(autoshard.sampler, plan, mesh, Endless())),
        ]
        found.append({"parts": sampler.num_replicas, "worst": worst, "rows": rows, "refused": refused})
    return found


def test_ranks_read_their_part_of_a_batch_and_a_loss_outside_is_that_of_one_process() -> None:
    plans = [
        autoshard.plan(
            Model(),
            (torch.zeros(BATCH, 6, dtype=torch.int64),),
            mesh="dp=2,tp=2",
            hardware=cases.slow_machine(),
            pins=[f"ids={ids}", f"output.0={scores}"],
        )
        for ids, scores in CUT
    ]
    ranks = run_ranks(4, _trained, [autoshard.dump_plan(plan) for plan in plans])
    first = samples().tensors[0][:, 0].tolist()
    for case, parts in enumerate(CUT.values()):
        seen = [rank[case] for rank in ranks]
        assert all(each["parts"] == parts and each["worst"] <= LIMIT for each in seen), (case, seen)
        # ranks with the same part read the same samples, and all parts together every sample once
        read = {tuple(each["rows"]) for each in seen}
        assert len(read) == parts and sorted(row for rows in read for row in rows) == sorted(first)
        for shape, length in (each["refused"] for each in seen):
            assert shape[0] == length[0] == "InputError"
            assert "target 1 has shape" in shape[1] and "has no length" in length[1]


@pytest.mark.parametrize("shape", [(), (0, 3), (7,), (5, 3, 40, 41)])
def test_what_is_compared_of_a_batch_is_the_same_wherever_it_lies_in_memory(shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    turned = tensor.transpose(0, -1).contiguous().transpose(0, -1) if tensor.dim() > 1 else tensor
    for part in (None, 1):
        reads = [noted_read(note_read(torch.empty(1), part, each)) for each in (tensor, turned)]
        assert all(read is not None and read[0] == part for read in reads)
        (_, one), (_, other) = filter(None, reads)
        assert torch.equal(one, other) and one.numel() <= 512 and bool(one.numel()) == bool(tensor.numel())


def _misread(text: str) -> list[Any]:
    """What the first call says of batches of which ranks have not read what they are to have read."""
    plan = autoshard.parse_plan(text)
    mesh, data = device_mesh_of(plan), samples()
    rank = torch.distributed.get_rank()

    def module() -> Any:
        return autoshard.parallelize(Model(), plan, mesh, batches=[BATCH // 2])

    def called(parallel: Any, first: int, count: int, **options: int) -> Tensor:
        ids = data.tensors[0][first : first + count]
        scores: Tensor = parallel(*autoshard.shard_inputs(plan, mesh, ids, **options))
        (targets,) = autoshard.shard_targets(plan, mesh, scores, data.tensors[1][first : first + count])
        assert targets.shape == scores.shape[:2]
        return full(scores)

    each, half = BATCH // 2, BATCH // 4
    part = autoshard.sampler(plan, mesh, data).rank
    found: list[Any] = [
        caught(
            partial(called, module(), rank * each, each)
        ),  # as torch's sampler has it, for as many ranks as there are
        caught(partial(called, module(), rank * BATCH, BATCH)),
        caught(partial(called, module(), part * each, each, batch=each)),
    ]
    right = module()
    expected = Model()(data.tensors[0][:BATCH])
    for size, options in ((each, {}), (half, {"batch": half * 2})):
        found.append(torch.allclose(called(right, part * size, size, **options), expected[: 2 * size], atol=LIMIT))
    state = [right.state_dict() if rank == 0 else None]
    torch.distributed.broadcast_object_list(state)
    found.append(caught(partial(right.load_state_dict, state[0])))
    return found


def test_ranks_that_have_not_read_what_they_are_to_are_told_at_the_first_call() -> None:
    plan = autoshard.plan(
        Model(),
        (torch.zeros(BATCH, 6, dtype=torch.int64),),
        mesh="dp=2,tp=2",
        hardware=cases.slow_machine(),
        pins=["ids=dp:S(0) tp:R", "output.0=dp:S(0) tp:R", "embedding.weight=dp:R tp:S(1)", "linear.*=dp:R tp:R"],
    )
    ranks = run_ranks(4, _misread, autoshard.dump_plan(plan))
    for rank, (other, whole, half, *right, loaded) in enumerate(ranks):
        assert "ranks that hold the same part of ids have read different samples" in other[1]
        assert "a full batch is equal on all ranks" in whole[1]
        assert "batch=len(ids) * sampler.num_replicas" in half[1]
        assert right == [True, True]
        is_another = rank % 2 == 1  # along tp, which cuts the table
        assert ("writes the shards of the rank that calls it" in loaded[1]) == is_another
