"""Profile files: what is read, what is refused and how, and what the fingerprint covers."""

from __future__ import annotations

import copy
import doctest
import os
import pickle
import random
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import cost_models
from cost_models import PRESETS, Hosts, Profile, ProfileError, load_profile
from cost_models.profile_text import MAX_BYTES

from .texts import GOOD

PRESET_DIR = Path(cost_models.__file__).parent / "profiles"


def test_a_users_profile_is_read(load: Callable[[str], Profile]) -> None:
    profile = load(GOOD)
    assert (profile.name, profile.memory_bytes) == ("two-boxes", 24_000_000_000)
    assert isinstance(profile.network, Hosts) and profile.network.devices_per_host == 4
    assert [link.name for link in profile.topology(("dp", "tp"), (2, 4)).links] == ["Ethernet", "PCIe 4"]
    assert profile.op_s("bfloat16", 56e12, 0, "matmul") == pytest.approx(1 + 5e-6)


def test_the_presets_are_the_shipped_files() -> None:
    assert sorted(PRESETS) == sorted(path.stem for path in PRESET_DIR.glob("*.yaml")) == list(PRESETS)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_states_its_name_its_sources_and_its_memory(name: str) -> None:
    profile = load_profile(name)
    assert profile.name == name
    assert len(str(profile.provenance)) > 100
    assert profile.memory_bytes > 1e9
    assert re.fullmatch(r"sha256:[0-9a-f]{64}", profile.fingerprint)
    assert pickle.loads(pickle.dumps(profile)) == profile
    assert hash(profile) == hash(load_profile(name))


@pytest.mark.parametrize("name", PRESETS)
def test_every_constant_of_a_preset_stands_beside_its_source(name: str) -> None:
    """In a comment on the number's line or above it, or on the line of the table that holds it."""
    text = (PRESET_DIR / f"{name}.yaml").read_text()
    lines = text.splitlines()

    def sourced(line: int) -> bool:
        return "#" in lines[line] or lines[line - 1].lstrip().startswith("#")

    unsourced = [
        lines[line]
        for table, line in numbered_lines(yaml.compose(text))
        if not (sourced(line) or sourced(table)) and not lines[line].startswith("version")
    ]
    assert unsourced == []


def numbered_lines(node: yaml.Node, table: int = 0) -> list[tuple[int, int]]:
    """Of each number below a node: the line of the key of its table, and its own."""
    if isinstance(node, yaml.MappingNode):
        return [
            found
            for key, value in node.value
            for found in numbered_lines(value, table if isinstance(value, yaml.ScalarNode) else key.start_mark.line)
        ]
    if isinstance(node, yaml.SequenceNode):
        return [found for value in node.value for found in numbered_lines(value, table)]
    return [(table, node.start_mark.line)] if re.fullmatch(r"[\d.]+(e-?\d+)?", node.value) else []


def shuffled(value: Any, seed: int) -> Any:
    if not isinstance(value, dict):
        return value
    keys = list(value)
    random.Random(seed).shuffle(keys)
    return {key: shuffled(value[key], seed) for key in keys}


@pytest.mark.parametrize("name", PRESETS)
def test_the_fingerprint_survives_reformatting(name: str, load: Callable[[str], Profile]) -> None:
    text = (PRESET_DIR / f"{name}.yaml").read_text()
    expected = load_profile(name).fingerprint
    assert load(re.sub(r"\s*#.*", "", text)).fingerprint == expected
    assert load(text.replace("\n", "\r\n")).fingerprint == expected
    entries = yaml.safe_load(text)
    for flow in (True, False):
        reordered = yaml.safe_dump(shuffled(numbers(entries), seed=3), sort_keys=False, default_flow_style=flow)
        assert load(reordered).fingerprint == expected


def numbers(value: Any) -> Any:
    """PyYAML alone reads 80e9 as text."""
    if isinstance(value, dict):
        return {key: numbers(entry) for key, entry in value.items()}
    if isinstance(value, str) and re.fullmatch(r"[\d.]+e[-+]?\d+", value):
        return float(value)
    return value


def test_the_fingerprint_survives_other_spellings_of_the_same_values(load: Callable[[str], Profile]) -> None:
    expected = load(GOOD).fingerprint
    same = [
        GOOD.replace("24e9", "24000000000"),
        GOOD.replace("1e12", "1000000000000"),
        GOOD.replace("40e12", "4.0e+13"),
        GOOD.replace("measured by hand", "measured by another hand"),
        GOOD.replace("20e9}", "20e9, efficiency: {}, reduce_scatter_as_all_reduce: false}"),
    ]
    assert [load(text).fingerprint for text in same] == [expected] * len(same)


