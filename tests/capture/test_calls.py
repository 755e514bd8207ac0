"""How a model is called, as text and back."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.capture import rebuild_call
from autoshard.capture.calls import describe_call
from autoshard.errors import PlanFileError


class Tensor:
    """Stands for a tensor."""


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
arguments = st.recursive(
    scalars | st.builds(Tensor),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text(), inner),
    max_leaves=12,
)


@given(st.lists(arguments).map(tuple), st.dictionaries(st.text(), arguments))
def test_rebuilding_is_the_inverse_of_describing(args, kwargs) -> None:
    named: dict[str, Tensor] = {}

    def name_of(value: object) -> str | None:
        if not isinstance(value, Tensor):
            return None
        named[f"x{len(named)}"] = value
        return f"x{len(named) - 1}"

    text = describe_call(args, kwargs, name_of)
    again_args, again_kwargs = rebuild_call(text, lambda name: named[name])
    assert again_args == args and again_kwargs == kwargs
    assert repr(type(again_args)) == repr(type(args))


def test_a_dict_that_looks_like_a_tensor_is_still_a_dict() -> None:
    args = ({"tensor": "x"}, {"tuple": [1]}, {"dict": {}})
    assert rebuild_call(describe_call(args, {}, lambda _: None), lambda name: 1 / 0) == (args, {})


@pytest.mark.parametrize("value", [object(), {1: 2}, {1, 2}, b"x", 1j])
def test_arguments_that_json_cannot_hold_are_described_by_an_empty_text(value: object) -> None:
    assert describe_call((value,), {}, lambda _: None) == ""
    assert describe_call((), {"key": [value]}, lambda _: None) == ""


@pytest.mark.parametrize(
    "text",
    ["", "nonsense", "[]", "[1, 2]", "{}", '[{"tuple": []}]', '[{"tuple": []}, {"dict": {}}, 3]', '[{"tuple": 3}, {}]',
     '[{"a": 1, "b": 2}, {"dict": {}}]', '[{"dict": {}}, {"tuple": []}]', "[" * 100_000],
)  # fmt: skip
def test_a_text_that_is_no_description_is_a_plan_file_error(text: str) -> None:
    with pytest.raises(PlanFileError, match="make the plan again"):
        rebuild_call(text, lambda name: name)


def test_an_unknown_tag_is_a_plan_file_error_and_never_a_silent_dict() -> None:
    text = json.dumps([{"tuple": [{"object": {"a": 1}}]}, {"dict": {}}])
    with pytest.raises(PlanFileError):
        rebuild_call(text, lambda name: name)
