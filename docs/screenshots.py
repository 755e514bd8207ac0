"""Makes the pictures of the report that the documents show: ``make screenshots``. Needs Chromium.

The plans are those of the golden difference (``python -m tests.plans.write_llama`` makes them anew).
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.plans import browser  # noqa: E402

PLANS = ROOT / "tests" / "plans" / "golden"
IMAGES = ROOT / "docs" / "images"
WIDTH = 1180
PICTURES = {
    "report.png": ("", 1010),
    "report-map.png": ("only=map", 1120),
    "report-modules.png": ("only=modules", 1000),
}
"""What the page is asked for each picture, and the picture's height."""


def main() -> None:
    """Writes every picture."""
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "report.html"
        options = ["-o", str(page), "--baseline", "llama3_8b.yaml"]
        command = [sys.executable, "-m", "autoshard", "report", "llama3_8b-tight.yaml", *options]
        subprocess.run(command, cwd=PLANS, check=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
        for name, (part, height) in PICTURES.items():
            picture = IMAGES / name
            opened = (f"--screenshot={picture}", f"--window-size={WIDTH},{height}", "--virtual-time-budget=2000")
            browser.open_page(page, part, opened)
            print(f"wrote {picture} ({picture.stat().st_size >> 10} KiB)")


if __name__ == "__main__":
    main()