def test_every_value_is_part_of_the_fingerprint(load: Callable[[str], Profile]) -> None:
    entries = yaml.safe_load(GOOD)
    seen = {load(GOOD).fingerprint}
    leaves = [path for path in walk(entries) if path[-1] not in ("version", "provenance")]
    for path in leaves:
        changed = copy.deepcopy(entries)
        table = changed
        for key in path[:-1]:
            table = table[key]
        value = table[path[-1]]
        number = isinstance(value, int | float) or re.fullmatch(r"[\d.]+e-?\d+", value)
        table[path[-1]] = int(value * 2) if isinstance(value, int) else float(value) / 2 if number else value + "!"
        seen.add(load(yaml.safe_dump(changed)).fingerprint)
    assert len(seen) == len(leaves) + 1


def walk(value: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    if not isinstance(value, dict):
        return [path]
    return [leaf for key in value for leaf in walk(value[key], (*path, key))]


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("version: 1\n", "", "version is missing"),
        ("version: 1", "version: 3", "of version 3; this autoshard reads versions 1 and 2"),
        ("version: 1", "version: true", "of version True"),
        ("name: two-boxes\n", "", "name is missing"),
        ("  launch_s: 5e-6\n", "", r"compute\.launch_s is missing"),
        ("float32: 40e12, ", "", r"peak_flops_per_s\.float32 is missing"),
        ("default: 0.2, ", "", r"compute_efficiency\.default is missing"),
        ("{default: 0.8}", "{}", r"memory_efficiency\.default is missing"),
        ("latency_s: 2e-6, ", "", r"links\.intra_host\.latency_s is missing"),
        ("  intra_host:", "  intra_hots:", r"intra_host is missing.*intra_hots is not an entry.*did you mean 'intra_h"),
        ("launch_s: 5e-6", "launch_s: -5e-6", r"compute\.launch_s is -5e-06, expected greater than or equal to 0"),
        ("3e9}", "0}", r"inter_host\.bandwidth_bytes_per_s is 0, expected greater than 0"),
        ("40e12", ".nan", r"peak_flops_per_s\.float32 is nan, expected a finite number"),
        ("40e12", ".inf", r"peak_flops_per_s\.float32 is inf, expected a finite number"),
        ("40e12", "1e999", r"peak_flops_per_s\.float32 is inf, expected a finite number"),
        ("40e12", "fast", r"peak_flops_per_s\.float32 is 'fast', expected a valid number"),
        ("40e12", "'40e12'", r"peak_flops_per_s\.float32 is '40e12', expected a valid number"),
        ("40e12", "true", r"peak_flops_per_s\.float32 is True, expected a valid number"),
        ("40e12", "", r"peak_flops_per_s\.float32 is None, expected a valid number"),
        ("40e12", "9" * 400, r"peak_flops_per_s\.float32 is inf, expected a finite number"),
        ("matmul: 0.7", "matmul: 1.7", r"compute_efficiency\.matmul is 1\.7, expected less than or equal to 1"),
        (
            "matmul: 0.7",
            "matmull: 0.7",
            r"compute_efficiency\.matmull: 'matmull' is no kind of kernel; did you mean 'matmul'",
        ),
        ("bfloat16: 80e12", "bf16: 80e12", r"peak_flops_per_s\.bf16 is 'bf16', expected 'float64', 'float32'"),
        ("devices_per_host: 4", "devices_per_host: 0", "devices_per_host is 0"),
        ("devices_per_host: 4", "devices_per_host: 2.5", "devices_per_host is 2.5"),
        ("memory_bytes: 24e9", "memory_bytes: 24.5", "memory_bytes is 24.5, expected a valid integer"),
        ("20e9}", "20e9, efficiency: {all_gathr: 1}}", r"efficiency\.all_gathr is 'all_gathr', expected 'all_gather'"),
        (
            "20e9}",
            "20e9, efficiency: {all_reduce: 0.9, reduce_scatter: 0.4}}",
            r"links\.intra_host: efficiency is not monotone: all_reduce 0\.9 is above twice reduce_scatter 0\.4",
        ),
        ("compute:\n", "colour: red\ncompute:\n", "colour is not an entry of a profile"),
        ("name: two-boxes", "name: two-boxes\nname: three", "line 3: 'name' stands here a second time"),
        ("name: two-boxes", "name: &a two-boxes", "line 2: the anchor &a is not allowed in a profile file"),
        ("name: two-boxes", "name: *a", r"line 2: the alias \*a is not allowed"),
        ("name: two-boxes", "name: !!python/object/apply:os.system [id]", "line 2: the tag .*os.system is not allowed"),
        ("name: two-boxes", "name: " + "[" * 17 + "]" * 17, "line 2: the file is nested more than 16 deep"),
        ("name: two-boxes", "{name: x}: two-boxes", "line 2: a key must be a name"),
        ("name: two-boxes", 'name: "\\UFFFFFFFF"', "is not YAML"),
        ("name: two-boxes", "name: 'two-boxes", "is not YAML"),
        ("name: two-boxes", "name: 2026-11-20", None),
    ],
)
def test_a_bad_entry_gets_its_clear_error(
    before: str, after: str, message: str | None, load: Callable[[str], Profile]
) -> None:
    assert GOOD.count(before) == 1
    if message is None:
        assert load(GOOD.replace(before, after)).name == "2026-11-20"
        return
    with pytest.raises(ProfileError, match=rf"(?s)hardware profile .*profile\.yaml: .*{message}"):
        load(GOOD.replace(before, after))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file is empty"),
        (b"- 1\n- 2\n", "holds a list"),
        (b"autoshard_plan: 8\n", "the file is a plan, and no profile; name a preset or a profile"),
        (b"dgx-h100", "holds a str"),
        (b"a: 1\n---\nb: 2\n", "line 2: a second document starts here"),
        (b"a: [1, 2", "is not YAML"),
        (b"a: \x00", "is not YAML"),
        (b"\xff\xfe\xfa", "not UTF-8 text"),
        (b"#" * (MAX_BYTES + 1), "larger than 65536 bytes"),
        (b"[" * MAX_BYTES, "nested more than 16 deep"),
        (b"x: " + b"1" * 5000, "version is missing"),
    ],
)
def test_what_is_no_profile_gets_its_clear_error(
    content: bytes, message: str, load: Callable[[str | bytes], Profile]
) -> None:
    with pytest.raises(ProfileError, match=message):
        load(content)


