"""Capture: the training step of a module as one immutable joint forward and backward graph."""

from .adapter import global_hooks
from .annotation import CONSTRAIN, annotated, constrain
from .arguments import Call, CallSignature, differences, input_names, keyword_names
from .by_numbers.representative import representative
from .calls import as_arguments, call_text, check_is_module, check_keywords, rebuild_call
from .capture import capture, captured_once
from .contained import Contained, contained_in, exchange
from .graph import CapturedGraph, Node, Ref, SameTensor, TensorMeta, is_random, map_refs, refs_in
from .micro_batched import micro_batched
from .model_key import described, model_key
from .modes import in_mode
from .operators.grouped_products import fake_grouped_mm
from .recompute import can_be_again, inner, marked, recomputable, recomputed, within_layers

__all__ = [
    "CONSTRAIN",
    "Call",
    "CallSignature",
    "CapturedGraph",
    "Contained",
    "Node",
    "Ref",
    "SameTensor",
    "TensorMeta",
    "annotated",
    "as_arguments",
    "call_text",
    "can_be_again",
    "capture",
    "captured_once",
    "check_is_module",
    "check_keywords",
    "constrain",
    "contained_in",
    "described",
    "differences",
    "exchange",
    "fake_grouped_mm",
    "global_hooks",
    "in_mode",
    "inner",
    "input_names",
    "keyword_names",
    "is_random",
    "map_refs",
    "marked",
    "micro_batched",
    "model_key",
    "rebuild_call",
    "recomputable",
    "representative",
    "recomputed",
    "refs_in",
    "within_layers",
]
