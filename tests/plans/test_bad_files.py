from __future__ import annotations

import re
import time

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.errors import PlanFileError
from autoshard.plans import ShardingPlan, dump_plan, parse_plan
from autoshard.plans.text.parse import MAX_FILE_BYTES

from ..thorough import tries
from .synthetic import transformer_plan

GOOD = dump_plan(transformer_plan(4))

# What is changed in a good file, and what the error says about it.
EDITS = {
    "version": ("autoshard_plan: 8", "autoshard_plan: 9", "reads formats 1 to 8; use the autoshard that"),
    "no version": ("autoshard_plan: 8", "plan: 8", "is no autoshard plan"),
    "count": ("float32, count: 4", "float32, count: 5", "the pattern names 4, but the line counts 5"),
    "operator count": (' x4"', ' x3"', "the pattern names 4, but the line counts 3"),
    "layout": (
        "tp:S(1) ->",
        "tp:S(1 ->",
        "line {line}: operators, forward, layers.*.attention.wo/mm: cannot read 'tp:S(1'",
    ),
    "axis": ('tp:S(0)",', 'pp:S(0)",', "the mesh dp=2,tp=2 has no such axis"),
    "arrow": ("tp:S(1) -> ", "tp:S(1) ", "write input layouts, ->, output layouts"),
    "empty layout": ("dp:R tp:R, dp:S", ", dp:S", "a layout is missing"),
    "rank": ("shape: [256, 256]", "shape: [256]", "cuts dim 1 of a tensor of shape [256]"),
    "size": ("shape: [256, 256]", "shape: [256, x]", "shape, entry 2: found 'x'; expected a whole number"),
    "negative size": ("shape: [256, 256]", "shape: [256, -1]", "found '-1'; input should be greater than"),
    "huge": ("shape: [256, 256]", "shape: [4294967296, 4294967296]", "no tensor has the shape"),
    "no list": ("shape: [256, 256]", "shape: 256", "found '256'; expected a list"),
    "unknown key": ("shape: [256, 256]", "size: [256, 256]", "'size' is not known here; expected layout, shape, dtype"),
    "no repeats": ("  layers: 4", "  layer: 4", "the section repeats has no 'layers'"),
    "repeats": ("  layers: 4", "  layers: 0", "line {line}: repeats, layers: found '0'"),
    "fewer repeats": ("  layers: 4", "  layers: 3", "the pattern names 3, but the line counts 4"),
    "bomb": ("  layers: 4", "  layers: 1000000", "names 1000000, but the line counts 4"),
    "alias": ("  layers.*.norm", "  *.norm", "put a name that begins with * in quotes"),
    "defined alias": ("tokens: {", "tokens: *x\n  a: {", "the alias *x is not allowed"),
    "anchor": ("tokens: {", "tokens: &x {", "line {line}: the anchor &x is not allowed"),
    "tag": ("tokens: {", "tokens: !!python/object:os.system {", "python/object:os.system is not allowed"),
    "directive": ("autoshard_plan", "%YAML 1.1\n---\nautoshard_plan", "directives"),
    "second document": ("model:", "---\nmodel:", "a second document starts here"),
    "same key": ("targets: {", "tokens: {", "line {line}: 'tokens' stands here a second time"),
    "same name": ("  layers.*.norm", "  layers.{0-3}.attention.wq", "is named by an earlier line too"),
    "mesh": ('"dp=2,', '"dp=x,', "line {line}: mesh: cannot read the mesh 'dp=x,tp=2'"),
    "kind": ("[all_reduce tp".replace("[", '["'), '["all_sum tp', "unknown collective 'all_sum'; expected all_gather"),
    "collective": ("524288 bytes", "524288 B", "write kind, axis, bytes and time"),
    "time": ("0.032768 ms", "0.0.3 ms", "cannot read the time '0.0.3'"),
    "infinite time": ("0.032768 ms", "9E999 ms", "negative, endless or not a number"),
    "collective axis": ("all_reduce tp", "all_reduce pp", "unknown mesh axis 'pp'"),
    "step": ("=> dp:S(0) tp:R", "=> dp:S(1) tp:R", "a step changes one axis, or several alike"),
    "no step": (" => dp:S(0) tp:R", "", "a path needs at least two layouts"),
    "dtype": ("float32", "float23", "unknown dtype 'float23'"),
    "lost line": ("  layers.*.norm.weight", "  #", "totals, parameters: the section parameters has 9 entries, not 13"),
    "nan": ("gap: 0.0", "gap: nan", "line {line}: result, gap: found 'nan'"),
    "no number": ("gap: 0.0", "gap:", "result, gap: found ''; expected a number"),
    "no mapping": ("buffers:\n", "buffers:\n#", "found ''; expected one line per name"),
    "phase": ("phase: forward, path", "phase: sideways, path", "input should be 'forward' or 'backward'"),
    "section": ("totals", "total", "'total' is not known here; expected autoshard_plan, model"),
    "no section": ("objective: step-time\n", "", "'objective' is missing"),
    "memory": ("other_bytes: 1576960", "other_bytes: 5", "memory: the tenants of the peak hold"),
    "kept in the forward": ('32768 ms"]', '32768 ms"], kept: true', "what is kept is read in the backward"),
    "kept": ("kept: true", "kept: yes", "kept: found 'yes'"),
    "tenant": ("kind: parameter", "kind: weight", "tenants, entry 2, kind: found 'weight'"),
    "memory of version 1": (
        "autoshard_plan: 8",
        "autoshard_plan: 1",
        "a plan of format 1 has no section 'memory'",
    ),
    "follower": (
        'dp:R tp:R -> dp:S(0) tp:R, -"',
        'dp:R tp:R -> dp:R tp:R, -"',
        "line {line}: followers, forward, entry 2: 'dp:S(0) tp:R, dp:R tp:R -> dp:R tp:R, -' does not follow",
    ),
    "follower twice": ("[rms_norm]", "[rms_norm, rms_norm]", "the pattern names 4, but the line counts 2"),
    "follower's count": ("[rms_norm]", "[rms_norm, x, y]", "the line counts 4, which 3 roles do not divide"),
    "follower's module": ("module: layers.*.norm", "module: layers.*.norm/a", "is no module: it has a slash"),
    "follower's key": (
        "{module: layers.*.norm",
        "{in: layers.*.norm",
        "'in' is not known here; expected module",
    ),
    "no roles": ("[rms_norm]", "[]", "followers, forward, entry 2, roles: found a list"),
    "consumer": ("for: [layers.*/add]", "for: [heads.*/add]", "the section repeats has no 'heads'"),
    "consumer's layer": ("for: [layers.*/add]", "for: [layers.*-1/add]", "there is no such layer"),
    "executed": ("- embed: {embedding", "- embed: {view", "'embed/view' of the forward runs, but has no strategy"),
    "executed less": (
        "attention: {mul.2: 0}",
        "attention: {mul.3: 0}",
        "'layers.0.attention/mul.3' of the forward runs, but has no",
    ),
    "loop": ("from 0 to 3", "from 0 to 2", "of the forward has a strategy, but never runs"),
    "long loop": ("from 0 to 3", "from 0 to 999999", "unfolds to more than 1000000 entries"),
    "loop's head": (
        "from 0 to 3",
        "of 4",
        "line {line}: execution, forward, entry 2: cannot read the loop",
    ),
    "loop's layer": ("layers.*.norm: {rms_norm: ", "layers.*-1.norm: {rms_norm: ", "there is no such layer"),
    "time of an operator": ("embedding: 0.0125", "embedding: soon", "embedding: found 'soon'; expected a number"),
    "fraction of a nanosecond": ("embedding: 0.0125", "embedding: 0.00000012", "at most six digits after the point"),
    "control character": ("transformer", "trans\x00former", "is not YAML"),
}


