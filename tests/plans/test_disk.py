from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from autoshard.errors import PlanFileError
from autoshard.plans import ShardingPlan, check_writable, dump_plan, read_plan, write_plan

from .synthetic import transformer_plan

PLAN = transformer_plan(2)
OTHER = transformer_plan(3)


def test_a_written_plan_is_read_back(tmp_path: Path) -> None:
    write_plan(PLAN, tmp_path / "plan.yaml")
    assert read_plan(tmp_path / "plan.yaml") == PLAN
    assert (tmp_path / "plan.yaml").read_text() == dump_plan(PLAN)
    assert os.listdir(tmp_path) == ["plan.yaml"]


def test_a_new_file_has_the_usual_permissions_and_an_old_one_keeps_its_own(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    mask = os.umask(0o027)
    try:
        write_plan(PLAN, path)
        assert path.stat().st_mode & 0o777 == 0o640
        path.chmod(0o600)
        write_plan(OTHER, path)
    finally:
        os.umask(mask)
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_plan(path) == OTHER


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "link.yaml").symlink_to(tmp_path / "plan.yaml")
    write_plan(PLAN, tmp_path / "link.yaml")
    assert (tmp_path / "link.yaml").is_symlink()
    assert read_plan(tmp_path / "plan.yaml") == PLAN


@pytest.mark.parametrize("failing", ["write", "fsync", "replace"])
@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=["full", "stopped"]
)
def test_a_failing_write_leaves_the_good_file_and_no_litter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str, error: BaseException
) -> None:
    path = tmp_path / "plan.yaml"
    write_plan(PLAN, path)
    before = path.read_bytes()

    def fail(*args: object) -> None:
        raise error

    if failing == "write":
        monkeypatch.setattr("autoshard.atomic_write._write_through", _half_then(error))
    else:
        monkeypatch.setattr(os, failing, fail)
    with pytest.raises((PlanFileError, KeyboardInterrupt)) as caught:
        write_plan(OTHER, path)
    if isinstance(error, OSError):
        assert f"cannot write the plan {path}: no space left on device" in str(caught.value)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["plan.yaml"]


def _half_then(error: BaseException) -> object:
    def write(path: Path, data: bytes) -> None:
        path.write_bytes(data[: len(data) // 2])
        raise error

    return write


def test_a_plan_that_cannot_be_dumped_leaves_the_good_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    write_plan(PLAN, path)
    with pytest.raises(PlanFileError):
        write_plan(replace(PLAN, compute_s=float("nan")), path)
    assert read_plan(path) == PLAN


@pytest.mark.parametrize("write", [check_writable, lambda path: write_plan(PLAN, path)], ids=["check", "write"])
@pytest.mark.parametrize(
    ("name", "said"),
    [
        (".", "it is a folder; name a file"),
        ("missing/plan.yaml", "there is no folder"),
        ("file/plan.yaml", "there is no folder"),
        ("pipe", "it is a device or pipe"),
        ("nul\0", "null byte"),
        ("x" * 300, "name too long"),
    ],
    ids=["folder", "no folder", "file as folder", "pipe", "null byte", "long"],
)
def test_a_path_that_cannot_be_written_says_why(tmp_path: Path, write: object, name: str, said: str) -> None:
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(PlanFileError) as caught:
        write(tmp_path / name)  # type: ignore[operator]
    assert said in str(caught.value)
    assert sorted(os.listdir(tmp_path)) == ["file", "pipe"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_place_says_so(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").touch(mode=0o444)
    with pytest.raises(PlanFileError, match="read-only"):
        check_writable(tmp_path / "plan.yaml")
    tmp_path.chmod(0o555)
    with pytest.raises(PlanFileError, match="choose a place you have access to"):
        check_writable(tmp_path / "new.yaml")


def test_a_read_only_file_system_says_so() -> None:
    with pytest.raises(PlanFileError, match=r"cannot write the plan /proc/plan\.yaml"):
        check_writable("/proc/plan.yaml")


def test_checking_leaves_an_old_file_as_it_was(tmp_path: Path) -> None:
    write_plan(PLAN, tmp_path / "plan.yaml")
    check_writable(tmp_path / "plan.yaml")
    check_writable(tmp_path / "new.yaml")
    assert os.listdir(tmp_path) == ["plan.yaml"]
    assert read_plan(tmp_path / "plan.yaml") == PLAN


@pytest.mark.parametrize(
    ("name", "said"),
    [(".", "is a directory; name the file"), ("none.yaml", "no such file"), ("nul\0", "null byte")],
    ids=["folder", "missing", "null byte"],
)
def test_a_path_that_cannot_be_read_says_why(tmp_path: Path, name: str, said: str) -> None:
    with pytest.raises(PlanFileError) as caught:
        read_plan(tmp_path / name)
    assert str(caught.value).startswith("cannot read the plan")
    assert said in str(caught.value)


def test_an_endless_file_is_refused() -> None:
    with pytest.raises(PlanFileError, match="larger than the 64 MiB"):
        read_plan("/dev/zero")


@pytest.mark.parametrize("head", ["", dump_plan(PLAN)], ids=["zeros", "a plan and zeros"])
def test_a_file_of_200_mb_is_refused_before_it_is_read(tmp_path: Path, head: str) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(head)
    os.truncate(path, 200 << 20)
    with pytest.raises(PlanFileError, match="larger than the 64 MiB") as caught:
        read_plan(path)
    assert str(caught.value).startswith(str(path))


def test_an_error_in_a_file_names_the_path(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(dump_plan(PLAN).replace("float32, count: 2", "float32, count: 3", 1))
    with pytest.raises(PlanFileError) as caught:
        read_plan(path)
    assert str(caught.value).startswith(f"{path}, line 40: ")


def test_a_plan_is_not_changed_by_another_process_writing_beside_it(tmp_path: Path) -> None:
    paths = [tmp_path / "plan.yaml"] * 2
    plans: list[ShardingPlan] = [PLAN, OTHER]
    for path, plan in zip(paths, plans):
        write_plan(plan, path)
    assert read_plan(paths[0]) == OTHER
