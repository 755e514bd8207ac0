"""The samples file: what is written is read, what is damaged is refused by line, what was cut short is continued."""

from __future__ import annotations

import json
import math
import os
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models.samples import (
    CollectivePoint,
    Header,
    KernelPoint,
    RowPoint,
    Sample,
    SamplesError,
    SamplesFile,
    TogetherPoint,
    read_samples,
)

ROOT = Path(__file__).resolve().parent.parent.parent
HEADER = Header("dp=2,tp=2", (0, 0, 1, 1), "cpu", "gloo", {"cores": "2"}, {"torch": "2.13.0"}, "2026-11-20", "run")

words = st.text(min_size=1, max_size=20)
seconds = st.floats(min_value=1e-9, max_value=1e6)
amounts = st.floats(min_value=0, max_value=1e18)
collectives = st.builds(CollectivePoint, words, words, st.integers(1, 1 << 60), st.booleans())
kernels = st.builds(
    KernelPoint,
    words,
    words,
    words,
    st.lists(st.integers(0, 1 << 40), max_size=4).map(tuple),
    amounts,
    amounts,
    st.booleans(),
)
rows = st.lists(kernels, min_size=1, max_size=4).map(tuple)
points = st.one_of(
    collectives,
    kernels,
    st.builds(TogetherPoint, collectives, kernels, st.integers(1, 1 << 20)),
    st.builds(RowPoint, rows, st.integers(0, 1 << 20), st.none() | collectives),
)
samples = st.builds(Sample, points, st.integers(0, 1 << 40), seconds)


@given(st.lists(samples, max_size=5), st.booleans())
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, given: list[Sample], done: bool) -> None:
    path = tmp_path_factory.mktemp("samples") / "s.jsonl"
    file = SamplesFile(path, HEADER)
    for sample in given:
        file.append([sample])
    if done:
        file.finish()
    file.close()
    found = read_samples(path)
    assert (found.header, found.samples, found.complete) == (HEADER, tuple(given), done)
    assert found.header.machine == HEADER.machine


def written(path: Path, count: int = 3) -> Path:
    file = SamplesFile(path, HEADER)
    file.append(_sample(round) for round in range(count))
    file.close()
    return path


def _sample(round: int) -> Sample:
    return Sample(CollectivePoint("all_reduce", "dp", 1024, held_out=False), round, 1e-3)


@pytest.mark.parametrize("cut", range(1, 40, 7))
def test_a_file_cut_anywhere_in_its_last_line_is_continued_behind_the_line_before(tmp_path: Path, cut: int) -> None:
    path = written(tmp_path / "s.jsonl")
    path.write_bytes(path.read_bytes()[:-cut])
    file = SamplesFile(path, HEADER)
    assert len(file.before.samples) == 2
    file.append([_sample(7)])
    file.close()
    assert [sample.round for sample in read_samples(path).samples] == [0, 1, 7]


@pytest.mark.parametrize("kept", [0, 1, 50])
def test_a_file_cut_in_its_first_line_is_begun_anew(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "s.jsonl"
    path.write_text(HEADER.line()[:kept])
    assert [sample.round for sample in read_samples(written(path)).samples] == [0, 1, 2]


OTHERS = {
    "mesh": (replace(HEADER, mesh="dp=4"), "mesh dp=4 instead of dp=2,tp=2"),
    "hosts": (replace(HEADER, hosts=(0, 0, 0, 0)), "hosts (0, 0, 0, 0) instead of (0, 0, 1, 1)"),
    "machine": (replace(HEADER, machine={"cores": "8"}), "machine cores 8 instead of 2"),
    "versions": (replace(HEADER, versions={"torch": "2.14"}), "versions torch 2.14 instead of 2.13.0"),
    "backend": (replace(HEADER, backend="nccl"), "backend nccl instead of gloo"),
}


@pytest.mark.parametrize("what", OTHERS)
def test_samples_of_another_mesh_or_machine_are_not_mixed(tmp_path: Path, what: str) -> None:
    other, said = OTHERS[what]
    path = written(tmp_path / "s.jsonl")
    before = path.read_bytes()
    with pytest.raises(SamplesError, match=".*".join(map(_escaped, (said, "--samples")))):
        SamplesFile(path, other)
    assert path.read_bytes() == before


def _escaped(text: str) -> str:
    return text.replace("(", r"\(").replace(")", r"\)")


def test_a_later_run_of_the_same_command_continues(tmp_path: Path) -> None:
    path = written(tmp_path / "s.jsonl")
    file = SamplesFile(path, replace(HEADER, created="2026-11-21", command="the same"))
    file.close()
    assert (len(file.before.samples), read_samples(path).header.created) == (3, HEADER.created)


GOOD = json.loads(_sample(0).line())
DAMAGE = {
    "not json": ("{", "line 2"),
    "a list": ("[]", "line 2"),
    "negative": (json.dumps(GOOD | {"seconds": -1.0}), "line 2: seconds"),
    "zero": (json.dumps(GOOD | {"seconds": 0.0}), "line 2: seconds"),
    "nan": (json.dumps(GOOD | {"seconds": math.nan}), "line 2"),
    "infinite": (json.dumps(GOOD | {"seconds": math.inf}), "line 2"),
    "text": (json.dumps(GOOD | {"seconds": "1"}), "line 2: seconds"),
    "unknown entry": (json.dumps(GOOD | {"more": 1}), "line 2: more"),
    "no bytes": (json.dumps(GOOD | {"size_bytes": 0}), "line 2: size_bytes"),
    "missing": (json.dumps({k: v for k, v in GOOD.items() if k != "axis"}), "line 2: axis"),
    "binary": ("\udcff", "line 2"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_line_is_refused_by_its_number(tmp_path: Path, damage: str) -> None:
    line, said = DAMAGE[damage]
    path = tmp_path / "s.jsonl"
    text = "\n".join([HEADER.line(), line, _sample(1).line(), ""])
    path.write_bytes(text.encode(errors="surrogateescape"))
    for use in (read_samples, lambda path: SamplesFile(path, HEADER)):
        with pytest.raises(SamplesError, match=said):
            use(path)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "first line"),
        (b"x\n", "no samples file of version 1"),
        (b'{"autoshard_samples":2}\n', "no samples file of version 1"),
    ],
)
def test_what_is_no_samples_file_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "s.jsonl"
    path.write_bytes(content)
    with pytest.raises(SamplesError, match=said):
        read_samples(path)


def test_a_missing_file_or_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SamplesError, match="no such file"):
        read_samples(tmp_path / "none.jsonl")
    with pytest.raises(SamplesError, match="no such file"):
        SamplesFile(tmp_path / "none" / "s.jsonl", HEADER)
    with pytest.raises(SamplesError, match="not an ordinary file"):
        SamplesFile(tmp_path, HEADER)


FULL = """
import resource, signal, sys
from tests.cost_models.test_samples import HEADER, _sample
from cost_models.samples import SamplesError, SamplesFile
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
file = SamplesFile(sys.argv[1], HEADER)
try:
    for round in range(1000):
        file.append([_sample(round)])
except SamplesError as error:
    print(file.count, error)
"""


def test_a_disk_that_fills_up_keeps_every_whole_sample(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(path)], capture_output=True, text=True, env=environment, timeout=60
    )
    assert done.returncode == 0, done.stderr
    count, _, said = done.stdout.partition(" ")
    assert int(count) > 0
    assert "too large" in said and f"{count} samples are kept" in said
    assert len(read_samples(path).samples) == int(count)
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 1000  # the limit was the other process's
