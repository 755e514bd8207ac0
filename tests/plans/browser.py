"""A page opened in a real Chromium without a window: its final DOM, what its console said, a picture, a print."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
MISSING = "no Chromium here: apt-get install chromium (as .ci/run does where it may)"
QUIET = (
    "--headless",
    "--no-sandbox",  # root has none
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--enable-logging=stderr",
)
_CONSOLE = re.compile(r":CONSOLE[:(\d)]*\] \"(.*)\", source: ")


@dataclass(frozen=True)
class Opened:
    """What Chromium made of a page."""

    dom: str
    console: list[str]


def find() -> str | None:
    """Chromium's path, if there is one."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


def open_page(
    page: Path, fragment: str = "", options: Sequence[str] = ("--dump-dom",), timeout_s: float = 90
) -> Opened:
    """Opens a file in a fresh, empty profile, with no network name resolving.

    Raises:
        RuntimeError: Chromium is missing, fails, or takes longer than ``timeout_s``.
    """
    chromium = find()
    if chromium is None:
        raise RuntimeError(MISSING)
    address = page.resolve().as_uri() + (f"#{fragment}" if fragment else "")
    with tempfile.TemporaryDirectory() as profile:
        command = [chromium, *QUIET, f"--user-data-dir={profile}", "--host-resolver-rules=MAP * ~NOTFOUND", *options]
        done = subprocess.run(
            [*command, address], capture_output=True, text=True, timeout=timeout_s, env=os.environ | {"HOME": profile}
        )
    if done.returncode:
        raise RuntimeError(f"Chromium ended with {done.returncode}: {done.stderr[-2000:]}")
    return Opened(done.stdout, _CONSOLE.findall(done.stderr))
