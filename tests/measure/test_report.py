"""The report of a run: one page that holds its pictures, for every axis and kind that was measured."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from cost_models.fit import compare
from cost_models.samples import Samples

from ..cost_models.test_fit import KINDS, fitted, machine, measured

report = pytest.importorskip("autoshard.measure.report", reason="the report needs matplotlib (the extra report)")

PNG = b"\x89PNG\r\n\x1a\n"


def drawn(samples: Samples) -> tuple[dict[str, bytes], str]:
    profile = fitted(samples)
    compared = compare(profile, samples)
    pictures = report.pictures(profile, samples, compared)
    return pictures, report.page(profile, samples, compared, pictures)


def test_the_page_needs_no_other_file_and_names_every_axis_and_kind() -> None:
    pictures, page = drawn(measured(machine, rounds=2))
    assert set(pictures) == {"collectives-dp", "collectives-tp", "kernels"}
    assert all(data.startswith(PNG) for data in pictures.values())
    assert len(re.findall('src="data:image/png;base64,', page)) == 3
    assert "http" not in page and "<script" not in page
    cells = re.findall(r"<td[^>]*>([^<]*)</td>", page)
    assert {"dp", "tp", *KINDS, "matmul", "pointwise"} <= set(cells)


def test_what_the_samples_say_is_text_and_no_markup() -> None:
    samples = measured(machine)
    header = replace(samples.header, command="<script>alert(1)</script>", machine={"<b>": "&"})
    _, page = drawn(replace(samples, header=header))
    assert "<script" not in page and "<b>" not in page
    assert "&lt;script&gt;" in page
