"""What a forward does beside computing: writes in place, changes buffers and Python state, hides from autograd."""

from __future__ import annotations

import torch

from .layers import Writes
from .templates import mask
from .writer import Unsuited, Writer

CHANGES = (
    "{v}.mul_(2)",
    "{v}.add_(1)",
    "{v}.add_({wide})",
    "{v}.mul_({wide})",
    "{v}.sub_({wide}, alpha=2)",
    "{v}.relu_()",
    "{v}.tanh_()",
    "{v}.zero_()",
    "{v}.fill_(0.5)",
    "{v}.clamp_(-0.5, 0.8)",
    "{v}.neg_()",
    "{v}.masked_fill_({mask}, 0.0)",
    "{v}.copy_({wide})",
    "{v}[0] = 0.5",
    "{v}[0] += 1",
    "{v}[..., 0] = {v}[..., -1]",
    "{v}[1:] *= 2",
    "{v}[:, 0].mul_(3)",
    "{v}.t().add_(1)",
    "{v}.view(-1)[0] = 2.0",
    "{v}.view(-1).add_(0.5)",
    "{v}.transpose(-1, -2).mul_(2)",
    "{v}.diagonal().fill_(1.0)",
    "{v}.select(0, -1).zero_()",
    "{v}.squeeze_()",
    "{v}.unsqueeze_(0)",
    "{v}.t_()",
    "{v}.index_add_(0, torch.zeros(1, dtype=torch.int64), {v}[:1].detach())",
    "{v}.index_fill_(0, torch.zeros(1, dtype=torch.int64), 0.1)",
    "{v}[torch.zeros(1, dtype=torch.int64)] = 0.7",
    "{v}[{mask}] = 0.0",
    "{v} += {wide}",
    "{v} *= 0.5",
    "{v} /= 3",
    "{v}.lerp_({wide}, 0.5)",
    "{v}.addcmul_({wide}, {wide})",
    "{v}.cumsum_(0)",
    "F.relu({v}, inplace=True)",
    "torch.add({v}, 1, out={v})",
)


def in_place(w: Writer) -> None:
    """Writes into a tensor, or a view of it, that the forward made: mostly a copy, as no backward needs what it was."""
    v = w.tensor(lambda t: t.is_floating_point() and t.dim() > 0)
    if v not in w.locals or w.chance(80):
        v = w.let(f"{v}.clone()")
    if w.chance(25):
        view = w.fresh("v")
        w.say(f"{view} = {v}{w.pick(('[0]', '[1:]', '.t()', '.view(-1)', '[..., 0]', '.unsqueeze(0)', '.detach()'))}")
        if view in w.locals:
            v = view
    change(w, v, CHANGES)


def in_place_on_an_input(w: Writer) -> None:
    change(w, w.tensor(lambda t: any(t is w.value(name) for name in w.inputs) and t.is_floating_point()), CHANGES)


def change(w: Writer, v: str, table: tuple[str, ...]) -> None:
    text = w.pick(table).replace("{v}", v)
    while "{wide}" in text:
        text = text.replace("{wide}", w.broadcastable(v), 1)
    if "{mask}" in text:
        text = text.replace("{mask}", mask(w, v))
    w.say(text)


BUFFERS = (
    "{s}.mul_(0.9).add_({u}, alpha=0.1)",
    "{s}.copy_({u})",
    "{s} = 0.9 * {s} + 0.1 * {u}",
    "{s} = {u}",
    "{s} = {s} + 1",
    "{s} += 1",
    "{s}.add_(1)",
    "{s}.fill_(0.5)",
    "{s}.zero_()",
    "{s}[0] = 0.3",
    "{s}[0].add_(1)",
    "{s}.lerp_({u}, 0.5)",
    "{s}.t().mul_(2)",
    "{s}.view(-1).copy_({u}.reshape(-1))",
    "{s}.copy_(torch.maximum({s}, {u}))",
    "torch.add({s}, {u}, out={s})",
    "{s}.data.mul_(0.5)",
)


