"""What version 2 of profile files added: measured axes, tori, curves, presets as a base, structured provenance."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from cost_models import (
    PRESETS,
    Curve,
    Hosts,
    MeasuredMesh,
    Profile,
    ProfileError,
    Residual,
    dump_profile,
    load_profile,
)

from .texts import BASED, GOOD, MEASURED, TORUS


def test_a_measured_profile_is_read(load: Callable[[str], Profile]) -> None:
    """1e6 flops at a quarter of 60e9 a second take 66.7 us; 1e5 bytes on the way from 65536 to 1e6 take 2.42 ms."""
    profile = load(MEASURED)
    topology = profile.topology(("dp", "tp"), (2, 2))
    sent = 1e-3 + (1e5 - 65536) / (1e6 - 65536) * 39e-3
    assert topology.collective_s("all_gather", 0, 2e5) == pytest.approx(5e-4 + sent)
    assert topology.collective_s("all_reduce", (0, 1), 1e6) == pytest.approx(3e-3 + 1.5 * 1e6 / 20e6)
    assert profile.op_s("float32", 1e6, 0, "matmul") == pytest.approx(2e-6 + 66.67e-6, rel=1e-3)
    assert profile.op_s("bfloat16", 1e6, 0, "matmul") == pytest.approx(2e-6 + 1e6 / 180e9)
    assert profile.copy_s(1e6) == pytest.approx(2e-6 + 1e6 / 20e9)
    assert profile.provenance.collectives["dp"]["all_gather"] == Residual(0.1, 0.3, 12)
    assert "dp all_gather: median 10%, largest 30% of 12 points" in str(profile.provenance)
    assert "machine: 2 cores" in str(profile.provenance)


def test_what_steps_add_is_read_written_and_part_of_the_fingerprint(load: Callable[[str], Profile]) -> None:
    plain = load(MEASURED)
    assert (plain.compute.issue_s, plain.compute.optimizer_launch_s, plain.meeting_s, plain.bucket_copies) == (
        0,
        0,
        0,
        False,
    )
    assert not any(
        name in dump_profile(plain) for name in ("issue_s", "optimizer_launch_s", "meeting_s", "bucket_copies")
    )
    rows = {"alone": Residual(0.02, 0.05, 3), "with a collective": Residual(0.1, 0.2, 8)}
    others = [
        replace(plain, compute=replace(plain.compute, issue_s=2e-5)),
        replace(plain, compute=replace(plain.compute, optimizer_launch_s=1e-4)),
        replace(plain, meeting_s=1.5e-3),
        replace(plain, bucket_copies=True),
    ]
    for other in others:
        other = replace(other, provenance=replace(plain.provenance, rows=rows))
        assert load(dump_profile(other)) == other
    assert "operators in a row, with a collective: median 10%" in str(other.provenance)
    assert len({each.fingerprint for each in (plain, *others)}) == 5


def test_a_torus_is_read(load: Callable[[str], Profile]) -> None:
    topology = load(TORUS).topology(("dp", "tp"), (4, 4))
    assert [link.name for link in topology.links] == ["PCIe 4 ring of 4", "PCIe 4 ring of 4"]


@pytest.mark.parametrize("text", [GOOD, MEASURED, TORUS], ids=["good", "measured", "torus"])
def test_what_is_dumped_reads_back_as_the_same_profile(text: str, load: Callable[[str], Profile]) -> None:
    profile = load(text)
    dumped = dump_profile(profile)
    again = load(dumped)
    assert (again, again.fingerprint, dump_profile(again)) == (profile, profile.fingerprint, dumped)
    assert dumped.startswith("version: 2\n")


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_dumped_and_reads_back(name: str, load: Callable[[str], Profile]) -> None:
    profile = load_profile(name)
    assert load(dump_profile(profile)) == profile


def test_a_profile_that_breaks_a_rule_is_not_dumped(load: Callable[[str], Profile]) -> None:
    profile = load(MEASURED)
    assert isinstance(profile.network, MeasuredMesh)
    bad = replace(profile.network.links[0], curves={"all_gather": Curve(((10.0, 2.0), (20.0, 1.0)), 1.0)})
    with pytest.raises(ProfileError, match="not monotone"):
        dump_profile(replace(profile, network=replace(profile.network, links=(bad, profile.network.links[1]))))


def test_a_profile_of_version_1_is_read_as_the_same_one_of_version_2(load: Callable[[str], Profile]) -> None:
    old, new = load(GOOD), load(GOOD.replace("version: 1", "version: 2"))
    assert (old, old.fingerprint) == (new, new.fingerprint)


def test_a_fingerprint_follows_the_values_of_a_profile_made_in_code(load: Callable[[str], Profile]) -> None:
    profile = load(GOOD)
    assert replace(profile, name="other").fingerprint == load(GOOD.replace("two-boxes", "other")).fingerprint
    assert replace(profile, memory_bytes=1).fingerprint != profile.fingerprint


def test_a_profile_based_on_a_preset_overrides_what_it_names(load: Callable[[str], Profile]) -> None:
    profile, base = load(BASED), load_profile("dgx-h100")
    assert isinstance(profile.network, Hosts) and isinstance(base.network, Hosts)
    assert profile.compute == base.compute
    assert profile.network.intra_host == base.network.intra_host
    assert (profile.name, profile.network.devices_per_host) == ("our-h100s", 4)
    over, under = profile.network.inter_host, base.network.inter_host
    assert over is not None and under is not None
    assert (over.name, over.bandwidth_bytes_per_s, over.latency_s) == ("RoCE", 25e9, under.latency_s)
    assert over.efficiency == {**under.efficiency, "all_to_all": 0.5}
    assert profile.fingerprint != base.fingerprint
    assert "h100s" in dump_profile(profile) and "based_on" not in dump_profile(profile)


def test_another_kind_of_network_replaces_that_of_the_preset(load: Callable[[str], Profile]) -> None:
    entry = "{size: 2, name: x, launch_s: 1e-6, latency_s: 0, bandwidth_bytes_per_s: 1e9}"
    measured = load(f"version: 2\nname: mine\nbased_on: dgx-h100\nprovenance: measured\naxes:\n  dp: {entry}\n")
    assert measured.topology(("dp",), (2,)).links[0].name == "x"


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("based_on: dgx-h100", "based_on: dgx-h10", r"'dgx-h10', which is no preset; .*did you mean 'dgx-h100'"),
        ("based_on: dgx-h100", "based_on: [dgx-h100]", "which is no preset"),
        ("name: our-h100s\n", "", "name is missing"),
        ("provenance: as", "# as", "provenance is missing"),
        ("25e9", "-25e9", r"links\.inter_host\.bandwidth_bytes_per_s is -25000000000\.0, expected greater than 0"),
    ],
)
def test_a_bad_override_gets_its_clear_error(
    before: str, after: str, message: str, load: Callable[[str], Profile]
) -> None:
    assert BASED.count(before) == 1
    with pytest.raises(ProfileError, match=rf"(?s)profile\.yaml: .*{message}"):
        load(BASED.replace(before, after))


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (
            "[65536, 1e-3]",
            "[65536, 5e-5]",
            r"axes\.dp\.curves\.all_gather: the curve is not monotone: knot 1 has 5e-05 s",
        ),
        ("[65536, 1e-3]", "[512, 1e-3]", r"curves\.all_gather: knot 1 is at 512, not above the 1024"),
        ("[1e6, 4e-2]", "[1e6, 1e-3]", "the last two knots both have 0.001 s"),
        ("[1e6, 4e-2]", "[1e6, .nan]", r"curves\.all_gather\.2\.1 is nan, expected a finite number"),
        ("[1e6, 4e-2]", "[1e6, -4e-2]", r"curves\.all_gather\.2\.1 is -0\.04, expected greater than 0"),
        ("[1e6, 4e-2]", "[1e6]", r"curves\.all_gather\.2 is \[1000000\.0\].*at least 2 items"),
        ("[[1024, 1e-4], [65536, 1e-3], [1e6, 4e-2]]", "[]", r"curves\.all_gather is \[\].*at least 1 item"),
        ("curves: {all_gather:", "curves: {all_gathr:", r"curves\.all_gathr is 'all_gathr', expected 'all_gather'"),
        ("launches_s: {all_gather: 5e-4}", "launches_s: {all_gather: -1}", r"launches_s\.all_gather is -1"),
        (
            "launches_s: {all_gather: 5e-4}",
            "launches_s: {all_reduce: 5e-4}",
            r"axes\.dp: launches are not monotone: all_reduce 0\.0005 s is below reduce_scatter 0\.001 s",
        ),
        (
            "curves: {all_gather:",
            "curves: {reduce_scatter: [[1000, 1]], all_gather:",
            r"axes\.dp: curves are not monotone: where a reduce_scatter sends 500 bytes",
        ),
        (
            "name: fast, ",
            "name: fast, curves: {all_reduce: [[1, 1]]}, alternatives: "
            "[{name: t, hops: tree, launch_s: 0, latency_s: 0, bandwidth_share: 1}], ",
            r"axes\.tp: curves: with alternatives, all_reduce and reduce_scatter both have a curve or neither",
        ),
        ("  tp: {size: 2, ", "  tp: {", r"axes\.tp\.size is missing"),
        ("  tp: {size: 2, ", "  tp: {size: 0, ", r"axes\.tp\.size is 0"),
        ("dp+tp: {size: 4", "dp+tp: {size: 8", r"axes\.dp\+tp\.size is 8, but its axes have 4 ranks"),
        ("dp+tp:", "tp+dp:", r"axes\.tp\+dp: a group names axes of the profile in their order \(dp, tp\)"),
        ("dp+tp:", "dp+pp:", r"axes\.dp\+pp: a group names axes"),
        ("dp+tp:", "dp tp:", r"axes\.dp tp is 'dp tp'"),
        ("axes:\n", "axes: {}\nlinks:\n", "links.intra_host is missing"),
        (
            "memory_bytes: 6e9\n",
            "memory_bytes: 6e9\ndevices_per_host: 4\n",
            "devices_per_host and torus belong to links",
        ),
        ("[1e9, 0.8]", "[1e9, 1.8]", r"compute_efficiency\.matmul: the share 1\.8 at 1e\+09 is above 1"),
        (
            "[1e9, 0.8]",
            "[2e6, 0.8]",
            r"compute_efficiency\.matmul: the efficiency is not monotone in time: knot 1, 2e\+06",
        ),
        (
            "matmul/bfloat16: 0.9",
            "matmul/bf16: 0.9",
            r"compute_efficiency\.matmul/bf16: 'matmul/bf16' is no kind of kernel",
        ),
        ("date: 2026-11-20", "date: yesterday", r"provenance\.date: 'yesterday' is no date; write it as 2026-11-20"),
        ("sources: measured by a test", "sauces: none", r"provenance\.sources is missing"),
        ("largest: 0.3, ", "largest: 0.05, ", r"all_gather: the largest error 0\.05 is below the median 0\.1"),
        ("{median: 0.1, ", "{median: -0.1, ", r"provenance\.residuals\.collectives\.dp\.all_gather\.median is -0\.1"),
        ("machine: 2 cores", "engine: 2 cores", r"provenance\.engine is not an entry of a profile"),
    ],
)
def test_a_bad_entry_of_a_measured_profile_gets_its_clear_error(
    before: str, after: str, message: str, load: Callable[[str], Profile]
) -> None:
    assert MEASURED.count(before) == 1
    with pytest.raises(ProfileError, match=rf"(?s)hardware profile .*profile\.yaml: .*{message}"):
        load(MEASURED.replace(before, after))


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("shape: [4, 4]", "shape: [4, 5]", r"devices_per_host is 16, but a torus of \[4, 5\] has 20 devices"),
        ("shape: [4, 4]", "shape: []", r"torus\.shape is \[\]"),
        ("shape: [4, 4]", "shape: [4, 4], wraparound: [true]", "wraparound has 1 entries for 2 dimensions"),
        ("[[2, 2]]", "[[2, 8]]", r"torus: the slice \[2, 8\] is no part of a torus of \[4, 4\]"),
        ("[[2, 2]]", "[[2, 2], [1, 4]]", "two slices have the same number of devices"),
        ("devices_per_host: 16\n", "", "devices_per_host is missing"),
        ("20e9}", "20e9, curves: {all_gather: [[1, 1]]}}", "of a torus is one link: it has neither curves nor"),
        (
            "links:\n",
            "axes: {x: {size: 2, name: x, launch_s: 0, latency_s: 0, bandwidth_bytes_per_s: 1}}\nlinks:\n",
            "either links .* or axes .*; both are there",
        ),
        (
            "3e9}",
            "3e9, alternatives: [{name: t, hops: star, launch_s: 0, latency_s: 0, bandwidth_share: 1}]}",
            r"links\.inter_host\.alternatives\.0\.hops is 'star', expected 'ring', 'tree' or 'switch'",
        ),
    ],
)
def test_a_bad_entry_of_a_torus_or_of_links_gets_its_clear_error(
    before: str, after: str, message: str, load: Callable[[str], Profile]
) -> None:
    assert TORUS.count(before) == 1
    with pytest.raises(ProfileError, match=rf"(?s)profile\.yaml: .*{message}"):
        load(TORUS.replace(before, after))
