"""The report: one file, no address in it, every number the plan's, nothing of a plan taken for markup."""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from autoshard.layout import parse_layout
from autoshard.plans import ShardingPlan, read_plan, summarize
from autoshard.plans.expert_attribution import distance
from autoshard.plans.expert_distance import ExpertDistance, PartDifference, TensorDifference
from autoshard.plans.exposure import Exposure
from autoshard.plans.text.folded_plan import fold_plan
from autoshard.plans.views.columns import bytes_column, seconds_column
from autoshard.plans.views.lanes import layer_charts, step_chart
from autoshard.plans.views.layer_map import layer_maps, tone
from autoshard.plans.views.memory_chart import HEIGHT, memory_chart
from autoshard.plans.views.module_tree import module_tree
from autoshard.plans.views.report import report_html
from autoshard.plans.views.report_comparison import comparison_html, head_rows, module_rows
from autoshard.plans.views.report_subject import Subject
from autoshard.plans.views.report_values import copies_s, cost_split

from ..thorough import tries
from . import browser
from .synthetic import MESH, plans, sharded_plan, transformer_plan, undivided
from .write_golden import FOLDER

PLAN = transformer_plan(4)
HOSTILE = '</script><script>alert(1)</script><img src=x onerror="alert(2)">\'"&{{ 7*7 }}{% raw %}'


@cache
def golden(name: str) -> ShardingPlan:
    """A plan of Llama-3-8B."""
    return read_plan(FOLDER / name)


@cache
def golden_page() -> str:
    """The report of one, beside another."""
    return report_html(golden("llama3_8b-tight.yaml"), [("llama3_8b.yaml", golden("llama3_8b.yaml"))])


needs_chromium = pytest.mark.skipif(browser.find() is None, reason=browser.MISSING)


def hostile_plan() -> ShardingPlan:
    """A plan that says hostile things wherever a plan may say anything."""
    assert PLAN.memory is not None
    tenants = tuple(replace(tenant, name=HOSTILE) for tenant in PLAN.memory.tenants)
    return replace(
        PLAN,
        model=HOSTILE,
        fingerprint=HOSTILE,
        hardware=HOSTILE,
        objective=HOSTILE,
        pins=(HOSTILE,),
        solver=replace(PLAN.solver, status=HOSTILE),
        parameters=(replace(PLAN.parameters[0], name=HOSTILE),),
        operators=tuple(replace(entry, name=f"{HOSTILE}{entry.name}") for entry in PLAN.operators),
        redistributions=tuple(
            replace(entry, tensor=f"{HOSTILE}{i}", consumers=(HOSTILE,)) for i, entry in enumerate(PLAN.redistributions)
        ),
        memory=replace(
            PLAN.memory, optimizer=HOSTILE, tenants=tenants, peak=replace(PLAN.memory.peak, operator=HOSTILE)
        ),
        execution=(),
        against=ExpertDistance(
            HOSTILE,
            1,
            1.0,
            1.0,
            1.0,
            1,
            (PartDifference("", "computation", 1.0, 2.0), PartDifference(HOSTILE, "activations", 1.0, 2.0)),
            (TensorDifference(f"/{HOSTILE}", "computation", 1.0, 2.0, HOSTILE, HOSTILE),),
        ),
    )


