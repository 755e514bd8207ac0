"""The schemes that people use by hand, as limits on one mesh axis each.

Sharding rules are products over the axes, so a scheme restricts its own axis and schemes combine freely.

``ddp`` (data parallelism)
    Inputs are cut along the batch (dim 0; dim 1 of those of a model that takes steps first), parameters whole,
    gradients are all-reduced, and of activations nothing communicates but sums over the batch, all-reduced as
    SyncBatchNorm does those of channels: the tokens of each expert in a loss that balances them, a correlation of
    features. So are gradients of what is computed of parameters alone (a clamped scale, a weight of norm one), where
    its derivative takes no addends: before it in the place of behind it.
    S. Li et al., "PyTorch Distributed", VLDB 13(12), 2020.
``fsdp`` (fully sharded data parallelism, ZeRO-3)
    As ``ddp``, but a parameter is cut on dim 0, gathered before its use in the forward and again in the backward, and
    its gradient is reduce-scattered; of several micro-batches in each. Over several axes the same on their product.
    What is computed of a gathered parameter alone may be sliced, which nothing sends.
    S. Rajbhandari et al., "ZeRO", SC20, arXiv:1910.02054, section 5.3; Y. Zhao et al., "PyTorch FSDP",
    arXiv:2304.11277.
``tp`` (Megatron tensor parallelism)
    In a layer every matrix is cut (the first half of one of low rank may be whole), attention runs on its share of the
    heads, and activations communicate by all-reduce alone: one after each pair of a matrix cut by columns and one cut
    by rows, and one in the backward.
    M. Shoeybi et al., "Megatron-LM", arXiv:1909.08053, section 3.
``sp`` (the same with sequence parallelism)
    The all-reduce becomes a reduce-scatter and an all-gather: between the pairs activations are cut along a dim behind
    the batch, the sequence, and so are tokens in rows, as experts take them. V. Korthikanti et al., "Reducing
    Activation Recomputation in Large Transformer Models", arXiv:2205.05198, section 4.2.2.
``cp`` (context parallelism)
    Inputs are cut along the sequence (dim 1, or dim 0), parameters and their gradients are those of ``ddp``, or, beside
    an axis of ``fsdp``, cut over both axes. Every rank attends with its block of the queries; keys and values are
    gathered, their gradients reduce-scattered, and no other activation communicates but sums, as under ``ddp``. Where
    attention is causal the last queries see most keys: there a rank may have a block of each of up to ``MOST_BLOCKS``
    parts of the sequence, so that ranks do more nearly as much, if that is faster.
    W. Liang et al., "TorchTitan", arXiv:2410.06511, section 2.1.4; A. Dubey et al., "The Llama 3 Herd of Models",
    arXiv:2407.21783, section 3.3.2 (which balances two blocks); W. Brandon et al., "Striped Attention",
    arXiv:2311.09431 (parts of one position).
``ep`` (expert parallelism)
    As ``ddp``, but the weights of experts are cut along the experts, and tokens go to their experts and back by
    all-to-all. D. Lepikhin et al., "GShard", arXiv:2006.16668, section 3.2.

Under ``tp`` and ``sp``, projections whose columns the ranks cannot share are left to the solver: those of fewer heads
than ranks (keys and values of grouped queries; of layers of whose heads the ranks can share none, if they can those of
others), and fused ones of unequal parts, in which no parameter can be cut. Each rank computes its columns, or all of
them and takes its heads, whose gradients may be gathered. So are matrices that the others have no pair for, such as a
projection between two stages. Which these are the planner finds (:mod:`autoshard.planning.lone_matrices`), and the
constraint names them: ``family tp=tp leaving down.weight``. What meets them, and what comes of it, may be sent in any
way.

Under a scheme that cuts the batch, or the sequence, what mixes it in another way (a contrastive loss, features of
neighbours, targets that the model shifts) is gathered for: what such an operator reads may be gathered, and what it
makes cut again. Which operators these are the planner finds (:mod:`autoshard.planning.mixing`), and the constraint
names them: ``family dp=ddp gathering /mm``. People gather the features of all ranks by hand.

Under ``tp`` and ``sp``, what stands outside the layers (embedding, head, loss) is left to the solver: whatever a person
could do there by hand, the scheme does no worse. Scalars (a loss, a count of targets) may always be all-reduced.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from functools import cached_property

from cost_models.collective_kinds import REDISTRIBUTION_KINDS

from ..capture import CapturedGraph, Ref
from ..errors import ConstraintError, ContradictionError
from ..layout import MOST_PARTS, Layout, Placement, R, S, has_empty_shard, is_even
from ..mesh import Mesh
from ..micro_batches import is_held, is_summed
from ..recomputation import first_name
from ..redistribution import Banned
from .limits import CutMost, Limits, OnAxis, TakingCut
from .values import CUT_OF_INPUTS, CUT_THE_BATCH, AxisScheme, Scheme, nearest_name

_ANY_DIM = Placement("S")
MOST_BLOCKS = 4
"""Blocks of queries that a rank of context parallelism has at most: of so many the slowest rank does 5/4 of the mean.
"""
_WITH_HEADS = 4
"""Dims of queries, keys and values once heads are split off."""

# The collectives that a scheme lets run over its axis; whatever is not here is banned.
_GATHERED = frozenset({"all_gather"})  # parameters under fsdp
_SUMS = frozenset({"all_reduce"})  # over the batch, or the sequence, where that is cut
_OF_FUNCTIONS = frozenset({"slice"})  # of parameters that fsdp has gathered, beside shards of gradients
_GRADIENTS: dict[Scheme, frozenset[str]] = {
    "ddp": frozenset({"all_reduce"}),
    "fsdp": frozenset({"reduce_scatter"}),
    "tp": frozenset({"all_reduce"}),  # of what every rank of the axis has used on other tokens, outside the layers
    "sp": frozenset({"all_reduce"}),  # of norms and biases, which meet other tokens on every rank
    "cp": frozenset({"all_reduce"}),
    "ep": frozenset({"all_reduce"}),
}
_ACTIVATIONS: dict[Scheme, frozenset[str]] = {
    "ddp": _SUMS,
    "fsdp": _SUMS,
    "tp": frozenset({"all_reduce"}),
    "sp": frozenset({"all_gather", "reduce_scatter"}),
    "cp": frozenset({"all_gather", "reduce_scatter"}) | _SUMS,  # of keys and values, and of their gradients
    "ep": frozenset({"all_to_all"}) | _SUMS,
}


def limit_to_schemes(limits: Limits, axis_schemes: Sequence[AxisScheme], graph: CapturedGraph, mesh: Mesh) -> None:
    """Adds what schemes leave, each on its axis. On an axis of one rank any scheme holds.

    Raises:
        ContradictionError: an axis has two schemes.
        ConstraintError: a scheme makes no sense for the model; the message says why.
    """
    schemes: dict[int, AxisScheme] = {}
    for axis_scheme in axis_schemes:
        if schemes.setdefault(axis_scheme.axis, axis_scheme).scheme != axis_scheme.scheme:
            raise ContradictionError(
                f"the constraints {schemes[axis_scheme.axis].text!r} and {axis_scheme.text!r} give one axis two schemes"
            )
    shared = tuple(axis_scheme for axis_scheme in schemes.values() if mesh.shape[axis_scheme.axis] > 1)
    for axis_scheme in shared:
        _SchemeLimits(limits, axis_scheme, shared, graph, mesh).add()


class _SchemeLimits:
    """Adds the limits of one scheme on one axis: see the module's docstring for what each scheme means."""

    def __init__(
        self,
        limits: Limits,
        axis_scheme: AxisScheme,
        axis_schemes: tuple[AxisScheme, ...],
        graph: CapturedGraph,
        mesh: Mesh,
    ) -> None:
        self._to, self._roles = limits, limits.roles
        self._scheme, self._axis, self._text = axis_scheme.scheme, axis_scheme.axis, axis_scheme.text
        self._graph, self._mesh = graph, mesh
        given = {f.scheme for f in axis_schemes}
        sharding = {"fsdp", "cp"} if "fsdp" in given else set()
        self._sharding = tuple(sorted(f.axis for f in axis_schemes if f.scheme in sharding))
        self._shards = self._axis in self._sharding
        self._cuts_rows = self._scheme in CUT_OF_INPUTS
        self._data = tuple(sorted(f.axis for f in axis_schemes if f.scheme in CUT_THE_BATCH))
        self._sequence = tuple(sorted(f.axis for f in axis_schemes if f.scheme == "cp"))
        self._tensor = any(f.scheme in ("tp", "sp") for f in axis_schemes)
        self._gathering, self._leaving = axis_scheme.gathering, axis_scheme.leaving

    def add(self) -> None:
        """Adds all limits of the scheme."""
        self._check()
        for i, _ in self._graph.of_kind("input"):
            self._only(i, *self._cuts_of_input(i))
        if self._scheme == "cp":
            self._cut_queries()
        if self._shards:
            self._cut_parameters()
        elif self._cuts_rows:
            for i, _ in self._graph.of_kind("parameter"):
                self._only(i, S(0) if self._scheme == "ep" and i in self._roles.experts else R)
        else:
            self._cut_layers()
        self._leave_gathered_to_mixers()
        self._to.ban(self._banned)

    def _leave_gathered_to_mixers(self) -> None:
        """In the forward only those that mix read what is gathered for them; the backward has their derivatives."""
        for i, node in self._graph.of_kind("operator") if self._gathering else ():
            read = [k for k, ref in enumerate(node.inputs) if ref in self._gathered and self._is_cut(ref)]
            if read and node.phase == "forward" and i not in self._mixers:
                self._to.limit(i, TakingCut(self._axis, tuple(read), self._text))

    def _is_cut(self, ref: Ref) -> bool:
        """Whether a tensor has what the scheme cuts of every input: rows, or places of the sequence."""
        shape = self._graph.meta(ref).shape
        if self._scheme == "cp":
            return self._roles.sequence in shape[:2]
        return self._graph.batch in shape[: self._graph.batch_dim + 1]

    def _cuts_of_input(self, index: int) -> tuple[Placement, ...]:
        if self._scheme == "cp" and index in self._roles.sequences:
            dim = self._roles.sequences[index]
            return S(dim), S(dim, self._parts_of_sequence)
        return (S(self._roles.batched[index]) if self._scheme in CUT_THE_BATCH and index in self._roles.batched else R,)

    @property
    def _rows(self) -> int:
        """Of the batch, on a rank."""
        return -(-self._graph.batch // math.prod(self._mesh.shape[i] for i in self._data))

    @cached_property
    def _parts_of_sequence(self) -> tuple[int, ...]:
        """The parts of which a rank has a block each, where attention is causal: as many as can be of MOST_BLOCKS."""
        ranks, length = self._mesh.shape[self._axis], self._roles.sequence
        if self._roles.causal:
            most = min(MOST_BLOCKS, MOST_PARTS // self._rows)
            fit = [parts for parts in range(2, most + 1) if length % (parts * ranks) == 0]
            return (1,) * max(fit, default=0)
        return ()

    def _check(self) -> None:
        """Checks, before anything is solved, that the scheme makes sense for the model; else raises an error that says
        why, for example that ``ep`` needs parameters of experts and the model has none.
        """
        axis, ranks = self._mesh.axes[self._axis], self._mesh.shape[self._axis]
        if self._gathering and not self._cuts_rows:
            raise ConstraintError(
                f"{self._text!r} gathers for operators that mix what a scheme cuts of every input, as "
                f"{', '.join(CUT_OF_INPUTS)} do; {self._scheme} cuts layers"
            )
        if self._leaving and self._cuts_rows:
            raise ConstraintError(
                f"{self._text!r} leaves parameters that a scheme would cut in layers, as tp and sp do; {self._scheme} "
                f"cuts {CUT_OF_INPUTS[self._scheme]}"
            )
        known = [name for _, node in self._graph.of_kind("parameter") for name in self._graph.called(node.name)]
        for pattern in self._leaving:
            if not any(fnmatchcase(name, pattern) for name in known):
                raise ConstraintError(
                    f"{self._text!r} leaves {pattern}, which is no parameter{nearest_name(pattern, known)}"
                )
        if self._scheme in CUT_THE_BATCH and not self._roles.batched:
            raise ConstraintError(f"{self._text!r} cuts the batch, but the model has no input with dims")
        if self._scheme in CUT_THE_BATCH and not self._shares(self._graph.batch, self._data):
            names = " and ".join(self._mesh.axes[i] for i in self._data)
            count = math.prod(self._mesh.shape[i] for i in self._data)
            raise ConstraintError(
                f"{self._text!r} cuts the batch, but the {count} ranks of {names} cannot share {self._graph.batch} rows"
                + (" evenly" if self._graph.batch >= count else "")
            )
        if self._scheme == "cp":
            self._check_sequence()
        if self._scheme == "ep" and not self._roles.experts:
            raise ConstraintError(f"{self._text!r} cuts experts, but {self._why_no_experts()}")
        if self._scheme in ("tp", "sp") and not self._roles.matrices - self._left:
            why = f"the model has none that {ranks} ranks can share"
            if self._leaving:
                why = "they are all left out"
            elif not self._roles.matrices:
                why = self._why_no_matrices()
            raise ConstraintError(f"{self._text!r} cuts the matrices of layers, but {why}")
        if self._scheme == "sp" and not self._roles.has_sequences:
            raise ConstraintError(
                f"{self._text!r} cuts the sequence between the matrices of layers, but nothing there is (batch, "
                "sequence, channels); tp cuts layers alone"
            )
        if self._scheme in ("tp", "sp"):
            self._check_heads(axis, ranks)

    def _why_no_matrices(self) -> str:
        if not self._roles.computed:
            return "the model has none: no product there takes a parameter of two dims, and what is made of an input"
        first, *others = (self._graph.nodes[i] for i in self._roles.computed)
        also = f" and of {len(others)} more" if others else ""
        return f"that of {first.name} ({first.source}){also} is computed of parameters, and has the shape of none"

    def _why_no_experts(self) -> str:
        if not self._roles.dropless:
            return "no parameter of three dims enters a batched matrix product"
        return (
            f"those of {self._graph.nodes[min(self._roles.dropless)].name} take as many tokens as come, and what is "
            "sent in a plan has a length known before; tp cuts the columns of every expert, or give the experts a "
            "capacity, as examples/moe.py does"
        )

    def _check_sequence(self) -> None:
        axis, ranks = self._mesh.axes[self._axis], self._mesh.shape[self._axis]
        if not self._roles.attentions and not self._roles.written_out:
            raise ConstraintError(
                f"{self._text!r} cuts attention along its queries, but the model has none "
                "(F.scaled_dot_product_attention, or a softmax between two products)"
            )
        if not self._roles.sequences:
            raise ConstraintError(f"{self._text!r} cuts the sequence, but the model has no input of two dims")
        if not self._shares(self._roles.sequence, self._sequence):
            raise ConstraintError(
                f"{self._text!r} cuts the sequence, but the {ranks} ranks of {axis} cannot share "
                f"{self._roles.sequence} positions"
            )
        uneven = self._graph.batch % math.prod(self._mesh.shape[i] for i in self._data)
        if uneven or self._rows > MOST_PARTS:
            raise ConstraintError(
                f"{self._text!r} cuts the sequence of each row that a rank has, which must be as many on each, and "
                f"{MOST_PARTS} at most; of {self._graph.batch} rows some would have {self._rows}: give the other axes "
                "more ranks, or the step more micro-batches"
            )

    def _check_heads(self, axis: str, ranks: int) -> None:
        """Checks that there are heads that the ranks can share, in a model with heads."""
        if not self._unshared or len(self._unshared) < len(self._most_heads):
            return
        layer, (node, heads) = next(iter(self._unshared.items()))
        name = self._graph.nodes[node].name
        what, shared = "attention by heads", f"{heads} heads of {name}"
        if layer not in self._roles.attending:
            what, shared = "layers by columns", f"{heads} parts that {name} makes of columns, as of heads"
        raise ConstraintError(f"{self._text!r} cuts {what}, but the {ranks} ranks of {axis} cannot share the {shared}")

    @cached_property
    def _unshared(self) -> dict[str, tuple[int, int]]:
        """Layers whose heads the ranks cannot share, each with the first operator that makes some, and how many."""
        ranks, found = self._mesh.shape[self._axis], dict[str, tuple[int, int]]()
        for node, heads in self._roles.heads:
            layer = self._roles.layered[node]
            if heads % ranks and self._most_heads[layer] % ranks:
                found.setdefault(layer, (node, heads))
        return found

    def _shares(self, size: int, axes: tuple[int, ...]) -> bool:
        """Whether a dim of this size can be cut over these axes: every rank gets a part, and equal ones where there are
        several axes.
        """
        layout = Layout(tuple(S(0) if axis in axes else R for axis in range(self._mesh.ndim)))
        empty = has_empty_shard((size,), layout, self._mesh)
        return not empty and (len(axes) == 1 or is_even((size,), layout, self._mesh))

    @cached_property
    def _most_heads(self) -> dict[str, int]:
        """Of each layer the most heads that one of its operators makes: those of the queries."""
        found: dict[str, int] = {}
        for node, heads in self._roles.heads:
            layer = self._roles.layered[node]
            found[layer] = max(found.get(layer, 0), heads)
        return found

    @cached_property
    def _not_shared(self) -> frozenset[int]:
        """Parameters of projections whose columns the ranks cannot share: of too few heads, or fused of parts that no
        parameter can be cut in.
        """
        ranks = self._mesh.shape[self._axis]
        nodes = [node for node in self._roles.fused if not self._shares_parts(node, ranks)]
        nodes += [node for node, heads in self._roles.heads if heads % ranks]
        return frozenset().union(*map(self._roles.made_for, nodes))

    @cached_property
    def _left(self) -> frozenset[int]:
        """Parameters that a scheme that cuts layers leaves to the solver: those that it names, and matrices that are
        shorter than the ranks along every dim.
        """
        if self._cuts_rows:
            return frozenset()
        names = ((i, self._graph.called(node.name)) for i, node in self._graph.of_kind("parameter"))
        named = {i for i, called in names if any(fnmatchcase(name, p) for name in called for p in self._leaving)}
        shapes = ((i, self._graph.meta(Ref(i)).shape) for i in self._roles.matrices)
        return frozenset(named | {i for i, shape in shapes if not any(self._shares(n, (self._axis,)) for n in shape)})

    @cached_property
    def _met_by_left(self) -> frozenset[Ref]:
        """What those that compute with them read and make."""
        met: set[Ref] = set()
        for i in self._roles.readers(self._left) if self._left else ():
            node = self._graph.nodes[i]
            met.update(ref for ref in node.inputs if ref.node not in self._roles.origins)
            met.update(Ref(i, k) for k in range(len(node.outputs)))
        return frozenset(met)

    @cached_property
    def _layers_not_shared(self) -> frozenset[str]:
        return frozenset(self._roles.layered[i] for i in self._not_shared if i in self._roles.layered)

    def _gathers_heads(self, ref: Ref) -> bool:
        """Whether a tensor is the gradient of heads that every rank has in whole, or from which it is cut."""
        node = self._graph.nodes[ref.node]
        is_of_heads = node.phase == "backward" and len(self._graph.meta(ref).shape) == _WITH_HEADS
        return is_of_heads and self._roles.layered.get(ref.node) in self._layers_not_shared

    def _shares_parts(self, node: int, ranks: int) -> bool:
        """Whether ranks can share each part of a product that an operator takes apart, wherever it is a dim's part."""
        ways = self._roles.equal_parts.get(node, ())
        return any(length % (len(placement.parts) * ranks) == 0 for length, placement in ways[-1:])

    def _only(self, index: int, *placements: Placement, allowed: bool = True) -> None:
        self._to.limit(index, OnAxis(self._axis, placements, allowed, self._text))

    def _cut_queries(self) -> None:
        parts = self._parts_of_sequence
        for i in self._roles.attentions:
            self._only(i, S(2), S(2, parts))
            node = self._graph.nodes[i]
            if parts and node.phase == "forward" and i in self._roles.causal:
                self._to.ask(node.inputs[0], S(2, parts))
        for count in sorted({self._rows, self._rows * max(len(parts), 1)} - {1}):
            self._ask_for_places(self._roles.rows_and_places, count)

    def _ask_for_places(self, taken_as_one: Iterable[int], count: int) -> None:
        """Of (B T, ...) the sequences of all rows that a rank has, or blocks of their parts: so many parts."""
        for i in taken_as_one:
            self._to.ask(Ref(i), S(0, (1,) * count))

    def _cut_parameters(self) -> None:
        if self._axis != self._sharding[0]:
            return  # the limit is one for all axes that shard
        several = self._graph.micro_batches > 1
        for i, node in enumerate(self._graph.nodes):
            if node.kind == "parameter" or (several and (is_held(node.name) or is_summed(node.name))):
                self._to.limit(i, CutMost(self._sharding, False, self._text))
        for i in self._roles.origins:
            self._to.remake(Ref(i))
        for i in self._roles.kept:
            self._to.limit(i, CutMost(self._sharding, True, self._text))

    def _cut_layers(self) -> None:
        for i in self._roles.matrices - self._roles.narrow - self._not_shared - self._left:
            self._only(i, _ANY_DIM)
        for i in self._roles.attentions:
            if self._roles.layered.get(i) not in self._unshared:
                self._only(i, S(1))
        if self._scheme == "sp":
            for i in self._roles.streams:
                self._only(i, R, S(self._graph.batch_dim), allowed=False)
            if 1 < self._rows <= MOST_PARTS:
                routed = (i for i in self._roles.rows_and_places if self._roles.layered.get(i) in self._roles.routed)
                self._ask_for_places(routed, self._rows)

    def _banned(self, ref: Ref) -> Banned:
        allowed = self._allowed(ref)
        banned: set[tuple[str, int, int]] = {
            (kind, self._axis, -1) for kind in REDISTRIBUTION_KINDS if kind not in allowed
        }
        activations = self._scheme == "sp" and ref.node in self._roles.layered and self._roles.of(ref) == "activations"
        left = ref in self._met_by_left or ref in self._roles.written
        if activations and not self._gathers_heads(ref) and not left:
            dims = set(range(len(self._graph.meta(ref).shape))) - {self._dim_of_places(ref)}
            banned |= {("all_gather", self._axis, dim) for dim in dims}
        if self._scheme == "cp" and self._roles.of(ref) == "activations" and ref not in self._met_by_mixers:
            if len(self._graph.meta(ref).shape) != _WITH_HEADS and not self._roles.is_scalar(ref):
                banned |= {(kind, self._axis, -1) for kind in REDISTRIBUTION_KINDS if kind not in _SUMS}
        if self._shards and self._roles.of(ref) == "gradients" and not self._may_be_sliced(ref):
            banned.add(("slice", self._axis, -1))  # what is all-reduced stays whole
        return frozenset(banned)

    def _dim_of_places(self, ref: Ref) -> int | None:
        """The dim of (batch, sequence, C) that is the sequence, or of (batch * sequence, C) that has all its places,
        each once or for every expert that it goes to.
        """
        shape, places = self._graph.meta(ref).shape, self._graph.batch * self._roles.sequence
        if len(shape) == 3:
            return 0 if self._graph.batch_dim and shape[0] != self._graph.batch else 1
        return 0 if shape and places and shape[0] % places == 0 else None

    @cached_property
    def _mixers(self) -> frozenset[int]:
        """Operators that are gathered for."""
        names = ((i, first_name(node.name) or node.name) for i, node in self._graph.of_kind("operator"))
        return frozenset(i for i, name in names if any(fnmatchcase(name, pattern) for pattern in self._gathering))

    @cached_property
    def _gathered(self) -> frozenset[Ref]:
        """What they read that others made, but for parameters."""
        read = {ref for i in self._mixers for ref in self._graph.nodes[i].inputs if ref.node not in self._mixers}
        return frozenset(ref for ref in read if self._roles.of(ref) != "parameters")

    @cached_property
    def _met_by_mixers(self) -> frozenset[Ref]:
        """What they read and make."""
        made = {Ref(i, k) for i in self._mixers for k in range(len(self._graph.nodes[i].outputs))}
        return self._gathered | {ref for ref in made if self._roles.of(ref) != "parameters"}

    def _allowed(self, ref: Ref) -> frozenset[str]:
        role = self._roles.of(ref)
        if self._roles.is_scalar(ref) or ref in self._met_by_mixers or ref in self._met_by_left:
            return frozenset(REDISTRIBUTION_KINDS)
        if self._scheme in CUT_THE_BATCH and self._roles.is_statistics(ref):
            return _SUMS
        if self._cuts_rows and ref.node in self._roles.led_back:
            return _SUMS | (_OF_FUNCTIONS | _GRADIENTS["fsdp"] if self._shards else frozenset())
        if self._shards and ref.node in self._roles.functions:
            return _OF_FUNCTIONS
        if self._scheme in ("tp", "sp") and ref in self._roles.written:
            return frozenset(REDISTRIBUTION_KINDS)
        if self._scheme in ("tp", "sp") and self._parameter_of(ref) in self._not_shared | self._left:
            return frozenset(REDISTRIBUTION_KINDS)
        if role == "parameters":
            return _GATHERED if self._shards else frozenset()
        if role == "gradients":
            parameter = self._roles.gradients[ref]
            if not self._shards:
                return _GRADIENTS[self._scheme]
            return _GRADIENTS["fsdp"] | (_GRADIENTS["ddp"] if self._may_be_whole(parameter) else frozenset())
        if self._scheme in ("tp", "sp") and ref.node not in self._roles.layered:
            return frozenset(REDISTRIBUTION_KINDS)
        gathered = _GATHERED if self._scheme in ("tp", "sp") and self._gathers_heads(ref) else frozenset()
        allowed = _ACTIVATIONS[self._scheme] | gathered
        if self._scheme == "sp" and (ref.node in self._roles.functions or ref.node in self._roles.led_back):
            allowed |= _SUMS
        return allowed - _SUMS if self._cuts_rows and ref.node not in self._roles.statistics else allowed

    def _may_be_sliced(self, ref: Ref) -> bool:
        """Whether a gradient is whole on every rank without having been all-reduced for it: it is made of sums that may
        be (statistics, gradients of functions), of parameters alone, as a penalty's is, or behind what was gathered.
        """
        nodes = self._roles.led_back | self._roles.functions
        return bool(self._gathering) or self._roles.is_statistics(ref) or ref.node in nodes

    def _parameter_of(self, ref: Ref) -> int | None:
        """The parameter that a tensor is a view of, or becomes the gradient of; None of any other."""
        return self._roles.origins.get(ref.node, self._roles.gradients.get(ref))

    def _may_be_whole(self, parameter: int) -> bool:
        """Whether fsdp may leave a parameter whole on some of its axes: one too small for them, or one that tp cuts
        along its only dim that is not, such as a bias, one number for each head, or a matrix of one row.

        Such a gradient is all-reduced, like ddp's.
        """
        shape = self._graph.meta(Ref(parameter)).shape
        return sum(self._shares(size, self._sharding) for size in shape) <= int(self._tensor)
