"""From a model to a :class:`CapturedGraph`: trace, then write every node in canonical form."""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import nn
from torch.fx import Node as FxNode
from torch.utils._pytree import tree_leaves

from ..errors import CaptureError
from ..precision import AS_IT_IS, Precision
from .adapter import Trace, mark_of, trace
from .ancestors import ancestors
from .arguments import CallSignature
from .by_numbers.static_shapes import of_shape, why_by_numbers
from .checks.autocast import check_autocast_around
from .checks.effects import ChangesModelError, ReplacesBufferError
from .checks.models import check_example, check_model, contained_tensors_held, hold_plain_tensors, let_plain
from .checks.writes import refuse_writes
from .dynamo.dynamo_errors import backward_stack, depends_on_numbers, is_explained, model_stack, own_error
from .fake_run import FakeRun
from .first_call import with_first_call_done
from .first_seen import let_libraries_see_tensors
from .graph import CapturedGraph, Node, Phase, Ref, TensorMeta, map_refs
from .kept_graph import read_graph, written_graph
from .lines import at, line_of, lines_in
from .model_key import known_model
from .operators import batch_norm_parts, extreme_parts, softmax_parts, spread_parts
from .operators.attention import attention, attention_backward, logsumexp_dtype
from .operators.constant import LARGEST, constant, constant_arguments
from .precise import dtype_of, precise
from .stacks.flat import Captured, captured_flat

aten = torch.ops.aten

# A value that only passes through: the node is the same tensor as its input.
_IDENTITY = {aten.detach.default, aten.alias.default, aten.lift_fresh_copy.default, aten.lift_fresh.default}
_NEW_VALUES = ("mutation", "parameter mutation", "replacement")
_STRIDED = {aten.as_strided.default, aten.as_strided_copy.default, aten.as_strided_scatter.default}
_ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu.default
_ATTENTION_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_FILLED_LIKE = {aten.zeros_like.default: 0, aten.ones_like.default: 1, aten.full_like.default: None}
# What an error of torch is about, and what to do.
_ADVICE = {
    "`torch.autograd.grad`": (
        "it takes a gradient within the forward (torch.autograd.grad), and a captured step has one backward, "
        "that of its results. Return what the gradient is taken of, or write the derivative out"
    ),
    "PackedSequence": (
        "it looks into a PackedSequence, and how many rows each step has depends on data. A captured step knows "
        "pack_padded_sequence, what nn.LSTM, nn.GRU and nn.RNN give for it, its .data, one with other data "
        "(PackedSequence(f(packed.data), *packed[1:])), and pad_packed_sequence"
    ),
    **dict.fromkeys(
        ("RandomValueSource", "`Random.", ".Random.", "of class `Random`", "of RandomState(", "function default_rng"),
        "it draws a random number in Python (random.random(), np.random.rand()), which a captured step would do once "
        "and never again. Draw it in torch (torch.rand) and choose by it (torch.where), or leave it out of the "
        "forward; a decorator that draws which types it checks (beartype) has to be left out, too",
    ),
    **dict.fromkeys(
        ("opaque object was created in the middle", ".Generator.__new__"),  # so says torch 2.12
        "it makes an object within the forward that torch cannot trace, such as a torch.Generator. Draw without one "
        "(autoshard.manual_seed says what is drawn), or draw outside and give the numbers as an argument",
    ),
    "in output, which is not a known type": (
        "its result holds an object that is neither a tensor nor a number or text (a dtype, a device); return its name "
        "(str(x.dtype)), or leave it out"
    ),
}
_EXPLANATION = re.compile(r"^\s*Explanation: (.+)$", re.MULTILINE)
_UNDER_A_LOCK = re.compile("`R?[lL]ock` context manager")


class KeptGraphs(Protocol):
    """Graphs from earlier processes, by keys that say all that a graph depends on but autoshard's own code."""

    def get(self, key: str) -> bytes | None:
        """What is kept under a key; None for nothing."""

    def put(self, key: str, data: bytes) -> None:
        """Keeps a graph."""


@dataclass(frozen=True)
class _Once:
    graphs: KeptGraphs | None
    captured: dict[object, CapturedGraph] = field(default_factory=dict)


_ONCE: ContextVar[_Once | None] = ContextVar("captures of which there is one", default=None)


