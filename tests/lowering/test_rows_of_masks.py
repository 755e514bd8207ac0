"""Forwards that compute with the rows that a mask picks, against one process, on simulated ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoshard
from autoshard.capture import capture
from autoshard.errors import CaptureError
from autoshard.mesh import Mesh

from ..capture.test_graph_computes_the_model import leaves_of
from ..fuzz.random_plans import random_plan
from ..oracles import interpret
from ..thorough import some_thorough
from .as_before import check_as_before

ROWS, WORDS, CLASSES = 4, 6, 5
Body = Callable[["Around", Tensor, Tensor, Tensor], Tensor]


class Around(nn.Module):
    """Layers for a body that takes features (rows, words, 8), classes and a mask (rows, words)."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.enter, self.classify, self.norm = nn.Linear(8, 8), nn.Linear(8, CLASSES), nn.LayerNorm(8)
        self.drop, self.table, self.body = nn.Dropout(0.0), nn.Embedding(CLASSES, 8), body

    def forward(self, x: Tensor, classes: Tensor, mask: Tensor) -> Tensor:
        return self.body(self, self.enter(x), classes, mask)


def scaled(s: Around, x: Tensor, t: Tensor, m: Tensor) -> Tensor:
    x = x.clone()
    x[m] = x[m] * 2 + 1
    return x.square().mean()


def labelled(s: Around, x: Tensor, t: Tensor, m: Tensor) -> Tensor:
    """As SAM adds to points what they are."""
    x = x.clone()
    x[t == 0] = 0.0
    x[t == 0] += s.table.weight[0]
    x[m] *= 1.5
    x[m] -= s.norm.weight
    x[t == 1] /= 2.0
    return x.square().mean()


def joined(s: Around, x: Tensor, t: Tensor, m: Tensor) -> Tensor:
    """As Qwen3-VL adds features of pictures to the words in whose places they are."""
    x = x.clone()
    pictures, others = (t >= 0) & (torch.arange(WORDS) % 2 == 0), x.tanh()[:, 1:4].reshape(-1, 8)
    x[pictures, :] = x[pictures, :] + others
    return x.square().mean()


def joined_in_every_layer(s: Around, x: Tensor, t: Tensor, m: Tensor) -> Tensor:
    """From the first sum on torch knows how many rows the mask picks."""
    pictures, others = (t >= 0) & (torch.arange(WORDS) % 2 == 0), x.tanh()[:, 1:4].reshape(-1, 8)
    for k in range(3):
        x = s.enter(x).clone()
        x[pictures, :] = x[pictures, :] + k * others
    x = x.clone()
    x[pictures] += others
    x[pictures] *= 2
    return x.square().mean() + x[pictures].abs().mean() + F.cross_entropy(s.classify(x[pictures]), t[pictures])


def infinite(s: Around, x: Tensor, t: Tensor, m: Tensor) -> Tensor:
    """Rows that are left out are infinite, or no numbers; those that are picked are not."""
    broken = torch.where(m[..., None], x, torch.inf) - torch.where(m[..., None], 0.0, torch.inf)
    ratio = (broken[m].abs() + 1).log() / (x[m] * x[m] + 0.5).sqrt()
    return ratio.mean() + (x.abs() + 2 * m[..., None])[m].rsqrt().sum()


def broken_again(s: Around, x: Tensor, t: Tensor, m: Tensor) -> Tensor:
    """Rows that are left out become infinite, or no index, by what is computed of them; others do not."""
    allowed = torch.arange(CLASSES) != t[..., None]
    chances = s.classify(x)[m].masked_fill(~allowed[m], -torch.inf).softmax(-1)
    steep = ((x - 900)[m] + 900 * s.norm.weight).exp().mean()
    places = (t + 1)[m] - 1
    looked_up = s.classify(s.table(places)).gather(1, places.unsqueeze(1))
    return F.linear(chances, s.table.weight.mT).square().mean() + steep + looked_up.mean()


def accuracy(s: Around, x: Tensor, t: Tensor, m: Tensor) -> Tensor:
    chosen = s.classify(x[m])
    right = (chosen.argmax(-1) == t[m]).float().mean()
    return F.cross_entropy(chosen, t[m]) * (1 + right.to(x.dtype))


def of_each_class(s: Around, x: Tensor, t: Tensor, m: Tensor) -> Tensor:
    return sum(x[t == k].mean(0).square().sum() for k in range(1, 3)) + x[(t > 0) & m].mean()


