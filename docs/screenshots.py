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
WIDTH = 1400
NARROW = 500  # Chromium's window is no narrower
TIGHT, ROOMY = "llama3_8b-tight.yaml", "llama3_8b.yaml"
PICTURES = {
    "report.png": ((TIGHT,), "", WIDTH, 1290, ()),
    "report-lanes.png": ((TIGHT,), "only=lanes", WIDTH, 870, ()),
    "report-memory.png": ((TIGHT,), "only=memory", WIDTH, 1180, ()),
    "report-map.png": ((TIGHT,), "only=map", WIDTH, 960, ()),
    "report-modules.png": ((TIGHT,), "only=modules", WIDTH, 900, ()),
    "report-comparison.png": ((ROOMY, TIGHT), "", WIDTH, 1290, ()),
    "report-dark.png": ((TIGHT,), "only=lanes", WIDTH, 870, ("--blink-settings=preferredColorScheme=0",)),
    "report-narrow.png": ((TIGHT,), "", NARROW, 1800, ()),
}
"""For each picture the plans, what the page is asked, the picture's width and height, and what the browser is told."""


def main() -> None:
    """Writes every picture."""
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for plans in {plans for plans, *_ in PICTURES.values()}:
            command = [sys.executable, "-m", "autoshard", "report", *plans, "-o", str(_page(folder, plans))]
            subprocess.run(command, cwd=PLANS, check=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
        for name, (plans, part, width, height, told) in PICTURES.items():
            picture = IMAGES / name
            opened = (f"--screenshot={picture}", f"--window-size={width},{height}", "--virtual-time-budget=2000")
            browser.open_page(_page(folder, plans), part, (*opened, *told))
            print(f"wrote {picture} ({picture.stat().st_size >> 10} KiB)")


def _page(folder: str, plans: tuple[str, ...]) -> Path:
    return Path(folder) / f"{len(plans)}.html"


if __name__ == "__main__":
    main()
