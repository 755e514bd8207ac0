"""Files of a run: whole or not at all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from autoshard.errors import CalibrationError
from autoshard.measure import check_writable
from autoshard.measure.output import write

ROOT = Path(__file__).resolve().parent.parent.parent


def test_a_file_is_replaced_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    for content in (b"one", b"two"):
        check_writable(path)
        write(path, content)
    assert path.read_bytes() == b"two"
    assert list(tmp_path.iterdir()) == [path]


def test_checking_leaves_no_file(tmp_path: Path) -> None:
    check_writable(tmp_path / "p.yaml")
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_refused_before_the_work(tmp_path: Path) -> None:
    for path, said in ((tmp_path, "it is a folder"), (tmp_path / "none" / "p.yaml", "there is no folder")):
        with pytest.raises(CalibrationError, match=said):
            check_writable(path)


FULL = """
import resource, signal, sys
from pathlib import Path
from autoshard.errors import CalibrationError
from autoshard.measure.output import write
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))
try:
    write(Path(sys.argv[1]), b"x" * 1000)
except CalibrationError as error:
    print(error)
"""


def test_a_disk_that_is_full_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text("good")
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(path)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        timeout=120,
    )
    assert "what was there stays" in done.stdout, done.stderr
    assert path.read_text() == "good"
    assert list(tmp_path.iterdir()) == [path]