def own_loss(s: Around, x: Tensor, t: Tensor, m: Tensor) -> Tensor:
    picked = s.classify(s.drop(F.gelu(s.norm(x[m])))).log_softmax(-1)
    loss = -picked.gather(-1, t[m].unsqueeze(-1)).squeeze(-1)
    return loss.sum() / max(len(loss), 1) + (picked[:, 0] * picked[..., 1:3].sum(-1)).sum() / picked.numel()


def ignored(s: Around, x: Tensor, t: Tensor, m: Tensor) -> Tensor:
    weight = torch.arange(1.0, 1 + CLASSES).to(x)
    seen = t != 2
    loss = F.cross_entropy(s.classify(x)[seen], t[seen], weight, ignore_index=1, label_smoothing=0.1)
    return loss + F.nll_loss(s.classify(x)[seen].log_softmax(1), t[seen], reduction="none").square().mean()


def of_their_class(s: Around, x: Tensor, t: Tensor, m: Tensor) -> Tensor:
    """Experts that overwrite their words, weighted by a probability of theirs, taken in several ways."""
    p, out = s.classify(x).softmax(-1), torch.zeros_like(x)
    for k in range(CLASSES):
        own = t == k
        weight = (
            p[own, k, None] + p[own][:, k : k + 1] * p[own][:, k, None] + p[own, k].unsqueeze(-1) + p[own, :2][:, 1:]
        )
        out[own] = (x[own] * s.table.weight[k] + x[own, None, 1:][:, 0].sum(-1, keepdim=True)) * weight
    return out.square().mean()


def filled(s: Around, x: Tensor, t: Tensor, m: Tensor) -> Tensor:
    """Words are filled at their places, with a number and with a tensor of one."""
    y = 2 * x
    y[torch.where(m)] = 0.5
    y[(t == 1).nonzero(as_tuple=True)] = s.table.weight.mean()
    return (y * x).mean()


def changing(s: Around, x: Tensor, t: Tensor, m: Tensor) -> Tensor:
    total = x.detach().abs().sum()
    factor = total.item()
    total.zero_()
    return x.mean() * factor + total


BODIES: dict[str, Body] = {
    "labelled": labelled,
    "mean": lambda s, x, t, m: x[m].mean(),
    "sum of squares": lambda s, x, t, m: x[m].pow(2).sum() / m.sum(),
    "sum over how many": lambda s, x, t, m: (x[m] ** 2).sum() / x[m].shape[0],
    "cross-entropy": lambda s, x, t, m: F.cross_entropy(s.classify(x)[m], t[m]),
    "cross-entropy of some words": lambda s, x, t, m: nn.CrossEntropyLoss()(
        s.classify(s.norm(x[m])).view(-1, CLASSES), t[m].view(-1)
    ),
    "losses of words": lambda s, x, t, m: F.cross_entropy(s.classify(x).flatten(0, 1), t.flatten(), reduction="none")[
        m.flatten()
    ].mean(),
    "masks made twice": lambda s, x, t, m: F.cross_entropy(s.classify(x)[t > 2], t[t > 2]),
    "places of a mask": lambda s, x, t, m: F.cross_entropy(s.classify(x)[torch.where(m)], t[torch.where(m)]),
    "places of rows": lambda s, x, t, m: x.view(-1, 8)[m.view(-1).nonzero().squeeze(1)].square().mean(),
    "distances": lambda s, x, t, m: (
        F.mse_loss(x[m], x.tanh()[m]) + F.smooth_l1_loss(x[m], s.table(t[m]), reduction="sum")
    ),
    "yes or no": lambda s, x, t, m: F.binary_cross_entropy_with_logits(x[..., 0][m], t[m].to(x.dtype) / 5),
    "elements": lambda s, x, t, m: x.masked_select(m[..., None]).mean() + x[x > 0].sum(),
    "rows of the batch": lambda s, x, t, m: x[m[:, 0]].square().mean(),
    "over a number": lambda s, x, t, m: (x.square() * m[..., None]).sum() / max(m.sum().item(), 1),
    "by a number": lambda s, x, t, m: (
        x / s.table.weight.exp().max().item() * (1 - 2 * float(x.detach().std()))
    ).mean(),
    "a number that changes": changing,
    "numbers of rows": lambda s, x, t, m: (
        (x[m].square() / (m.sum().item() * (1 / 3))).sum() + x[m].sum() / min(len(x[m]), 5)
    ),
    "scaled": scaled,
    "joined": joined,
    "joined in every layer": joined_in_every_layer,
    "infinite": infinite,
    "broken again": broken_again,
    "accuracy": accuracy,
    "of each class": of_each_class,
    "own loss": own_loss,
    "filled": filled,
    "ignored": ignored,
    "of their class": of_their_class,
}


