"""Files of weights, of which a rank reads the blocks that it holds: safetensors as Hugging Face lays them out, and the
folders of ``torch.distributed.checkpoint``.

Source of the format: https://github.com/huggingface/safetensors#format. Eight bytes say how long a header of JSON is,
which says of every tensor its dtype, its shape, and where its bytes lie after the header, in row-major order.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch

from ..errors import InputError
from .adapter import local_of, read_shards, saved_tensors

Block = Sequence[tuple[int, int]]
"""``[start, stop)`` of every dim."""

Blocks = Sequence[Sequence[tuple[int, int]]]
"""What is wanted of every dim, joined: one range of most, of a dim that is cut in parts one of each."""

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_ADVICE = (
    "give the folder or file that holds the weights; what torch.save wrote is loaded by "
    "module.load_state_dict(torch.load(FILE, mmap=True))"
)
_MOST_HEADER = 100_000_000  # bytes, as the format says
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class Stored:
    """A tensor in a file."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class WeightFiles(Protocol):
    """Files that hold tensors by name."""

    @property
    def stored(self) -> Mapping[str, Stored]:
        """What they hold."""

    def read(self, wanted: Mapping[str, tuple[Blocks, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Blocks of tensors, in the dtypes of the files, one after the other.

        Args:
            wanted: by name, the block, and the tensor that it is for, whose memory it may be read into.
        """


def weight_files(path: Path) -> WeightFiles:
    """The files at a path: a folder, or one file in the format of safetensors.

    Raises:
        InputError: there are none, or none that this can read; says what can.
    """
    if path.suffix == ".safetensors":
        return _Safetensors({path: None})
    if path.name.endswith(".safetensors.index.json"):
        return _Safetensors(_indexed(path))
    if not path.is_dir():
        raise InputError(f"{path} is no folder of weights and no .safetensors file; {_ADVICE}")
    if (path / ".metadata").is_file():
        return _Saved(path)
    if (path / _INDEX).is_file():
        return _Safetensors(_indexed(path / _INDEX))
    if (path / _SINGLE).is_file():
        return _Safetensors({path / _SINGLE: None})
    found = ", ".join(sorted(each.name for each in path.iterdir())[:5]) or "nothing"
    raise InputError(
        f"{path} has neither {_SINGLE}, nor {_INDEX}, nor the .metadata of torch.distributed.checkpoint; there is "
        f"{found}: {_ADVICE}"
    )


def _indexed(index: Path) -> dict[Path, frozenset[str] | None]:
    """The files that an index names, and which tensors each holds."""
    try:
        where: Any = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names: dict[Path, set[str]] = {}
        for name, file in where.items():
            if Path(file).name != file:
                raise InputError(f"{index} says that {name} is in {file!r}, which is not a file beside it")
            names.setdefault(index.parent / file, set()).add(name)
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{index} is no index of weights: {type(error).__name__}: {error}") from None
    return {file: frozenset(held) for file, held in sorted(names.items())}


class _Safetensors:
    """Files in the format of safetensors; of each either all tensors, or those that an index says it has."""

    def __init__(self, files: Mapping[Path, frozenset[str] | None]) -> None:
        self._places: dict[str, tuple[Path, int]] = {}
        self.stored: dict[str, Stored] = {}
        for path, names in files.items():
            found = _header(path)
            if missing := sorted((names or frozenset()) - found.keys()):
                raise InputError(f"{path} does not hold {missing[0]}, which the index says it does")
            for name in names or found:
                self.stored[name], start = found[name]
                self._places[name] = path, start

    def read(self, wanted: Mapping[str, tuple[Blocks, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """See :class:`WeightFiles`."""
        for name, (blocks, _) in wanted.items():
            yield name, self._joined(name, blocks)

    def _joined(self, name: str, blocks: Blocks) -> torch.Tensor:
        dim = next((dim for dim, ranges in enumerate(blocks) if len(ranges) > 1), None)
        if dim is None:
            return self._block(name, [found for (found,) in blocks])
        return torch.cat([self._joined(name, [*blocks[:dim], [r], *blocks[dim + 1 :]]) for r in blocks[dim]], dim)

    def _block(self, name: str, blocks: Block) -> torch.Tensor:
        """A block, read run by run; a run are elements that lie in a row in the file."""
        stored, (path, begins) = self.stored[name], self._places[name]
        made = torch.empty([stop - start for start, stop in blocks], dtype=stored.dtype)
        into = memoryview(made.view(-1).view(torch.uint8).numpy().data) if made.numel() else memoryview(bytearray())
        strides = [prod(stored.shape[dim + 1 :]) for dim in range(len(stored.shape))]
        cut = [dim for dim, block in enumerate(blocks) if block != (0, stored.shape[dim])]
        # of 4 x 6 cut into columns every row is a run; cut into rows, all of the block is one
        first = cut[-1] if cut else 0
        run = prod(made.shape[first:]) * stored.dtype.itemsize
        inside = sum(block[0] * stride for block, stride in zip(blocks[first:], strides[first:]))
        with path.open("rb", buffering=0) as file:
            for at, outer in enumerate(product(*(range(*block) for block in blocks[:first])) if run else ()):
                before = sum(index * stride for index, stride in zip(outer, strides))
                file.seek(begins + (before + inside) * stored.dtype.itemsize)
                _fill(into[at * run : (at + 1) * run], file, path)
        return made


def _fill(into: memoryview, file: Any, path: Path) -> None:
    while into:
        count = file.readinto(into)
        if not count:
            raise InputError(f"{path} has become shorter while it was read")
        into = into[count:]


def _header(path: Path) -> dict[str, tuple[Stored, int]]:
    """What a file holds: each tensor, and at which byte it begins.

    Raises:
        InputError: the file cannot be read, is none of this format, or is not whole.
    """
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            text = file.read(length) if length <= _MOST_HEADER else b""
        size, begins = path.stat().st_size, 8 + length
        entries = json.loads(text)
        entries.pop("__metadata__", None)
        made = {}
        for name, entry in entries.items():
            stored = Stored(tuple(entry["shape"]), _DTYPES[entry["dtype"]])
            start, stop = entry["data_offsets"]
            if stop - start != prod(stored.shape) * stored.dtype.itemsize or not 0 <= start <= stop:
                raise ValueError(f"{name} has {stop - start} bytes for {entry['dtype']}{entry['shape']}")
            if begins + stop > size:
                raise InputError(f"{path} is cut short: {name} ends at byte {begins + stop} of {size}")
            made[name] = stored, begins + start
        return made
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path} is no file of safetensors: {type(error).__name__}: {error}") from None


class _Saved:
    """A folder that ``torch.distributed.checkpoint`` has written."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            found = saved_tensors(path)
        except Exception as error:  # whatever a broken file makes of its reader
            raise InputError(f"{path} is no checkpoint that can be read: {type(error).__name__}: {error}") from None
        self.stored = {name: Stored(shape, dtype) for name, (shape, dtype) in found.items()}

    def read(self, wanted: Mapping[str, tuple[Blocks, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """See :class:`WeightFiles`; the reader of torch finds blocks by the placements of DTensors."""
        targets = {}
        for name, (_, tensor) in wanted.items():
            dtype = self.stored[name].dtype
            targets[name] = tensor.detach() if tensor.dtype == dtype else torch.empty_like(tensor.detach(), dtype=dtype)
        read_shards(self._path, dict(targets))
        for name, tensor in targets.items():
            yield name, local_of(tensor)