def test_many_faults_are_named_up_to_a_handful(load: Callable[[str], Profile]) -> None:
    with pytest.raises(ProfileError, match=r"name is missing; .* \(and 1 more\)"):
        load("version: 1\ncolour: red\ntaste: sweet\n")


def test_a_missing_file_gets_its_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=r"no such file; the presets are a100-40, cpu-gloo, dgx-a100, dgx-b200"):
        load_profile(str(tmp_path / "none.yaml"))


def test_a_name_too_long_for_a_file_gets_its_clear_error() -> None:
    for name in ("x" * 5000, "x/" * 5000, "a/\0.yaml"):
        with pytest.raises(ProfileError, match="the presets are"):
            load_profile(name)


def test_what_is_no_plain_file_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    with pytest.raises(ProfileError, match="not a plain file"):
        load_profile(str(tmp_path / "pipe.yaml"))


def test_a_folder_is_told_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=rf"{tmp_path} is a folder; give the file in it, for example {tmp_path}/"):
        load_profile(str(tmp_path))


def test_an_unreadable_file_gets_its_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "p.yaml").write_text(GOOD)

    def refuse(*args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ProfileError, match=r"cannot be read: .*Permission denied"):
        load_profile(str(tmp_path / "p.yaml"))


@pytest.mark.parametrize("name", ["dgx-h10", "DGX-H100", "", "cpu_gloo"])
def test_an_unknown_name_lists_the_presets(name: str) -> None:
    with pytest.raises(
        ProfileError, match=r"unknown hardware profile .*presets are a100-40, cpu-gloo, dgx-a100, dgx-b200, dgx-h100"
    ):
        load_profile(name)


def test_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(ProfileError, match="did you mean 'dgx-h100'"):
        load_profile("dgx-h10")


def test_torch_is_never_loaded() -> None:
    code = (
        "import sys, cost_models\n"
        "profile = cost_models.load_profile('dgx-h100')\n"
        "profile.topology(('dp',), (8,)).collective_s('all_gather', 0, 1.0)\n"
        "bad = {'torch', 'autoshard', 'solver', 'ortools', 'pulp'} & {name.partition('.')[0] for name in sys.modules}\n"
        "sys.exit(f'loaded {bad}' if bad else 0)\n"
    )
    root = Path(cost_models.__file__).parent.parent
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root)


def test_the_public_names_are_all_there() -> None:
    assert set(cost_models.__all__) >= {"Profile", "Topology", "Link", "load_profile", "PRESETS", "ProfileError"}
    assert all(hasattr(cost_models, name) for name in cost_models.__all__)


def test_the_documented_profiles_load_and_those_of_a_cluster_are_ten_lines(load: Callable[[str], Profile]) -> None:
    page = (Path(cost_models.__file__).parent.parent / "docs" / "cost_models.md").read_text()
    examples = {load(text).name: text for text in re.findall(r"```yaml\n(.*?)```", page, flags=re.DOTALL)}
    assert {"our-h100s", "two-boxes", "my-two-hosts"} <= set(examples)
    assert all(len(examples[name].splitlines()) <= 10 for name in ("our-h100s", "two-boxes"))


def test_the_examples_of_the_docstrings_hold() -> None:
    assert doctest.testmod(cost_models).failed == 0
