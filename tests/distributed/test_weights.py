"""Weights from files and from whole state dicts: every rank reads its blocks, and what does not fit is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import autoshard
from autoshard.errors import InputError
from autoshard.lowering.adapter import local_of
from autoshard.lowering.weight_files import weight_files

from . import cases
from .harness import caught, run_ranks
from .parity import device_mesh_of, full

MESH = "dp=2,tp=2"
PINS = ("ids=dp:S(0) tp:R", "embedding.weight=dp:S(0) tp:S(0)", "up.weight=dp:S(0) tp:S(1)", "down.weight=dp:R tp:S(1)")
IDS = torch.arange(32).reshape(8, 4)
NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.int64: "I64"}


class Model(nn.Module):
    """Tied, with buffers of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 64)
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)
        self.head = nn.Linear(64, 256, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.rand(64))
        self.register_buffer("table", torch.arange(64.0).sin(), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.down(self.up(self.embedding(ids) * self.scale + self.table)))


def made(seed: int) -> Model:
    torch.manual_seed(seed)
    return Model()


def write(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """A file as the format of safetensors says."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, tensor in tensors.items():
        raw = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        header[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def saved(folder: Path) -> dict[str, Model]:
    """Models, each saved in another way under its name."""
    models = {name: made(seed) for seed, name in enumerate(("one file", "several files", "checkpoint"))}
    for name in models:
        (folder / name).mkdir()
    untied = {name: value for name, value in models["one file"].state_dict().items() if name != "head.weight"}
    write(folder / "one file" / "model.safetensors", untied)
    whole = models["several files"].state_dict()
    parts = {"model-1.safetensors": sorted(whole)[::2], "model-2.safetensors": sorted(whole)[1::2]}
    for file, names in parts.items():
        write(folder / "several files" / file, {name: whole[name] for name in names})
    index = {"weight_map": {name: file for file, names in parts.items() for name in names}}
    (folder / "several files" / "model.safetensors.index.json").write_text(json.dumps(index))
    state = {"model": models["checkpoint"].state_dict(), "optimizer": {"step": torch.ones(())}}
    with pytest.warns(UserWarning):  # that no other process saves
        dcp.save(state, checkpoint_id=folder / "checkpoint", no_dist=True)

    base = models["one file"].state_dict()
    bad = {
        "other names": {**untied, "extra": torch.ones(2)} | {"down.weight": base["down.weight"].T.contiguous()},
        "other dtypes": {name: value.bfloat16() for name, value in untied.items()},
        "untied": {**base, "head.weight": base["head.weight"] + 1.0},
    }
    del bad["other names"]["up.bias"]
    for name, tensors in bad.items():
        write(folder / f"{name}.safetensors", tensors)
    return models


def _bytes_read() -> int:
    """By this process, since it began, out of all files."""
    said = Path("/proc/self/io").read_text()
    return int(next(line for line in said.splitlines() if line.startswith("rchar")).split()[1])


def _off(model: nn.Module, reference: Model) -> list[str]:
    expected = dict(reference.named_parameters()) | dict(reference.named_buffers())
    held = dict(model.named_parameters()) | dict(model.named_buffers())
    return [name for name, value in held.items() if not torch.equal(full(value), expected[name])]


def _loaded(text: str, folder: Path, models: dict[str, Model]) -> dict[str, Any]:
    plan = autoshard.parse_plan(text)
    mesh = device_mesh_of(plan)
    with autoshard.weights_on_meta():
        model: Any = Model()
    autoshard.parallelize(model, plan, mesh)
    off, reads = {}, []
    for name, reference in (*models.items(), *models.items()):
        before = _bytes_read()
        autoshard.load_weights(model, folder / name)
        reads.append(_bytes_read() - before)
        model.table.copy_(reference.table)  # built on the meta device
        off[name] = _off(model, reference)
    autoshard.load_weights(model, folder / "one file")
    refused = {
        name: caught(lambda name=name: autoshard.load_weights(model, folder / f"{name}.safetensors"))[1]
        for name in ("other names", "other dtypes")
    }
    off["after refusals"] = _off(model, models["one file"])
    refused["untied"] = caught(lambda: autoshard.load_weights(model, folder / "untied.safetensors"))[1]
    autoshard.load_weights(model, folder / "other dtypes.safetensors", cast=True)
    rounded = made(0)
    for tensor in (*rounded.parameters(), rounded.scale):
        tensor.data = tensor.data.bfloat16().float()
    off["cast"] = _off(model, rounded)

    model.load_state_dict(models["checkpoint"].state_dict())
    off["load_state_dict"] = _off(model, models["checkpoint"])
    difference = full(model(*autoshard.shard_inputs(plan, mesh, IDS))) - models["checkpoint"](IDS)
    return {
        "off": off,
        "refused": refused,
        "read": reads[3:5],  # of files of safetensors, the second time: the first loads what else it needs
        "held": sum(local_of(tensor).nbytes for tensor in (*model.parameters(), model.scale)),
        "difference": difference.abs().max().item(),
    }


def test_every_rank_reads_its_part_and_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    models = saved(tmp_path)
    plan = autoshard.plan(Model(), (IDS,), mesh=MESH, hardware=cases.slow_machine(), pins=PINS)
    whole = sum(p.nbytes for p in Model().parameters())
    for seen in run_ranks(4, _loaded, autoshard.dump_plan(plan), tmp_path, models):
        assert not any(seen["off"].values()), seen["off"]
        assert seen["difference"] <= 1e-4
        one, several = seen["read"]
        assert seen["held"] <= one <= seen["held"] + 16384 < 0.6 * whole  # with headers, and what the index says
        assert one <= several <= 2 * seen["held"] + 16384  # tied weights are there twice, and compared
        for name, texts in REFUSED.items():
            assert all(text in seen["refused"][name] for text in texts), seen["refused"][name]


REFUSED = {
    "other names": (
        "missing there: up.bias",
        "not in the model: extra",
        "down.weight has shape [128, 64] there, [64, 128] in the model",
    ),
    "other dtypes": ("up.bias is torch.bfloat16 there, torch.float32 in the model (cast=True converts)",),
    "untied": ("embedding.weight and head.weight are one tensor in the model, and differ in the files",),
}


BROKEN = {
    "empty": (b"", "no file of safetensors"),
    "text": (b"weights, weights, weights", "no file of safetensors"),
    "cut short": ((2).to_bytes(8, "little"), "no file of safetensors"),
    "no tensor": (b'{"w": 3}', "no file of safetensors"),
    "dtype": (b'{"w": {"dtype": "F4", "shape": [1], "data_offsets": [0, 1]}}', "F4"),
    "size": (b'{"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}', "w has 4 bytes for F32"),
    "before": (b'{"w": {"dtype": "U8", "shape": [4], "data_offsets": [-4, 0]}}', "w has 4 bytes for U8"),
    "beyond": (b'{"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}', "cut short: w ends at byte"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_file_is_refused(what: str, tmp_path: Path) -> None:
    data, said = BROKEN[what]
    path = tmp_path / "w.safetensors"
    path.write_bytes((len(data).to_bytes(8, "little") if data.startswith(b"{") else b"") + data)
    with pytest.raises(InputError, match=said):
        weight_files(path)


def test_a_folder_without_weights_is_refused_with_what_can_be_given(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(InputError, match=r"there is pytorch_model\.bin: .*load_state_dict\(torch\.load"):
        weight_files(tmp_path)
    with pytest.raises(InputError, match="no folder of weights"):
        weight_files(tmp_path / "nothing")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"w": "../w.safetensors"}}')
    with pytest.raises(InputError, match="not a file beside it"):
        weight_files(tmp_path)


@pytest.mark.parametrize("shape", [(), (0, 3), (7,), (3, 5, 4)])
def test_any_block_of_a_tensor_is_read(shape: tuple[int, ...], tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    whole = torch.arange(math.prod(shape)).view(shape)
    write(path, {"before": torch.ones(3), "w": whole})
    files = weight_files(path)
    for blocks in (
        [(0, n) for n in shape],
        [(n // 3, n - n // 3) for n in shape],
        [(n // 2, n) if dim == len(shape) - 1 else (0, n) for dim, n in enumerate(shape)],
        [(n, n) for n in shape],
    ):
        expected = whole[tuple(slice(*block) for block in blocks)]
        ((_, found),) = files.read({"w": ([[block] for block in blocks], whole)})
        assert found.dtype == whole.dtype and torch.equal(found, expected)
