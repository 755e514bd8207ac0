"""Sizes that no axis divides: axes of 1, 3 and 6, rows, positions, heads and the vocabularies of GPT-2 and BERT."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.zoo.checks import Checks
from benchmarks.zoo.member import Member

GPT2, BERT = 50257, 30522


class Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = (each(x).view(rows, length, self.heads, -1).transpose(1, 2) for each in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.o(y.transpose(1, 2).reshape(rows, length, width))


class Words(nn.Module):
    """A language model of one layer with 3 heads of 2 numbers each."""

    def __init__(self, vocabulary: int, width: int = 6) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList([Layer(width, 3)])
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, words: Tensor, wanted: Tensor) -> Tensor:
        x = self.layers[0](self.embedding(words))
        return F.cross_entropy(self.head(x).flatten(0, 1), wanted.flatten())


def example(vocabulary: int, rows: int) -> tuple[nn.Module, dict[str, Tensor]]:
    words, wanted = (torch.randint(0, vocabulary, (rows, 7)) for _ in range(2))
    words[0, 0] = wanted[0, 0] = vocabulary - 1  # of the last rank's block
    return Words(vocabulary), {"words": words, "wanted": wanted}


@pytest.mark.parametrize(
    ("vocabulary", "rows", "mesh", "schemes"),
    [
        pytest.param(GPT2, 5, "a=3", {"tp"}, marks=pytest.mark.thorough),
        pytest.param(BERT, 6, "a=6", {"ddp", "fsdp"}, marks=pytest.mark.thorough),
        pytest.param(GPT2, 5, "a=1,b=3", {"fsdp+tp", "ddp+tp"}, marks=pytest.mark.thorough),
        pytest.param(BERT, 6, "a=3,b=1", {"fsdp+tp", "ddp"}, marks=pytest.mark.thorough),
        (BERT, 4, "a=2,b=3", {"fsdp+tp", "ddp+tp"}),
        pytest.param(GPT2, 5, "a=1", {"tp", "ddp"}, marks=pytest.mark.thorough),
    ],
)
def test_loss_and_gradients_are_those_of_one_process(vocabulary: int, rows: int, mesh: str, schemes: set[str]) -> None:
    """Under the optimum, the first two baselines that there are, and a plan drawn at random."""
    checks = Checks(Member("words", lambda: example(vocabulary, rows), (mesh,)), tight=False)
    found = {cell.what: cell for cell in checks.run()}
    assert not {cell.what: cell.detail for cell in found.values() if cell.outcome == "failed"}
    assert {what for what, cell in found.items() if cell.outcome == "ok"} >= {"optimum", "drawn"} | schemes
