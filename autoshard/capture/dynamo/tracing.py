"""A forward as dynamo's graph, with what else dynamo found in it."""

from __future__ import annotations

import logging
import re
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, is_dataclass
from types import CodeType
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch._dynamo import functional_export, trace_rules
from torch._dynamo.convert_frame import get_traced_fn
from torch._functorch.autograd_function import autograd_function_apply as autograd_function_apply
from torch.export._trace import _restore_state_dict
from torch.utils._pytree import SUPPORTED_NODES, TreeSpec, tree_leaves, tree_structure

from ...errors import CaptureError
from ..checks.autocast import check_autocast_within
from ..lines import is_models_file, line_of
from .asked_of_tensors import ATTRIBUTE, asked_into, attributes_asked
from .draws_left_out import draws_left_out
from .followed import (
    attributes_asked_for,
    indexed_by_tensors,
    items_of_arrays,
    keys_listed,
    leaves_within,
    named_classes,
    numbers_in_text,
    older_names,
    reentrant_cut_off,
    unrecorded,
)
from .guards import Guards, guards_of, written_as_they_are
from .lengths_in_tensors import lengths_in_tensors
from .numbers_as_indices import numbers_as_indices
from .packed_sequences import packed_sequences
from .readable import readable
from .runs_of_alike import runs_of_alike
from .seen import attribute_asked
from .side_effects import Changed, side_effects_into
from .ways import conditions_known

_IN_DICT = re.compile(r"\.__dict__\['(\w+)'\]")
_WORD = re.compile(r"\w+")
# Functions that say something, or set what is said, and compute nothing. Methods of loggers dynamo leaves out itself.
_SAYING = (print, warnings.warn, warnings.simplefilter, warnings.filterwarnings, warnings.resetwarnings) + (
    logging.debug, logging.info, logging.warning, logging.error, logging.exception, logging.critical, logging.log,
)  # fmt: skip


@dataclass
class Dynamo:
    """What dynamo found in a forward besides its graph.

    ``changed`` is what the forward changes; ``names`` are those that the model's own code uses, of functions and
    attributes; ``answer`` is the module that dynamo traced, and what it says of it.
    """

    changed: Changed = field(default_factory=Changed)
    names: frozenset[str] = frozenset()
    answer: tuple[nn.Module, Any] | None = None

    def guards(self) -> Guards:
        """The conditions under which the model does what the graph does, with the values that are in force now: to be
        called once nothing is set that was only set for the capture.
        """
        assert self.answer is not None, "dynamo has given an answer"
        module, output = self.answer
        return guards_of(output.output_graph, module, get_traced_fn(module)[0].__code__, output.traced_code)

    def reads_attribute(self, path: str) -> bool:
        """Whether the forward depends on what an attribute of the model, or of a module in it, was before."""
        assert self.answer is not None, "dynamo has given an answer"
        found = re.compile(rf"\bmodel\.{re.escape(path)}\b")
        guards = self.answer[1].output_graph.guards
        read = [_IN_DICT.sub(r".\1", readable(guard.name)) for guard in guards]
        asked = (f"{readable(g.name)}.{attribute_asked(g)}" for g in guards if g.create_fn_name() == "HASATTR")
        return any(map(found.search, (*read, *asked)))

    def reads(self) -> frozenset[str]:
        """The names of all attributes that the forward has read."""
        assert self.answer is not None, "dynamo has given an answer"
        names = (guard.name for guard in self.answer[1].output_graph.guards)
        return frozenset(word for name in names for word in _WORD.findall(name))


def look_functions_up() -> None:
    """Has dynamo note torch's functions as they are. It does so once, as it meets the first one, which must not be
    while another stands in the place of one.
    """
    trace_rules.lookup(torch.cat)


