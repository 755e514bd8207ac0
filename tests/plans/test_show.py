from __future__ import annotations

import io
import json
import re
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from autoshard.layout import Layout, R
from autoshard.plans import CollectiveTotal, OperatorEntry, PlanSummary, ShardingPlan, summarize, summary_json
from autoshard.plans.dtypes import DTYPE_BYTES
from autoshard.plans.text.notation import parse_strategy
from autoshard.plans.units import format_bytes, format_enough, format_gap, format_seconds, parse_bytes
from autoshard.plans.views.axis_use import axis_lines, samples, throughput_line, tokens, unused_axes
from autoshard.plans.views.expensive import MOST_EXPENSIVE
from autoshard.plans.views.show import console_for, show_text

from ..thorough import tries
from .synthetic import MESH, plans, transformer_plan, undivided

GOLDEN = Path(__file__).with_name("golden") / "transformer.txt"
DOCUMENT = Path(__file__).parents[2] / "docs" / "plan_file.md"


class Pipe(io.TextIOWrapper):
    """A stream as a pipe is: bytes below, no terminal."""

    def __init__(self, encoding: str = "utf-8") -> None:
        super().__init__(io.BytesIO(), encoding=encoding)

    def text(self) -> str:
        self.flush()
        return self.buffer.getvalue().decode(self.encoding)  # type: ignore[attr-defined]


def shown(plan: ShardingPlan, encoding: str = "utf-8") -> str:
    pipe = Pipe(encoding)
    show_text(plan, console_for(pipe))
    return pipe.text()


@pytest.mark.parametrize(("name", "value"), [("FORCE_COLOR", "1"), ("COLUMNS", "20"), ("TERM", "xterm-256color")])
def test_the_environment_does_not_change_what_a_pipe_gets(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    assert shown(transformer_plan(4)) == GOLDEN.read_text()


def test_a_pipe_gets_whole_names_without_escape_codes() -> None:
    plan = transformer_plan(1)
    long = replace(plan.parameters[0], name="module." * 60 + "weight")
    text = shown(replace(plan, parameters=(long,)))
    assert long.name in text
    assert "\x1b" not in text


def test_a_pipe_that_takes_ascii_only_gets_ascii() -> None:
    assert shown(transformer_plan(4), encoding="ascii").isascii()


@pytest.mark.parametrize("width", [40, 80, 200])
def test_a_terminal_gets_lines_that_fit_and_loses_no_text(width: int) -> None:
    stream = io.StringIO()
    show_text(transformer_plan(4), Console(file=stream, width=width, force_terminal=True, color_system="standard"))
    text = stream.getvalue()
    assert "\x1b[1m" in text
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    assert max(map(len, plain.splitlines())) <= width
    assert "…" not in plain


def test_names_with_brackets_are_no_markup() -> None:
    plan = transformer_plan(1)
    odd = replace(plan.parameters[0], name="[red]x[/red]")
    assert "[red]x[/red]" in shown(replace(plan, parameters=(odd,), model="[bold]m"))


@settings(max_examples=tries(30), suppress_health_check=[HealthCheck.too_slow])
@given(plans())
def test_every_plan_can_be_shown(plan: ShardingPlan) -> None:
    shown(plan)
    json.dumps(summary_json(plan))


def test_at_most_ten_redistributions_are_listed_the_dearest_first() -> None:
    plan = transformer_plan(1)
    first = plan.redistributions[0]
    many = tuple(
        replace(first, tensor=f"t{'x' * i}", collectives=(replace(first.collectives[0], predicted_s=i * 1e-3),))
        for i in range(1, 21)
    )
    listed = re.findall(r"^(tx+) ", shown(replace(plan, redistributions=many)), re.MULTILINE)
    assert [len(name) - 1 for name in listed] == list(range(20, 20 - MOST_EXPENSIVE, -1))


def test_operators_left_out_are_counted() -> None:
    assert "13 operators follow their first input or handle whole tensors" in shown(transformer_plan(4))


@pytest.mark.parametrize(
    ("strategy", "listed"),
    [
        ("dp:R tp:R, dp:R tp:R -> dp:R tp:R", False),
        ("-> dp:R tp:R", False),
        ("-> dp:S(0) tp:R", True),
        ("dp:S(0) tp:R -> dp:S(0) tp:R, -", False),
        ("dp:S(2) tp:R -> dp:S(1) tp:R", False),
        ("dp:S(0) tp:R, dp:R tp:R -> dp:S(0) tp:R", False),
        ("dp:S(0) tp:R, dp:R tp:S(1) -> dp:S(0) tp:S(1)", True),
        ("dp:S(0) tp:S(1), dp:R tp:S(0) -> dp:S(0) tp:P(sum)", True),
        ("dp:R tp:R, dp:S(0) tp:R -> dp:S(0) tp:R", True),
    ],
)
def test_operators_are_listed_unless_they_follow(strategy: str, listed: bool) -> None:
    (inputs, outputs), _ = parse_strategy(strategy, MESH)
    plan = replace(transformer_plan(0), execution=(), operators=(OperatorEntry("the/op", "forward", inputs, outputs),))
    assert ("the/op" in shown(plan)) == listed


def test_the_summary_adds_up() -> None:
    summary = summarize(transformer_plan(4))
    assert summary.optimizer_s == 42.5e-6
    assert summary.mfu == pytest.approx(summary.compute_s / 2 / summary.step_s)
    assert summary.step_s == summary.compute_s + summary.communication_s + summary.optimizer_s
    assert summary.parameters == 13
    assert summary.parameter_bytes == 4 * (512 * 256 + 4 * (2 * 256 * 256 + 256))
    assert summary.parameter_bytes_per_rank == 4 * (512 * 256 + 4 * (256 * 256 + 256))
    assert summary.ranks == 4
    assert summary.collectives == (
        CollectiveTotal("forward", "all_reduce", "tp", 4, 4 << 19, 4 * 3.2768e-05),
        CollectiveTotal("backward", "all_reduce", "dp", 4, 4 << 17, 4 * 1.1e-05),
    )


def test_an_uneven_cut_counts_the_largest_shard() -> None:
    plan = transformer_plan(0)
    odd = replace(plan.parameters[0], shape=(5, 3), layout=plan.inputs[0].layout)
    assert summarize(replace(plan, parameters=(odd,))).parameter_bytes_per_rank == 3 * 3 * 4


def test_the_json_has_the_documented_keys() -> None:
    summary = summary_json(transformer_plan(4))
    assert list(summary) == ["autoshard_summary", *(field.name for field in fields(PlanSummary))]
    assert json.loads(json.dumps(summary)) == summary
    collectives = summary["collectives"]
    assert isinstance(collectives, list)
    assert list(collectives[0]) == ["phase", "kind", "axis", "count", "size_bytes", "predicted_s"]
    documented = DOCUMENT.read_text().partition("## JSON for scripts")[2]
    assert set(re.findall(r"`(\w+)`", documented)) >= set(summary)
    assert ", ".join(collectives[0]) in documented


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (1 << 20, "1 MiB"),
        (1000 << 20, "1000 MiB"),
        (1 << 52, "4096 TiB"),
    ],
)
def test_bytes_for_people(size_bytes: int, text: str) -> None:
    assert format_bytes(size_bytes) == text


