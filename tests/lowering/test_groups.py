"""Process groups along several axes of a mesh at once."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from autoshard.lowering.adapter import group_names, links_of
from autoshard.mesh import Mesh

from ..one_process import fake_ranks


def _ranks(name: str) -> list[int]:
    return dist.get_process_group_ranks(dist.distributed_c10d._resolve_process_group(name))


def test_the_ranks_of_a_group_are_those_that_differ_in_its_axes_alone() -> None:
    with fake_ranks(8, rank=5):
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
        found = group_names(mesh, ["a", "a+b", "a+c", "b+c", "a+b+c"])
        expected = {"a": [1, 5], "a+b": [1, 3, 5, 7], "a+c": [0, 1, 4, 5], "b+c": [4, 5, 6, 7], "a+b+c": [*range(8)]}
        assert {link: _ranks(name) for link, name in found.items()} == expected
        assert group_names(mesh, list(expected)) == found  # made once
        assert links_of(mesh) == {name: link for link, name in (group_names(mesh, "abc") | found).items()}


def test_a_part_of_a_mesh_has_groups_of_its_own_and_leaves_none_for_dtensors() -> None:
    with fake_ranks(8, rank=5):
        root = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
        part = root["dp", "tp"]
        assert _ranks(group_names(part, ["dp+tp"])["dp+tp"]) == [4, 5, 6, 7]
        assert not root._flatten_mapping and links_of(root).keys().isdisjoint(group_names(part, ["dp+tp"]).values())


def test_ranks_rise_along_the_axes_of_a_mesh_that_counts_them_through() -> None:
    plain, turned = Mesh.parse("a=2,b=3"), Mesh(("a", "b"), (2, 3), (0, 2, 4, 1, 3, 5))
    assert all(plain.is_rising(axes) for axes in ((0,), (1,), (0, 1)))
    assert turned.is_rising((0,)) and turned.is_rising((1,)) and not turned.is_rising((0, 1))
    assert not Mesh(("a", "b"), (2, 3), (3, 4, 5, 0, 1, 2)).is_rising((0,))
