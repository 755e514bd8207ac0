"""Which operators are the same but for the tensors that they take."""

from __future__ import annotations

from ..capture import Node, Ref, TensorMeta


def signature(node: Node, metas: tuple[TensorMeta, ...]) -> object:
    """A key: operators with equal ones have the same strategies at the same cost."""
    return (node.op, repr(_anonymous(node.args)), repr(_anonymous(node.kwargs)), metas, node.outputs)


def _anonymous(value: object) -> object:
    if isinstance(value, Ref):
        return "tensor"
    return tuple([_anonymous(item) for item in value]) if isinstance(value, tuple) else value
