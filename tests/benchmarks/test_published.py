"""Published runs as plans: tiny rows are built, predicted and compared, and a row that cannot be built is named."""

from __future__ import annotations

import csv
import importlib
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

published, runs = (importlib.import_module(name) for name in ("published", "published_runs"))
CannotBuild, Run = runs.CannotBuild, runs.Run

COLUMNS = (
    *("id", "source", "model", "params", "layers", "d_model", "heads", "kv_heads", "ffn", "vocab", "gpus", "gpu"),
    *("scheme", "mesh", "local_batch", "seq", "dtype", "recompute", "compile", "step_s", "step_s_derived"),
    *("memory_gib", "grad_accum", "pp"),
)
LLAMA = dict.fromkeys(COLUMNS, "") | {
    **{"id": "tiny-eager", "source": "here", "model": "Llama", "layers": "2", "d_model": "64", "heads": "4"},
    **{"kv_heads": "2", "ffn": "128", "vocab": "256", "gpus": "4", "gpu": "H100", "scheme": "FSDP2"},
    **{"local_batch": "2", "seq": "32", "dtype": "bf16", "recompute": "selective (op)", "compile": "no"},
    **{"mesh": "dp_shard=4"},
    **{"step_s": "0.01", "memory_gib": "1", "grad_accum": "1"},
}


def test_rows_are_predicted_and_what_cannot_be_built_is_named(tmp_path, capsys) -> None:
    """Of three rows the compiled one is faster than the eager one, which is the published order; the third is named."""
    rows = [LLAMA, LLAMA | {"id": "tiny-compiled", "compile": "yes", "step_s": "0.005"}]
    rows.append(LLAMA | {"id": "tiny-float8", "dtype": "float8 rowwise"})
    with (tmp_path / "runs.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    picture = tmp_path / "runs.svg"
    assert published.main(["--data", str(tmp_path / "runs.csv"), "--picture", str(picture)]) == 0
    printed = capsys.readouterr().out
    assert "tiny-float8                                it computes in float8" in printed
    assert "pairs in the published order, all rows: 1 of 1 (100%)" in printed
    assert picture.read_text().count("<circle") == 2


def test_of_several_micro_batches_only_the_optimizer_steps_once() -> None:
    plans = published.Plans()
    one, three = (published.predict(Run(LLAMA | {"grad_accum": n}), plans).step_s for n in ("1", "3"))
    optimizer_s = plans.of(Run(LLAMA), 2).optimizer_s
    assert optimizer_s and three - optimizer_s == pytest.approx(3 * (one - optimizer_s))


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        ({"pp": "2"}, "a pipeline"),
        ({"mesh": "dp=2, cp=2"}, "cp=2"),
        ({"scheme": "FSDP2+TP(SP)+AsyncTP"}, "AsyncTP"),
        ({"gpus": "8"}, "does not make 8 GPUs"),
        ({"recompute": "not stated"}, "not stated"),
    ],
)
def test_a_run_without_a_scheme_says_why(cells: dict[str, str], reason: str) -> None:
    with pytest.raises(CannotBuild, match=reason):
        _ = Run(LLAMA | cells).constraints
