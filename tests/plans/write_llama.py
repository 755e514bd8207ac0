"""Makes the two plans of Llama-3-8B on 8x8 that the golden difference compares: ``python -m tests.plans.write_llama``.

The second one holds the weights of the layers in the way that a small memory budget asks for. Run
``python -m tests.plans.write_golden`` afterwards. Takes about a minute.
"""

from __future__ import annotations

import subprocess
import sys

from .write_golden import FOLDER, ROOT

COLUMNS, ROWS = "dp:S(0) tp:S(0)", "dp:S(0) tp:S(1)"
SHARDED = {"w[qkv]": COLUMNS, "wo": ROWS, "w[13]": COLUMNS, "w2": ROWS}
PLANS: dict[str, list[str]] = {
    "llama3_8b.yaml": [],
    "llama3_8b-sharded.yaml": [
        *(part for name, layout in SHARDED.items() for part in ("--pin", f"layers.*.{name}.weight={layout}")),
        *("--pin", f"output.weight={COLUMNS}"),
    ],
}


def main() -> None:
    """Plans both."""
    for name, options in PLANS.items():
        command = [sys.executable, "-m", "autoshard", "plan", "examples/llama.py:llama3_8b", "--mesh", "dp=8,tp=8"]
        subprocess.run([*command, "-o", str(FOLDER / name), *options], cwd=ROOT, check=True)


if __name__ == "__main__":
    main()
