"""Packed sequences as padded ones with their lengths: how many rows each step has, numbers decide.

A recurrent module runs over them as padded ones, and a row that has ended keeps its state; the backward direction of
one that goes both ways starts where the row ends, as it keeps its first state until then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import rnn

from ..dynamo.numbers_as_indices import in_tensor
from ..operators.longest import as_long

FORWARDS = (nn.LSTM.forward, nn.GRU.forward, nn.RNN.forward)

_OF_MODE: dict[str, Any] = {
    "LSTM": torch.lstm,
    "GRU": torch.gru,
    "RNN_TANH": torch.rnn_tanh,
    "RNN_RELU": torch.rnn_relu,
}


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def run_to_lengths(mode: str, x: Tensor, lengths: Tensor, *others: Any) -> tuple[Tensor, ...]:
    """Stands in a graph for what a recurrent module makes of rows (B, T, I) of such lengths, padded with zeros: it runs
    on over the padding, and what keeps to the lengths is put in its place.

    Args:
        mode: as the module has it.
        others: its other arguments for torch, without the last, which says that rows are in front.
    """
    made: tuple[Tensor, ...] = _OF_MODE[mode](x, *others, True)
    return made


class PackedSequence:
    """In the place of torch's: (rows, steps, ...) and the length of each row."""

    def __init__(self, padded: Tensor, lengths: Tensor, is_sorted: bool) -> None:
        self.padded, self.lengths, self.is_sorted = padded, lengths, is_sorted

    @property
    def data(self) -> Tensor:
        """All that is not padding, row by row; torch has it step by step."""
        return self.padded[is_within(self.padded, self.lengths)]

    @property
    def batch_sizes(self) -> PackedSequenceSizes:
        """What only :func:`packed_again` takes."""
        return PackedSequenceSizes(self)

    @property
    def sorted_indices(self) -> PackedSequenceSizes | None:
        """The same; None where torch's are."""
        return None if self.is_sorted else self.batch_sizes

    unsorted_indices = sorted_indices

    def __getitem__(self, index: Any) -> Any:
        return (self.data, self.batch_sizes, self.sorted_indices, self.unsorted_indices)[index]

    def __iter__(self) -> Any:
        return iter(self[:])

    def _replace(self, *, data: Tensor) -> PackedSequence:
        return packed_again(data, self.batch_sizes, self.sorted_indices)


class PackedSequenceSizes:
    """What says how many rows each step of packed sequences has, or how they are sorted: it can be handed on alone."""

    def __init__(self, packed: PackedSequence) -> None:
        self.packed = packed


def packed_again(
    data: Tensor,
    batch_sizes: PackedSequenceSizes,
    sorted_indices: PackedSequenceSizes | None = None,
    unsorted_indices: PackedSequenceSizes | None = None,
) -> PackedSequence:
    """In the place of torch's class, whose arguments these are: what was computed of the data of packed sequences.

    Raises:
        ValueError: nothing says how they were sorted, and torch has them in their new order then.
    """
    packed = batch_sizes.packed
    if not packed.is_sorted and sorted_indices is None and unsorted_indices is None:
        raise ValueError("PackedSequence(data, batch_sizes) of sequences that were sorted, without sorted_indices")
    within = is_within(packed.padded, packed.lengths)
    padded = packed.padded.new_zeros(*within.shape, *data.shape[1:], dtype=data.dtype)
    padded[within] = data
    return PackedSequence(padded, packed.lengths, packed.is_sorted)


def pack_padded_sequence(
    input: Tensor, lengths: Tensor | Sequence[int], batch_first: bool = False, enforce_sorted: bool = True
) -> PackedSequence:
    """In the place of torch's function, whose arguments these are. That lengths are sorted is not checked."""
    if isinstance(lengths, list | tuple):
        lengths = torch.stack([in_tensor(length) for length in lengths])
    lengths = torch.as_tensor(lengths).to(input.device, torch.int64)
    return PackedSequence(input if batch_first else input.transpose(0, 1), lengths, enforce_sorted)


def pad_packed_sequence(
    sequence: PackedSequence, batch_first: bool = False, padding_value: float = 0.0, total_length: int | None = None
) -> tuple[Tensor, Tensor]:
    """In the place of torch's function, whose arguments these are. Without ``total_length`` every step looks whether
    the longest sequence is as long as the padded ones were: one process gives as many steps as it has.
    """
    x, lengths = sequence.padded, sequence.lengths
    steps = x.shape[1]
    if total_length is None:
        lengths = as_long(lengths, steps - lengths.amax(0, keepdim=True))
    else:
        after = [0, 0] * (x.dim() - 2) + [0, total_length - steps]
        x = nn.functional.pad(x, after) if total_length != steps else x
    x = torch.where(_beside(is_within(x, lengths), x), x, padding_value)
    return x if batch_first else x.transpose(0, 1), lengths


def run_recurrent(self: Any, input: PackedSequence, hx: Any = None) -> tuple[PackedSequence, Any]:
    """In the place of the forward of an ``nn.LSTM``, ``nn.GRU`` or ``nn.RNN``, for packed sequences."""
    module, packed = self, input
    is_lstm = module.mode == "LSTM"
    x = torch.where(_beside(is_within(packed.padded, packed.lengths), packed.padded), packed.padded, 0.0)
    if hx is None:
        count = module.num_layers * (2 if module.bidirectional else 1)
        memory = x.new_zeros(count, x.shape[0], module.hidden_size)
        output = x.new_zeros(count, x.shape[0], module.proj_size or module.hidden_size)
        hx = (output, memory) if is_lstm else output
    given = (module.bias, module.num_layers, module.dropout, module.training, module.bidirectional)
    output, *last = run_to_lengths(module.mode, x, packed.lengths, hx, module._flat_weights, *given)
    return PackedSequence(output, packed.lengths, packed.is_sorted), tuple(last) if is_lstm else last[0]


FUNCTIONS = {
    rnn.pack_padded_sequence: pack_padded_sequence,
    rnn.pad_packed_sequence: pad_packed_sequence,
}
"""Functions of torch, and what stands for them."""


def is_within(x: Tensor, lengths: Tensor) -> Tensor:
    """Which steps of each row are none of its padding."""
    return torch.arange(x.shape[1], device=x.device) < lengths.unsqueeze(1)


def _beside(mask: Tensor, x: Tensor) -> Tensor:
    return mask.reshape(*mask.shape, *[1] * (x.dim() - 2))
