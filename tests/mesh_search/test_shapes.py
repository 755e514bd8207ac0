"""The shapes of a number of devices: all of them, each once."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest

from autoshard.errors import MeshError
from autoshard.mesh_search import shapes_of
from cost_models import load_profile

H100 = load_profile("dgx-h100")


@pytest.mark.parametrize("devices", [1, 8, 12, 64])
def test_every_factorisation_is_there_or_one_of_equal_links(devices: int) -> None:
    """Axes that lie wholly inside hosts may change places, and so may those that cross them, and nothing else may."""
    sizes = [size for size in range(2, devices + 1) if devices % size == 0] or [1]
    every = {f for n in (1, 2, 3, 4) for f in product(sizes, repeat=n) if prod(f) == devices}
    found = shapes_of(devices, H100)
    kept = [shape.mesh.shape for shape in found]
    assert set(kept) <= every and len(set(kept)) == len(kept)
    if devices == 64:  # hosts of 8
        known = {tuple(sorted(zip(shape.mesh.shape, shape.places))) for shape in found}
        assert len(known) == len(found)
        of_2_4_2_4 = {(2, 4, 4, 2), (4, 2, 4, 2), (4, 2, 2, 4)}
        assert every - set(kept) == {(4, 2, 8), (8, 4, 2), *of_2_4_2_4}
    if devices == 8:
        assert kept == [(8,), (2, 4), (2, 2, 2)]


def test_a_shape_says_which_axes_cross_hosts() -> None:
    texts = {str(shape.mesh): shape.text for shape in shapes_of(64, H100, 2)}
    assert texts["dp=8,tp=8"] == "dp=8 across hosts, tp=8 inside hosts"
    assert texts["dp=4,tp=16"] == "dp=4 across hosts, tp=16 inside and across hosts"


@pytest.mark.parametrize(
    ("devices", "axes", "profile", "said"),
    [(0, 2, "dgx-h100", "from 1"), (4, 5, "dgx-h100", "from 1 to 4"), (1 << 21, 1, "dgx-h100", "1048576")],
)
def test_what_cannot_be_is_refused(devices: int, axes: int, profile: str, said: str) -> None:
    with pytest.raises(MeshError, match=said):
        shapes_of(devices, load_profile(profile), axes)
