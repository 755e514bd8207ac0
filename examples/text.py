"""Byte-level batches of real text: the repository's own documents. Equal seeds give equal batches."""

from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = ("README.md", "CHANGELOG.md", "LICENSE", "docs/**/*.md")


def corpus(root: Path = ROOT) -> Tensor:
    """Every document under ``root``, one after the other in a fixed order, as bytes (int64).

    Raises:
        FileNotFoundError: there is no document.
    """
    paths = [path for pattern in DOCUMENTS for path in sorted(root.glob(pattern))]
    if not paths:
        raise FileNotFoundError(f"no text to train on: none of {', '.join(DOCUMENTS)} is under {root}")
    return torch.tensor(list(b"\n".join(path.read_bytes() for path in paths)), dtype=torch.int64)


def batches(count: int, *, batch: int, sequence: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """``count`` pairs of tokens and next tokens, each (``batch``, ``sequence``), cut at random places.

    Raises:
        ValueError: the documents are shorter than one sequence.
    """
    text = corpus()
    if len(text) <= sequence:
        raise ValueError(f"the documents hold {len(text)} bytes; a sequence of {sequence} needs {sequence + 1}")
    generator = torch.Generator().manual_seed(seed)
    windows = text.unfold(0, sequence + 1, 1)
    chosen = [windows[torch.randint(len(windows), (batch,), generator=generator)] for _ in range(count)]
    return [(window[:, :-1].contiguous(), window[:, 1:].contiguous()) for window in chosen]
