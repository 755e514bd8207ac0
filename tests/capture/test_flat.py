"""Stacks of alike blocks are captured short and repeated: the graph is that of a whole capture, or one is made."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import fields
from functools import partial
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import autoshard
from autoshard.capture import CapturedGraph, Node, capture
from autoshard.capture.adapter import FakeResults, storage_of
from autoshard.capture.fake_run import fake_run
from autoshard.capture.stacks import flat
from autoshard.capture.stacks.block_guards import BlockGuards
from autoshard.capture.stacks.blocks import FEWEST, stacks_of
from autoshard.precision import AS_IT_IS, Precision
from examples.gpt2 import GPT2, GPT2Config
from examples.llama import Llama, LlamaConfig

DEPTH, WIDTH = 9, 4
CAPTURE = import_module("autoshard.capture.capture")  # the package has a function of that name

Captured = Callable[[], tuple[CapturedGraph, Any]]


class Block(nn.Module):
    """A block that a test changes."""

    def __init__(self, index: int = 0) -> None:
        super().__init__()
        self.index = index
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = nn.Linear(WIDTH, 2 * WIDTH)
        self.outer = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.rate, self.scale = 0.0, 0.5

    def forward(self, x: Tensor) -> Tensor:
        """(B, C) to (B, C)."""
        x = nn.functional.dropout(x + self.outer(self.inner(self.norm(x)).relu()) * self.scale, self.rate)
        return x


class Gained(Block):
    """Asks its weight for a factor."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, C) to (B, C)."""
        return super().forward(x) * getattr(self.inner.weight, "gain", 1.0)


class Rooted(Block):
    """What it begins with keeps something for the backward, where what it is given wants a gradient."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, C) to (B, C)."""
        return super().forward(x * (x.pow(2).mean(-1, keepdim=True) + 1).rsqrt())


class Deep(nn.Module):
    """Blocks in a row."""

    def __init__(self, block: Callable[[int], nn.Module] = Block, depth: int = DEPTH) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(block(index) for index in range(depth))
        self.special: tuple[int, ...] = ()
        self.depth = depth

    def forward(self, x: Tensor) -> Tensor:
        """(B, C) to ()."""
        x = self.first(x)
        for index, block in enumerate(self.blocks):
            x = block(x) if index not in self.special else block(x).tanh()
        return x.square().sum()


class Config:
    scale = 2.0

    def __init__(self) -> None:
        self.stretch = None


class Configured(Deep):
    """Asks for attributes by names that stand in a list, and by one that is made of what a model can give."""

    def __init__(self) -> None:
        super().__init__()
        self.config = Config()

    def forward(self, x: Tensor) -> Tensor:
        """(B, C) to ()."""
        for name in ["scale", "shift", "stretch", "slant"]:
            given = getattr(self.config, name, None)
            x = x if given is None else given * x
        wanted = [kind for kind in ("logits",) if getattr(self.config, f"output_{kind}", False)]
        return super().forward(x) + len(wanted)


class Normed(Block):
    """Has buffers that it writes."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.batch = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C) to (B, C)."""
        return super().forward(self.batch(x))


class Tabled(Block):
    """Has a table by name, of its own or of another block too."""

    def __init__(self, index: int, table: Tensor | None = None) -> None:
        super().__init__(index)
        self.tables = {"a": torch.full((WIDTH,), float(index)) if table is None else table}

    def forward(self, x: Tensor) -> Tensor:
        """(B, C) to (B, C)."""
        return super().forward(x * self.tables["a"])


class Marked(Block):
    """Its backward computes it again."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, C) to (B, C)."""
        result: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return result


class Shifted(Marked):
    """Has one more parameter."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.shift = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """(B, C) to (B, C)."""
        return super().forward(x + self.shift)


class Numbered(Block):
    """Numbers stand in its forward, as an index and as a tensor."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, C) to (B, C)."""
        first = x[:, [-2]] * torch.sqrt(torch.tensor(float(x.shape[-1])) * self.scale)
        return super().forward(x + first)


class Given(Block):
    """Has functions that it was given, each an object of its own."""

    def __init__(self, index: int = 0) -> None:
        super().__init__(index)
        self.act, self.again = partial(nn.functional.gelu, approximate="tanh"), self._doubled

    def forward(self, x: Tensor) -> Tensor:
        """(B, C) to (B, C)."""
        return super().forward(self.again(self.act(x)))

    def _doubled(self, x: Tensor) -> Tensor:
        return x * self.scale * 2