def buffers(w: Writer) -> None:
    """Updates a buffer, in place or by assignment, mostly with something computed, and mostly reads it somewhere."""
    v = w.tensor(lambda t: t.dtype == w.dtype and t.dim() <= 3)
    s = w.buffer(tuple(w.value(v).shape)) if not w.buffers or w.chance(60) else w.pick(w.buffers)
    same = w.names(lambda t: t.shape == w.value(s).shape and t.dtype == w.value(s).dtype)
    u = w.pick(same)
    if w.chance(30):
        w.let(f"{s} * {w.number()}")
    w.say(w.pick(BUFFERS).replace("{s}", s).replace("{u}", u if w.chance(10) else f"{u}.detach()"))
    if w.chance(60):
        w.let(f"{s} + {w.number()}")


def counter(w: Writer) -> None:
    """A buffer that counts, whole or floating."""
    s = w.buffer((), w.pick((torch.int64, torch.float64)))
    w.say(w.pick((f"{s}.add_(1)", f"{s} += 1", f"{s} = {s} + 1")))
    if w.chance(50):
        w.let(f"{w.floating()} / ({s} + 1)")


def scalar_state(w: Writer) -> None:
    """A Python attribute that the forward reads; sometimes it changes it."""
    name = w.fresh("self.a")
    w.prepare(f"{name} = " + w.pick(("2", "0.5", "True", "[1.0, 2.0]", "(3, 0.5)", "{'k': 2.0}")))
    value = w.value(name)
    key = "[1]" if isinstance(value, list | tuple) else "['k']" if isinstance(value, dict) else ""
    w.let(f"{w.floating()} * {name}{key}")
    if w.chance(15) and type(value) in (int, float):
        w.say(w.pick((f"{name} += 1", f"{name} = {name} * 2")))
    elif w.chance(10) and isinstance(value, list):
        w.say(f"{name}.append(1.0)")


def tensor_attribute(w: Writer) -> None:
    """A tensor that is neither parameter nor buffer."""
    x = w.floating()
    name = w.fresh("self.a")
    w.prepare(f"{name} = make({', '.join(map(str, w.value(x).shape))})")
    w.let(f"{x} + {name}")


def remembered(w: Writer) -> None:
    """A tensor kept in an attribute, for reading after the call."""
    name = w.fresh("self.a")
    w.prepare(f"{name} = None")
    w.say(f"{name} = {w.floating()}{w.pick(('', '.detach()'))}")


def branch(w: Writer) -> None:
    x = w.floating()
    name = w.fresh("v")
    of = w.pick((f"{x}.shape[0] > 2", f"{x}.dim() == 2", f"{x}.requires_grad"))
    condition = w.pick(("self.training", "torch.is_grad_enabled()", of))
    w.say(f"if {condition}:\n    {name} = {x} * 2\nelse:\n    {name} = {x} + 1")


def loop(w: Writer) -> None:
    x = w.floating(1)
    name = w.fresh("v")
    factor = w.pick(("2", "k", "(k + 1)"))
    w.say(f"{name} = {x}\nfor k in range({w.integer(1, 3)}):\n    {name} = torch.tanh({name}) * {factor}")


def without_gradient(w: Writer) -> None:
    x = w.floating()
    name = w.fresh("v")
    w.say(f"with torch.no_grad():\n    {name} = {x} * {w.number()}")


def in_autocast(w: Writer) -> None:
    x = w.tensor(lambda t: t.dim() == 2 and t.dtype in (torch.float32, torch.bfloat16))
    name = w.fresh("v")
    columns = w.parameter((w.value(x).shape[-1], w.length()), w.value(x).dtype)
    w.say(f"with torch.autocast('cpu', torch.bfloat16):\n    {name} = {x} @ {columns}")


def parameter_in_place(w: Writer) -> None:
    """A parameter changed in the forward."""
    p = w.pick(w.parameters)
    w.say(f"with torch.no_grad():\n    {p}.mul_(0.9)")


def gradient_changed(w: Writer) -> None:
    """A tensor's gradient scaled on its way, as gradient reversal does it."""
    x = w.floating()
    w.let(f"{x} + ({x} - {x}.detach()) * -2.0")


EFFECTS: tuple[Writes, ...] = (
    in_place, in_place, in_place, in_place, buffers, buffers, counter, scalar_state, branch, loop, without_gradient,
    gradient_changed,
)  # fmt: skip

REFUSED: tuple[Writes, ...] = (
    in_place_on_an_input, scalar_state, tensor_attribute, remembered, in_autocast, parameter_in_place,
)  # fmt: skip
"""What autoshard may refuse; rare, so that most programs run."""

__all__ = ["EFFECTS", "REFUSED", "Unsuited"]
