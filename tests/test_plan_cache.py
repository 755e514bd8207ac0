"""Plans kept on disk: the same bytes for the same question, and another answer for anything that changes it."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autoshard
from autoshard.capture import model_key
from autoshard.capture.lines import is_installed
from autoshard.disk_cache import DiskCache, disk_cache
from autoshard.errors import StrategyWarning
from autoshard.ops import operator

ROOT = Path(__file__).resolve().parent.parent
X = torch.zeros(8, 4)
FLAG = False


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 4)
        self.k, self.options = 2.0, {"both": False}
        self.calls: list[int] = []

    def forward(self, x: torch.Tensor) -> Any:
        y = self.second(torch.relu(self.first(x)))
        if FLAG:
            y = y.tanh()
        if os.environ.get("TEST_OF_THE_CACHE"):
            y = y.exp()
        loss = (self.k * y).sum()
        return (loss, y) if self.options["both"] else loss


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AUTOSHARD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def plan(model: nn.Module | None = None, x: torch.Tensor = X, **options: Any) -> tuple[str, bool]:
    """The text of a plan, and whether it was made now."""
    stages: list[str] = []
    made = autoshard.plan(model or Net(), x, **{"mesh": "dp=2", "progress": stages.append, **options})
    return autoshard.dump_plan(made), "capturing the training step" in stages


def entries(folder: Path) -> list[Path]:
    return sorted((folder / "plans").iterdir())


def test_the_second_plan_has_the_bytes_of_the_first_and_is_not_made(folder: Path) -> None:
    (first, was_made), (second, is_made) = plan(), plan()
    assert (was_made, is_made) == (True, False)
    assert first == second == plan(cache=False)[0]
    assert plan(cache=False)[1]
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    "options",
    [{"mesh": "dp=4"}, {"x": torch.zeros(16, 4)}, {"hardware": "dgx-a100"}, {"pins": "x=dp:R"}, {"evaluation": True}]
    + [{"optimizer": "sgd"}, {"param_dtype": "bfloat16"}, {"objective": "communication-time"}, {"name": "other"}]
    + [{"mesh": autoshard.Mesh(("dp",), (2,), (1, 0))}, {"bucket": 0}, {"memory": "1GiB"}, {"tie_layers": False}],
    ids=lambda options: next(iter(options)),
)
def test_another_question_is_answered_anew(folder: Path, options: dict[str, Any]) -> None:
    plan()
    assert plan(**options)[1]
    assert not plan(**options)[1]


def _flag(model: nn.Module, patch: pytest.MonkeyPatch) -> None:
    patch.setitem(globals(), "FLAG", True)


def _environment(model: nn.Module, patch: pytest.MonkeyPatch) -> None:
    patch.setenv("TEST_OF_THE_CACHE", "1")


def _function(model: nn.Module, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch, "relu", torch.sigmoid)


def _nothing_seen(model: nn.Module, patch: pytest.MonkeyPatch) -> None:
    model.note = "read by what no run shows"  # type: ignore[assignment]


CHANGES: dict[str, Callable[[Any, pytest.MonkeyPatch], object]] = {
    "a number": lambda model, patch: setattr(model, "k", 3.0),
    "inside a container": lambda model, patch: model.options.update(both=True),
    "a global": _flag,
    "the environment": _environment,
    "another function": _function,
    "an attribute": _nothing_seen,
    "frozen": lambda model, patch: model.first.requires_grad_(False),
    "tied": lambda model, patch: setattr(model.second, "bias", nn.Parameter(model.second.bias.detach()[:1])),
    "mode": lambda model, patch: model.eval(),
    "a hook": lambda model, patch: model.first.register_forward_hook(lambda *_: None),
    "a class": lambda model, patch: setattr(model, "second", nn.Sequential(model.second)),
    "default dtype": lambda model, patch: patch.setattr(torch, "get_default_dtype", lambda: torch.float64),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_changes_has_another_key(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net()
    before = model_key(model, (X,), {})
    assert before is not None
    assert before == model_key(Net(), (X,), {})
    CHANGES[change](model, monkeypatch)
    assert model_key(model, (X,), {}) not in (before, None)


FACTOR, OPTIONS = 2.0, {"factor": 2.0}


class Settings:
    factor = 2.0


def _times(gradient: torch.Tensor) -> torch.Tensor:
    return gradient * OPTIONS["factor"]


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return _times(gradients[0])


class Handed(Scaled):
    """Its forward hands over what its backward reads."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.factor, ctx.like = FACTOR, x
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return ctx.factor * gradients[0]


