"""The captured training step as an immutable value."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
from torch.utils._pytree import TreeSpec

from ..layout import batch_dim_of
from ..precision import AS_IT_IS, Precision
from .dynamo.asked_of_tensors import ATTRIBUTE, CLASS, STRIDES
from .dynamo.guards import Guards
from .stacks.block_guards import BlockGuards

Phase = Literal["forward", "backward"]
NodeKind = Literal["parameter", "buffer", "input", "tangent", "operator"]


class Ref(NamedTuple):
    """A tensor of the graph: result ``output`` of node ``node``. It is a tuple: who walks through nested ones asks for
    it first.
    """

    node: int
    output: int = 0


@dataclass(frozen=True)
class TensorMeta:
    """Global shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.dtype.itemsize * int(torch.Size(self.shape).numel())


@dataclass(frozen=True)
class Mark:
    """What ``torch.utils.checkpoint`` says of an operator: the number of the call that it stands in, and whether that
    call's policy saves what it makes; otherwise the backward computes it again.
    """

    region: int
    saved: bool


@dataclass(frozen=True, eq=False)
class Node:
    """A parameter, buffer, input, tangent or operator.

    ``name`` is unique, and the same whatever device the model was traced on: the FQN of a parameter or buffer, the name
    of an input, ``module path/role`` of a forward operator and ``module path/bwd.role`` of a backward one. ``args`` and
    ``kwargs`` hold :class:`Ref` where the operator takes a tensor. ``outputs`` has one entry per result, None for one
    that is absent. ``source`` is the line of the model that called the operator. ``mark`` is what the model marks it
    with, None for nothing. ``orders``, of an operator that draws random numbers, has for each tensor that it takes the
    order in which its dims lie in memory in one process, the outermost first: numbers are drawn in that order.
    """

    name: str
    kind: NodeKind
    phase: Phase
    outputs: tuple[TensorMeta | None, ...]
    op: torch._ops.OpOverload | None = None
    args: tuple[Any, ...] = ()
    kwargs: tuple[tuple[str, Any], ...] = ()
    source: str = ""
    mark: Mark | None = None
    orders: tuple[tuple[int, ...], ...] = ()

    @cached_property
    def inputs(self) -> tuple[Ref, ...]:
        """The tensors the operator takes, in argument order, repeated where one is taken twice."""
        return tuple(refs_in((self.args, self.kwargs)))


@dataclass(frozen=True)
class SameTensor:
    """What a result is that is no new tensor: the parameter, buffer or input ``name``, or the result of that number.

    ``is_copy`` says that the model's result only shares memory with that tensor, and that the graph makes a copy.
    """

    kind: Literal["parameter", "buffer", "input", "output"]
    name: str
    is_copy: bool = False


