"""Shapes, and ways through a forward, that depend on numbers in a tensor are refused with the line and what to do."""

from __future__ import annotations

import inspect
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

from autoshard.capture import capture, lines
from autoshard.errors import CaptureError


class Inner(nn.Module):
    """A linear layer, and what is done with its result and some whole numbers."""

    def __init__(self, body: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.body = nn.Linear(4, 4), body

    def forward(self, x: Tensor, n: Tensor) -> Any:
        return self.body(self.linear(x), n)


class Outer(nn.Module):
    def __init__(self, body: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(4, 4), Inner(body)

    def forward(self, x: Tensor, n: Tensor) -> Any:
        return self.inner(self.first(x), n) * 2


def refused(body: Callable[[Tensor, Tensor], Any]) -> str:
    """The error, where it names the line of the body that is marked, and nothing of torch's own names."""
    with pytest.raises(CaptureError) as caught:
        capture(Outer(body), (torch.randn(3, 4), torch.tensor([3, 2, 1])))
    said = str(caught.value)
    code, first = inspect.getsourcelines(body)
    number = first + next(k for k, line in enumerate(code) if "# culprit" in line)
    assert f"{__file__}:{number}: {code[number - first].strip()}" in said
    assert "Outer cannot be captured as one graph" in said and "unknown while planning" in said
    assert not any(word in said for word in ("aten.", "u0", "zuf0", "graph break", "torch._check")), said
    return said


def mask(x: Tensor, n: Tensor) -> Tensor:
    return x[x > 0].max()  # culprit


def rows(x: Tensor, n: Tensor) -> Tensor:
    return x[n > 2]  # culprit


def write_rows(x: Tensor, n: Tensor) -> Tensor:
    x[n > 1] = x[n > 1].cumsum(0)  # culprit
    return x


def put_rows(x: Tensor, n: Tensor) -> Tensor:
    made = torch.zeros(3, 4)
    made[n > 1] = x[:2]  # culprit
    return made.square()


def masked_select(x: Tensor, n: Tensor) -> Tensor:
    return torch.masked_select(x, x > 0).prod()  # culprit


def where(x: Tensor, n: Tensor) -> Tensor:
    (found,) = torch.where(n > 2)  # culprit
    return x[found]


def nonzero(x: Tensor, n: Tensor) -> Tensor:
    return x[(n > 2).nonzero().squeeze(1)]  # culprit


def unique(x: Tensor, n: Tensor) -> Tensor:
    return x * len(torch.unique(n))  # culprit


def repeated(x: Tensor, n: Tensor) -> Tensor:
    return x.repeat_interleave(n, dim=0)  # culprit


def counted(x: Tensor, n: Tensor) -> Tensor:
    return x.sum() * torch.bincount(n)  # culprit


def up_to(x: Tensor, n: Tensor) -> Tensor:
    return x.sum() * torch.arange(n.max())  # culprit


def classes(x: Tensor, n: Tensor) -> Tensor:
    return x.sum() * F.one_hot(n)  # culprit


def checkpointed(x: Tensor, n: Tensor) -> Any:
    return checkpoint(lambda y: y[y > 0].max(), x, use_reentrant=False)  # culprit


SHAPES = {
    mask: ("indexing", "torch.where"), rows: ("indexing", "pad to a fixed length"),
    write_rows: ("indexing", "torch.where"), put_rows: ("the backward of this line", "torch.where"),
    masked_select: ("torch.masked_select", "torch.where"),
    where: ("torch.where", "multiply by it"), nonzero: (".nonzero()", "torch.nonzero_static"),
    unique: ("torch.unique", "Keep the shape"), repeated: (".repeat_interleave()", "output_size"),
    counted: ("torch.bincount", "Keep the shape"), up_to: ("torch.arange", "as a Python number"),
    classes: ("torch.nn.functional.one_hot", "num_classes"), checkpointed: ("indexing", "torch.where"),
}  # fmt: skip


@pytest.mark.parametrize("body", SHAPES, ids=lambda body: body.__name__)
def test_a_shape_that_depends_on_numbers_is_refused(body: Any) -> None:
    operation, remedy = SHAPES[body]
    said = refused(body)
    assert f"the shape of what {operation} gives depends on numbers in a tensor" in said and remedy in said


def factor(x: Tensor, n: Tensor) -> Tensor:
    return x * 2 ** x.sum().item()  # culprit


def scale(x: Tensor, n: Tensor) -> Tensor:
    q = x[None, None]
    return F.scaled_dot_product_attention(q, q, q, scale=x.sum().item())  # culprit


def beta(x: Tensor, n: Tensor) -> Tensor:
    return F.smooth_l1_loss(x, 2 * x, beta=x.exp().sum().item())  # culprit


def causal(x: Tensor, n: Tensor) -> Tensor:
    q = x[None, None]
    return F.scaled_dot_product_attention(q, q, q, is_causal=x.sum().item() > 0)  # culprit


def order(x: Tensor, n: Tensor) -> Tensor:
    return x * sorted(n.tolist())[0]  # culprit


def in_numpy(x: Tensor, n: Tensor) -> Tensor:
    return x * int(np.cumsum(n.tolist())[-1])  # culprit


def length(x: Tensor, n: Tensor) -> Tensor:
    longest = int(n.max())  # culprit
    return x[:, :longest]


def least(x: Tensor, n: Tensor) -> Tensor:
    longest = min(int(n.max()), 4)  # culprit
    return x[:, :longest]


def view(x: Tensor, n: Tensor) -> Tensor:
    return x.view(int(n[0]), -1)  # culprit


def times(x: Tensor, n: Tensor) -> Tensor:
    for k in range(int(n[0])):  # culprit
        x = x + k
    return x


def parts(x: Tensor, n: Tensor) -> Tensor:
    return torch.stack([part.sum() for part in x.split(n.tolist())])  # culprit


def floats(x: Tensor, n: Tensor) -> Tensor:
    return x * sum(x[0].tolist())  # culprit


def one_of(x: Tensor, n: Tensor) -> Tensor:
    return [F.relu, F.silu][n[0]](x)  # culprit


def within_library(x: Tensor, n: Tensor) -> Tensor:
    return x * statistics.fmean(n.tolist())  # culprit


NUMBERS = [factor, length, least, view, times, parts, floats, one_of, within_library, scale, beta, causal, in_numpy]


@pytest.mark.parametrize("body", NUMBERS, ids=lambda body: body.__name__)
def test_a_number_out_of_a_tensor_is_refused(body: Any) -> None:
    if body is one_of and torch.__version__ < "2.12":
        pytest.skip("dynamo of torch 2.11 does not index lists by tensors, and says that")
    said = refused(body)
    assert "Python takes a number out of a tensor" in said and "in the place of x * t.item()" in said


def branch(x: Tensor, n: Tensor) -> Tensor:
    if x.sum() > 0:  # culprit
        return x
    return -x


def branch_on_a_number(x: Tensor, n: Tensor) -> Tensor:
    if n.max().item() == 3:  # culprit
        return x
    return -x


def branch_on_a_length(x: Tensor, n: Tensor) -> Tensor:
    (found,) = torch.where(n == 1)
    if found.numel() == 0:  # culprit
        return x
    return x.index_add(0, found, x[found])


def equal(x: Tensor, n: Tensor) -> Tensor:
    return x if torch.equal(n, n.flip(0)) else -x  # culprit


def contains(x: Tensor, n: Tensor) -> Tensor:
    return x if 3 in n else -x  # culprit


def loop(x: Tensor, n: Tensor) -> Tensor:
    while x.norm() > 1:  # culprit
        x = x / 2
    return x


def padded(x: Tensor, n: Tensor) -> Tensor:
    return pad_sequence([x[:k] for k in n])  # culprit


WAYS = [branch, branch_on_a_number, branch_on_a_length, equal, contains, loop, padded, order]


def some_finite(x: Tensor, n: Tensor) -> Tensor:
    return x * 2 if torch.isfinite(x).any() else x  # culprit


def all_of_an_argument(x: Tensor, n: Tensor) -> Tensor:
    return x * 2 if n.all() else x  # culprit


def each_row_finite(x: Tensor, n: Tensor) -> Tensor:
    return x * 2 if torch.isfinite(x).all(1)[0] else x  # culprit


def infinite_in_half_precision(x: Tensor, n: Tensor) -> Tensor:
    half = x.half()
    return half.clamp(-1, 1) if half.isinf().any() else half  # culprit


def again_and_again(x: Tensor, n: Tensor) -> Tensor:
    rest = x.sum().item()
    while rest > 0.5:  # culprit
        x, rest = x + 1, rest - 0.5
    return x


def until_none_is_large(x: Tensor, n: Tensor) -> Tensor:
    while (x > 2).any():  # culprit
        for _ in range(2):
            x = x * 0.5
    return x


def drawn_until_none_is_large(x: Tensor, n: Tensor) -> Tensor:
    while True:
        large = x > 2
        if not large.any():  # culprit
            return x
        x = torch.where(large, torch.randn_like(x), x)


WAYS += [some_finite, all_of_an_argument, each_row_finite, infinite_in_half_precision, again_and_again]


def by_key(x: Tensor, n: Tensor) -> Tensor:
    return x * {"scale_1": 1.0, "scale_3": 3.0}[f"scale_{n[0]}"]  # culprit


def by_key_of_a_maximum(x: Tensor, n: Tensor) -> Tensor:
    return x * {"scale_3": 3.0}[f"scale_{n.max()}"]  # culprit


def by_attribute(x: Tensor, n: Tensor) -> Tensor:
    return getattr(x, f"log{n[1]}")()  # type: ignore[no-any-return]  # culprit


WAYS += [until_none_is_large, drawn_until_none_is_large, by_key, by_key_of_a_maximum, by_attribute]


@pytest.mark.parametrize("body", WAYS, ids=lambda body: body.__name__)
def test_a_way_that_depends_on_numbers_is_refused(body: Any) -> None:
    said = refused(body)
    assert "which way Python goes here, or a shape, depends on numbers in a tensor" in said
    assert "torch.where(condition, a, b)" in said


def limited(x: Tensor, n: Tensor) -> Tensor:
    if not torch.isfinite(x).all():
        x = x.clamp(-1, 1)
    return x


def raising(x: Tensor, n: Tensor) -> Tensor:
    if torch.isinf(x).any() or (x.dtype == torch.float32 and x.isnan().any()):
        raise ValueError
    return x


def chosen(x: Tensor, n: Tensor) -> Tensor:
    return x if torch.all(x.isfinite()) else x * 2


@pytest.mark.parametrize("body", [limited, raising, chosen], ids=lambda body: body.__name__)
def test_numbers_are_finite_for_who_asks_whether_all_are(body: Any) -> None:
    given = torch.randn(3, 4), torch.tensor([3, 2, 1])
    assert capture(Outer(body), given).fingerprint == capture(Outer(lambda x, n: x), given).fingerprint


def named(x: Tensor, n: Tensor) -> Tensor:
    for k in torch.arange(3):
        x = x * {"scale_0": 2.0, "scale_1": 3.0, "scale_2": 4.0}[f"scale_{k}"] + float(f"{k:d}")
    return x


def numbered(x: Tensor, n: Tensor) -> Tensor:
    return ((x * 2.0 + 0.0) * 3.0 + 1.0) * 4.0 + 2.0


def said(x: Tensor, n: Tensor) -> Tensor:
    print(f"the largest is {x.max()} of {n.sum():d}")
    return x


@pytest.mark.parametrize("body, same", [(named, numbered), (said, lambda x, n: x)], ids=["named", "said"])
def test_a_text_has_the_numbers_that_are_known(body: Any, same: Any) -> None:
    given = torch.randn(3, 4), torch.tensor([3, 2, 1])
    assert capture(Outer(body), given).fingerprint == capture(Outer(same), given).fingerprint


def test_of_a_library_the_line_of_its_caller_is_named_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / "library.py"
    library.write_text("def positive(x):\n    return x[x > 0]\n")
    names: dict[str, Any] = {}
    exec(compile(library.read_text(), str(library), "exec"), names)

    def call(x: Tensor, n: Tensor) -> Tensor:
        return names["positive"](x).max()  # culprit

    assert str(library) in _message(call) and __file__ not in _message(call)
    monkeypatch.setattr(lines, "is_installed", lambda path: path.startswith(str(tmp_path)))
    assert f"(in {library}:2: return x[x > 0])" in refused(call)


def _message(body: Callable[[Tensor, Tensor], Any]) -> str:
    with pytest.raises(CaptureError) as caught:
        capture(Outer(body), (torch.randn(3, 4), torch.tensor([3, 2, 1])))
    return str(caught.value)


def test_the_remedies_are_captured() -> None:
    """What the errors say to write in the place of what is refused."""
    bodies: list[Callable[[Tensor, Tensor], Tensor]] = [
        lambda x, n: torch.where(x > 0, x, 0.0).sum(),
        lambda x, n: x * (n > 2)[:, None],
        lambda x, n: x[torch.nonzero_static(n > 2, size=3, fill_value=0)[:, 0]],
        lambda x, n: x.repeat_interleave(n, 0, output_size=6),
        lambda x, n: x.sum() * F.one_hot(n, 4),
        lambda x, n: x * x.sum(),
        lambda x, n: torch.where(x.sum() > 0, x, -x),
    ]
    for body in bodies:
        assert len(capture(Outer(body), (torch.randn(3, 4), torch.tensor([3, 2, 1]))).nodes) > 5
