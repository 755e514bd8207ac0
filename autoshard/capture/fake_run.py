"""A model's forward, run once as the Python it is on tensors without memory: every operator that it calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves

from .adapter import hooks_into, made_by, run_on_fakes, storage_of, written_down
from .dynamo.dynamo_errors import depends_on_numbers
from .graph import Node, Ref, TensorMeta
from .stacks.blocks import Stack
from .stacks.repeat import NotPeriodicError
from .ways_between import WaysBetween

aten = torch.ops.aten

# What of the numbers that a block is given can be told from others as it prints.
_CONSTANTS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


@dataclass(frozen=True, eq=False)
class FakeRun:
    """What a call of a model does: a node for each operator, named by the block that it runs in, behind those of the
    tensors that it may take. Nodes say, too, which way Python went to each block and what numbers it gave it, what the
    call leaves behind, and what it gives: the leaves of its result, of this ``structure``.

    ``elsewhere`` are tensors that operators take and that are none of the model's, nor made of numbers in the forward.
    ``fills`` says that the call writes into parameters or buffers, or puts other tensors in their places. ``backwards``
    are what it gives its own backward: :class:`~autoshard.capture.adapter.UsersBackward`, and hooks of tensors.
    """

    nodes: tuple[Node, ...]
    structure: TreeSpec
    elsewhere: tuple[torch.Tensor, ...]
    fills: bool
    backwards: tuple[Any, ...]


def fake_run(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dtype: torch.dtype | None,
    stacks: Sequence[Stack] = (),
) -> FakeRun:
    """Runs a model's forward.

    Args:
        dtype: what floating parameters and arguments are cast to; None for as they are.
        stacks: whose blocks name what runs in them.

    Raises:
        NotPeriodicError: the forward cannot be run so.
    """
    run = _Run(model)
    with ExitStack() as hooks:
        for stack in stacks:
            for index, block in stack.container.named_children():
                name = f"{stack.path}.{index}".removeprefix(".")
                hooks.callback(block.register_forward_pre_hook(run.entering(name), with_kwargs=True).remove)
                hooks.callback(block.register_forward_hook(run.leaving).remove)
        hooks.callback(model.register_forward_pre_hook(run.begun).remove)
        hooks.callback(model.register_forward_hook(run.ended).remove)
        hooks.callback(run.ways.off)
        hooks.enter_context(hooks_into(run.backwards))
        try:
            result = run_on_fakes(model, args, kwargs, lambda leaves: run.start(model, leaves), dtype)
            leaves, structure = tree_flatten(result)
            noted = tuple(map(run.noted, leaves))
            run.note_backwards(leaves)
            run.nodes.append(Node("result", "input", "forward", (), None, noted, (("structure", str(structure)),)))
            return FakeRun(tuple(run.nodes), structure, tuple(run.elsewhere), run.fills, tuple(run.backwards))
        except Exception as error:  # it is the user's code that runs: on fakes it may do whatever it likes
            reason = "it looks at numbers of a tensor" if depends_on_numbers(error) else error
            raise NotPeriodicError(f"the forward cannot be run on fake tensors: {reason}") from error


def seen(node: Node) -> tuple[object, ...]:
    """What tells an operator of one run from that of another."""
    return node.name, node.outputs, node.op, repr((node.args, node.kwargs))


class _Run:
    def __init__(self, model: nn.Module) -> None:
        self.nodes: list[Node] = []
        self.elsewhere: list[torch.Tensor] = []
        self.backwards: list[Any] = []
        self._refs: dict[int, Ref] = {}
        self._alive: list[Any] = []  # so that no other tensor gets the identity of one that is known
        self._contexts: set[int] = set()
        self._blocks = [""]
        self._left = ""
        self._counts: Counter[str] = Counter()
        self._held: dict[str, torch.Tensor] = {}
        self.ways = WaysBetween(model)
        self._memory: frozenset[int] = frozenset()
        self.fills = False

    def entering(self, block: str) -> Callable[..., None]:
        """A hook for before a block runs."""

        def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if len(self._blocks) == 1:
                self.ways.off()
            is_next = self._left.rpartition(".")[0] == block.rpartition(".")[0]  # and not the first of another stack
            self._note(f"{self._left}/way." if is_next else "way.", self.ways.taken())
            self._blocks.append(block)
            others = [leaf for leaf in tree_leaves((args, kwargs)) if not isinstance(leaf, torch.Tensor)]
            self._note(
                f"{block}/given.", str([each if isinstance(each, _CONSTANTS) else type(each) for each in others])
            )

        return enter

    def leaving(self, *_: Any) -> None:
        """A hook for after a block has run. The way from there is the block's: the first may have one of its own."""
        self._left = self._blocks.pop()
        if len(self._blocks) == 1:
            self.ways.on()

    def _note(self, kind: str, what: str) -> None:
        self._counts[kind] += 1
        self.nodes.append(Node(f"{kind}{self._counts[kind]}", "input", "forward", (), args=(what,)))

    def begun(self, *_: Any) -> None:
        """A hook for before the model runs."""
        self.ways.on()

    def start(self, model: nn.Module, leaves: Sequence[Any]) -> Callable[..., None]:
        """Notes the tensors that are there before the call."""
        self._held = _held(model)
        self._memory = frozenset(map(storage_of, self._held.values()))
        for name, tensor in self._held.items():
            self._add(Node(name, "parameter", "forward", (TensorMeta(tuple(tensor.shape), tensor.dtype),)), [tensor])
        for k, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                self._add(Node(f"input.{k}", "input", "forward", ()), [leaf])
        return self._ran

    def ended(self, model: nn.Module, *_: Any) -> None:
        """A hook for after the model has run."""
        self.ways.off()
        self._note("way.", self.ways.taken())
        now = _held(model)
        replaced = [name for name, held in self._held.items() if name in now and now[name] is not held]
        for name in replaced:
            self.nodes.append(Node(f"{name}/after", "input", "forward", (), args=(self.noted(now[name]),)))
        self.fills |= now.keys() != self._held.keys() or bool(replaced)

    def _ran(self, op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        results = [value for value in tree_flatten(result)[0] if isinstance(value, torch.Tensor)]
        metas = tuple(TensorMeta(tuple(value.shape), value.dtype) for value in results)
        given = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
        self.note_backwards(given)
        gradients = torch.is_grad_enabled(), *(tensor.requires_grad for tensor in given)  # no other argument says so
        named = *self.noted(list(kwargs.items())), ("gradients", gradients)
        self.fills |= any(storage_of(tensor) in self._memory for tensor in _written(op, args, kwargs))
        self._add(Node(self._name(op), "operator", "forward", metas, op, self.noted(args), named), results)

    def note_backwards(self, values: Iterable[Any]) -> None:
        """Notes the functions of the user's that have made tensors among these."""
        for value in values:
            made = made_by(value) if isinstance(value, torch.Tensor) else None
            if made is not None and id(made.context) not in self._contexts:
                self._contexts.add(id(made.context))
                self._alive.append(made.context)
                self.backwards.append(made)

    def _name(self, op: torch._ops.OpOverload) -> str:
        """Operators are numbered in their block, apart from those with which autograd keeps something for itself: how
        many these are depends on whether a gradient is wanted.
        """
        kind = f"{self._blocks[-1]}/{'detach.' if op is aten.detach.default else ''}"
        self._counts[kind] += 1
        return f"{kind}{self._counts[kind] - 1}"

    def noted(self, value: Any) -> Any:
        """A value with the number of the tensor in the place of each."""
        if isinstance(value, torch.Tensor):
            if id(value) not in self._refs:
                self._note_other(value)
            return self._refs[id(value)]
        return tuple(map(self.noted, value)) if isinstance(value, (tuple, list)) else value

    def _note_other(self, tensor: torch.Tensor) -> None:
        """Notes a tensor that no operator has made: its numbers, in the block that takes it, or that it is there."""
        numbers = written_down(tensor)
        if numbers is None:
            self._add(Node(f"elsewhere.{len(self.elsewhere)}", "input", "forward", ()), [tensor])
            self.elsewhere.append(tensor)
            return
        block = f"{self._blocks[-1]}/numbers."
        self._counts[block] += 1
        meta = TensorMeta(tuple(tensor.shape), tensor.dtype)
        self._add(Node(f"{block}{self._counts[block]}", "input", "forward", (meta,), args=(numbers,)), [tensor])

    def _add(self, node: Node, results: Sequence[torch.Tensor]) -> None:
        self._refs |= {id(value): Ref(len(self.nodes), k) for k, value in enumerate(results)}
        self._alive += results
        self.nodes.append(node)


def _held(model: nn.Module) -> dict[str, torch.Tensor]:
    return dict((*model.named_parameters(), *model.named_buffers()))


def _written(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """The arguments that an operator writes into."""
    if op._schema.is_mutable:
        for k, argument in enumerate(op._schema.arguments):
            if argument.is_write:
                given = args[k] if k < len(args) else kwargs.get(argument.name)
                yield from (value for value in tree_flatten(given)[0] if isinstance(value, torch.Tensor))