def error_of(text: str | bytes) -> str:
    with pytest.raises(PlanFileError) as caught:
        parse_plan(text, source="plan.yaml")
    return str(caught.value)


@pytest.mark.parametrize("loader", ["libyaml", "pure"])
@pytest.mark.parametrize("edit", EDITS)
def test_a_broken_file_says_where_and_what(edit: str, loader: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if loader == "pure":
        monkeypatch.delattr(yaml, "CSafeLoader", raising=False)
    old, new, said = EDITS[edit]
    assert old in GOOD
    said = said.replace("{line}", str(GOOD[: GOOD.index(old)].count("\n") + 1))
    message = error_of(GOOD.replace(old, new, 1))
    assert said in message
    assert message.startswith("plan.yaml")


@pytest.mark.parametrize("kept", [*range(0, len(GOOD) - 1, 13), len(GOOD) - 2])
def test_a_file_cut_short_anywhere_is_refused(kept: int) -> None:
    error_of(GOOD[:kept])


NO_PLANS = {
    "nothing": ("", "is empty"),
    "list": ("[]", "is no autoshard plan"),
    "constraints": ("autoshard_constraints: 1", "is no autoshard plan: it is a file of constraints; name a plan"),
    "profile": ("{version: 2, provenance: x}", "is no autoshard plan: it is a hardware profile; name a plan"),
    "text": ("just a text", "is no autoshard plan"),
    "deep lists": ("[" * 1_000_000, "nested more than 16 deep"),
    "deep mappings": ("{a: " * 1_000_000, "nested more than 16 deep"),
    "deep keys": ("? " * 1_000_000, "nested more than 16 deep"),
    "deep entries": ("- " * 1_000_000, "nested more than 16 deep"),
    "many values": ("[" + "x," * 1_500_000 + "]", "more than 1000000 values"),
    "many bytes": ("x" * (MAX_FILE_BYTES + 1), "larger than the 64 MiB"),
    "billion laughs": (
        "a: &a [x, x, x, x, x, x, x, x, x]\n"
        + "".join(f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi")),
        "the anchor &a is not allowed",
    ),
    "merge": ("a: {b: c}\n<<: *a", "the alias *a is not allowed"),
    "include": ("model: !include /etc/passwd", "the tag !include is not allowed"),
    "object": ("!!python/object/apply:os.system [id]", "the tag tag:yaml.org,2002:python/object/apply:os.system"),
    "tag prefix": ("%TAG ! tag:example.com,2000:\n---\n!x {}", "YAML directives"),
    "other encoding": (b"\xff\xfe\x00", "is not UTF-8 text"),
    "surrogate": ("\ud800", "is not UTF-8 text"),
    "escape": ('"\\UFFFFFFFF"', "is not YAML"),
    "Python": (
        "import torch\n\ndef f(x): return x\n",
        "is no autoshard plan: it has no line 'autoshard_plan: 8' (plan",
    ),
    "list as key": ("? [a]\n: b", "a key must be a name"),
    "list as version": ("autoshard_plan: [1, 1]", "this autoshard reads formats 1"),
}


@pytest.mark.parametrize("case", NO_PLANS)
def test_what_is_no_plan_is_refused_quickly(case: str) -> None:
    text, said = NO_PLANS[case]
    start = time.process_time()
    assert said in error_of(text)
    assert time.process_time() - start < 30


def test_an_error_quotes_only_the_beginning_of_a_huge_text() -> None:
    huge = "x" * 1_000_000
    assert len(error_of(GOOD.replace("tp:S(1) ->", f"{huge} ->", 1))) < 1000
    assert len(error_of(GOOD.replace("tokens: {", f"? {huge}\n  : {{", 1))) < 1000


def test_unfolding_is_bounded() -> None:
    lines = "".join(
        f'  "a{i}.{{0-999999}}.b": {{layout: "dp:R", shape: [], dtype: int8, count: 1000000}}\n' for i in (1, 2)
    )
    text = GOOD.replace("buffers:\n", f"buffers:\n{lines}", 1)
    assert "unfolds to more than 1000000 entries" in error_of(text)


def _mutations() -> st.SearchStrategy[bytes]:
    data = GOOD.encode()
    special = st.sampled_from([ord(c) for c in " \n:{}[]*&!-,'\"#?|>%@`\\0x.\x00\xff\t"])
    edit = st.tuples(
        st.integers(0, len(data) - 1), st.integers(0, 4), st.lists(special | st.integers(0, 255), max_size=4)
    )

    def apply(edits: list[tuple[int, int, list[int]]]) -> bytes:
        mutated = bytearray(data)
        for start, removed, inserted in edits:
            mutated[start : start + removed] = bytes(inserted)
        return bytes(mutated)

    return st.lists(edit, min_size=1, max_size=5).map(apply)


# A file that is no text, no YAML of any line, or no plan at all has no line to name.
PLACE = r"plan\.yaml(, line \d+\b| is not UTF-8 text| is not YAML: | is no autoshard plan| says 'autoshard_plan)"


@settings(max_examples=tries(500))
@given(_mutations())
def test_a_mutated_file_is_a_plan_or_a_clear_error(data: bytes) -> None:
    try:
        plan = parse_plan(data, source="plan.yaml")
    except PlanFileError as error:
        assert re.match(PLACE, str(error)), str(error)
        return
    assert isinstance(plan, ShardingPlan)
    assert parse_plan(dump_plan(plan)) == plan


@settings(max_examples=tries(200))
@given(_mutations())
def test_a_mutated_file_is_a_plan_or_a_clear_error_without_libyaml(data: bytes) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(yaml, "CSafeLoader", raising=False)
        test_a_mutated_file_is_a_plan_or_a_clear_error.hypothesis.inner_test(data)  # type: ignore[attr-defined]


@given(st.binary(max_size=200) | st.text(max_size=200))
def test_any_bytes_are_refused_clearly(data: bytes | str) -> None:
    error_of(data)


@settings(max_examples=tries(300))
@given(st.data())
def test_swapped_lines_are_a_plan_or_a_clear_error(data: st.DataObject) -> None:
    lines = GOOD.splitlines(keepends=True)
    for _ in range(data.draw(st.integers(1, 3))):
        i, j = data.draw(st.integers(0, len(lines) - 1)), data.draw(st.integers(0, len(lines) - 1))
        lines[i], lines[j] = lines[j], lines[i]
    try:
        parse_plan("".join(lines))
    except PlanFileError:
        pass
