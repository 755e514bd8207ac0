"""A start of a job says what it does: on its first rank, which plans and captures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import autoshard
from autoshard.lowering import agree
from autoshard.lowering.board import open_board

from ..one_process import one_rank
from .sessions import Model, example


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    with one_rank() as mesh:
        yield mesh


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    heard: list[str] = []

    @contextmanager
    def line(stage: str) -> Iterator[Callable[[str], None]]:
        heard.append(stage)
        yield heard.append

    monkeypatch.setattr(agree, "progress_line", line)
    return heard


def body(model: Model, x: Tensor) -> Tensor:
    return (x @ model.w + model.bias).relu().square().sum()


def test_auto_parallelize_says_how_far_the_plan_is(mesh: DeviceMesh, said: list[str]) -> None:
    autoshard.auto_parallelize(Model(body), mesh, (example(),), cache=False)
    stages = "\n".join(said)
    for stage in ("planning", "capturing", "enumerating", "solving"):
        assert stage in stages, stages


def test_parallelize_says_what_it_does(mesh: DeviceMesh, said: list[str]) -> None:
    plan = autoshard.plan(Model(body), (example(),), mesh="dp=1", hardware="cpu-gloo")
    assert said == []  # plan itself is silent, but for what is told to its caller
    autoshard.parallelize(Model(body), plan, mesh, (example(),))
    assert len(said) > 1 and any("capturing" in stage for stage in said), said


def test_other_ranks_are_silent(mesh: DeviceMesh, said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    board = open_board(mesh)
    monkeypatch.setattr(type(board), "is_first", False)
    with agree.agreed(board, "a stage of another rank"):
        pass
    assert said == []