def capture(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    guarded: bool = False,
    precision: Precision = AS_IT_IS,
    graphs: KeptGraphs | None = None,
) -> CapturedGraph:
    """Captures one step of a model: forward, and backward where something is trained. Tensors that modules have as
    plain attributes become buffers of the model, and so do those in containers that it reads; nothing else of it is
    changed.

    Args:
        model: any module whose forward is one graph; its tensors may be on any device, meta included.
        args: example positional arguments; only shapes, dtypes and Python values are read.
        kwargs: example keyword arguments.
        guarded: gives the graph ``guards``, which cost some time: for those who run the graph later.
        precision: the dtypes in which the step computes and reduces. With a ``param_dtype`` floating parameters and
            floating arguments are cast before the forward, and buffers stay as they are.
        graphs: where graphs with guards are kept. That of the same model is read there, and a new one kept.

    Returns:
        The joint graph. A scalar floating-point result is the loss; other results get one tangent each.

    Raises:
        CaptureError: the model has a graph break, an operator whose result shape depends on data, or dynamic shapes.
    """
    kwargs = dict(kwargs or {})
    once = _ONCE.get()
    if once is None or not isinstance(model, nn.Module):
        return _captured(model, args, kwargs, guarded, precision, graphs)
    modes = tuple(module.training for module in model.modules())
    given = tuple(map(id, tree_leaves((args, kwargs))))
    asked = (id(model), modes, given, precision, torch.is_grad_enabled())
    if asked not in once.captured:
        once.captured[asked] = _captured(model, args, kwargs, True, precision, graphs or once.graphs)
    return once.captured[asked]


@contextmanager
def captured_once(graphs: KeptGraphs | None = None) -> Iterator[None]:
    """Inside, a model is captured once for the same arguments, in the same mode and precision: for those who know that
    neither it nor they change.

    Args:
        graphs: as for :func:`capture`, for all captures inside.
    """
    token = _ONCE.set(_Once(graphs))
    try:
        yield
    finally:
        _ONCE.reset(token)


def _captured(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    guarded: bool,
    precision: Precision,
    graphs: KeptGraphs | None,
) -> CapturedGraph:
    check_autocast_around()
    check_model(model)
    made = hold_plain_tensors(model)
    let_libraries_see_tensors()
    with_buffers: CapturedGraph | None = None
    left = set[str]()
    while True:
        try:
            with contained_tensors_held(model) as read:
                graph = _checked(model, args, kwargs, guarded, precision, graphs)
                read.update(node.name for _, node in graph.of_kind("buffer"))
        except ReplacesBufferError as error:
            replaced = model.get_buffer(error.name)
            left = {name for name in made if model.get_buffer(name) is replaced}
            if not left:
                raise
            with_buffers = None
        except ChangesModelError:
            if with_buffers is None:
                raise
            hold_plain_tensors(model, left)  # it is asked whether it is there, too, which a buffer always is
            return with_buffers
        else:
            with_buffers = graph
            left = made & graph.replaced - _read(graph)
        if not left:
            return graph
        let_plain(model, left)  # an earlier call has left it there, and the next one only puts another in its place
        made -= left


def _read(graph: CapturedGraph) -> set[str]:
    """The names of what some node of a graph takes."""
    return {graph.nodes[ref.node].name for node in graph.nodes for ref in node.inputs}


def _checked(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    guarded: bool,
    precision: Precision,
    graphs: KeptGraphs | None,
) -> CapturedGraph:
    signature = CallSignature(model)
    try:
        call = signature.bind(args, kwargs)
    except TypeError as error:
        raise CaptureError(
            f"{type(model).__name__} cannot be captured: its forward takes other arguments than the example's: {error}"
        ) from None
    with _explained(model, precision):
        check_example(call)
    names = signature.names(args, kwargs)
    dtype = dtype_of(precision.param_dtype) if precision.param_dtype else None

    def as_it_is() -> Captured:
        with _explained(model, precision):
            traced = trace(model, args, kwargs, guarded, dtype)
        refuse_writes(traced, model, names)
        return _Builder(traced, model, names).build(), traced

    def attempt(run: FakeRun | None = None) -> CapturedGraph:
        return captured_flat(model, args, kwargs, as_it_is, dtype, run) or as_it_is()[0]

    def made(run: FakeRun | None = None) -> CapturedGraph:
        graph = with_first_call_done(model, args, kwargs, dtype, partial(attempt, run), attempt)
        if precision == AS_IT_IS:
            return graph
        parameters = dict(model.named_parameters(remove_duplicate=False))
        return precise(graph, precision, {name: t.dtype for name, t in (parameters | call.tensors()).items()})

    known = known_model(model, args, kwargs, precision.param_dtype) if graphs is not None and guarded else None
    if graphs is None or known is None:
        return made()
    key = f"{known.key} {precision!r}"
    data = graphs.get(key)
    graph = None if data is None else read_graph(data, model, known.run.structure, precision)
    if graph is None:
        graph = made(known.run)
        if (data := written_graph(graph, known.run.structure)) is not None:
            graphs.put(key, data)
    return graph


