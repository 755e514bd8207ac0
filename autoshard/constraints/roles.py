"""The roles of tensors in a training step: which are parameters, gradients or activations; which parameters are
matrices, routers or experts; which inputs are batches; which operators belong to a layer.

Roles are read from the graph, not from names, so they hold for every model. A view or cast of a parameter counts as a
parameter; a tensor that becomes a parameter's gradient by views, copies, casts and additions alone is a gradient.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property

from ..capture import CapturedGraph, Node, Ref, TensorMeta
from ..layout import Placement
from ..ops import are_rows_of, has, is_causal_attention, is_contraction, is_free, known, parts_asked_for
from .layers import layers
from .low_rank import narrowing
from .values import TensorClass


class Roles:
    """The roles in one graph; nodes are named by their index."""

    def __init__(self, graph: CapturedGraph) -> None:
        self._graph = graph

    def of(self, ref: Ref) -> TensorClass:
        """The class of a tensor: ``parameters``, ``gradients`` or ``activations``, as in constraints."""
        if ref.node in self.origins:
            return "parameters"
        return "gradients" if ref in self.gradients else "activations"

    def is_scalar(self, ref: Ref) -> bool:
        """Whether a tensor has one element: a loss, or a count of targets."""
        return all(size == 1 for size in self._graph.meta(ref).shape)

    def is_statistics(self, ref: Ref) -> bool:
        """Whether a tensor is sums of channels over the batch, or what a batch norm makes of them for its weights."""
        return has(self._graph.nodes[ref.node], "statistics") and len(self._graph.meta(ref).shape) == 1

    @cached_property
    def origins(self) -> dict[int, int]:
        """Every parameter, and every operator that merely views or casts one, with the parameter's node."""
        found: dict[int, int] = {}
        for i, node in enumerate(self._graph.nodes):
            if node.kind == "parameter":
                found[i] = i
            elif _passes_on(node) and node.inputs[0].node in found:
                found[i] = found[node.inputs[0].node]
        return found

    @cached_property
    def written(self) -> frozenset[Ref]:
        """What buffers become, which are whole on every rank: running means of channels."""
        parameters = {node.name for _, node in self._graph.of_kind("parameter")}
        return frozenset(ref for name, ref in self._graph.mutations if name not in parameters)

    @cached_property
    def gradients(self) -> dict[Ref, int]:
        """Every tensor that becomes a gradient by views, copies, casts and additions, with the parameter's node."""
        number = {node.name: i for i, node in self._graph.of_kind("parameter")}
        found: dict[Ref, int] = {}
        for name, gradient in self._graph.gradients:
            waiting = [gradient]
            while waiting:
                ref = waiting.pop()
                node = self._graph.nodes[ref.node]
                if node.phase == "backward" and node.kind == "operator" and ref not in found:
                    found[ref] = number[name]
                    if _passes_on(node) or has(node, "sum") or has(node, "copied"):
                        waiting.extend(node.inputs)
        return found

    @cached_property
    def kept(self) -> frozenset[int]:
        """Views and casts of parameters that the backward reads of the forward: what is gathered for them there stays.
        Those that are made in the backward, again, keep nothing.
        """
        nodes = self._graph.nodes
        return frozenset(
            ref.node
            for node in nodes
            if node.phase == "backward"
            for ref in node.inputs
            if ref.node in self.origins and nodes[ref.node].kind == "operator" and nodes[ref.node].phase == "forward"
        )

    @cached_property
    def batched(self) -> Mapping[int, int]:
        """Inputs that have the batch, with the dim that it is: that of the first of them, or dim 0."""
        inputs = ((i, node.outputs[0]) for i, node in self._graph.of_kind("input"))
        found = ((i, self._graph.batch_dim_of(meta.shape)) for i, meta in inputs if meta)
        return {i: dim for i, dim in found if dim is not None}

    @cached_property
    def statistics(self) -> frozenset[int]:
        """Nodes whose results, where they are sums over the batch, are wanted as that before the backward ends: those
        of the forward that are made of the batch, and gradients that meet it again, as that of a mean over the batch
        does; not those that lead to gradients of parameters alone, which are sums over the batch as well.
        """
        nodes, meet_it = self._graph.nodes, set[int]()
        for i, node in reversed(list(self._graph.of_kind("operator"))):
            if Ref(i) not in self.gradients:
                read = {ref.node for ref in node.inputs}
                meet_it |= {r for r in read if i in meet_it or not self._of_batch.isdisjoint(read - {r})}
        return frozenset(i for i in self._of_batch if nodes[i].phase == "forward" or i in meet_it)

    @cached_property
    def _of_batch(self) -> frozenset[int]:
        """Batched inputs, and all that is made of them."""
        return self._made_of(self.batched)

    def _made_of(self, first: Iterable[int]) -> frozenset[int]:
        found = set(first)
        for i, node in enumerate(self._graph.nodes):
            if any(ref.node in found for ref in node.inputs):
                found.add(i)
        return frozenset(found)

    @cached_property
    def functions(self) -> frozenset[int]:
        """Operators that compute something of parameters alone, which no row of the batch reaches: a scale that is
        clamped, a weight of norm one.
        """
        return self._made_of(i for i, _ in self._graph.of_kind("parameter")) - self._of_batch - self.origins.keys()

    @cached_property
    def weights(self) -> dict[int, int]:
        """Origins, and what is computed of a parameter of two or more dims and has its elements still, with that
        parameter: a weight that is scaled, rounded, masked, of norm one, or has something added; no part of a table of
        positions, nor one that is repeated.
        """
        found = dict(self.origins)
        for i in sorted(self.functions):
            node = self._graph.nodes[i]
            made = node.outputs[0]
            if made is None or is_contraction(node):
                continue
            for ref in node.inputs:
                if ref.node in found and (_passes_on(node) or self._has_its_elements(made, ref, found[ref.node])):
                    found.setdefault(i, found[ref.node])
        return found

    def _has_its_elements(self, made: TensorMeta, ref: Ref, parameter: int) -> bool:
        """Whether what is made of a tensor has its shape, two or more dims, and as many elements as a parameter."""
        shape, whole = self._graph.meta(ref).shape, self._graph.meta(Ref(parameter)).shape
        return made.shape == shape and len(shape) > 1 and math.prod(shape) == math.prod(whole)

    @cached_property
    def led_back(self) -> frozenset[int]:
        """Nodes of the backward whose results are gradients of such functions, or become gradients of parameters as
        the derivatives of these say: sums over the batch, and what is made of one of them and of parameters alone.
        Only those that no derivative would take as addends, as that of a clamp or a softmax does not.
        """
        found = set[int]()
        for ref in self.gradients:
            through, reached, waiting = set[int](), set[int](), [] if self._is_passed(ref.node) else [ref.node]
            while waiting:
                i = waiting.pop()
                if i not in through and (given := self._of_one_sum(i)):
                    through.add(i)
                    reached |= given
                    waiting += given
            if any(map(self._takes_sums, through)):
                found |= through | reached
        return frozenset(found)

    def _takes_sums(self, index: int) -> bool:
        """Whether an operator takes the gradient of a function as a sum alone: it is a derivative at what parameters
        are, and no product with that; or it puts a gradient beside something else, or leaves some of it out.
        """
        node = self._graph.nodes[index]
        if has(node, "masked") or has(node, "copied"):
            return True
        if self._is_passed(index):
            return any(ref.node not in self._of_batch for ref in node.inputs)
        is_at = any(ref.node in self.functions or ref.node in self.origins for ref in node.inputs)
        return is_at and not (has(node, "scaling") or is_contraction(node))

    def _of_one_sum(self, index: int) -> set[int]:
        """What an operator of the backward reads that the batch has reached, if all of that is made of the first of it
        and of parameters alone, or is added up; else nothing.
        """
        given = set[int]() if self._adds_rows(index) else self._reached(index)
        seen, waiting = set[int](), [] if self._is_passed(index) else sorted(given)[1:]
        while waiting:
            k = waiting.pop()
            if k in seen or k == min(given):
                continue
            seen.add(k)
            more = self._reached(k)
            if not more or min(more) < min(given):
                return set()
            waiting += more
        return given

    def _reached(self, index: int) -> set[int]:
        """What an operator reads that is of the batch; nothing where some of it is of the forward, as it then meets
        rows of the batch.
        """
        found = {ref.node for ref in self._graph.nodes[index].inputs if ref.node in self._of_batch}
        return found if all(self._graph.nodes[k].phase == "backward" for k in found) else set()

    def _adds_rows(self, index: int) -> bool:
        """Whether an operator adds up the rows of the batch: what it reads is no sum over them yet."""
        node = self._graph.nodes[index]
        if known(node.op).kernel != "reduction" or not self._has_rows(self._graph.meta(node.inputs[0])):
            return False
        return not any(map(self._has_rows, filter(None, node.outputs)))

    def _has_rows(self, meta: TensorMeta) -> bool:
        return self._graph.batch in meta.shape[: self._graph.batch_dim + 1]

    def _is_passed(self, index: int) -> bool:
        """Whether an operator adds, views, casts or puts together what it is given."""
        node = self._graph.nodes[index]
        return _passes_on(node) or has(node, "sum") or has(node, "linear")

    @cached_property
    def sequence(self) -> int:
        """The length of the sequence in the first batched input that has two dims, 0 where there is none."""
        shapes = ((self._graph.meta(Ref(i)).shape, 1 - dim) for i, dim in sorted(self.batched.items()))
        return next((shape[dim] for shape, dim in shapes if len(shape) > 1), 0)

    @cached_property
    def sequences(self) -> Mapping[int, int]:
        """Batched inputs that have the sequence, with the dim that it is: of dims 0 and 1 the other one."""
        shapes = ((i, 1 - dim, self._graph.meta(Ref(i)).shape) for i, dim in self.batched.items())
        return {i: dim for i, dim, shape in shapes if shape[dim : dim + 1] == (self.sequence,)}

    @cached_property
    def layered(self) -> Mapping[int, str]:
        """Nodes that belong to a layer, with the path of the outermost layer (``layers.3``). In a model without layers
        all nodes count, with an empty path.
        """
        found: dict[int, str] = {}
        for path, nodes in sorted(layers(self._graph).items(), key=lambda item: item[0].count(".")):
            for i in nodes:
                found.setdefault(i, path)
        return found or dict.fromkeys(range(len(self._graph.nodes)), "")

    @cached_property
    def matrices(self) -> frozenset[int]:
        """Parameters of two or more dims that a matrix product of a layer reads beside what is made of an input.

        Without routers of experts, and others that are as small beside the largest: below a twentieth of it.
        """
        largest = max(self._sizes.values(), default=0)
        return frozenset(i for i, size in self._sizes.items() if 20 * size >= largest)

    @cached_property
    def _sizes(self) -> Mapping[int, int]:
        """Matrices and smaller parameters that products read so, with the elements of a matrix: what einsum multiplies
        with is one, whatever dims the parameter has.
        """
        made_of_inputs = self._made_of(i for i, _ in self._graph.of_kind("input"))
        found: dict[int, int] = defaultdict(int)
        for i, product, ref in self._multiplied():
            shapes = self._graph.meta(Ref(i)).shape, self._graph.meta(ref).shape
            is_read = product in made_of_inputs and self._graph.nodes[product].phase == "forward"
            if is_read and len(shapes[0]) >= 2 and i in self.layered and i not in self.routers:
                found[i] = max(found[i], *(math.prod(shape[-2:]) for shape in shapes))
        return found

    @cached_property
    def computed(self) -> Mapping[int, int]:
        """Products of layers, of what is made of an input and of what is computed of parameters and has the shape of
        none (a product of two, what a small network makes), with where they take that. Without the small, as above.
        """
        made_of_inputs = self._made_of(i for i, _ in self._graph.of_kind("input"))
        sizes = {i: self._sizes[i] for i in self.matrices}
        found, of_none = dict[int, int](), self.functions - self.weights.keys()
        for i, node in self._graph.of_kind("operator"):
            if node.phase == "forward" and is_contraction(node) and i in self.layered and i in made_of_inputs:
                for k, ref in enumerate(node.inputs):
                    if ref.node in of_none and len(self._graph.meta(ref).shape) == 2:  # no table of positions
                        found[i], sizes[i] = k, math.prod(self._graph.meta(ref).shape[-2:])
        return {i: k for i, k in found.items() if 20 * sizes[i] >= max(sizes.values())}

    @cached_property
    def narrow(self) -> frozenset[int]:
        """Matrices that are the first half of one of low rank, wherever they are read."""
        products = set(narrowing(self._graph, self.weights, self.layered))
        return self.matrices - {i for i, product, _ in self._multiplied() if product not in products}

    @cached_property
    def routers(self) -> frozenset[int]:
        """Parameters of products of whose columns the largest are chosen: each rank needs all of these."""
        found: set[int] = set()
        waiting = [ref for node in self._graph.nodes if has(node, "choice") for ref in node.inputs[:1]]
        seen: set[int] = set()
        while waiting:
            ref = waiting.pop()
            node, size = self._graph.nodes[ref.node], math.prod(self._graph.meta(ref).shape)
            if ref.node in seen or node.kind != "operator":
                continue
            seen.add(ref.node)
            if is_contraction(node):
                found |= {self.weights[r.node] for r in node.inputs if r.node in self.weights}
            else:
                waiting += [r for r in node.inputs if math.prod(self._graph.meta(r).shape) == size]
        return frozenset(found)

    @cached_property
    def routed(self) -> frozenset[str]:
        """Layers that choose for each token where it goes: experts, which take tokens in rows."""
        return frozenset(path for i, path in self.layered.items() if has(self._graph.nodes[i], "choice"))

    @cached_property
    def experts(self) -> frozenset[int]:
        """Parameters of three dims that a batched matrix product reads: one matrix per expert."""
        return frozenset(
            i
            for i, product, _ in self._multiplied()
            if self._is_of_three(i) and has(self._graph.nodes[product], "batched")
        )

    @cached_property
    def dropless(self) -> frozenset[int]:
        """Matrices of experts that take as many tokens as come: how many is seen when the step runs."""
        return frozenset(
            i
            for i, product, _ in self._multiplied()
            if self._is_of_three(i) and has(self._graph.nodes[product], "grouped")
        )

    @cached_property
    def attentions(self) -> frozenset[int]:
        """Attention operators, forward and backward; dims 0 and 1 of their tensors are batch and heads."""
        return frozenset(i for i, node in enumerate(self._graph.nodes) if has(node, "attention"))

    @cached_property
    def written_out(self) -> frozenset[int]:
        """Operators of the forward in attentions that are no single operator: from a product of activations over a
        softmax to the next product of activations.
        """
        found: set[int] = set()
        since: dict[int, set[int]] = {}  # what of the operators since a product of activations leads to a node
        for i, node in self._graph.of_kind("operator"):
            if node.phase == "forward":
                read = {ref.node for ref in node.inputs}
                path = set[int]().union(*(since.get(k, set()) for k in read))
                if not is_contraction(node):
                    since[i] = path and path | {i}
                elif not read & self.weights.keys():
                    since[i] = {i}
                    if any(known(self._graph.nodes[k].op).kernel == "softmax" for k in path):
                        found |= path | {i}
        return frozenset(found)

    @cached_property
    def rows_and_places(self) -> tuple[int, ...]:
        """Operators of the forward that take the batch and the sequence as one dim, as a product wants them."""
        views = (i for i, node in self._graph.of_kind("operator") if node.phase == "forward" and has(node, "reshape"))
        shapes = ((i, self._graph.meta(self._graph.nodes[i].inputs[0]).shape) for i in views)
        batch = (self._graph.batch, self.sequence)
        return tuple(
            i for i, shape in shapes if shape[:2] == batch and are_rows_of(self._graph.meta(Ref(i)).shape, shape)
        )

    @cached_property
    def causal(self) -> frozenset[int]:
        """Those of them of which each query sees the keys up to it."""
        return frozenset(i for i in self.attentions if is_causal_attention(self._graph.nodes[i]))

    @cached_property
    def streams(self) -> frozenset[int]:
        """Operators of layers whose result has the shape of what passes between layers: (batch, sequence, C), or
        (sequence, batch, C).
        """
        shapes = {
            self._graph.meta(ref).shape
            for i, node in self._graph.of_kind("operator")
            for ref in node.inputs
            if ref.node in self.layered and self.layered[ref.node] != self.layered.get(i)
        }
        passed = {shape for shape in shapes if len(shape) >= 3 and shape[self._graph.batch_dim] == self._graph.batch}
        return frozenset(
            i
            for i, node in self._graph.of_kind("operator")
            if i in self.layered and node.outputs[0] and node.outputs[0].shape in passed
        )

    @cached_property
    def has_sequences(self) -> bool:
        """Whether an operator of a layer makes (batch, sequence, C), or (sequence, batch, C)."""
        forward = (node for i, node in self._graph.of_kind("operator") if i in self.layered and node.phase == "forward")
        shapes = (meta.shape for node in forward for meta in node.outputs if meta)
        return any(len(shape) == 3 and shape[self._graph.batch_dim] == self._graph.batch for shape in shapes)

    @cached_property
    def heads(self) -> tuple[tuple[int, int], ...]:
        """Operators of layers that make heads of the last dim of (batch, sequence, C), take some of those of a fused
        projection, or attend with them, with how many there are. One of each is none where a layer has no attention.
        """
        made = {i: heads for i, heads in self._made_heads.items() if i not in self._taken_from}
        forward = (i for i in self.attentions if self._graph.nodes[i].phase == "forward" and i in self.layered)
        made |= {i: self._graph.meta(self._graph.nodes[i].inputs[0]).shape[1] for i in forward}
        made |= {i: self._graph.meta(Ref(i)).shape[2] for i in self._takes_heads}
        return tuple(sorted((i, n) for i, n in made.items() if n > 1 or self.layered.get(i) in self.attending))

    @cached_property
    def attending(self) -> frozenset[str]:
        """Layers that have attention."""
        return frozenset(path for i, path in self.layered.items() if i in self.attentions or i in self.written_out)

    @cached_property
    def equal_parts(self) -> Mapping[int, tuple[tuple[int, Placement], ...]]:
        """Operators that take the columns of a product apart into equal parts, each of which can be cut: the lengths of
        the dims on the way from the product, with their cuts in parts.
        """
        found: dict[int, tuple[tuple[int, Placement], ...]] = {}
        for ref, placement, i in parts_asked_for(self._graph):
            if set(placement.parts) == {1}:
                found[i] = (*found.get(i, ()), (self._graph.meta(ref).shape[placement.dim], placement))
        return found

    @cached_property
    def fused(self) -> tuple[int, ...]:
        """Operators of layers that split the last dim of (batch, sequence, C) or take ranges that fill it, or take some
        of the heads that were made of it: queries, keys and values of one projection.
        """
        ranges = {i for _, _, i in parts_asked_for(self._graph)}
        found = set(self._takes_heads)
        for i, node in self._graph.of_kind("operator"):
            if i in self.layered and node.phase == "forward" and (has(node, "split") or i in ranges):
                shape = self._graph.meta(node.inputs[0]).shape
                if len(shape) == 3 and _dim_taken_apart(node) % 3 == 2:
                    found.add(i)
        return tuple(sorted(found))

    @cached_property
    def _made_heads(self) -> dict[int, int]:
        forward = ((i, node) for i, node in self._graph.of_kind("operator") if node.phase == "forward")
        views = ((i, node) for i, node in forward if has(node, "reshape") and i in self.layered)
        shapes = ((i, self._graph.meta(node.inputs[0]).shape, self._graph.meta(Ref(i)).shape) for i, node in views)
        made = {i: b[2] for i, a, b in shapes if len(a) == 3 and len(b) == 4 and a[:2] == b[:2]}
        return {i: heads for i, heads in made.items() if i not in self._images}

    @cached_property
    def _images(self) -> frozenset[int]:
        """What convolutions read; a sequence that becomes an image has rows and columns of it, not heads."""
        convolutions = (node for node in self._graph.nodes if node.op and known(node.op).kernel == "convolution")
        return frozenset(node.inputs[0].node for node in convolutions)

    @cached_property
    def _takes_heads(self) -> frozenset[int]:
        """Operators that take some of the heads that were made of one projection."""
        forward = ((i, node) for i, node in self._graph.of_kind("operator") if node.phase == "forward")
        return frozenset(
            i
            for i, node in forward
            if has(node, "part")
            and node.inputs[0].node in self._made_heads
            and _dim_taken_apart(node) % 4 == 2
            and self._graph.meta(Ref(i)).shape != self._graph.meta(node.inputs[0]).shape
        )

    @cached_property
    def _taken_from(self) -> frozenset[int]:
        return frozenset(self._graph.nodes[i].inputs[0].node for i in self._takes_heads)

    def made_for(self, index: int) -> frozenset[int]:
        """Parameters of the product whose columns an operator takes apart, its bias included, and of convolutions of
        single columns between them; or the one parameter that it takes apart itself.
        """
        found: set[int] = set()
        while True:
            node = self._graph.nodes[index]
            found |= {self.weights[ref.node] for ref in node.inputs if ref.node in self.weights}
            is_made = is_contraction(node) and not self._is_of_single_channels(node)
            if is_made or not node.inputs or node.inputs[0].node in self.weights:
                return frozenset(found)
            index = node.inputs[0].node

    def readers(self, parameters: frozenset[int]) -> Iterator[int]:
        """Operators that compute with one of these parameters, a view of it, or a weight that is computed of it."""
        for i, node in self._graph.of_kind("operator"):
            if i not in self.origins and any(self.weights.get(ref.node) in parameters for ref in node.inputs):
                yield i

    def _is_of_single_channels(self, node: Node) -> bool:
        image, filters = (self._graph.meta(ref).shape for ref in node.inputs[:2])
        return known(node.op).kernel == "convolution" and filters[1] == 1 < image[1]

    def _is_of_three(self, parameter: int) -> bool:
        return len(self._graph.meta(Ref(parameter)).shape) == 3

    def _multiplied(self) -> Iterator[tuple[int, int, Ref]]:
        """Each parameter that a matrix product reads, with the product and what it reads: a view of it, for example."""
        for i, node in enumerate(self._graph.nodes):
            if is_contraction(node):
                for ref in node.inputs:
                    if ref.node in self.weights:
                        yield self.weights[ref.node], i, ref


def _dim_taken_apart(node: Node) -> int:
    at = 2 if has(node, "split") else 1
    return int(node.args[at]) if len(node.args) > at else 0


def _passes_on(node: Node) -> bool:
    return node.kind == "operator" and len(node.inputs) == 1 and (is_free(node) or has(node, "cast"))
