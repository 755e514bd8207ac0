"""The report: one file, no address in it, every number the plan's, nothing of a plan taken for markup."""

from __future__ import annotations

import html
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from autoshard.layout import parse_layout
from autoshard.plans import ShardingPlan, read_plan, summarize
from autoshard.plans.text.folded_plan import fold_plan
from autoshard.plans.views.module_tree import module_tree
from autoshard.plans.views.report import report_html
from autoshard.plans.views.report_values import cost_split, layer_maps, memory_chart, palette

from . import browser
from .synthetic import MESH, plans, sharded_plan, transformer_plan
from .write_golden import FOLDER

PLAN = transformer_plan(4)
HOSTILE = '</script><script>alert(1)</script><img src=x onerror="alert(2)">\'"&{{ 7*7 }}{% raw %}'

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
        numbers |= {"peak_bytes": plan.memory.peak.size_bytes, "other_bytes": plan.memory.other_bytes}
        numbers["static_bytes"] = plan.memory.static_bytes
        numbers |= {f"tenant:{i}": tenant.size_bytes for i, tenant in enumerate(plan.memory.tenants)}
        if plan.memory.allocator_margin:
            numbers["reserved_bytes"] = plan.memory.reserved_bytes
        if plan.memory.budget_bytes is not None:
            numbers["budget_bytes"] = plan.memory.budget_bytes
    return {key: str(value) for key, value in numbers.items()}


def test_the_numbers_on_the_page_are_those_of_the_plan() -> None:
    assert Page(report_html(PLAN)).numbers == expected_numbers(PLAN)


@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow])
@given(plans())
def test_every_plan_has_a_report_with_its_numbers(plan: ShardingPlan) -> None:
    numbers, expected = Page(report_html(plan)).numbers, expected_numbers(plan)
    assert numbers.keys() == expected.keys()
    # A page holds no carriage return and no null character; the names of a plan may.
    assert {key for key in expected if numbers[key] != expected[key]} <= {"status"}


@pytest.mark.parametrize("plan", [PLAN, hostile_plan()], ids=["good", "hostile"])
def test_the_page_fetches_nothing_and_runs_only_its_own_script(plan: ShardingPlan) -> None:
    text = report_html(plan, [("old", sharded_plan(4)), (HOSTILE, hostile_plan())])
    page = Page(text)
    sources = [attrs[key] for _, attrs in page.tags for key in ("src", "href", "action", "srcset") if key in attrs]
    assert sources == ["data:,"]
    assert [tag for tag, _ in page.tags if tag in ("script", "img", "iframe", "object", "link")] == ["link", "script"]
    assert not [attrs for _, attrs in page.tags if any(key.startswith("on") or key == "style" for key in attrs)]
    policy = next(a["content"] for t, a in page.tags if t == "meta" and a.get("http-equiv"))
    assert policy is not None and policy.startswith("default-src 'none'; ") and "unsafe" not in policy
    assert "://" not in html.unescape(text)


def test_a_baseline_is_compared_in_words_and_in_the_chart() -> None:
    text = html.unescape(report_html(sharded_plan(4), [("old.yaml", PLAN)], name="new.yaml"))
    assert "dp: 60% replicated, 40% data parallel -> 80% fully sharded, 20% replicated" in text
    assert {"new.yaml", "old.yaml"} <= set(re.findall(r'class="label">(.*?):', text))


def test_a_plan_of_format_1_has_a_report_too() -> None:
    plan = read_plan(FOLDER / "transformer.format-1.yaml")
    assert Page(report_html(plan)).numbers == expected_numbers(plan)


def test_the_parts_of_the_cost_add_up_to_the_step() -> None:
    for name in ("llama3_8b.yaml", "llama3_8b-tight.yaml"):
        plan = read_plan(FOLDER / name)
        half_a_ns_each = 0.5e-9 * len(plan.operators)
        assert sum(part.seconds for part in cost_split(plan)) == pytest.approx(plan.step_s, abs=half_a_ns_each)


def test_the_tree_holds_every_second_of_the_plan_once() -> None:
    plan = read_plan(FOLDER / "llama3_8b-tight.yaml")
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


def test_layers_that_differ_are_columns_of_their_own() -> None:
    cut = parse_layout("dp:S(0) tp:S(0)", MESH)
    changed = tuple(replace(e, layout=cut) if e.name == "layers.2.attention.wq.weight" else e for e in PLAN.parameters)
    plan = replace(PLAN, parameters=changed)
    layers, outside = layer_maps(plan, fold_plan(plan))
    assert (layers.stack, layers.columns) == ("layers", ("0-1 (x2)", "2", "3"))
    row = next(row for row in layers.rows if row.name == "attention.wq.weight")
    assert row.labels == ("tp:S(0)", "dp:S(0) tp:S(0)", "tp:S(0)")
    assert [row.name for row in outside.rows] == ["embed.weight", "embed/embedding"]


def test_every_placement_on_the_map_has_a_colour_and_a_label() -> None:
    maps = layer_maps(PLAN, fold_plan(PLAN))
    labels = {label for layers in maps for row in layers.rows for label in row.labels if label}
    assert labels <= palette(maps).keys()
    assert len(set(palette(maps).values())) == len(palette(maps))


def test_the_course_of_memory_reaches_its_peak_below_the_budget() -> None:
    chart = memory_chart(PLAN)
    assert chart is not None and PLAN.memory is not None
    heights = {size: chart.height - y for _, y, _, _, size in chart.bars}
    assert heights[PLAN.memory.peak.size_bytes] == pytest.approx(
        chart.height * PLAN.memory.peak.size_bytes / (8 << 20), 1e-3
    )
    assert chart.budget_at == 0
    assert memory_chart(replace(PLAN, memory=None)) is None


# In a browser ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    baseline = read_plan(FOLDER / "llama3_8b.yaml")
    path.write_text(report_html(read_plan(FOLDER / "llama3_8b-tight.yaml"), [("llama3_8b.yaml", baseline)]))
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
    assert Page(opened.dom).numbers == expected_numbers(read_plan(FOLDER / "llama3_8b-tight.yaml"))


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


@needs_chromium
def test_pointing_at_a_placement_marks_it_everywhere(llama_page: Path) -> None:
    page = Page(browser.open_page(llama_page, "layout=dp%3AS(0)%20tp%3AS(1)").dom)
    cells = [attrs for _, attrs in page.tags if "data-layout" in attrs]
    marked = {attrs["data-layout"] for attrs in cells if "same" in (attrs.get("class") or "").split()}
    assert marked == {"dp:S(0) tp:S(1)"}


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
