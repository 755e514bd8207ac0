"""Dynamo's names of objects, and what it says of them, as a reader writes it."""

from __future__ import annotations

import re

MODEL_SOURCE = "L['self']._modules['_export_root']._modules['model']"


def readable(source: str) -> str:
    """Dynamo's name for an object, or its condition on one, as a reader writes it: ``model.layers.0.k == 3.0``."""
    source = source.replace(MODEL_SOURCE, "model").replace(".__dict__['_modules']", "._modules")
    source = re.sub(r"G\['__import_(\w+)'\]", lambda m: m[1].replace("_dot_", "."), source)
    source = re.sub(r"\._modules\['([^']*)'\]|\._buffers\['([^']*)'\]|\._parameters\['([^']*)'\]", _dotted, source)
    source = re.sub(r"[GL]\['([^']*)'\]", r"\1", source)
    source = re.sub(r"___check_type_id\((.*), \d+\), type=<class '(.*)'>", r"type(\1) is \2", source)
    source = re.sub(r"___check_obj_id\((.*), \d+\), type=.*", r"\1 is what it was", source)
    source = re.sub(r"^len\((.*)\) != (\d+)$", r"len(\1) == \2", source)  # so dynamo prints the length of a dict
    source = re.sub(r"^CodeGuardAccessor: Not a function on (.*)\.__code__$", r"\1 is what it was", source)
    source = re.sub(r"^(?:getattr failed on source|KeyError on) (.*)$", r"what is read of \1 is there", source)
    return re.sub(r"not ___dict_contains\((.*), (.*)\)", r"\1 not in \2", source)


def _dotted(match: re.Match[str]) -> str:
    return "." + next(group for group in match.groups() if group is not None)
