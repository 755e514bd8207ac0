"""Makes the two plans of Llama-3-8B on 8x8 that the golden difference compares: ``python -m tests.plans.write_llama``.

They differ in what a GPU may hold. Run ``python -m tests.plans.write_golden`` afterwards. Takes a few minutes.
"""

from __future__ import annotations

import subprocess
import sys

from .write_golden import FOLDER, ROOT

PLANS = {"llama3_8b.yaml": "80GiB", "llama3_8b-tight.yaml": "26GiB"}
"""By file, what a GPU may hold."""


def main() -> None:
    """Plans both."""
    for name, budget in PLANS.items():
        command = [sys.executable, "-m", "autoshard", "plan", "examples/llama.py:llama3_8b", "--mesh", "dp=8,tp=8"]
        command += ["--checkpointing", "as-marked"]  # so that layouts differ, and not what is computed again
        subprocess.run([*command, "--memory", budget, "-o", str(FOLDER / name)], cwd=ROOT, check=True)


if __name__ == "__main__":
    main()
