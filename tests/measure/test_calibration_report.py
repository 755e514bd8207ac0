"""The report of a run: one page that holds its pictures, for every axis and kind that was measured."""

from __future__ import annotations

import re
from dataclasses import replace
from xml.etree import ElementTree

from autoshard.measure import calibration_report
from autoshard.measure.chart import Picture
from cost_models.fit import compare
from cost_models.samples import CollectivePoint, Samples

from ..cost_models.test_fit import KINDS, fitted, machine, measured


def drawn(samples: Samples) -> tuple[tuple[Picture, ...], str]:
    profile = fitted(samples)
    compared = compare(profile, samples)
    pictures = calibration_report.pictures(profile, samples, compared)
    return pictures, calibration_report.page(profile, samples, compared, pictures)


def test_the_page_needs_no_other_file_and_names_every_axis_and_kind() -> None:
    pictures, page = drawn(measured(machine, rounds=2))
    assert [picture.name for picture in pictures] == ["collectives-dp", "collectives-tp", "kernels"]
    assert page.count("<svg ") == 3
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "") and "<script" not in page
    cells = re.findall(r"<td[^>]*>([^<]*)</td>", page)
    assert {"dp", "tp", *KINDS, "matmul", "pointwise"} <= set(cells)


def test_a_picture_is_a_file_of_its_own_with_every_sample_and_every_median() -> None:
    samples = measured(machine, rounds=2)
    for picture in drawn(samples)[0]:
        root = ElementTree.fromstring(calibration_report.svg(picture))
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        dots = root.findall(".//{*}circle")
        axis = picture.name.removeprefix("collectives-")
        points = [p for p in samples.by_point() if isinstance(p, CollectivePoint) and p.axis == axis]
        if points:  # two samples and two medians (of the time and of the error)
            assert len(dots) == 4 * len(points)
        for dot in dots:
            x, y = float(dot.attrib["cx"]), float(dot.attrib["cy"])
            assert 0 < x < picture.width and 0 < y < picture.height


def test_what_the_samples_say_is_text_and_no_markup() -> None:
    samples = measured(machine)
    header = replace(samples.header, command="<script>alert(1)</script>", machine={"<b>": "&"})
    _, page = drawn(replace(samples, header=header))
    assert "<script" not in page and "<b>" not in page
    assert "&lt;script&gt;" in page