class Reading(Block):
    """Reads another tensor too."""

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:  # type: ignore[override]
        """(B, C) and (B, C) to (B, C)."""
        return super().forward(x + memory)


class TwoStacks(nn.Module):
    """The second stack reads what the first one gives, in every block."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(*(Block() for _ in range(DEPTH)))
        self.decoder = nn.ModuleList(Reading() for _ in range(DEPTH - 1))

    def forward(self, x: Tensor) -> Tensor:
        """(B, C) to ()."""
        memory = self.encoder(x).tanh()  # an operator between the stacks
        for block in self.decoder:
            x = block(x, memory)
        return x.sum()


class Nested(nn.Module):
    """A stack within blocks that are too few to be one."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(nn.Sequential(*(Block() for _ in range(size))) for size in (2, DEPTH, 3))

    def forward(self, x: Tensor) -> Tensor:
        """(B, C) to ()."""
        for stage in self.stages:
            x = stage(x)
        return x.sum()


class Indexed(Block):
    """What it does depends on which block it is."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, C) to (B, C)."""
        return super().forward(x) * (2.0 if self.index == DEPTH - 2 else 1.0)


class Reversed(torch.autograd.Function):
    """Turns a gradient around; its forward says nothing of that."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """The same numbers."""
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        """Its gradient, turned around."""
        return -gradients[0]


class Passed(Reversed):
    """Passes a gradient on."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        """Its gradient."""
        return gradients[0]


class TurnedAround(Deep):
    """Behind one block gradients are turned around."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, C) to ()."""
        for index, block in enumerate(self.blocks):
            x = block(x)
            x = Reversed.apply(x) if index == DEPTH - 3 else Passed.apply(x)
        return x.sum()


class Smooth(nn.Module):
    """Keeps for its backward what no operator shows."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C) to (B, C)."""
        return x + nn.functional.silu(self.inner(x))


class Untrained(Deep):
    """No gradient is computed within some blocks."""

    def __init__(self, *without: int) -> None:
        super().__init__(Smooth)
        self.without = without

    def forward(self, x: Tensor) -> Tensor:
        """(B, C) to ()."""
        x = self.first(x)
        for index, block in enumerate(self.blocks):
            with torch.set_grad_enabled(index not in self.without):
                x = block(x)
        return x.sum()


class HalfGradient(Deep):
    """Behind one block a hook halves the gradient."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, C) to ()."""
        x = self.first(x)
        for index, block in enumerate(self.blocks):
            x = block(x)
            if index == 6:
                x.register_hook(lambda gradient: gradient * 0.5)
        return x.sum()


