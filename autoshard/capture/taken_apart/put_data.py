"""``p.data = value``, as MoCo moves its second encoder: the numbers are written into the tensor that is there.

Python gives the parameter other memory, which a captured step cannot. A write into its own memory is the same where
nobody reads what was in it before, and nobody else has the new one. ``p.data = p`` does nothing
(``module.to(x.device)`` of a module that is there).
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from ...errors import CaptureError
from ..examples import name_of, tensor_of
from ..lines import at, line_of

_SHARES = ("_get_data_attr", "detach")
"""What shares memory with its argument though torch does not call it a view."""


def write_data(node: fx.Node) -> bool:
    """Rewrites such an assignment to what the model is called with, or has, in place; False of any other call.

    Raises:
        CaptureError: it is no write: the value is of another shape or dtype, or is used elsewhere, or what was in the
            memory of before is read afterwards.
    """
    p = node.args[0] if name_of(node) == "set_" else None
    if not isinstance(p, fx.Node) or p.op not in ("placeholder", "get_attr"):
        return False
    given = node.args[1] if len(node.args) == 2 else None
    is_itself = tensor_of(given) is tensor_of(p) is not None
    if not is_itself and not _is_write(p, given, node):
        raise CaptureError(
            f"the forward gives a tensor other memory{at(line_of(node))}: parameters and buffers stay where they are. "
            "Write into it (p.data.copy_(value)), a value of its shape and dtype that is used for nothing else "
            "(.clone()), before anything reads it"
        )
    for user in list(node.users):  # torch takes back that it counted a write
        user.replace_all_uses_with(p)
        node.graph.erase_node(user)
    if is_itself:
        node.graph.erase_node(node)
    else:
        node.op, node.target = "call_function", _write
    return True


def _is_write(p: fx.Node, value: object, node: fx.Node) -> bool:
    old, new = tensor_of(p), tensor_of(value)
    if old is None or new is None or not isinstance(value, fx.Node) or value.op in ("placeholder", "get_attr"):
        return False
    is_alike = (old.shape, old.dtype) == (new.shape, new.dtype)
    return is_alike and _is_alone(value, node) and not _is_read_as_before(p, node)


def _write(p: Tensor, value: Tensor) -> None:
    with torch.no_grad():
        p.data.copy_(value)


def _is_alone(value: fx.Node, node: fx.Node) -> bool:
    """Whether no other tensor has the memory of a value, and nothing but an assignment reads it."""
    others = (each for each in node.graph.nodes if each not in (value, node, node.args[0], *node.users))
    return list(value.users) == [node] and not any(_memory(each) == _memory(value) for each in others)


def _is_read_as_before(p: fx.Node, node: fx.Node) -> bool:
    """Whether something reads, after an assignment, what was in the memory of a tensor, or a backward may."""
    place = {each: k for k, each in enumerate(node.graph.nodes)}
    before = [user for user in p.users if place[user] < place[node]]
    read = [value for value in map(tensor_of, before) if value is not None]
    shared = {_memory(user) for user in before if _shares(user)}
    aliases = [each for each in place if place[each] < place[node] and each is not p and _memory(each) in shared]
    late = any(place[user] > place[node] for each in aliases for user in each.users)
    return late or any(value.requires_grad for value in read)


def _shares(node: fx.Node) -> bool:
    value = tensor_of(node)
    return value is not None and (name_of(node) in _SHARES or value._is_view())


def _memory(node: fx.Node) -> int | None:
    value = tensor_of(node)
    return None if value is None else value.untyped_storage()._cdata