@dataclass(frozen=True, eq=False)
class CapturedGraph:
    """One training step (or inference step): nodes in execution order, forward before backward.

    ``outputs`` are the leaves of the model's result, None for one that the graph does not make; ``constants`` has for
    that one its value, and for one that is no new tensor in the model a :class:`SameTensor`;
    ``gradients`` maps the FQN of each trained parameter to its gradient; ``mutations`` maps the FQN of each buffer that
    the forward updates to its new value (``replaced`` are those that are another tensor afterwards; the others are
    written in place); ``aliases`` maps each further FQN of a tied parameter to the first one; ``unused`` are the
    parameters the step never reads. ``out_spec`` rebuilds the model's result from the leaves.

    The graph is what the model does as long as the Python values that its forward reads stay as they are, which
    ``guards`` finds out (None if the capture was not asked for it). ``names`` are those of functions and attributes
    that the model's own code uses: what guards do not see shows there, such as ``is_grad_enabled``.

    ``again`` names the operators of the forward that the backward computes again (:mod:`autoshard.capture.recompute`);
    ``original`` is then the graph in which none is.

    The graph is that of one of the ``micro_batches`` of a step. Where they are several, ``one_batch`` is the graph as
    it was captured (:mod:`autoshard.capture.micro_batched`). ``precision`` is the policy whose casts stand in it
    (:mod:`autoshard.capture.precise`).

    ``batch_dim`` is the dim of the batch in inputs: 1 where a model takes (steps, rows), else 0
    (:mod:`autoshard.capture.batch_dim`).

    ``left`` are the paths of the attributes of modules in which the model leaves tensors. Where it has any, its result
    is a pair here: what it returns, and a list of what it leaves.
    """

    nodes: tuple[Node, ...]
    outputs: tuple[Ref | None, ...]
    constants: tuple[Any, ...]
    gradients: tuple[tuple[str, Ref], ...]
    mutations: tuple[tuple[str, Ref], ...]
    aliases: tuple[tuple[str, str], ...]
    unused: tuple[tuple[str, TensorMeta], ...]
    out_spec: TreeSpec
    replaced: frozenset[str] = frozenset()
    guards: Guards | BlockGuards | None = None
    names: frozenset[str] = frozenset()
    again: tuple[str, ...] = ()
    original: CapturedGraph | None = None
    micro_batches: int = 1
    one_batch: CapturedGraph | None = None
    precision: Precision = AS_IT_IS
    batch_dim: int = 0
    left: tuple[str, ...] = ()

    def meta(self, ref: Ref) -> TensorMeta:
        """Shape and dtype of a tensor of the graph."""
        meta = self.nodes[ref.node].outputs[ref.output]
        assert meta is not None, f"{self.nodes[ref.node].name} has no result {ref.output}"
        return meta

    def tensor_name(self, ref: Ref) -> str:
        """The name of a tensor: that of its node, with ``:k`` for a result other than the first."""
        name = self.nodes[ref.node].name
        return f"{name}:{ref.output}" if ref.output else name

    def called(self, name: str) -> tuple[str, ...]:
        """Every name of a tied parameter, this one first; of anything else its own."""
        return (name, *(other for other in self._tied.get(name, ()) if other != name))

    @cached_property
    def _tied(self) -> dict[str, list[str]]:
        """The names of each tied parameter, by each of them."""
        found: dict[str, list[str]] = {}
        for name, first in self.aliases:
            found[name] = found.setdefault(first, [first])
            found[name].append(name)
        return found

    @cached_property
    def first_shape(self) -> tuple[int, ...]:
        """The shape of the first input that has dims, of no dims where there is none."""
        shapes = (node.outputs[0].shape for _, node in self.of_kind("input") if node.outputs[0])
        return next(filter(None, shapes), ())

    @cached_property
    def batch(self) -> int:
        """The length of the batch dim of the first input that has dims, 0 where there is none."""
        return self.first_shape[self.batch_dim] if self.first_shape else 0

    def batch_dim_of(self, shape: tuple[int, ...]) -> int | None:
        """The dim of an input of this shape that is the batch; None where none is as long."""
        return batch_dim_of(shape, self.batch, self.batch_dim)

    @property
    def asks_for_strides(self) -> bool:
        """Whether the model's own code asks how a tensor lies in memory."""
        return STRIDES in self.names

    @property
    def asks_for_classes(self) -> bool:
        """Whether the model's own code asks an argument whether it is a parameter or a buffer."""
        return CLASS in self.names

    @property
    def absent_attributes(self) -> frozenset[str]:
        """The attributes that arguments had not when the forward asked for them."""
        return frozenset(name.removeprefix(ATTRIBUTE) for name in self.names if name.startswith(ATTRIBUTE))

    def of_kind(self, kind: NodeKind) -> Iterator[tuple[int, Node]]:
        """The nodes of one kind with their index, in order."""
        return iter(self._by_kind.get(kind, ()))

    @cached_property
    def _by_kind(self) -> dict[NodeKind, list[tuple[int, Node]]]:
        found: dict[NodeKind, list[tuple[int, Node]]] = {}
        for i, node in enumerate(self.nodes):
            found.setdefault(node.kind, []).append((i, node))
        return found

    @cached_property
    def reads(self) -> Counter[Ref]:
        """How many operators read each tensor, as often as they do; who a gradient is made for reads it, too."""
        found = Counter(ref for node in self.nodes for ref in node.inputs)
        found.update(ref for _, ref in self.gradients)
        return found

    @cached_property
    def readers(self) -> Mapping[Ref, Sequence[int]]:
        """The operators that read each tensor, by number and in order; a tensor that none reads is not among them."""
        found: dict[Ref, list[int]] = {}
        for i, node in self.of_kind("operator"):
            for ref in dict.fromkeys(node.inputs):
                found.setdefault(ref, []).append(i)
        return found

    @cached_property
    def fingerprint(self) -> str:
        """A digest of operators, shapes, dtypes and arguments as captured. Devices do not enter it."""
        captured = self.original or self.one_batch
        if captured is not None:
            return captured.fingerprint
        digest = hashlib.sha256()
        ops, metas = _Texts(str), _Texts(lambda outputs: [_meta_text(meta) for meta in outputs])
        for node in self.nodes:
            line = (node.kind, node.phase, node.name, ops.of(node.op), metas.of(node.outputs))
            digest.update(repr((line, _portable(node.args), _portable(node.kwargs))).encode())
        digest.update(repr((self.outputs, self.gradients, self.mutations, self.aliases)).encode())
        return "sha256:" + digest.hexdigest()[:32]


def is_random(node: Node) -> bool:
    """Whether an operator draws random numbers."""
    return node.op is not None and torch.Tag.nondeterministic_seeded in node.op.tags


def refs_in(value: Any) -> Iterator[Ref]:
    """Every :class:`Ref` in nested tuples, in order."""
    if isinstance(value, Ref):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from refs_in(item)


def map_refs(value: Any, fn: Callable[[Ref], Any]) -> Any:
    """The same nested tuples with every :class:`Ref` replaced."""
    if isinstance(value, Ref):
        return fn(value)
    if isinstance(value, tuple):
        return tuple([map_refs(item, fn) for item in value])
    return value


def _meta_text(meta: TensorMeta | None) -> str:
    return "-" if meta is None else f"{meta.dtype}{list(meta.shape)}"


class _Texts:
    """Texts of objects, each written once: identical layers have them in common."""

    def __init__(self, write: Callable[[Any], Any]) -> None:
        self._write, self._known = write, dict[int, Any]()

    def of(self, value: Any) -> Any:
        if id(value) not in self._known:
            self._known[id(value)] = self._write(value)
        return self._known[id(value)]


def _portable(value: Any) -> Any:
    kind = type(value)
    if kind is Ref:  # nearly always
        return f"Ref(node={value.node}, output={value.output})"
    if kind is tuple:
        return tuple([_portable(item) for item in value])
    return "device" if kind is torch.device else str(value)