@contextmanager
def _explained(model: nn.Module, precision: Precision) -> Iterator[None]:
    try:
        yield
    except CaptureError:
        raise
    except Exception as error:
        kind = ChangesModelError if _UNDER_A_LOCK.search(str(error)) else CaptureError
        raise kind(_why(model, error, precision)) from (None if is_explained(error) else error)


class _Builder:
    """Walks the traced graph once and collects canonical nodes."""

    def __init__(self, traced: Trace, model: nn.Module, names: list[str]) -> None:
        self._traced = traced
        self._model = model
        self._input_names = names
        self._modules: dict[str, str] = {str(id(module)): path for path, module in model.named_modules()}
        self._refs: dict[FxNode, Ref] = {}
        self._nodes: list[Node] = []
        self._paths: list[str] = []
        self._counts: Counter[tuple[str, str]] = Counter()

    def build(self) -> CapturedGraph:
        forward = self._forward_nodes()
        needed = ancestors(self._traced.graph.output_node().all_input_nodes)
        placeholders = iter(self._traced.placeholders)
        for fx in self._in_order(forward):
            if fx.op == "placeholder":
                self._add_placeholder(fx, *next(placeholders))
            elif fx.op == "get_attr" and fx in needed:
                self._add_constant(fx, "forward" if fx in forward else "backward")
            elif fx.op == "call_function" and fx in needed:
                self._add_operator(fx, "forward" if fx in forward else "backward")
        return self._finish()

    def _in_order(self, forward: set[FxNode]) -> Iterator[FxNode]:
        """The nodes of the forward, then those of the backward. What is traced in the midst of the forward for the
        backward alone, such as copies of what is written into, stands right before the first that reads it: if it is of
        a layer that is computed again, all of that would else be computed, and be there, at the start of the backward.
        """
        in_front: list[FxNode] = []
        behind: list[FxNode] = []
        early: set[FxNode] = set()
        for fx in reversed(self._traced.graph.nodes):
            if fx.op == "placeholder" or fx in forward:
                in_front.append(fx)
            elif in_front:
                early.add(fx)
            else:
                behind.append(fx)
        yield from reversed(in_front)
        for fx in reversed(behind):
            waiting = [fx]
            while waiting:
                missing = [read for read in waiting[-1].all_input_nodes if read in early]
                if missing:
                    waiting.append(missing[0])
                    continue
                early.discard(waiting[-1])
                yield waiting.pop()

    def _forward_nodes(self) -> set[FxNode]:
        results = self._traced.graph.output_node().args[0]
        roots = [
            value
            for value, (kind, _) in zip(results, self._traced.outputs)  # type: ignore[arg-type]
            if kind in ("output", *_NEW_VALUES) and isinstance(value, FxNode)
        ]
        return ancestors(roots)

    def _add_placeholder(self, fx: FxNode, kind: Any, detail: Any) -> None:
        value = fx.meta.get("val")
        if not isinstance(value, torch.Tensor) or kind == "state tangent":
            return
        name = self._input_names[detail] if kind == "input" else f"grad.{detail}" if kind == "tangent" else detail
        phase: Phase = "backward" if kind == "tangent" else "forward"
        self._append(fx, Node(name, kind, phase, (_meta(value, name),)), path="")

    def _add_constant(self, fx: FxNode, phase: Phase) -> None:
        """A tensor whose numbers stand in the forward: an operator makes it, as the model does, at every step."""
        value = getattr(self._traced.graph.owning_module, str(fx.target))
        if not isinstance(value, torch.Tensor):
            return  # the body of an operator that calls others; that one is refused
        user = next(iter(fx.users))
        if value.numel() > LARGEST:
            raise CaptureError(
                f"the forward writes down a tensor of {value.numel()} numbers ({line_of(user)}); register it as a "
                "buffer in __init__ instead"
            )
        args, kwargs = constant_arguments(value)
        path = self._path(user)
        name = self._name(path, "constant")
        self._append(
            fx, Node(name, "operator", phase, (_meta(value, name),), constant, args, kwargs, line_of(user)), path
        )

    def _add_operator(self, fx: FxNode, phase: Phase) -> None:
        if fx.target is operator.getitem:
            self._refs[fx] = Ref(self._node_of(fx.args[0]), cast(int, fx.args[1]))
            return
        op = fx.target
        if not isinstance(op, torch._ops.OpOverload):
            raise CaptureError(f"the captured graph calls {op}, which is no torch operator ({line_of(fx)})")
        if op in _STRIDED:
            raise CaptureError(
                f"{op} reads memory as one process lays it out, which shards do not ({line_of(fx)}); index or unfold "
                "instead"
            )
        if op in _IDENTITY:
            self._refs[fx] = self._refs[fx.args[0]]  # type: ignore[index]
            return
        args, kwargs = self._convert(fx.args, fx), self._convert(tuple(sorted(fx.kwargs.items())), fx)
        if op is aten.t.default:
            inner = self._nodes[args[0].node]
            if inner.op is aten.t.default:
                self._refs[fx] = inner.args[0]
                return
        op, args, kwargs = _canonical(op, args, kwargs, fx.meta["val"] if phase == "forward" else None)
        if phase == "backward" and torch.Tag.nondeterministic_seeded in op.tags:
            raise CaptureError(f"{op} draws random numbers in the backward ({line_of(fx)}), where ranks could differ")
        path = self._path(fx)
        role = ("bwd." if phase == "backward" else "") + op._schema.name.split("::")[-1]
        values = fx.meta["val"] if isinstance(fx.meta["val"], (tuple, list)) else (fx.meta["val"],)
        if any(isinstance(value, torch.Tensor) and value.layout is not torch.strided for value in values):
            raise CaptureError(
                f"{op} makes a sparse tensor ({line_of(fx)}), of which no rank can hold a part; where it is the "
                "gradient of an embedding, give that sparse=False"
            )
        outputs = tuple(None if v is None else _meta(v, role) for v in values)[: len(op._schema.returns) or None]
        if len(op._schema.returns) == 1 and str(op._schema.returns[0].type) == "List[Tensor]":
            outputs = tuple(None if v is None else _meta(v, role) for v in values)
        if op is attention:  # of which torch 2.11 and 2.12 say float32 always
            out, lse = cast("tuple[TensorMeta, TensorMeta]", outputs)
            outputs = out, replace(lse, dtype=logsumexp_dtype(out.dtype))
        mark = mark_of(fx) if phase == "forward" else None

        def add(part: Any, taken: tuple[Any, ...], meta: TensorMeta) -> Ref:
            name = self._name(path, ("bwd." if phase == "backward" else "") + part._schema.name.split("::")[-1])
            self._nodes.append(Node(name, "operator", phase, (meta,), part, taken, (), line_of(fx), mark))
            self._paths.append(path)
            return Ref(len(self._nodes) - 1)

        op, args = softmax_parts.in_parts(op, args, self._meta_of, add)
        op, args = extreme_parts.in_parts(op, args, self._meta_of, add)
        op, args, kwargs = spread_parts.in_parts(op, args, kwargs, self._meta_of, add)
        op, args, outputs = batch_norm_parts.in_parts(op, args, outputs, self._meta_of, add)
        name = self._name(path, role)
        orders = _orders(fx) if torch.Tag.nondeterministic_seeded in op.tags else ()
        self._append(fx, Node(name, "operator", phase, outputs, op, args, kwargs, line_of(fx), mark, orders), path)

    def _meta_of(self, ref: Ref) -> TensorMeta:
        return cast(TensorMeta, self._nodes[ref.node].outputs[ref.output])

    def _name(self, path: str, role: str) -> str:
        count = self._counts[path, role]
        self._counts[path, role] += 1
        return f"{path}/{role}" + (f".{count}" if count else "")

    def _append(self, fx: FxNode, node: Node, path: str) -> None:
        self._refs[fx] = Ref(len(self._nodes))
        self._nodes.append(node)
        self._paths.append(path)

    def _node_of(self, fx: Any) -> int:
        return self._refs[fx].node

    def _convert(self, value: Any, fx: FxNode) -> Any:
        if isinstance(value, FxNode):
            if value not in self._refs:
                raise CaptureError(
                    f"{fx.target} depends on a Python number computed from data ({line_of(fx)}); "
                    "autoshard needs static shapes"
                )
            return self._refs[value]
        if isinstance(value, (tuple, list)):
            return tuple(self._convert(item, fx) for item in value)
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            raise CaptureError(f"{fx.target} has a dynamic size ({line_of(fx)}); autoshard needs static shapes")
        return value

    def _path(self, fx: FxNode) -> str:
        """The module that called the operator; the sum of two gradients belongs to the module that adds the second."""
        stack = fx.meta.get("nn_module_stack", fx.meta.get("fwd_nn_module_stack"))
        if stack:
            key, (path, _) = list(stack.items())[-1]
            # dynamo names a module as it was first reached (a second name, a __getattr__ of the model's, a list)
            if (first := self._modules.get(key.partition("@")[0])) is not None:
                return first
            path = re.sub(r"\._modules\['([^']*)'\]|\['([^']*)'\]", _dotted, path.removeprefix("L['self']"))
            # what torch.utils.checkpoint runs is named from the root of dynamo's own module
            return path.removeprefix("._export_root").removeprefix(".model").strip(".")
        producers = [self._paths[self._node_of(n)] for n in fx.all_input_nodes if n in self._refs]
        return next((path for path in reversed(producers) if path), "")

    def _finish(self) -> CapturedGraph:
        outputs: list[Ref | None] = []
        constants: list[Any] = []
        gradients: list[tuple[str, Ref]] = []
        mutations: list[tuple[str, Ref]] = []
        results = self._traced.graph.output_node().args[0]
        for value, (kind, detail) in zip(results, self._traced.outputs):  # type: ignore[arg-type]
            ref = self._refs[value] if isinstance(value, FxNode) else None
            if kind == "output":
                outputs.append(ref)
                constants.append(self._constant(detail, None if ref else value))
            elif kind == "gradient" and ref:
                gradients.append((detail, ref))
            elif kind in _NEW_VALUES and ref:
                mutations.append((detail, ref))
        if not any(outputs) and not mutations:
            raise CaptureError(f"{type(self._model).__name__} computes nothing: there is nothing to plan")
        nodes, renumber = _without_dead(self._nodes, [*outputs, *(ref for _, ref in gradients + mutations)])
        return CapturedGraph(
            nodes=nodes,
            outputs=tuple(ref and renumber(ref) for ref in outputs),
            constants=tuple(constants),
            gradients=tuple((name, renumber(ref)) for name, ref in gradients),
            mutations=tuple((name, renumber(ref)) for name, ref in mutations),
            aliases=_aliases(self._model),
            unused=self._unused(),
            out_spec=self._traced.out_spec,
            replaced=frozenset(name for kind, name in self._traced.outputs if kind == "replacement"),
            guards=self._traced.guards,
            names=self._traced.names,
            batch_dim=self._traced.batch_dim,
            left=self._traced.left,
        )

    def _constant(self, position: int, value: Any) -> Any:
        """A leaf of the model's result that the graph does not make: a Python value, or a tensor of the caller's."""
        same = self._traced.same.get(position)
        if same is not None and same.kind == "input":
            return replace(same, name=self._input_names[int(same.name)])
        return same or value

    def _unused(self) -> tuple[tuple[str, TensorMeta], ...]:
        used = {node.name for node in self._nodes if node.kind == "parameter"}
        tied = dict(_aliases(self._model))
        return tuple(
            (name, TensorMeta(tuple(p.shape), p.dtype))
            for name, p in self._model.named_parameters()
            if name not in used and not any(tied.get(other) == name for other in used)
        )