def forward_graph(
    observed: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[torch.fx.GraphModule, Dynamo, TreeSpec]:
    """The torch operators that a module calls, its parameters and buffers under their FQNs; what else it does; and the
    structure of its result, whose leaves the graph returns.
    """
    found = Dynamo()
    answers: list[tuple[nn.Module, Any]] = []
    asked: set[str] = set()
    with (
        side_effects_into(found.changed),
        _answers_into(answers),
        leaves_within(),
        named_classes(),
        older_names(),
        attributes_asked_for(),
        keys_listed(),
        reentrant_cut_off(),
        indexed_by_tensors(),
        numbers_in_text(),
        items_of_arrays(),
        runs_of_alike(),
        numbers_as_indices(),
        lengths_in_tensors(),
        packed_sequences(),
        conditions_known(),
        draws_left_out(),
        unrecorded(),
        asked_into(asked),
        _settings(),
    ):
        graph = _traced(observed, args, kwargs)
    (found.answer,) = answers
    output = found.answer[1]
    absent = attributes_asked(output.output_graph.guards, tree_leaves((args, kwargs)))
    asked |= {f"{ATTRIBUTE}{name}" for name in absent}
    found.names = frozenset(asked).union(*(_names(code) for code in output.traced_code))
    _check_autocast(graph.graph)
    _restore_state_dict(observed, graph)
    codegen: Any = graph.graph._codegen
    return graph, found, codegen.pytree_info.out_spec


@contextmanager
def _settings() -> Iterator[None]:
    """Recurrent modules are taken apart, step by step; what only says something is left out. What a function computes
    that keeps its results (``lru_cache``) is computed, of which torch warns.
    """
    ignored = torch._dynamo.config.ignore_logging_functions | set(_SAYING)
    with (
        warnings.catch_warnings(),
        torch._dynamo.config.patch(allow_rnn=True, ignore_logging_functions=ignored),
        # torch notes its settings for statistics; torch 2.11 cannot write functions down and logs an error
        patch.object(torch._dynamo.utils, "_get_dynamo_config_for_logging", lambda: None),
    ):
        warnings.filterwarnings("ignore", message="Dynamo detected a call to a `functools.lru_cache`")
        yield


def _traced(observed: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.fx.GraphModule:
    """Traces a module; dataclasses in its result become containers that torch takes apart and puts together again.

    Raises:
        CaptureError: other objects are in the result.
    """
    while True:
        try:
            return functional_export._dynamo_graph_capture_for_export(observed)(*args, **kwargs)
        except AssertionError as error:
            returned = _returned(error)
            if returned is None:
                raise
            if not is_dataclass(returned) or returned in SUPPORTED_NODES:
                raise CaptureError(
                    f"the forward returns an object of class {returned.__name__}; return tensors and numbers, in "
                    "tuples, lists, dicts and dataclasses (a cache of keys and values belongs to generation: call the "
                    "model with use_cache=False, or put a module around it that returns the loss alone)"
                ) from None
            torch.export.register_dataclass(returned)


def _returned(error: AssertionError) -> type | None:
    """The class of a result that dynamo cannot take apart, where that is what it complains about."""
    if "Encountered unrecognized type" not in str(error):
        return None
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    variable = frames[-1].f_locals.get("vt")
    return variable.python_type() if variable is not None else None


def _check_autocast(graph: torch.fx.Graph) -> None:
    entered: list[torch.fx.Node] = []  # regions whose first line is still to come: they have none of their own
    for node in graph.nodes:
        if node.target is torch.amp.autocast_mode._enter_autocast:
            entered.append(node)
        for region in entered if line_of(node) or node.op == "output" else ():
            device_type, _, is_enabled, *_ = region.args
            check_autocast_within(str(device_type), bool(is_enabled), line_of(node))


def return_only(graph: torch.fx.GraphModule, result: Sequence[Any], others: Sequence[Any]) -> None:
    """Makes a graph of :func:`forward_graph` return a result's leaves, and others, as two lists: taken apart again, a
    dataclass would lose the leaves that left the graph.
    """
    graph.graph.output_node().args = ((*result, *others),)
    codegen: Any = graph.graph._codegen
    both = TreeSpec(tuple, None, [tree_structure(list(leaves)) for leaves in (result, others)])
    codegen.pytree_info = codegen.pytree_info._replace(out_spec=both)
    graph.recompile()


@contextmanager
def _answers_into(answers: list[tuple[nn.Module, Any]]) -> Iterator[None]:
    """Appends the module that dynamo traced, and all that it says of it."""
    capture, check = functional_export.fullgraph_capture, functional_export._suggest_or_raise_constraint_violation

    def and_record(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        answer = capture(module, *args, **kwargs)
        answers.append((module, answer.graph_capture_output))
        return answer

    def of_guards(module: Any, called: Any, mode: Any, *others: Any) -> None:
        """Without what dims that change would need: none does, and a number out of a tensor fails torch 2.12 there."""
        with written_as_they_are():
            check(module, called, None, *others)

    with (
        patch.object(functional_export, "fullgraph_capture", and_record),
        patch.object(functional_export, "_suggest_or_raise_constraint_violation", of_guards),
    ):
        yield


def _names(code: CodeType) -> frozenset[str]:
    """The names that the model's own code uses, inner functions included."""
    if not is_models_file(code.co_filename):
        return frozenset()
    inner = (_names(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return frozenset(code.co_names).union(*inner)