@given(st.integers(0, 1 << 50))
def test_a_budget_that_is_typed_back_is_enough_and_not_much_more(size_bytes: int) -> None:
    assert size_bytes <= parse_bytes(format_enough(size_bytes)) <= size_bytes * 1.0011


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0, "0 us"), (1.5e-7, "0.15 us"), (0.0125, "12.5 ms"), (1.0, "1 s"), (83.21, "83.21 s")]
)
def test_seconds_for_people(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(("gap", "text"), [(1.0, "100.00%"), (0.0013, "0.13%"), (5e-5, "0.01%"), (1.6e-6, "0.0002%")])
def test_a_gap_is_never_called_none(gap: float, text: str) -> None:
    assert format_gap(gap) == text


def test_element_sizes_are_those_of_torch() -> None:
    torch = pytest.importorskip("torch")
    for name, size in DTYPE_BYTES.items():
        if hasattr(torch, name):  # the newest are missing in older versions
            assert getattr(torch, name).itemsize == size


def test_an_axis_that_divides_nothing_is_said_loudly_and_one_that_does_is_not() -> None:
    plan = transformer_plan(2)
    assert unused_axes(plan) == () and "WARNING" not in "".join(axis_lines(plan))
    *lines, warning = axis_lines(undivided(plan))
    assert len(lines) == plan.mesh.ndim and all("every rank reads the whole batch" in line for line in lines)
    assert warning.startswith("WARNING: nothing is divided along dp and tp: 4 ranks do the same work.")
    assert "or without its constraints" in warning  # it has a pin
    assert warning in shown(undivided(plan))
    terminal = io.StringIO()
    show_text(undivided(plan), Console(file=terminal, force_terminal=True, width=200))
    assert "\x1b[1;31mWARNING: nothing is divided" in terminal.getvalue()
    dp_only = replace(plan, operators=tuple(_whole_along(e, 1) for e in plan.operators))
    assert unused_axes(dp_only) == ("tp",)


def _whole_along(entry: OperatorEntry, index: int) -> OperatorEntry:
    def changed(layout: Layout) -> Layout:
        return Layout(tuple(R if i == index else p for i, p in enumerate(layout)))

    outputs = tuple(o and changed(o) for o in entry.outputs)
    return replace(entry, inputs=tuple(map(changed, entry.inputs)), outputs=outputs)


def test_a_step_takes_the_samples_and_tokens_of_all_its_micro_batches() -> None:
    plan = transformer_plan(2)
    batch, length = plan.inputs[0].shape
    assert (samples(plan), tokens(plan)) == (batch, batch * length)
    thrice = replace(plan, micro_batches=3)
    assert (samples(thrice), tokens(thrice)) == (3 * batch, 3 * batch * length)
    odd = replace(plan.inputs[0], name="odd", shape=(batch + 1,))
    uneven = replace(plan, inputs=(*plan.inputs, odd))
    assert samples(uneven) is None and tokens(uneven) is None and throughput_line(uneven) is None