def _without_dead(nodes: list[Node], roots: list[Ref | None]) -> tuple[tuple[Node, ...], Callable[[Ref], Ref]]:
    """The nodes that a result depends on, inputs and parameters always kept, and the new number of each tensor."""
    alive = {ref.node for ref in roots if ref}
    for index in reversed(range(len(nodes))):
        if index in alive:
            alive.update(ref.node for ref in nodes[index].inputs)
    kept = [i for i, node in enumerate(nodes) if i in alive or node.kind != "operator"]
    position = {old: new for new, old in enumerate(kept)}

    def renumber(ref: Ref) -> Ref:
        return Ref(position[ref.node], ref.output)

    return tuple(_renumbered(nodes[i], renumber) for i in kept), renumber


def _renumbered(node: Node, renumber: Callable[[Ref], Ref]) -> Node:
    return replace(node, args=map_refs(node.args, renumber), kwargs=map_refs(node.kwargs, renumber))


def _canonical(op: Any, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...], made: Any) -> tuple[Any, Any, Any]:
    """CPU attention becomes the canonical operator; its dropout probability is always zero on this path. A number in
    the shape of another tensor needs nothing of that one: shapes are static, and any rank can make any block.

    Args:
        made: what it gives, in the forward. A zero of the backward is a gradient, which is absent where that is that it
            has the shape of.
    """
    named = dict(kwargs)
    if op is _ATTENTION:
        q, k, v, _, causal, *_ = (*args, 0.0, False)[:5] if len(args) < 5 else args
        return attention, (q, k, v, named.get("attn_mask"), causal, named.get("scale")), ()
    if op is _ATTENTION_BACKWARD:
        grad, q, k, v, out, lse, _, causal = args
        mask, scale = named.get("attn_mask"), named.get("scale")
        return attention_backward, (grad, q, k, v, out, lse, mask, causal, scale), ()
    if op in _FILLED_LIKE and made is not None:
        (fill,) = args[1:] or (named.get("fill_value", _FILLED_LIKE[op]),)
        return aten.full.default, (tuple(made.shape), fill), (("device", made.device), ("dtype", made.dtype))
    return op, args, kwargs


