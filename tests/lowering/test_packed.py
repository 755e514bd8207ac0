"""Packed sequences on ranks: losses and gradients as in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

import autoshard
from autoshard.capture import capture
from autoshard.errors import CaptureError
from autoshard.mesh import Mesh

from ..fuzz.random_plans import random_plan
from ..one_process import one_rank
from ..thorough import some_thorough
from .as_before import check_as_before

ROWS, STEPS, FEATURES, HIDDEN = 4, 4, 5, 4
SORTED = torch.tensor([4, 3, 3, 1])
LENGTHS = torch.tensor([2, 4, 1, 3])
Body = Callable[["Reader", Tensor, Tensor], Tensor]


class Reader(nn.Module):
    """Rows (rows, steps, features) and their lengths to a number, as a body makes it with a recurrent layer."""

    def __init__(self, body: Body, kind: type[nn.Module] = nn.LSTM, **settings: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.features, self.body = nn.Linear(FEATURES, FEATURES), body
        self.layer = kind(FEATURES, HIDDEN, **{"batch_first": True} | settings)
        self.classes = nn.Linear(HIDDEN * (1 + settings.get("bidirectional", False)), 3)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        return self.body(self, self.features(x), lengths)


def all_steps(model: Reader, x: Tensor, lengths: Tensor) -> Tensor:
    """Outputs and last states."""
    packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
    output, states = model.layer(packed)
    padded, found = pad_packed_sequence(output, batch_first=True, padding_value=0.5, total_length=x.size(1))
    states = states if isinstance(states, tuple) else (states,)
    return padded.square().sum() + sum(state.cos().sum() for state in states) + (padded[:, 0, 0] * found).sum()


def steps_in_front(model: Reader, x: Tensor, lengths: Tensor) -> Tensor:
    packed = pack_padded_sequence(x.transpose(0, 1), [4, 3, 3, 1])
    output, _ = pad_packed_sequence(model.layer(packed)[0], total_length=STEPS + 2)
    return (output * torch.arange(STEPS + 2.0).reshape(-1, 1, 1)).square().mean()


def last_state(model: Reader, x: Tensor, lengths: Tensor) -> Tensor:
    """A classifier of texts."""
    _, (state, _) = model.layer(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))
    return F.cross_entropy(model.classes(torch.cat([state[-2], state[-1]], 1)), lengths % 3)


def with_a_start(model: Reader, x: Tensor, lengths: Tensor) -> Tensor:
    start = x[:, 0, :HIDDEN].expand(1, -1, -1).contiguous()
    packed = pack_padded_sequence(x, lengths.tolist(), True, False)
    output, state = model.layer(packed, (start, 2 * start) if isinstance(model.layer, nn.LSTM) else start)
    padded, _ = pad_packed_sequence(output, True)
    return padded.square().sum() + (state[0] if isinstance(state, tuple) else state).sum()


def classes_of_all(model: Reader, x: Tensor, lengths: Tensor) -> Tensor:
    """As captions of pictures are trained: the padding of scores and targets is packed away."""
    output, _ = model.layer(pack_padded_sequence(x, lengths, batch_first=True))
    scores = model.classes(pad_packed_sequence(output, batch_first=True)[0])
    targets = (x[..., 0] > 0).long() + (x[..., 1] > 0).long()
    packed = pack_padded_sequence(scores, lengths, batch_first=True).data
    return F.cross_entropy(packed, pack_padded_sequence(targets, lengths, batch_first=True).data)


def data_handed_on(model: Reader, x: Tensor, lengths: Tensor) -> Tensor:
    """Padding is taken away in front of the layer, and put back behind the classes."""
    packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    others = (packed.batch_sizes, packed.sorted_indices, packed.unsorted_indices)
    output = model.layer(input=PackedSequence(packed.data.tanh(), *others))[0]
    scores, *others = output._replace(data=model.classes(output[0]))
    padded, _ = pad_packed_sequence(PackedSequence(scores, *others), total_length=STEPS)
    return (padded * torch.arange(ROWS).unsqueeze(-1)).square().sum()


class Dropping(nn.LSTM):
    """As wrappers of recurrent modules are, for packed sequences and others."""

    def forward(self, x: PackedSequence | Tensor, hx: Any = None) -> Any:  # type: ignore[override]
        if isinstance(x, PackedSequence):
            x = x._replace(data=2 * x.data)
        return super().forward(x, hx)  # type: ignore[arg-type]


def in_a_checkpoint(model: Reader, x: Tensor, lengths: Tensor) -> Tensor:
    return checkpoint(last_state, model, x, lengths, use_reentrant=False)  # type: ignore[no-any-return]


def hooked() -> Reader:
    model = Reader(all_steps)
    model.layer.register_forward_hook(lambda layer, args, result: (result[0], tuple(2 * each for each in result[1])))
    return model


MODELS: dict[str, tuple[Callable[[], Reader], Tensor]] = {
    "LSTM": (lambda: Reader(all_steps), LENGTHS),
    "both ways": (lambda: Reader(all_steps, bidirectional=True, num_layers=2), LENGTHS),
    "projected": (lambda: Reader(all_steps, proj_size=2, num_layers=2), LENGTHS),
    "GRU": (lambda: Reader(all_steps, nn.GRU, bidirectional=True), LENGTHS),
    "RNN": (lambda: Reader(all_steps, nn.RNN, nonlinearity="relu", bias=False), LENGTHS),
    "steps in front": (lambda: Reader(steps_in_front, batch_first=False), SORTED),
    "last state": (lambda: Reader(last_state, bidirectional=True), LENGTHS),
    "with a start": (lambda: Reader(with_a_start), LENGTHS),
    "GRU with a start": (lambda: Reader(with_a_start, nn.GRU), LENGTHS),
    "classes of all": (lambda: Reader(classes_of_all), SORTED),
    "data handed on": (lambda: Reader(data_handed_on), LENGTHS),
    "class of the model's": (lambda: Reader(all_steps, Dropping), LENGTHS),
    "hooked": (hooked, LENGTHS),
    "in a checkpoint": (lambda: Reader(in_a_checkpoint, bidirectional=True), LENGTHS),
}
CASES = [(name, seed) for seed in range(2) for name in MODELS]


@pytest.mark.parametrize(("name", "seed"), some_thorough(CASES, CASES[len(MODELS) :]))
@pytest.mark.filterwarnings("ignore::autoshard.errors.StrategyWarning")
def test_losses_and_gradients_are_those_of_one_process(name: str, seed: int) -> None:
    model, args = _made(name)
    plan = random_plan(capture(model, args), Mesh(("dp", "tp"), (2, 2)), seed, model, args, {})
    check_as_before(model, args, plan, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["both ways", "classes of all"])
def test_data_parallel_training_gathers_nothing_but_gradients(name: str) -> None:
    model, args = _made(name)
    plan = autoshard.plan(model, args, mesh="dp=2", hardware="cpu-gloo", constraints="baseline ddp")
    sent = {c.kind for r in plan.redistributions for c in r.collectives if c.size_bytes > 8}
    assert sent == {"all_reduce"}
    check_as_before(model, args, plan, rtol=1e-9, atol=1e-9)


def test_fewer_steps_than_the_padded_ones_are_an_error() -> None:
    model, args = _made("GRU with a start")
    with one_rank():
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
        plan = autoshard.plan(model, args, mesh="dp=1", hardware="cpu-gloo")
        parallel = autoshard.parallelize(model, plan, mesh, args)
        parallel(*args)
        with pytest.raises(
            RuntimeError, match=r"shorter than the padded sequences .*total_length=x\.size\(1\).*test_packed"
        ):
            parallel(args[0], SORTED - 1)


def _sizes(model: Reader, x: Tensor, lengths: Tensor) -> Tensor:
    packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    return model.layer(packed)[0].data[: packed.batch_sizes[0]].sum()


def _in_their_new_order(model: Reader, x: Tensor, lengths: Tensor) -> Tensor:
    packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    return pad_packed_sequence(PackedSequence(packed.data, packed.batch_sizes))[0][:, 0].sum()


@pytest.mark.parametrize("body", [_sizes, _in_their_new_order])
def test_what_looks_into_packed_sequences_is_refused(body: Body) -> None:
    with pytest.raises(CaptureError, match=r"looks into a PackedSequence, .* A captured step knows"):
        capture(Reader(body), (torch.randn(ROWS, STEPS, FEATURES), LENGTHS))


def _made(name: str) -> tuple[Reader, tuple[Tensor, Tensor]]:
    if name == "classes of all" and torch.__version__ < "2.12":
        pytest.skip("dynamo of torch 2.11 asks whether two masks pick equally many")
    make, lengths = MODELS[name]
    x = torch.randn(ROWS, STEPS, FEATURES, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return make().double(), (x, lengths)