def _example(body: Body) -> tuple[nn.Module, tuple[Tensor, Tensor, Tensor]]:
    torch.manual_seed(0)
    mask = torch.arange(ROWS * WORDS).view(ROWS, WORDS) % 5 < 2
    mask[0, 1], mask[-1, -2:] = True, True
    assert mask.sum() == 12 and len(set(mask.sum(1).tolist())) > 1
    classes = torch.arange(ROWS * WORDS).view(ROWS, WORDS) * 7 % 11 % CLASSES
    return Around(body).double(), (torch.randn(ROWS, WORDS, 8, dtype=torch.float64), classes, mask)


ALIKE = {
    *("mean", "sum of squares", "sum over how many", "cross-entropy of some words", "losses of words"),
    *("places of rows", "yes or no", "over a number", "scaled", "infinite", "own loss"),
}
"""Bodies that are looked at in `make test-all`: of each, another one is much like it."""


@pytest.mark.parametrize("name", some_thorough(BODIES, ALIKE))
def test_what_is_computed_of_picked_rows(name: str) -> None:
    _skip_where_masks_are_compared(name)
    model, args = _example(BODIES[name])
    plan = autoshard.plan(model, args, mesh="a=2", hardware="cpu-gloo", constraints=["baseline ddp"])
    check_as_before(model, args, plan, rtol=1e-8, atol=1e-10)
    check_as_before(model, (args[0], args[1], args[2].flip(0, 1)), plan, rtol=1e-8, atol=1e-10)


def losses(s: Around, x: Tensor, t: Tensor, m: Tensor) -> Tensor:
    """Torch's own, as modules: they give their arguments by place and by name."""
    scores, weight = s.classify(x), torch.arange(1.0, 1 + CLASSES).to(x)
    chances = scores.sigmoid()
    yes = (t[..., None] > torch.arange(CLASSES)).to(x)
    kinds = (nn.BCEWithLogitsLoss(), nn.BCEWithLogitsLoss(weight, pos_weight=weight), nn.SoftMarginLoss())
    found = [kind(scores[m], yes[m]) for kind in (*kinds, nn.HingeEmbeddingLoss(), nn.PoissonNLLLoss(full=True))]
    if torch.__version__ >= "2.13":  # earlier ones ask how long the rows of a weight are, for its broadcast
        found += [nn.BCELoss(x[..., :CLASSES].detach().abs()[m])(chances[m], yes[m])]
    found += [nn.MarginRankingLoss()(scores[m], chances[m], yes[m]), nn.CosineSimilarity()(scores[m], yes[m]).mean()]
    found += [nn.KLDivLoss(reduction="batchmean")(scores[m], chances[m])]
    found += [F.cosine_similarity(F.normalize(scores[m]), chances[m]).mean()]
    return sum(k * loss for k, loss in enumerate(found, 1))  # type: ignore[return-value]


def test_torchs_losses_of_picked_rows() -> None:
    """Of the graph alone: a plan of it is that of losses of all rows."""
    model, args = _example(losses)
    graph = capture(model, args)
    leaves = leaves_of(model, args, graph)
    values = interpret(graph, leaves)
    (loss,) = graph.outputs
    expected = model(*args)
    expected.backward(leaves["grad.0"])
    assert loss is not None
    torch.testing.assert_close(values[loss.node, loss.output], expected)
    gradients = {name: values[ref.node, ref.output] for name, ref in graph.gradients}
    torch.testing.assert_close(gradients, {name: model.get_parameter(name).grad for name in gradients})


UNLIKE = {
    "cross-entropy",
    "joined",
    "places of a mask",
    "by a number",
    "accuracy",
    "infinite",
    "broken again",
}


@pytest.mark.parametrize("name", some_thorough(BODIES, BODIES.keys() - UNLIKE))
def test_whatever_is_cut(name: str) -> None:
    _skip_where_masks_are_compared(name)
    model, args = _example(BODIES[name])
    plan = random_plan(capture(model, args), Mesh.parse("a=2,b=2"), 0, model, args, {})
    check_as_before(model, args, plan, rtol=1e-8, atol=1e-10)


