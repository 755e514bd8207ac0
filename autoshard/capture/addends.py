"""In which order sums of several tensors are added up: results of products first.

Of a product that is cut along what it adds up every rank has an addend. Autograd adds the gradients of a tensor one
after the other as they come: where that of a residual comes first (BERT, whose norms stand behind the sums), those of
queries, keys and values would be reduced one by one; added to each other first, they are reduced once. So it is with
attention and an MLP beside each other, each added to the residual.

The sums are the same up to the last bits.
"""

from __future__ import annotations

import torch
from torch.fx import Graph
from torch.fx import Node as FxNode

from .examples import name_of

aten = torch.ops.aten
_PRODUCTS = {
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "convolution",
    "linear",
    "outer",
    "linear_of_each",
    "outer_of_each",
    "matmul",
}
_VIEWS = {"view", "_unsafe_view", "reshape", "transpose", "permute", "t", "unsqueeze", "squeeze"}


def add_products_first(graph: Graph) -> None:
    """Rewrites the sums of a joint graph in place. Of each chain of additions, of tensors of one shape and dtype, that
    nobody else reads, the addends change places, and the additions stand where the last of them was.
    """
    for node in list(graph.nodes):
        if not _is_sum(node) or _goes_on(node):
            continue
        chain, addends = _chain(node)
        products = [each for each in addends if _is_of_product(each)]
        ordered = [*products, *(each for each in addends if each not in products)]
        if len(products) < 2 or ordered == addends:
            continue
        before = ordered[0]
        for each, addend in zip(chain, ordered[1:]):
            if each is not node:
                node.prepend(each)
            # a sum of gradients has the name of the module that the second is of
            each.args = (before, addend) if addend in products else (addend, before)
            before = each


def _chain(last: FxNode) -> tuple[list[FxNode], list[FxNode]]:
    """The additions that end in one, in order, and what they add up."""
    chain, addends = [last], list[FxNode]()
    while True:
        first, second = map(_node, chain[-1].args)
        if not _goes_on(first) and _goes_on(second):
            first, second = second, first
        addends.append(second)
        if not _goes_on(first):
            return chain[::-1], [first, *reversed(addends)]
        chain.append(first)


def _node(given: object) -> FxNode:
    assert isinstance(given, FxNode)
    return given


def _goes_on(node: FxNode) -> bool:
    """Whether a node is a sum that another one adds to, once, and nobody else reads."""
    if not _is_sum(node) or len(node.users) != 1:
        return False
    reader = next(iter(node.users))
    return _is_sum(reader) and reader.args.count(node) == 1


def _is_sum(node: FxNode) -> bool:
    """Whether a node adds two tensors of its own shape and dtype."""
    if node.target is not aten.add.Tensor or node.kwargs or len(node.args) != 2:
        return False
    mine = node.meta["val"]
    given = [each.meta.get("val") for each in node.args if isinstance(each, FxNode)]
    tensors = [each for each in given if isinstance(each, torch.Tensor)]
    return len(tensors) == 2 and all((each.shape, each.dtype) == (mine.shape, mine.dtype) for each in tensors)


def _is_of_product(node: object) -> bool:
    """Whether a tensor is what a product makes, as it is or seen in another shape."""
    while isinstance(node, FxNode) and name_of(node) in _VIEWS:
        node = node.args[0]
    return isinstance(node, FxNode) and name_of(node) in _PRODUCTS
