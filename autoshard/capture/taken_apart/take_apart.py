"""Functions of torch whose operators cannot be cut, in parts that can."""

from __future__ import annotations

import operator

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from ..batch_dim import batch_dim, first_shape
from ..by_numbers.packed import run_to_lengths
from ..examples import note, shape_of, tensor_of
from .attention_of_pieces import attend_to_pieces
from .attention_parts import attention_in_parts, attention_of_views, is_of_views, is_without_kernel
from .bags import can_be_added_up, embedding_bag
from .batch_inside import keep_batch_inside, keep_heads_in_front
from .ctc_loss import ctc_loss
from .equations import sum_in_order, take_in_pairs
from .folded_heads import keep_heads_apart
from .matrix_functions import leave_looks_out
from .matrix_products import fronts_of, is_product, product, take_equation_apart
from .moved_pieces import move_pieces
from .multihead import has_a_batch, multihead_attention
from .put_data import write_data
from .put_together import put_together
from .recurrent import RECURRENT, keeping_to_lengths
from .roots_of_squares import take_length_apart
from .row_numbers import as_range, by_position, is_mapped, map_dims, part, positions, write_by_position
from .strided_windows import take_windows
from .triangles import solve_apart

POOLS = {F.adaptive_avg_pool1d: 1, F.adaptive_avg_pool2d: 2, F.adaptive_avg_pool3d: 3}
"""Pools, and the number of dims that they go over."""
DECOMPOSING = {torch.det, torch.logdet, torch.slogdet, torch.linalg.det, torch.linalg.slogdet, torch.linalg.solve_ex}
DECOMPOSING |= {"det", "logdet", "slogdet"}
"""Their gradient solves with what they made of the matrix, or of its transpose, by how the matrix lies in memory."""
BY_POSITION = {operator.getitem: by_position, operator.setitem: write_by_position}
"""What picks or writes by indices, and what does it where these are row numbers."""


def take_apart(module: fx.GraphModule) -> int:
    """Rewrites a graph of torch functions in place: heads that are folded into the batch, recurrent modules, bags, the
    loss of alignments, attention of several heads, without a kernel, to one head or of one row for all, products of
    matrices with several dims in front, with a batch that is not in front, or of all heads with one matrix, equations
    of three tensors or more, or that sum over several labels, lengths over the batch, batches in a list that are joined
    again, attention of equal pieces of a row, pieces of one dim that are joined along another, windows by strides,
    functions of matrices, picking from each row, writing into each, picking by numbers in a row, means that are written
    as pools, norms of instances, and data that is assigned.

    Returns:
        The dim of the batch in what the model is called with.
    """
    dim = batch_dim(module.graph)
    batch = next(iter(first_shape(module.graph)[dim:]), 0)
    leave_looks_out(module)
    for node in list(module.graph.nodes):
        _ = attend_to_pieces(node) or write_data(node) or move_pieces(node) or take_in_pairs(node)
    keep_heads_apart(module.graph, batch)
    fronts = fronts_of(module.graph)
    for node in module.graph.nodes:
        if is_product(node):
            node.op, node.target = "call_function", product
        elif take_equation_apart(node) or keep_batch_inside(node, batch) or keep_heads_in_front(node, fronts):
            continue
        elif take_length_apart(node) or put_together(node) or take_windows(node):
            continue
        elif solve_apart(node) or sum_in_order(node):
            continue
        elif node.target in DECOMPOSING:
            _take_in_order(module.graph, node)
        if node.op != "call_function" or _by_lengths(node):
            continue
        if node.target is F.embedding_bag and can_be_added_up(*node.args, **node.kwargs):
            node.target = embedding_bag
        elif node.target is F.multi_head_attention_forward and has_a_batch(_dims(node), *node.args, **node.kwargs):
            node.target = multihead_attention
        elif is_without_kernel(node):
            node.target = attention_in_parts
        elif is_of_views(node):
            node.target = attention_of_views
        elif node.target is operator.getitem and (index := as_range(node.args[1])) is not None:
            node.target, node.args = part, (node.args[0], index)
        elif is_mapped(node):
            map_dims(node)
        elif node.target in BY_POSITION and (picked := positions(node)) is not None:
            x, _, *written = node.args
            indices, along = picked
            node.target, node.args = BY_POSITION[node.target], (x, indices, *written, along)
        elif node.target is F.instance_norm and _statistics(node) == (None, None):
            node.target = instance_norm
        elif node.target in POOLS and len(node.args) == 2 and set(_listed(node.args[1])) == {1}:
            node.args, node.target = (node.args[0], POOLS[node.target]), mean_of_all
    module.recompile()
    for within in module.modules():  # what a checkpoint computes
        if isinstance(within, fx.GraphModule) and within is not module:
            for node in within.graph.nodes:
                _by_lengths(node)
            within.recompile()
    return dim


def _by_lengths(node: fx.Node) -> bool:
    """Has a recurrent module run as one operator, to the lengths of packed sequences, and the loss of alignments take
    padded targets; whether a node is one of these.
    """
    if node.target in RECURRENT and isinstance(node.args[3], bool):
        node.target = RECURRENT[node.target]
    elif node.target is run_to_lengths:
        node.target = keeping_to_lengths
    elif node.target in (F.ctc_loss, torch.ctc_loss):
        node.target = ctc_loss
    else:
        return False
    return True


def _take_in_order(graph: fx.Graph, node: fx.Node) -> None:
    """Has a function take its first tensor as one that lies in memory in the order of its dims, as what moved does."""
    x = node.all_input_nodes[0]
    with graph.inserting_before(node):
        node.replace_input_with(x, note(graph.call_method("contiguous", (x,)), tensor_of(x)))


def mean_of_all(x: Tensor, dims: int) -> Tensor:
    """A pool that leaves one element of the last so many dims; torch's own asks how a picture lies in memory."""
    return x.mean([-1 - k for k in range(dims)], keepdim=True)


def _statistics(node: fx.Node) -> tuple[object, ...]:
    """The running mean and variance that an instance norm has."""
    given = dict(zip(("running_mean", "running_var"), node.args[1:])) | node.kwargs
    return given.get("running_mean"), given.get("running_var")


def instance_norm(
    input: Tensor,
    running_mean: None = None,
    running_var: None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """An instance norm, with the arguments of ``F.instance_norm``, as one of groups of one channel: torch's own sees
    rows and channels as one dim, of which no block is some channels of all rows.
    """
    return F.group_norm(input, input.shape[1], weight, bias, eps)


def _listed(sizes: object) -> tuple[object, ...]:
    return tuple(sizes) if isinstance(sizes, (tuple, list)) else (sizes,)


def _dims(node: fx.Node) -> int:
    """The number of dims of the first tensor that a node takes."""
    first = node.args[0] if node.args else node.kwargs.get("query")
    return first.dim() if isinstance(first, Tensor) else len(shape_of(first))