class Page(HTMLParser):
    """The tags of a page, and its numbers by key."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    @property
    def numbers(self) -> dict[str, str]:
        return {str(a["data-key"]): str(a["data-value"]) for _, a in self.tags if "data-key" in a}


def expected_numbers(plan: ShardingPlan) -> dict[str, str]:
    """Every number that the page of a plan must hold, computed here from the plan."""
    numbers: dict[str, object] = {
        "status": plan.solver.verdict,
        "gap": plan.solver.gap,
        "step_s": plan.compute_s + plan.communication_s + (plan.optimizer_s or 0.0),
        "compute_s": plan.compute_s,
        "communication_s": plan.communication_s,
        "parameter_bytes": summarize(plan).parameter_bytes,
        "parameter_bytes_per_rank": summarize(plan).parameter_bytes_per_rank,
    }
    if plan.optimizer_s is not None:
        numbers["optimizer_s"] = plan.optimizer_s
    for total in summarize(plan).collectives:
        key = f"collective:{total.phase}:{total.kind}:{total.axis}"
        numbers |= {f"{key}:{field}": getattr(total, field) for field in ("count", "size_bytes", "predicted_s")}
    numbers |= {f"part:{part.name}": part.seconds for part in cost_split(plan)}
    if plan.memory is not None:
        numbers["peak_bytes"] = plan.memory.peak.size_bytes
        numbers |= {f"others:{kind}": size for kind, size in plan.memory.others.items()}
        if plan.memory.other_bytes and not plan.memory.others:
            numbers["other_bytes"] = plan.memory.other_bytes
        numbers["static_bytes"] = plan.memory.static_bytes
        numbers |= {f"tenant:{i}": tenant.size_bytes for i, tenant in enumerate(plan.memory.tenants)}
        if plan.memory.allocator_margin:
            numbers["reserved_bytes"] = plan.memory.reserved_bytes
        if plan.memory.budget_bytes is not None:
            numbers["budget_bytes"] = plan.memory.budget_bytes
    for i, again in enumerate(summarize(plan).recomputed if plan.memory else ()):
        numbers |= {f"again_s:{i}": again.predicted_s, f"saved:{i}": again.saved_bytes}
    if plan.against is not None:
        numbers["against:step_s"] = plan.against.step_s
        for i, difference in enumerate(plan.against.parts):
            numbers |= {f"against:{i}:{field}": getattr(difference, field) for field in ("ours_s", "theirs_s")}
    chart = memory_chart(plan)
    numbers |= {f"band:{band.tone}": band.peak_bytes for band in (chart.bands if chart else ())}
    for link in Exposure.of(plan).links if plan.execution else ():
        numbers |= {f"lane:hidden:{link.link}": link.hidden_s, f"lane:exposed:{link.link}": link.exposed_s}
    return {key: str(value) for key, value in numbers.items()}


def test_the_numbers_on_the_page_are_those_of_the_plan() -> None:
    assert Page(report_html(PLAN)).numbers == expected_numbers(PLAN)


@settings(max_examples=tries(30), suppress_health_check=[HealthCheck.too_slow])
@given(plans())
def test_every_plan_has_a_report_with_its_numbers(plan: ShardingPlan) -> None:
    numbers, expected = Page(report_html(plan)).numbers, expected_numbers(plan)
    assert numbers.keys() == expected.keys()
    # A page holds no carriage return and no null character; the names of a plan may.
    assert {key for key in expected if numbers[key] != expected[key]} <= {"status"}


@pytest.mark.parametrize("plan", [PLAN, hostile_plan()], ids=["good", "hostile"])
def test_the_page_fetches_nothing_and_runs_only_its_own_script(plan: ShardingPlan) -> None:
    for text in (
        report_html(plan, [("old", sharded_plan(4)), (HOSTILE, hostile_plan())], HOSTILE, (HOSTILE,)),
        comparison_html((HOSTILE, hostile_plan()), ("b", plan), ((HOSTILE,), (HOSTILE,))),
    ):
        check_it_stands_alone(text)


def check_it_stands_alone(text: str) -> None:
    page = Page(text)
    sources = [attrs[key] for _, attrs in page.tags for key in ("src", "href", "action", "srcset") if key in attrs]
    assert [source for source in sources if not str(source).startswith("#")] == ["data:,"]
    named = {attrs.get("id") for _, attrs in page.tags}
    assert {str(source)[1:] for source in sources if str(source).startswith("#")} <= named
    assert [tag for tag, _ in page.tags if tag in ("script", "img", "iframe", "object", "link")] == ["link", "script"]
    assert not [attrs for _, attrs in page.tags if any(key.startswith("on") or key == "style" for key in attrs)]
    policy = next(a["content"] for t, a in page.tags if t == "meta" and a.get("http-equiv"))
    assert policy is not None and policy.startswith("default-src 'none'; ") and "unsafe" not in policy
    assert "://" not in html.unescape(text)


def test_a_baseline_is_compared_in_words_and_in_the_chart() -> None:
    text = html.unescape(report_html(sharded_plan(4), [("old.yaml", PLAN)], name="new.yaml"))
    assert "dp: 60% replicated, 40% data parallel -> 80% fully sharded, 20% replicated" in text
    assert {"new.yaml", "old.yaml"} <= set(re.findall(r"<figcaption>(.*?):", text))


def test_a_plan_of_format_1_has_a_report_too() -> None:
    plan = read_plan(FOLDER / "transformer.format-1.yaml")
    assert Page(report_html(plan)).numbers == expected_numbers(plan)


def test_the_parts_of_the_cost_add_up_to_the_step() -> None:
    for name in ("llama3_8b.yaml", "llama3_8b-tight.yaml"):
        plan = golden(name)
        half_a_ns_each = 0.5e-9 * len(plan.operators)
        assert sum(part.seconds for part in cost_split(plan)) == pytest.approx(plan.step_s, abs=half_a_ns_each)


def test_the_differences_from_experts_add_up_to_both_steps() -> None:
    plan, theirs = transformer_plan(3), sharded_plan(3)
    found = distance(plan, "fsdp+tp", theirs)
    numbers = Page(report_html(replace(plan, against=found))).numbers
    ours, other = (
        math.fsum(float(numbers[f"against:{k}:{whose}"]) for k in range(len(found.parts)))
        for whose in ("ours_s", "theirs_s")
    )
    assert float(numbers["against:step_s"]) == found.step_s
    assert plan.step_s - ours == pytest.approx(theirs.step_s - other)  # what takes as long in both


def test_the_tree_holds_every_second_of_the_plan_once() -> None:
    plan = golden("llama3_8b-tight.yaml")
    root = module_tree(plan, fold_plan(plan))
    nodes = [root]
    for node in nodes:
        nodes += node.children.values()
    moves = [move for node in nodes for move in node.moves]
    assert sum(move.count for move in moves) == len(plan.redistributions)
    assert sum(move.seconds for move in moves) == pytest.approx(root.communication_s)
    assert root.compute_s == pytest.approx(plan.compute_s, rel=1e-5)
    assert root.communication_s == pytest.approx(sum(c.predicted_s for _, c in plan.collectives()))


def test_a_deep_name_is_shown_at_a_bounded_depth() -> None:
    deep = replace(PLAN.redistributions[0], tensor=".".join("m" * 400) + "/mm")
    assert "m.m.m" in report_html(replace(PLAN, redistributions=(deep,)))


def test_layers_that_differ_are_rows_of_their_own() -> None:
    cut = parse_layout("dp:S(0) tp:S(0)", MESH)
    changed = tuple(replace(e, layout=cut) if e.name == "layers.2.attention.wq.weight" else e for e in PLAN.parameters)
    plan = replace(PLAN, parameters=changed)
    layers, outside = layer_maps(plan, fold_plan(plan))
    assert (layers.stack, layers.count, outside.stack) == ("layers", 4, "")
    found = {}
    for row in layers.rows:
        if row.module == "attention.wq" and row.cells[0] is not None:
            found[row.layers] = row.cells[0].placements
    assert found == {"0-1, 3": ("R", "S(0)"), "2": ("S(0)", "S(0)")}
    assert {row.layers for row in layers.rows if row.module == "attention.wo"} == {""}
    assert [row.module for row in outside.rows] == ["embed"]


@settings(max_examples=tries(30), suppress_health_check=[HealthCheck.too_slow])
@given(plans())
def test_the_map_has_every_parameter_once_on_every_axis(plan: ShardingPlan) -> None:
    cells = [row.cells[0] for layers in layer_maps(plan, fold_plan(plan)) for row in layers.rows if row.cells[0]]
    assert all(len(cell.placements) == plan.mesh.ndim for cell in cells)
    assert len(cells) <= len(plan.parameters) and bool(cells) == bool(plan.parameters)


def test_dims_have_few_colours() -> None:
    assert [tone(text) for text in ("R", "P(sum)", "S(0)", "S(3)", "S(17)")] == ["isR", "isP", "isS0", "isS3", "isS3"]


def test_the_bands_of_memory_are_all_that_is_in_use_and_its_peak_is_marked() -> None:
    for plan in (PLAN, golden("llama3_8b-tight.yaml")):
        chart, memory = memory_chart(plan), plan.memory
        assert chart is not None and memory is not None
        assert sum(band.peak_bytes for band in chart.bands) == memory.peak.size_bytes
        assert chart.peak_at[1] == pytest.approx(HEIGHT * (1 - memory.peak.size_bytes / chart.top_bytes), abs=0.01)
        assert {band.tone for band in chart.bands} >= {"parameter"}
    assert memory_chart(replace(PLAN, memory=None)) is None


def test_a_budget_far_above_the_peak_does_not_flatten_the_chart() -> None:
    assert PLAN.memory is not None
    near, far = (
        memory_chart(replace(PLAN, memory=replace(PLAN.memory, budget_bytes=times * PLAN.memory.reserved_bytes)))
        for times in (1, 5)
    )
    assert near is not None and near.budget_at is not None
    assert far is not None and (far.budget_at, far.top_bytes) == (None, PLAN.memory.peak.size_bytes)


def test_memory_by_kind_is_all_that_is_in_use_with_no_tail_of_unknown_kind() -> None:
    plan = golden("llama3_8b-tight.yaml")
    chart, memory = memory_chart(plan), plan.memory
    assert chart is not None and memory is not None
    assert {"kept", "activation", "parameter", "optimizer"} <= {band.tone for band in chart.bands}
    named = sum(tenant.size_bytes for tenant in memory.tenants)
    assert named + sum(memory.others.values()) == memory.peak.size_bytes
    kinds = {tenant.name: tenant.kind for tenant in memory.tenants}
    assert kinds["layers.*.attention.wq.weight"] == kinds["layers.*.ffn_norm/mul.1"] == "kept copy"
    assert ">temporary<" not in golden_page()


def test_memory_of_unknown_kinds_is_said_to_be_so() -> None:
    assert PLAN.memory is not None
    plan = replace(PLAN, memory=replace(PLAN.memory, kinds=()))
    chart, text = memory_chart(plan), report_html(plan)
    assert chart is not None and "does not tell apart" in chart.bands[-1].name
    assert sum(band.peak_bytes for band in chart.bands) == PLAN.memory.peak.size_bytes
    assert "of kinds that the plan does not tell apart" in text


def test_an_axis_that_divides_nothing_is_a_warning_on_the_page() -> None:
    """As in what ``show`` and ``plan`` say."""
    warnings = [attrs for tag, attrs in Page(report_html(undivided(PLAN))).tags if attrs.get("class") == "warning"]
    assert len(warnings) == 1 and "4 ranks do the same work" in report_html(undivided(PLAN))
    assert not [attrs for tag, attrs in Page(report_html(PLAN)).tags if attrs.get("class") == "warning"]


# Sums -----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["llama3_8b.yaml", "llama3_8b-tight.yaml"])
def llama(request: pytest.FixtureRequest) -> ShardingPlan:
    return golden(request.param)


def test_the_redistributions_add_up_to_the_communication_of_the_head(llama: ShardingPlan) -> None:
    moves = Subject.of("", llama).moves
    assert sum(move.predicted_s for move in moves) + copies_s(llama) == pytest.approx(llama.communication_s)
    assert [move.predicted_s for move in moves] == sorted((move.predicted_s for move in moves), reverse=True)
    assert all(move.exposed_s is not None and move.exposed_s <= move.predicted_s * 1.001 for move in moves)


def test_what_hides_and_what_is_exposed_add_up_to_the_communication_of_the_head(llama: ShardingPlan) -> None:
    exposure = Exposure.of(llama)
    rounding = 0.5e-9 * len(exposure.simulation.spans)
    assert exposure.hidden_s + exposure.exposed_s + copies_s(llama) == pytest.approx(
        llama.communication_s, abs=rounding
    )
    at_best = llama.step_s - copies_s(llama) - exposure.hidden_s - exposure.at_once_s
    assert at_best == pytest.approx(exposure.simulation.step_ns / 1e9, abs=rounding)
    assert sum(exposure.by_redistribution.values()) == pytest.approx(exposure.exposed_s)
    assert exposure.hidden_s > 0 and exposure.at_once_s > 0


def test_the_lanes_are_as_full_as_their_links_are_busy(llama: ShardingPlan) -> None:
    exposure = Exposure.of(llama)
    chart = step_chart(exposure)
    assert [lane.name for lane in chart.lanes] == ["computation", *(f"link {link}" for link in llama.links)]
    for lane, link in zip(chart.lanes[1:], exposure.links):
        for area, seconds in zip(lane.areas, (link.exposed_s, link.hidden_s)):
            points = [tuple(map(float, point.split(","))) for point in area.points.split()]
            closed = [*points, points[0]]
            twice = sum(a[0] * b[1] - b[0] * a[1] for a, b in pairwise(closed))
            share = abs(twice) / 2 / (1000 * 34)
            assert share == pytest.approx(seconds * 1e9 / chart.took_ns, abs=0.002), (lane.name, area.name)


def test_a_layer_of_each_phase_is_drawn_operator_by_operator(llama: ShardingPlan) -> None:
    charts = layer_charts(Exposure.of(llama))
    assert [(chart.name, chart.phase) for chart in charts] == [("layers.16", "forward"), ("layers.15", "backward")]
    for chart in charts:
        titles = [bar.title for lane in chart.lanes for bar in lane.bars]
        assert any(chart.name in title and "feed_forward.w1/" in title for title in titles)
        assert all(0 <= bar.x and bar.x + bar.width <= 1000.1 for lane in chart.lanes for bar in lane.bars)


def test_the_tree_opens_along_the_most_expensive_path() -> None:
    llama = golden("llama3_8b-tight.yaml")
    opened = re.findall(r"<details( open)? data-group><summary data-search=\"([^\"]*)\">", golden_page())
    path = [name for is_open, name in opened if is_open]
    assert path == [node.name for node in module_tree(llama, fold_plan(llama)).dearest_path]
    assert path[1].startswith("layers") and len(path) > 2


def test_micro_batches_count_as_often_as_they_run() -> None:
    plan = replace(PLAN, micro_batches=3)
    root, moves = module_tree(plan, fold_plan(plan)), Subject.of("", plan).moves
    exposure = Exposure.of(plan)
    once = module_tree(PLAN, fold_plan(PLAN))
    assert root.compute_s == pytest.approx(3 * once.compute_s)
    assert sum(move.predicted_s for move in moves) == pytest.approx(root.communication_s)
    assert exposure.hidden_s + exposure.exposed_s == pytest.approx(sum(c.predicted_s for _, c in plan.collectives()))


def test_the_numbers_of_a_column_can_be_added_up() -> None:
    column = seconds_column(0.4355)
    assert (column.unit, column(0.4355), column(0.06722), column(1e-7), column(0.0)) == (
        "ms",
        "435.50",
        "67.22",
        "<0.01",
        "0.00",
    )
    sizes = bytes_column(25427415192)
    assert (sizes.unit, sizes(25427415192), sizes(1 << 30)) == ("GiB", "23.68", "1.00")
    assert bytes_column(12)(12) == "12" and seconds_column(0.0)(0.0) == "0.0000"


# Two plans ------------------------------------------------------------------------------------------------------------


def test_the_numbers_of_a_comparison_are_those_of_both_plans() -> None:
    first, second = golden("llama3_8b.yaml"), golden("llama3_8b-tight.yaml")
    numbers = Page(comparison_html(("a.yaml", first), ("b.yaml", second))).numbers
    for key, plan in (("a", first), ("b", second)):
        assert plan.memory is not None
        assert numbers[f"{key}:step_s"] == str(plan.step_s)
        assert numbers[f"{key}:communication_s"] == str(plan.communication_s)
        assert numbers[f"{key}:peak_bytes"] == str(plan.memory.peak.size_bytes)
    (step,) = (row for row in head_rows(Subject.of("", first), Subject.of("", second)) if row.key == "step_s")
    assert step.ratio == f"{second.step_s / first.step_s:.3f}" and step.difference.startswith("+")


def test_the_modules_of_a_comparison_add_up_to_both_plans() -> None:
    both = golden("llama3_8b.yaml"), golden("llama3_8b-tight.yaml")
    rows = module_rows(*both)
    for k, plan in enumerate(both):
        assert sum(row.compute_s[k] for row in rows) == pytest.approx(plan.compute_s, rel=1e-5)
        total = sum(row.communication_s[k] for row in rows)
        assert total + copies_s(plan) == pytest.approx(plan.communication_s)
    assert [abs(row.difference_s) for row in rows] == sorted((abs(row.difference_s) for row in rows), reverse=True)


def test_a_comparison_says_which_step_is_shorter_and_what_changed() -> None:
    text = html.unescape(comparison_html(("old.yaml", PLAN), ("new.yaml", sharded_plan(4))))
    assert "The step of old.yaml is predicted to take" in text and "less time than that of new.yaml." in text
    assert "dp: 60% replicated, 40% data parallel -> 80% fully sharded, 20% replicated" in text
    assert "The plans are the same." in comparison_html(("a", PLAN), ("b", PLAN))
    other = replace(PLAN, fingerprint="another")
    assert "of different graphs or batches" in comparison_html(("a", PLAN), ("b", other))


@settings(max_examples=tries(15), suppress_health_check=[HealthCheck.too_slow])
@given(plans(), plans())
def test_any_two_plans_can_be_compared(first: ShardingPlan, second: ShardingPlan) -> None:
    numbers = Page(comparison_html(("a", first), ("b", second))).numbers
    assert (numbers["a:step_s"], numbers["b:step_s"]) == (str(first.step_s), str(second.step_s))


# In a browser ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(golden_page())
    return path


@needs_chromium
def test_the_browser_hears_what_a_console_says(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text("<script>console.error('one'); missing()</script><img src='http://127.0.0.1:9/x.png'>")
    console = "\n".join(browser.open_page(page).console)
    assert "one" in console and "missing is not defined" in console


@needs_chromium
@pytest.mark.parametrize("plan", [PLAN, hostile_plan()], ids=["good", "hostile"])
def test_a_browser_shows_the_plans_numbers_and_says_nothing(tmp_path: Path, plan: ShardingPlan) -> None:
    page = tmp_path / "report.html"
    page.write_text(report_html(plan, [("old", sharded_plan(4))]))
    opened = browser.open_page(page)
    assert opened.console == []
    assert Page(opened.dom).numbers == expected_numbers(plan)


@needs_chromium
def test_a_browser_shows_the_numbers_of_a_large_plan(llama_page: Path) -> None:
    opened = browser.open_page(llama_page)
    assert opened.console == []
    assert Page(opened.dom).numbers == expected_numbers(golden("llama3_8b-tight.yaml"))


@needs_chromium
def test_searching_hides_what_does_not_fit_and_opens_what_does(llama_page: Path) -> None:
    before, after = (
        Page(browser.open_page(llama_page, fragment).dom) for fragment in ("", "search=attention.wq%20gather")
    )
    for page, searched in ((before, False), (after, True)):
        rows = [attrs for tag, attrs in page.tags if tag == "tr" and "data-search" in attrs]
        hidden = [attrs for attrs in rows if "hidden" in (attrs.get("class") or "")]
        fits = [a for a in rows if all(word in str(a["data-search"]) for word in ("attention.wq", "gather"))]
        assert bool(hidden) == searched
        assert not searched or len(rows) - len(hidden) == len(fits) > 0
    opened = [sum(tag == "details" and "open" in attrs for tag, attrs in page.tags) for page in (before, after)]
    assert opened[0] < opened[1]
    sections = [
        {attrs["id"]: "hidden" in (attrs.get("class") or "") for tag, attrs in page.tags if tag == "section"}
        for page in (before, after)
    ]
    assert not any(sections[0].values())
    shown = {name for name, is_hidden in sections[1].items() if not is_hidden}
    assert shown == hits(after) and "modules" in shown and len(shown) < len(sections[1]) / 2


def hits(page: Page) -> set[str]:
    """The sections with something that a search has not hidden."""
    found, section = set(), ""
    for tag, attrs in page.tags:
        section = str(attrs["id"]) if tag == "section" else section
        if "data-search" in attrs and tag != "summary" and "hidden" not in (attrs.get("class") or ""):
            found.add(section)
    return found


@needs_chromium
def test_pointing_at_a_placement_marks_it_everywhere(llama_page: Path) -> None:
    page = Page(browser.open_page(llama_page, "layout=dp%3AS(0)%20tp%3AS(1)").dom)
    cells = [attrs for _, attrs in page.tags if "data-layout" in attrs]
    marked = {attrs["data-layout"] for attrs in cells if "same" in (attrs.get("class") or "").split()}
    assert marked == {"dp:S(0) tp:S(1)"}


@pytest.fixture(scope="module")
def window() -> Iterator[browser.Shown]:
    with browser.window() as opened:
        yield opened


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory, llama_page: Path) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    both = [(name, golden(name)) for name in ("llama3_8b.yaml", "llama3_8b-tight.yaml")]
    texts = {"comparison": comparison_html(*both), "hostile": report_html(hostile_plan()), "small": report_html(PLAN)}
    for name, text in texts.items():
        (folder / f"{name}.html").write_text(text)
    return {"llama": llama_page, **{name: folder / f"{name}.html" for name in texts}}


BEYOND = """[...document.body.querySelectorAll("*")].filter((one) => {
  const box = one.getBoundingClientRect();
  return box.width && !one.parentElement.closest(".scroll") && (box.left < -1 || box.right > innerWidth + 1);
}).map((one) => one.outerHTML.slice(0, 100))"""
"""What is wider than the window, or beyond its edge, and in nothing that scrolls by itself."""


@needs_chromium
@pytest.mark.parametrize("width", [400, 800, 1400])
@pytest.mark.parametrize("page", ["llama", "comparison", "hostile", "small"])
def test_nothing_is_wider_than_the_window(window: browser.Shown, pages: dict[str, Path], page: str, width: int) -> None:
    window.show(pages[page], width)
    assert window.ask("innerWidth") == width
    assert window.ask(BEYOND) == []
    assert window.ask("document.documentElement.scrollWidth") == width


PALE = """(() => {
  const numbers = (text) => (text.match(/[\\d.]+/g) || []).map(Number);
  const light = (rgb) => rgb.map((c) => c / 255).map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, k) => sum + c * [0.2126, 0.7152, 0.0722][k], 0);
  const on = (top, below, share) => top.map((c, k) => share * c + (1 - share) * below[k]);
  const behind = (one) => {
    for (; one; one = one.parentElement) {
      const [r, g, b, a = 1] = numbers(getComputedStyle(one).backgroundColor);
      if (a > 0) return [r, g, b];
    }
    return [255, 255, 255];
  };
  const found = [];
  for (const one of document.body.querySelectorAll("*")) {
    const texts = [...one.childNodes].some((node) => node.nodeType === Node.TEXT_NODE && node.textContent.trim());
    if (!texts || !one.getClientRects().length || one.closest("script, title")) continue;
    const style = getComputedStyle(one);
    let ink = style.color, paper = behind(one);
    if (one instanceof SVGElement) {
      ink = style.fill;
      const bar = one.classList.contains("inside") && one.parentElement.querySelector("rect");
      if (bar) {
        const filled = getComputedStyle(bar);
        const lane = one.closest("svg").querySelector(".lane");
        const below = lane ? numbers(getComputedStyle(lane).fill).slice(0, 3) : paper;
        paper = on(numbers(filled.fill).slice(0, 3), below, Number(filled.fillOpacity));
      }
    }
    const [high, low] = [light(numbers(ink).slice(0, 3)), light(paper)].sort((a, b) => b - a);
    const contrast = (high + 0.05) / (low + 0.05);
    if (contrast < 4.5) found.push(`${contrast.toFixed(1)} ${one.outerHTML.slice(0, 100)}`);
  }
  return found;
})()"""
"""Texts whose contrast to what is behind them is below 4.5, what WCAG 2.2 asks for (success criterion 1.4.3)."""


@needs_chromium
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("page", ["llama", "comparison"])
def test_every_text_can_be_read(window: browser.Shown, pages: dict[str, Path], page: str, dark: bool) -> None:
    window.show(pages[page], 1400, dark=dark)
    paper = window.ask("getComputedStyle(document.body).backgroundColor")
    assert (paper == "rgb(255, 255, 255)") != dark
    assert window.ask(PALE) == []


@needs_chromium
def test_on_paper_there_is_no_search_field(window: browser.Shown, pages: dict[str, Path]) -> None:
    window.show(pages["llama"], 800, media="print", dark=True)
    assert window.ask("getComputedStyle(document.querySelector('.tools')).display") == "none"
    assert window.ask("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"


@needs_chromium
def test_the_page_prints_and_is_a_picture(llama_page: Path, tmp_path: Path) -> None:
    printed, picture = tmp_path / "report.pdf", tmp_path / "report.png"
    browser.open_page(llama_page, options=(f"--print-to-pdf={printed}", "--no-pdf-header-footer"))
    browser.open_page(llama_page, options=(f"--screenshot={picture}", "--window-size=1280,900"))
    assert printed.read_bytes().startswith(b"%PDF")
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_json_numbers_survive_the_page() -> None:
    """``str`` of a float is its shortest exact decimal, in HTML as in JSON."""
    seconds = float(Page(report_html(PLAN)).numbers["compute_s"])
    assert json.loads(json.dumps(seconds)) == PLAN.compute_s
