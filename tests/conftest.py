"""What every test relies on, however the tests are started."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from .thorough import check_names, thinned, tries, try_fewer

# A shell that starts a command in the background makes it ignore Ctrl-C, and the processes of the tests inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ["AUTOSHARD_CACHE"] = "off"  # for the processes that tests start, too: no test reads plans of another

TESTS = Path(__file__).parent
SLOW = (
    *("benchmarks", "distributed", "fuzz", "review", "lowering/test_order.py", "test_api.py", "test_packaging.py"),
    *(
        "cli/test_review_commands.py",
        "constraints/test_schemes.py",
        "mesh_search/test_search.py",
        "mesh_search/test_side_by_side.py",
    ),
    *(f"capture/test_{name}.py" for name in ("flat", "kept_graph")),
    *(f"lowering/test_{name}.py" for name in ("batch_norm", "compiled", "taken_apart", "vocabulary")),
    "lowering/test_written_out_attention.py",
    *(f"measure/test_{name}.py" for name in ("calibrate_command", "runs")),
    *(f"planning/test_{name}.py" for name in ("against_experts", "overlap")),
    *(f"planning/test_{name}.py" for name in ("allocator_margin", "budget", "chosen_again", "comparison")),
    *(f"planning/test_{name}.py" for name in ("formulation", "layer_ties", "lives", "micro_batch_laws")),
    *(f"planning/test_{name}.py" for name in ("optimizer_step", "schedule_prices", "tensor_networks", "timeline")),
    *(f"planning/test_{name}.py" for name in ("interpretation", "interruption", "precision_policy")),
    *(f"solver/test_{name}.py" for name in ("interruption", "networks", "reductions")),
    *(f"strategies/test_{name}.py" for name in ("enumerator", "meaning", "rules_are_right")),
)
"""What `make test-fast` leaves out: folders and files that start processes, plan whole models or try all cases."""


CAPTURING = ("capture", "fuzz")
"""Folders of tests that are about captures: each has its own."""


@pytest.fixture(autouse=True)
def graphs(request: pytest.FixtureRequest) -> Iterator[None]:
    """Captures what was not captured in this process before."""
    if request.path.relative_to(TESTS).parts[0] in CAPTURING:
        yield
        return
    from .kept_graphs import kept_graphs  # which imports torch; what only deals out tests has no use for that

    with kept_graphs():
        yield


def pytest_configure(config: pytest.Config) -> None:
    """How many examples of laws are tried: no law is held to wall time, and `make test` takes fewer."""
    if "not thorough" in config.option.markexpr:
        try_fewer()
    settings.register_profile("no wall time", deadline=None, max_examples=tries(100))
    settings.load_profile("no wall time")


@pytest.hookimpl(wrapper=True)
def pytest_xdist_auto_num_workers() -> Generator[None, int, int]:
    """One more than there are cores: tests that start processes wait for them, a tenth of the time in all."""
    return (yield) + 1


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest tests first: one that starts last keeps a process busy while the others have nothing left to do."""
    slow = {TESTS / path for path in SLOW}
    assert all(path.exists() for path in slow), slow
    for item in items:
        if slow & {item.path, *item.path.parents}:
            item.add_marker(pytest.mark.slow)
    check_names(TESTS)
    for item in thinned(TESTS, items):
        item.add_marker(pytest.mark.thorough)
    items.sort(key=lambda item: "fuzz" not in item.path.parts)


def pytest_collection_finish() -> None:
    """What is imported and collected stays; looking through it for garbage took a sixth of the time of the tests."""
    gc.collect()
    gc.freeze()