def _skip_where_masks_are_compared(name: str) -> None:
    if name == "masks made twice" and torch.__version__ < "2.12":
        pytest.skip("dynamo of torch 2.11 asks whether two masks pick equally many")


def written_twice(s: Around, x: Tensor, t: Tensor, m: Tensor) -> Tensor:
    first = x[m]
    m &= t > 1
    return F.mse_loss(first, x[m])


def written_as_it_is(s: Around, x: Tensor, t: Tensor, m: Tensor) -> Tensor:
    m, first = m.clone(), x[m]
    rows, view = x[m], m.view(-1)
    view[0] = False
    return (rows * first).mean() + x[m].mean()


def written_between(s: Around, x: Tensor, t: Tensor, m: Tensor) -> Tensor:
    x = x.clone()
    rows = x[x > 0] * 2
    x[:, 0] = 1.0
    x[x > 0] = rows
    return x.mean()


def joined_and_changed(s: Around, x: Tensor, t: Tensor, m: Tensor) -> Tensor:
    x, others = x.clone(), x.tanh()[:, 1:4].reshape(-1, 8)
    x[m] = x[m] + others
    rows = x[m]
    rows.mul_(2)
    x[m] = rows
    return x.square().mean()


def counted_late(s: Around, x: Tensor, t: Tensor, m: Tensor) -> Tensor:
    m = m.clone()
    places = torch.where(m)
    m[0] = False
    return x.sum() / len(places[0])


REFUSED: dict[str, Body] = {
    "rows of another mask": lambda s, x, t, m: (x[m] * x[~m][:1]).mean(),
    "a mask that is written into": written_twice,
    "a mask whose view is written into": written_as_it_is,
    "a mask of what is written into": written_between,
    "how many a mask picked before it was written into": counted_late,
    "a loss by weights of its own": lambda s, x, t, m: F.mse_loss(x[m], 2 * x[m], weight=x[m].abs()),
    "a weight for each row": lambda s, x, t, m: F.binary_cross_entropy_with_logits(
        x[m], x[m].sigmoid(), torch.ones(12, 1).to(x)
    ),
    "the largest": lambda s, x, t, m: x[m].max(),
    "in order": lambda s, x, t, m: x[m].sort(0)[0].mean(),
    "products of rows": lambda s, x, t, m: (x[m] @ x[m].t()).mean(),
    "as many as were joined, written into": joined_and_changed,
    "the first of as many as were joined": lambda s, x, t, m: (x[m] + x.flatten(0, 1)[:12]).mean() + x[m][0].mean(),
    "the first": lambda s, x, t, m: x[m][0].mean(),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_reads_picked_rows_in_another_way_is_refused(name: str) -> None:
    with pytest.raises(CaptureError, match=r"depends on numbers|unknown while planning|writes into"):
        capture(*_example(REFUSED[name]))


def test_in_half_precision_a_number_is_as_precise_as_pythons() -> None:
    """257 is none of bfloat16's."""

    class Over(nn.Module):
        def __init__(self, of_rows: bool) -> None:
            super().__init__()
            self.enter, self.of_rows = nn.Linear(1, 1), of_rows

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            h = self.enter(x)
            return h[mask].mean() if self.of_rows else h.sum() / mask.sum().item()

    mask = torch.arange(258) < 257
    for of_rows in (True, False):
        torch.manual_seed(0)
        model, args = Over(of_rows).bfloat16(), (torch.ones(258, 1, dtype=torch.bfloat16), mask)
        plan = autoshard.plan(model, args, mesh="a=2", hardware="cpu-gloo", constraints=["baseline ddp"])
        check_as_before(model, args, plan, rtol=3e-3, atol=0)


class Clustered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.classes = nn.Linear(8, 16), nn.AdaptiveLogSoftmaxWithLoss(16, 24, [8, 16], head_bias=True)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        found = self.classes(self.enter(x), y)
        return found.loss + found.output.square().mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize("constraint", ["baseline ddp", "family a=tp"])
def test_rare_classes_are_computed_of_all_rows(constraint: str) -> None:
    torch.manual_seed(0)
    args = torch.randn(16, 8, dtype=torch.float64), torch.arange(16) * 7 % 24
    model = Clustered().double()
    plan = autoshard.plan(model, args, mesh="a=2", hardware="cpu-gloo", constraints=[constraint])
    check_as_before(model, args, plan, rtol=1e-8, atol=1e-10)