def _orders(fx: FxNode) -> tuple[tuple[int, ...], ...]:
    """For each tensor that an operator takes, its dims as they lie in memory, the outermost first."""
    taken = [leaf for leaf in tree_leaves((fx.args, sorted(fx.kwargs.items()))) if isinstance(leaf, FxNode)]
    return tuple(_order(torch.empty_like(leaf.meta["val"]).stride()) for leaf in taken)


def _order(strides: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(range(len(strides)), key=lambda dim: -strides[dim]))


def _aliases(model: nn.Module) -> tuple[tuple[str, str], ...]:
    first: dict[int, str] = {}
    aliases = []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(parameter), name) != name:
            aliases.append((name, first[id(parameter)]))
    return tuple(aliases)


def _meta(value: Any, name: str) -> TensorMeta:
    if not isinstance(value, torch.Tensor) or any(not isinstance(size, int) for size in value.shape):
        raise CaptureError(f"{name} has a result whose shape is not static; autoshard needs static shapes")
    return TensorMeta(tuple(value.shape), value.dtype)


def _dotted(match: re.Match[str]) -> str:
    return "." + (match[1] or match[2])


def _why(model: nn.Module, error: Exception, precision: Precision) -> str:
    text = str(error)
    behind = backward_stack(error)
    where = at(lines_in(text) or lines_in(model_stack(error)) or lines_in(behind))
    for word, advice in _ADVICE.items():
        if word in text:
            return f"{type(model).__name__} cannot be captured as one graph{where}: {advice}"
    if depends_on_numbers(error):
        why = of_shape("the backward of this line") if behind else why_by_numbers(text)
        return f"{type(model).__name__} cannot be captured as one graph{where}: {why}"
    if (own := own_error(error)) and precision.param_dtype:
        return (
            f"the forward of {type(model).__name__} fails{where} with its parameters and floating arguments cast to "
            f"{precision.param_dtype}: {own.rstrip('.')}. Buffers are not cast: where they meet what is, the forward "
            "has to cast the result (x.to(y.dtype))"
        )
    if own:
        return (
            f"the forward of {type(model).__name__} fails{where}: {own.rstrip('.')}. Call the model alone with the "
            "same arguments: if that fails too, the error is its own; if it runs, the model does something else while "
            "torch traces it (it asks torch.compiler.is_compiling)"
        )
    first = text.strip().splitlines()[0] if text.strip() else type(error).__name__
    if explanation := _EXPLANATION.search(text):
        first += f" ({explanation[1].rstrip('.')})"
    return (
        f"{type(model).__name__} cannot be captured as one graph{where}: {first}. The forward must be free of graph "
        "breaks: calls that torch cannot trace (files, the time, random numbers of Python's or numpy's)"
    )