class Helped(Scaled):
    @classmethod
    def factor(cls) -> float:
        return FACTOR

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return Helped.factor() * gradients[0]


class Scales:
    def scaled(self, gradient: torch.Tensor) -> torch.Tensor:
        return FACTOR * gradient


SCALES = Scales()


def _hook_around(scaled: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda gradient: scaled(gradient)


BACKWARDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a backward": Scaled.apply,
    "what a forward hands over": Handed.apply,
    "a method of a class": Helped.apply,
    "a method of an object": lambda x: (x.register_hook(lambda gradient: SCALES.scaled(gradient)), x)[1],
    "a function in a closure": lambda x: (x.register_hook(_hook_around(_times)), x)[1],
    "a hook of a class": lambda x: (x.register_hook(lambda gradient: gradient * Settings.factor), x)[1],
    "a hook": lambda x: (x.register_hook(lambda gradient: gradient * FACTOR), x)[1],
    "a mode": lambda x: x.detach() if FACTOR == 2.0 else x,
    "a part without gradients": lambda x: torch.set_grad_enabled(FACTOR == 2.0)(lambda: x * 2)(),
}


@pytest.mark.parametrize("what", BACKWARDS)
def test_what_a_backward_reads_is_part_of_the_key(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Model(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return BACKWARDS[what](self.first(x)).sum()

    before = model_key(Model(), (X,), {})
    assert before is not None and before == model_key(Model(), (X,), {})
    monkeypatch.setitem(globals(), "FACTOR", 0.5)
    monkeypatch.setitem(OPTIONS, "factor", 0.5)
    monkeypatch.setattr(Settings, "factor", 0.5)
    assert model_key(Model(), (X,), {}) not in (before, None)


class _Held:
    """What nobody can describe."""

    def __reduce_ex__(self, protocol: object) -> Any:
        raise TypeError


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(4, 4), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.linear(x).sum()


class Replaces(nn.Module):
    """Puts other tensors in the places of several buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        for name in "abcdef":
            self.register_buffer(name, torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        for name in "abcdef":
            setattr(self, name, y.detach().mean(0) + ord(name))
        return y.sum()


def test_a_key_is_the_same_whatever_order_sets_have() -> None:
    code = "from tests.test_plan_cache import *; print(model_key(Replaces(), (X,), {}))"
    keys = {
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            timeout=100,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(keys) == 1 and keys != {"None\n"}


def test_what_cannot_be_told_has_no_key_and_the_model_stays_as_it_was() -> None:
    model = Net()
    model.held = _Held()  # type: ignore[assignment]
    assert model_key(model, (X,), {}) is None
    counts = Counts()
    assert model_key(counts, (X,), {}) is not None
    assert counts.calls == 0
    assert model_key(nn.LSTM(4, 4), (torch.zeros(2, 3, 4),), {}) is not None  # which holds weak references


@pytest.mark.parametrize("damage", [lambda data: data[:-9], lambda data: b"", lambda data: data.replace(b"dp", b"pd")])
def test_an_entry_that_is_damaged_is_made_anew(folder: Path, damage: Callable[[bytes], bytes]) -> None:
    first, _ = plan()
    (entry,) = entries(folder)
    entry.write_bytes(damage(entry.read_bytes()))
    assert plan() == (first, True)
    assert plan() == (first, False)


def test_an_entry_of_another_key_is_not_served(folder: Path) -> None:
    plan()
    (entry,) = entries(folder)
    plan(mesh="dp=4")
    (other,) = (path for path in entries(folder) if path != entry)
    other.write_bytes(entry.read_bytes())
    assert plan(mesh="dp=4")[1]


@torch.library.custom_op("testcache::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@doubled.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class Doubling(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.testcache.doubled(super().forward(x)).sum() + torch.tensor(2.0)


def test_a_kept_plan_comes_with_its_warnings_until_rules_are_registered(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operator, "_ENTRIES", dict(operator._ENTRIES))

    def said() -> tuple[list[str], bool]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            _, is_made = plan(Doubling(4, 8), evaluation=True)
        return [str(each.message) for each in caught if issubclass(each.category, StrategyWarning)], is_made

    try:
        first, _ = said()
        assert len(first) == 1
        assert "doubled" in first[0]
        assert said() == (first, False)
        autoshard.register_operator("testcache::doubled", ["S(0) -> S(0)"])
        assert said() == ([], True)
        assert said() == ([], False)
    finally:
        operator.known.cache_clear()


@pytest.mark.slow
def test_the_code_of_the_user_is_part_of_the_key(tmp_path: Path) -> None:
    (tmp_path / "scale.py").write_text("def scaled(x):\n    return x * 1\n")
    (tmp_path / "net.py").write_text(
        "import torch\nfrom scale import scaled\n\nclass Net(torch.nn.Linear):\n"
        "    def forward(self, x):\n        return scaled(super().forward(x)).sum()\n"
    )
    program = """
        import torch
        from net import Net
        from autoshard.capture import model_key
        print(model_key(Net(4, 4), (torch.zeros(2, 4),), {}))
    """

    def key() -> str:
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)]), "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-c", textwrap.dedent(program)]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=True).stdout

    first, again = key(), key()
    (tmp_path / "scale.py").write_text(
        "# a comment: lines of the source stand in plans\ndef scaled(x):\n    return x * 1\n"
    )
    assert first == again != "None\n"
    assert key() not in (first, "None\n")


def test_what_was_not_used_for_longest_goes_first(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path / "cache" / "small", largest_bytes=1000)  # two of these, with their digests
    for age_s, key in ((30, "a"), (20, "b")):
        cache.put(key, bytes(400))
        for path in (tmp_path / "cache" / "small").iterdir():
            os.utime(path, (path.stat().st_atime - age_s, path.stat().st_mtime - age_s))
    assert cache.get("a") == bytes(400)  # which makes it the younger one
    cache.put("c", bytes(400))
    assert [cache.get(key) for key in "abc"] == [bytes(400), None, bytes(400)]


@pytest.mark.parametrize("said", ["off", "0", ""])
def test_the_cache_can_be_turned_off(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOSHARD_CACHE", said)
    assert disk_cache("plans", "") is None


def test_a_folder_that_others_may_write_is_not_used(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.warns(UserWarning, match="others may write"):
        assert plan()[1]
    assert list(folder.iterdir()) == []


@pytest.mark.slow
def test_processes_that_write_one_key_at_once_leave_a_whole_entry(tmp_path: Path) -> None:
    program = """
        import sys
        from pathlib import Path
        from autoshard.disk_cache import DiskCache
        cache = DiskCache(Path(sys.argv[1]), largest_bytes=100_000)
        for k in range(60):
            cache.put("key", sys.argv[2].encode() * 20_000)
            cache.put(f"{sys.argv[2]} {k}", bytes(20_000))
            found = cache.get("key")
            assert found is None or (len(found), len(set(found))) == (20_000, 1), found[:99]
    """
    command = [sys.executable, "-c", textwrap.dedent(program), str(tmp_path / "cache")]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    running = [subprocess.Popen([*command, word], env=env, stderr=subprocess.PIPE, text=True) for word in "abc"]
    said = [process.communicate(timeout=120)[1] for process in running]
    assert [process.returncode for process in running] == [0, 0, 0], said
    assert not list((tmp_path / "cache").glob(".*"))


def test_code_under_a_prefix_of_python_is_the_users_own_unless_it_is_installed() -> None:
    assert is_installed(os.__file__) and is_installed(torch.__file__) and is_installed(pytest.__file__)
    assert not is_installed(str(ROOT / "model.py")) and not is_installed(__file__)
    assert not is_installed(os.path.join(sys.prefix, "src", "app", "model.py"))  # as under /usr, where Python is, too