class Taking(Deep):
    """Does something with what the fifth of its blocks makes, or at one block alone; has a number for each block."""

    def __init__(self, what: str) -> None:
        super().__init__(block=Scaled)
        self.what, self.flag = what, False
        self.numbers, self.n0, self.n1, self.n2, self.n3, self.n4 = [1.0] * DEPTH, *[1.0] * 5
        self.n5, self.n6, self.n7, self.n8 = [1.0] * 4
        self.alike = [*self.blocks]
        self.register_buffer("last", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Any:
        """(B, C) to what is asked for."""
        made = [self.first(x)]
        for k, block in enumerate(self.alike if self.what == "a plain list" else self.blocks):
            scale = 1.0
            if self.what == "items":
                scale = self.numbers[k]
            elif self.what == "attributes":
                scale = getattr(self, f"n{k}")
            elif self.what == "a flag" and k == 6 and self.flag:
                scale = 2.0
            made.append(block(made[-1], k if self.what == "an index" else scale))
        if self.what == "a buffer":
            self.last = made[5].detach().mean(0)
        loss = made[-1].square().sum()
        return {"a result": (loss, made[5]), "a count": (loss, len(self.blocks))}.get(self.what, loss)


class Scaled(Block):
    """Is given a number."""

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:  # type: ignore[override]
        """(B, C) to (B, C)."""
        return x + super().forward(x).tanh() * (scale if scale > 0 else 1)


class Collected(Deep):
    """Gives what every block makes."""

    def forward(self, x: Tensor) -> Any:
        """(B, C) to the same of each block."""
        made = [x]
        for block in self.blocks:
            made.append(block(made[-1]))
        return tuple(made[1:])


class Known(Deep):
    """Goes by numbers of an argument: in front of its blocks, and perhaps at each of them."""

    def __init__(self, in_blocks: bool) -> None:
        super().__init__(block=Scaled)
        self.in_blocks = in_blocks

    def forward(self, x: Tensor, numbers: Tensor) -> Tensor:  # type: ignore[override]
        """(B, C) and (DEPTH,) to ()."""
        x = x[: int(numbers[0])]
        for k, block in enumerate(self.blocks):
            x = block(x, int(numbers[k]) if self.in_blocks else 1.0)
        return x.sum()


class LastByNumber(Deep):
    """Knows the number of its blocks by heart."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, C) to ()."""
        for index in range(self.depth):
            x = self.blocks[index](x)
        return x.sum()


def deep(change: Callable[[Deep], object] = lambda model: None, block: Callable[[int], nn.Module] = Block) -> Deep:
    """Blocks in a row, changed in some way."""
    model = Deep(block)
    change(model)
    return model


def frozen(model: Deep) -> None:
    """Two blocks, one of them in the middle, are not trained."""
    for index in (0, 5):
        model.blocks[index].requires_grad_(False)


def tied(model: Deep) -> None:
    """Two blocks share a weight."""
    model.blocks[6].outer.weight = model.blocks[3].outer.weight  # type: ignore[union-attr]


def hooked(model: Deep) -> None:
    """One block has a hook."""
    model.blocks[5].register_forward_hook(lambda module, args, result: 2 * result)


def scaled(model: Deep, other: float = 2.0) -> None:
    """Every block has a hook of its own that does the same, but perhaps for one."""

    def hook_of(factor: float) -> Callable[..., Tensor]:
        return lambda module, args, made: made * factor

    for k, block in enumerate(model.blocks):
        block.register_forward_hook(hook_of(other if k == 5 else 2.0))


def attribute(name: str, value: Any) -> Callable[[Deep], None]:
    """One block has another value of an attribute."""
    return lambda model: setattr(model.blocks[6], name, value)


OTHERS = [True, True, *[False] * 10, True]
"""Which blocks are of another kind."""


def among_others(index: int) -> Block:
    """One of ten alike blocks, or one that stands before or behind them."""
    return Shifted(index) if OTHERS[index] else Marked(index)


def in_turn(index: int) -> Block:
    """A block of one of two kinds, which an attribute tells apart."""
    block = Normed(index)
    block.scale = 0.5 if index % 2 else 0.25
    return block


def specials(*indices: int) -> Callable[[Deep], None]:
    """The model does something else after some blocks."""
    return lambda model: setattr(model, "special", indices)


def llama() -> Llama:
    """A small one with a stack."""
    return Llama(LlamaConfig(8, DEPTH, 8, 2, 1, 16, 8))


def gpt2() -> GPT2:
    """A small one with a stack, and embeddings tied to its head."""
    return GPT2(GPT2Config(8, DEPTH, 8, 2, 8))


FLAT: dict[str, Callable[[], nn.Module]] = {
    "blocks": deep,
    "attributes by names that stand in the code": Configured,
    "buffers that are written": lambda: deep(block=Normed),
    "tables in dicts": lambda: deep(block=Tabled),
    "dropout": lambda: deep(lambda model: [setattr(block, "rate", 0.1) for block in model.blocks]),
    "parts computed again": lambda: deep(block=Marked),
    "items of a list by number": partial(Taking, "items"),
    "numbers that stand in every block": lambda: deep(block=Numbered),
    "functions that blocks were given": lambda: deep(block=Given),
    "hooks of their own that do the same": lambda: deep(scaled),
    "two stacks": TwoStacks,
    "a stack within": Nested,
    "the model is the stack": lambda: nn.Sequential(*(Block() for _ in range(DEPTH))),
    "no gradient before the first block": lambda: deep(lambda model: model.first.requires_grad_(False), Rooted),
    "all blocks frozen": lambda: deep(lambda model: model.blocks.requires_grad_(False)),
    "others before and behind": lambda: Deep(among_others, len(OTHERS)),
    "of two kinds in turn": lambda: Deep(in_turn, 18),
    "of two kinds in turn, and others": lambda: Deep(lambda k: in_turn(k) if k > 0 else Shifted(k), 22),
}
WHOLE: dict[str, Callable[[], nn.Module]] = {
    "two blocks frozen": lambda: deep(frozen),
    "one block scales otherwise": lambda: deep(attribute("scale", 0.25)),
    "a number that stands in one block is another": lambda: deep(attribute("scale", 0.25), Numbered),
    "one block was given another function": lambda: deep(attribute("act", partial(nn.functional.gelu)), Given),
    "one block drops otherwise": lambda: deep(attribute("rate", 0.25)),
    "one block is in evaluation": lambda: deep(lambda model: model.blocks[6].eval()),
    "one block has a hook that does something else": lambda: deep(partial(scaled, other=3.0)),
    "one block has a hook": lambda: deep(hooked),
    "a block in between is special": lambda: deep(specials(5)),
    "the last block is special": lambda: deep(specials(DEPTH - 1)),
    "one weight has a factor that changes nothing": lambda: deep(
        lambda model: setattr(model.blocks[6].inner.weight, "gain", 1.0), Gained
    ),
    "an index is read": lambda: deep(block=Indexed),
    "blocks of two kinds in turn": lambda: deep(block=lambda k: Normed(k) if k % 2 else Block(k)),
    "a weight of two blocks": lambda: deep(tied),
    "a table in the dicts of all blocks": lambda: deep(block=partial(Tabled, table=torch.ones(WIDTH))),
    "a backward of its own": TurnedAround,
    "a block without a gradient": partial(Untrained, 5),
    "first blocks without a gradient": partial(Untrained, 0, 1, 2, 3, 4),
    "a hook of a gradient": HalfGradient,
    **{f"of one block alone: {what}": partial(Taking, what) for what in ("a result", "a count", "a buffer", "a flag")},
    "an index is given": partial(Taking, "an index"),
    "blocks of a plain list": partial(Taking, "a plain list"),
    "what every block makes is a result": Collected,
    "the number of blocks is known by heart": LastByNumber,
    "few blocks": lambda: Deep(depth=FEWEST - 1),
}
ALIKE = {
    *("the model is the stack", "all blocks frozen", "two blocks frozen", "one block drops otherwise"),
    *("one block is in evaluation", "the last block is special", "blocks of two kinds in turn"),
    *("a block in between is special", "one block has a hook", "parts computed again", "of two kinds in turn"),
    *("others before and behind", "of one block alone: a count", "of one block alone: a buffer", "an index is given"),
    *("first blocks without a gradient", "blocks of a plain list"),
}
"""Models that are looked at in `make test-all`: of each, another one is much like it."""


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # dynamo's own
@pytest.mark.parametrize(
    ("name", "is_flat"),
    [pytest.param(name, name in FLAT, marks=pytest.mark.thorough if name in ALIKE else ()) for name in (*FLAT, *WHOLE)],
)
def test_the_graph_is_that_of_a_whole_capture(name: str, is_flat: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = (FLAT | WHOLE)[name]()
    assert equal_to_whole(model, (torch.randn(8, WIDTH),), monkeypatch) == is_flat


@pytest.mark.parametrize("in_blocks", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_numbers_of_a_representative_argument_are_known_in_both(
    in_blocks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = torch.randn(8, WIDTH), autoshard.representative(torch.full((DEPTH,), 4))
    assert equal_to_whole(Known(in_blocks), args, monkeypatch) != in_blocks


@pytest.mark.parametrize(
    ("make", "precision"),
    [
        pytest.param(llama, AS_IT_IS, marks=pytest.mark.thorough),
        pytest.param(gpt2, AS_IT_IS, marks=pytest.mark.thorough),
        (gpt2, Precision.of("bfloat16", "float32")),
        pytest.param(llama, Precision.of("bfloat16", "float32"), marks=pytest.mark.thorough),
    ],
)
@pytest.mark.thorough
def test_the_graph_of_a_language_model_is_that_of_a_whole_capture(
    make: Callable[[], nn.Module], precision: Precision, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    assert equal_to_whole(make(), (tokens, tokens), monkeypatch, precision)


@pytest.mark.parametrize("index", range(DEPTH))
def test_a_change_of_any_block_is_seen(index: int, guarded: CapturedGraph, changing: Deep) -> None:
    assert broken(guarded) is None
    block = changing.blocks[index]
    block.scale = 0.25
    assert broken(guarded) == f"model.blocks.{index}.scale == 0.5"
    block.scale = 0.5
    changing.blocks.append(Block())
    assert broken(guarded) == f"len(model.blocks) == {DEPTH}"
    del changing.blocks._modules[str(DEPTH)]
    assert broken(guarded) is None


@pytest.mark.parametrize("index", [0, 1, 2, 7, 11, 12])
def test_a_change_of_any_block_among_others_is_seen(index: int, among: tuple[Deep, CapturedGraph]) -> None:
    model, graph = among
    assert broken(graph) is None
    model.blocks[index].scale = 0.25
    found = broken(graph)
    model.blocks[index].scale = 0.5
    assert found == f"model.blocks.{index}.scale == 0.5"


def test_an_item_that_only_a_deep_model_reads_is_seen() -> None:
    model = Taking("items")
    guards = capture(model, (torch.randn(8, WIDTH),), guarded=True).guards
    assert isinstance(guards, BlockGuards) and guards.broken() is None
    for k in range(DEPTH):
        model.numbers[k] = 2.0
        assert guards.broken() is not None
        model.numbers[k] = 1.0
    assert guards.broken() is None


def test_attributes_by_number_are_all_looked_at() -> None:
    guards = capture(Taking("attributes"), (torch.randn(8, WIDTH),), guarded=True).guards
    assert guards is not None and not isinstance(guards, BlockGuards)


class Asking(Deep):
    """Has settings for its blocks, which it reads by keys that it makes of their numbers."""

    def __init__(self, read: Callable[[Any, int, nn.Module], float]) -> None:
        super().__init__(block=Scaled)
        self.read = read
        self.skipped: dict[int, float] = {}
        self.halves, self.doubles, self.fifths = [1.0] * 5, [1.0] * (2 * DEPTH), (1.0, 1.0)
        self.named = {f"layer{k}.rate": 1.0 for k in range(DEPTH)}
        self.paired = {("rate", k): 1.0 for k in range(DEPTH)}
        self.functions: list[Callable[[float], float]] = [float] * 5
        self.by_block = dict.fromkeys(self.blocks, 1.0)
        self.rate0_x = self.rate1_x = self.rate2_x = self.rate3_x = self.rate4_x = 1.0
        self.rate5_x = self.rate6_x = self.rate7_x = self.rate8_x = 1.0
        self.unread, self.by_name = 1.0, {"read": 1.0, "unread": 1.0}

    def forward(self, x: Tensor) -> Tensor:
        """(B, C) to ()."""
        x = self.first(x)
        for k, block in enumerate(self.blocks):
            x = block(x, self.read(self, k, block))
        return x.square().sum()


def by_keys(model: Asking, k: int, block: nn.Module) -> float:
    """Reads constants under numbers of all kinds, and under names that are made of them."""
    if k in model.skipped:
        return 0.5
    found = model.halves[k // 2] * model.doubles[2 * k] * model.fifths[k // 5] * model.named[f"layer{k}.rate"]
    return found * model.paired["rate", k] * model.by_name["read"]


def test_what_only_a_deep_model_asks_a_container_for_is_seen() -> None:
    model = Asking(by_keys)
    guards = capture(model, (torch.randn(8, WIDTH),), guarded=True).guards
    assert isinstance(guards, BlockGuards) and guards.broken() is None
    others: dict[str, Any] = {"skipped": {6: 1.0}, "halves": [*[1.0] * 4, 2.0], "fifths": (1.0, 2.0)}
    others["doubles"] = [2.0 if k == 12 else 1.0 for k in range(2 * DEPTH)]
    others["named"] = model.named | {"layer6.rate": 2.0}
    others["paired"] = model.paired | {("rate", 6): 2.0}
    for name, other in others.items():
        before = getattr(model, name)
        setattr(model, name, other)
        found = guards.broken()
        setattr(model, name, before)
        assert found is not None and name in found[0], name
    model.unread = model.by_name["unread"] = 2.0
    assert guards.broken() is None


IN_TURN: dict[str, Callable[[Any, int, nn.Module], float]] = {
    "attributes": lambda model, k, block: float(getattr(model, f"rate{k}_x")),
    "attributes that are not there": lambda model, k, block: float(getattr(model, f"factor{k // 5}", 1.0)),
    "functions": lambda model, k, block: model.functions[k // 2](1.0),
    "keys that are blocks": lambda model, k, block: model.by_block[block],
}


@pytest.mark.parametrize("what", IN_TURN)
def test_a_model_that_asks_in_turn_for_other_things_than_constants_is_captured_whole(what: str) -> None:
    guards = capture(Asking(IN_TURN[what]), (torch.randn(8, WIDTH),), guarded=True).guards
    assert guards is not None and not isinstance(guards, BlockGuards) and guards.broken() is None


def test_another_order_of_blocks_is_seen() -> None:
    model, other = deep(), Taking("a plain list")
    guards, others = (capture(each, (torch.randn(8, WIDTH),), guarded=True).guards for each in (model, other))
    assert guards is not None and others is not None and guards.broken() is None and others.broken() is None
    model.blocks._modules["6"] = model.blocks._modules.pop("6")
    other.alike[2:4] = reversed(other.alike[2:4])
    assert guards.broken() is not None and others.broken() is not None


def test_a_copy_of_the_guards_looks_at_the_copy_of_the_model(guarded: CapturedGraph, changing: Deep) -> None:
    memo: dict[int, Any] = {}
    copied = deepcopy(guarded.guards, memo)
    assert copied is not None
    memo[id(changing)].blocks[6].scale = 0.25
    found = copied.broken()
    assert found is not None and found[0] == "model.blocks.6.scale == 0.5"
    assert broken(guarded) is None


@pytest.mark.parametrize("index", [0, 1, 6, DEPTH - 1])
def test_another_function_in_any_block_is_seen(index: int, given: tuple[Deep, CapturedGraph]) -> None:
    model, graph = given
    assert broken(graph) is None
    block = model.blocks[index]
    before, block.act = block.act, partial(nn.functional.gelu, approximate="none")
    found = broken(graph)
    block.act = before
    assert found is not None and f"model.blocks.{index}.act" in found
    assert broken(graph) is None


@pytest.fixture(scope="module")
def given() -> tuple[Deep, CapturedGraph]:
    """A model whose blocks were given functions, with its graph."""
    model = deep(block=Given)
    return model, capture(model, (torch.randn(8, WIDTH),), guarded=True)


@pytest.fixture(scope="module")
def changing() -> Deep:
    """A model whose attributes tests change and set back."""
    return deep()


@pytest.fixture(scope="module")
def among() -> tuple[Deep, CapturedGraph]:
    """A model whose blocks stand among others, with its graph."""
    model = Deep(among_others, len(OTHERS))
    return model, capture(model, (torch.randn(8, WIDTH),), guarded=True)


@pytest.fixture(scope="module")
def guarded(changing: Deep) -> CapturedGraph:
    """Its graph, with guards."""
    return capture(changing, (torch.randn(8, WIDTH),), guarded=True)


def broken(graph: CapturedGraph) -> str | None:
    """The condition that no longer holds."""
    assert graph.guards is not None
    found = graph.guards.broken()
    return found and found[0]


def test_stacks_within_stacks_are_part_of_them() -> None:
    def rows(block: Callable[[], nn.Module]) -> nn.Module:
        return nn.Sequential(*(block() for _ in range(FEWEST)))

    inner = rows(lambda: rows(lambda: nn.Linear(2, 2)))
    outer = nn.ModuleDict({"a": rows(lambda: nn.Linear(2, 2)), "b": inner})
    assert [stack.path for stack in stacks_of(inner, FEWEST)] == [""]
    assert [stack.path for stack in stacks_of(outer, FEWEST)] == ["a", "b"]


def test_blocks_are_found_where_kinds_take_turns() -> None:
    def found(kinds: str) -> list[tuple[int, int, int]]:
        rows = nn.ModuleList(nn.Linear(2, 2 + "abcdefgh".index(kind)) for kind in kinds)
        return [(stack.first, stack.each, stack.size) for stack in stacks_of(rows, FEWEST)]

    assert found("a" * 8) == [(0, 1, 8)]
    assert found("aaa" + "b" * 58) == [(3, 1, 58)]
    assert found("aaaaab" * 10 + "aa") == [(0, 6, 10)]
    assert found("c" + "aab" * 12) == [(1, 3, 12)]
    assert found("ab" * 8 + "b") == []  # of which a short model would have eleven
    assert found("aaaabbbb" + "abbabbaab") == []


def test_the_model_is_left_as_it_was() -> None:
    model = deep()
    tensors, names = [*model.parameters()], [name for name, _ in model.named_modules()]
    capture(model, (torch.randn(8, WIDTH),))
    assert [id(p) for p in model.parameters()] == [id(p) for p in tensors]
    assert [name for name, _ in model.named_modules()] == names
    assert not any(block._forward_hooks or block._forward_pre_hooks for block in model.blocks)


def test_a_run_on_fakes_notes_operators_alone_and_says_the_devices_of_the_model() -> None:
    found: list[torch.device] = []

    class Asking(Deep):
        def forward(self, x: Tensor) -> Tensor:
            """(B, C) to ()."""
            result = super().forward(x)
            found.extend((x.device, self.first.weight.device, result.device))
            return result

    run = fake_run(Asking(), (torch.randn(8, WIDTH),), {}, None)
    assert found == [torch.device("cpu")] * 3  # not meta, where tensors without memory are
    operators = [node for node in run.nodes if node.kind == "operator"]
    assert operators and all(node.outputs for node in operators)


def test_what_is_known_of_an_operator_on_fakes_is_what_torch_makes_of_it() -> None:
    aten = torch.ops.aten
    with FakeTensorMode() as mode:
        x, y = torch.empty(6, 4), torch.empty(4, 6, dtype=torch.float16)
        results = FakeResults(mode)
        calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
            (aten.mm.default, (x, x.t()), {}),
            (aten.t.default, (x,), {}),
            (aten.view.default, (x[1:], [2, 10]), {}),
            (aten.view.default, (x[:5], [2, 10]), {}),
            (aten.split.Tensor, (y, 3, 1), {}),
            (aten.native_layer_norm.default, (x, [4], None, None, 1e-5), {}),
            (aten.cat.default, ([x, x], 1), {}),
            (aten.arange.default, (3,), {"device": torch.device("cpu")}),
            (aten.arange.default, (3.0,), {"device": torch.device("cpu")}),
            (aten.sum.dim_IntList, (y, [0], True), {"dtype": torch.float32}),
            (aten.add_.Tensor, (x, x), {}),
        ]

        def looks(result: Any) -> list[tuple[Any, ...]]:
            places = {storage_of(x): "x", storage_of(y): "y"}
            tensors = result if isinstance(result, (tuple, list)) else [result]
            return [
                (t.shape, t.stride(), t.storage_offset(), t.dtype, t.device, places.get(storage_of(t))) for t in tensors
            ]

        for op, args, kwargs in calls:
            asked, first, known = op(*args, **kwargs), results.of(op, args, kwargs), results.of(op, args, kwargs)
            assert looks(asked) == looks(first) == looks(known)
            assert type(asked) is type(known)
            assert (known is first) == (asked is x)  # what is written into stays what it is
        before = results.of(aten.full.default, ([2], 1.0), {})
        torch.set_default_dtype(torch.float64)
        try:
            after = results.of(aten.full.default, ([2], 1.0), {})
        finally:
            torch.set_default_dtype(torch.float32)
        assert (before.dtype, after.dtype) == (torch.float32, torch.float64)


def equal_to_whole(
    model: nn.Module, args: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch, precision: Precision = AS_IT_IS
) -> bool:
    """Captures a model in both ways, which must give the same; whether the first one was flat."""
    found: list[CapturedGraph | None] = []

    def watched(model: nn.Module, args: Any, kwargs: Any, whole: Captured, dtype: Any, run: Any) -> Any:
        found.append(flat.captured_flat(model, args, kwargs, whole, dtype, run))
        return found[-1]

    with monkeypatch.context() as patched:
        patched.setattr(CAPTURE, "captured_flat", watched)
        one = capture(model, args, precision=precision, guarded=True)
        patched.setattr(CAPTURE, "captured_flat", lambda *_: None)
        other = capture(model, args, precision=precision)
    assert one.fingerprint == other.fingerprint
    for mine, its in zip(one.nodes, other.nodes, strict=True):
        assert all(getattr(mine, f.name) == getattr(its, f.name) for f in fields(Node) if f.name != "mark"), mine.name
        assert (mine.mark is None) == (its.mark is None)
    assert _regions(one) == _regions(other)
    compared = ("outputs", "constants", "gradients", "mutations", "aliases", "unused", "out_spec", "replaced", "names")
    assert all(getattr(one, name) == getattr(other, name) for name in compared)
    return found != [None]


def _regions(graph: CapturedGraph) -> list[tuple[int, bool] | None]:
    """What is marked, with regions numbered from 0."""
    first = min((node.mark.region for node in graph.nodes if node.mark), default=0)
    return [node.mark and (node.mark.region - first, node.mark.saved) for node in graph.nodes]
