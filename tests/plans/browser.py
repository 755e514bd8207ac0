"""A page opened in a real Chromium without a window: its final DOM, what its console said, a picture, a print."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from select import select
from typing import Any

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
TIMEOUT_S = 90
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
    page: Path, fragment: str = "", options: Sequence[str] = ("--dump-dom",), timeout_s: float = TIMEOUT_S
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


class Shown:
    """A page in a window of any size, which is asked by scripts: over the pipe of the DevTools protocol.

    Source: https://chromedevtools.github.io/devtools-protocol/
    """

    def __init__(self, said: int, heard: int) -> None:
        self._said, self._heard, self._rest, self._number = said, heard, b"", 0
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session: str | None = None
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._call("Page.enable")

    def show(self, page: Path, width: int, fragment: str = "", dark: bool = False, media: str = "") -> None:
        """Loads a page in a window so wide, light or ``dark``, on paper where ``media`` is print."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", media=media, features=[scheme])
        self._size(width, 900)
        self._call("Page.navigate", url="about:blank")  # else another fragment loads nothing
        self._event("Page.loadEventFired")
        self._call("Page.navigate", url=page.resolve().as_uri() + (f"#{fragment}" if fragment else ""))
        self._event("Page.loadEventFired")

    def ask(self, script: str) -> Any:
        """What an expression is on the page."""
        said = self._call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in said, said
        return said["result"].get("value")

    def picture(self, path: Path, width: int, height: int) -> None:
        """Writes what is at the top of the page, or all of it where the height is 0, as PNG."""
        self._size(width, height or self.ask("document.documentElement.scrollHeight"))
        path.write_bytes(base64.b64decode(self._call("Page.captureScreenshot", format="png")["data"]))

    def _size(self, width: int, height: int) -> None:
        size = {"width": width, "height": height}
        self._call("Emulation.setDeviceMetricsOverride", **size, deviceScaleFactor=1, mobile=width < 700)

    def _call(self, method: str, **arguments: Any) -> Any:
        self._number += 1
        asked = {"id": self._number, "method": method, "params": arguments}
        if method.partition(".")[0] != "Target":
            asked["sessionId"] = self._session
        os.write(self._said, json.dumps(asked).encode() + b"\0")
        while (heard := self._next()).get("id") != self._number:
            pass
        assert "error" not in heard, heard
        return heard["result"]

    def _event(self, method: str) -> None:
        while self._next().get("method") != method:
            pass

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            more = os.read(self._heard, 1 << 20) if select([self._heard], [], [], TIMEOUT_S)[0] else b""
            if not more:
                raise RuntimeError(f"Chromium has ended, or says nothing for {TIMEOUT_S} seconds")
            self._rest += more
        message, _, self._rest = self._rest.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found


@contextmanager
def window() -> Iterator[Shown]:
    """A window in which pages are shown, in a fresh profile, with no network name resolving.

    Raises:
        RuntimeError: Chromium is missing, or ends.
    """
    chromium = find()
    if chromium is None:
        raise RuntimeError(MISSING)
    to_read, said = os.pipe()
    heard, to_write = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = [*QUIET, f"--user-data-dir={profile}", "--host-resolver-rules=MAP * ~NOTFOUND"]
        process = subprocess.Popen(
            # the protocol's pipe is file descriptors 3 and 4 of Chromium
            ["bash", "-c", f'exec "$@" 3<&{to_read} 4>&{to_write}', "-", chromium, *options, "--remote-debugging-pipe"],
            pass_fds=(to_read, to_write),
            stderr=subprocess.DEVNULL,
            env=os.environ | {"HOME": profile},
        )
        os.close(to_read)
        os.close(to_write)
        try:
            yield Shown(said, heard)
        finally:
            os.close(said)  # which ends it
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            os.close(heard)
