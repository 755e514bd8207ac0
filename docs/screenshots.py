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
WIDTH, NARROW = 1400, 400
TIGHT, ROOMY = "llama3_8b-tight.yaml", "llama3_8b.yaml"
PICTURES = {
    "report.png": ((TIGHT,), "", WIDTH, 1290, False),
    "report-lanes.png": ((TIGHT,), "only=lanes", WIDTH, 930, False),
    "report-memory.png": ((TIGHT,), "only=memory", WIDTH, 1180, False),
    "report-map.png": ((TIGHT,), "only=map", WIDTH, 1050, False),
    "report-modules.png": ((TIGHT,), "only=modules", WIDTH, 1050, False),
    "report-comparison.png": ((ROOMY, TIGHT), "", WIDTH, 1290, False),
    "report-dark.png": ((TIGHT,), "only=lanes", WIDTH, 930, True),
    "report-narrow.png": ((TIGHT,), "", NARROW, 1800, False),
}
"""For each picture the plans, what the page is asked, the picture's width and height, and whether it is dark."""


def main() -> None:
    """Writes every picture."""
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, browser.window() as window:
        for plans in {plans for plans, *_ in PICTURES.values()}:
            command = [sys.executable, "-m", "autoshard", "report", *plans, "-o", str(_page(folder, plans))]
            subprocess.run(command, cwd=PLANS, check=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
        for name, (plans, part, width, height, dark) in PICTURES.items():
            window.show(_page(folder, plans), width, part, dark)
            window.picture(IMAGES / name, width, height)
            print(f"wrote {IMAGES / name} ({(IMAGES / name).stat().st_size >> 10} KiB)")


def _page(folder: str, plans: tuple[str, ...]) -> Path:
    return Path(folder) / f"{len(plans)}.html"


if __name__ == "__main__":
    main()
