"""What a forward asks of tensors beside their numbers, and of its surroundings: answered as in one process, or refused.

Each program takes a step, something changes, and it takes another one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

import autoshard
from autoshard.capture import capture
from autoshard.errors import AutoshardError, CaptureError, InputError, PlanMismatchError

from ..fuzz.judge import capturing_once
from ..fuzz.ranks import run_ranks
from ..one_process import one_rank

SIZE = 4
Body = Callable[..., Tensor]
Change = Callable[[Any], Any]


def nothing(model: Any) -> None:
    """No change."""


class Model(nn.Module):
    """(rows, features) to a number, by two products and what a body makes beside them."""

    def __init__(self, body: Body, setup: Change = nothing) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = body
        self.a, self.b = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)
        self.register_buffer("table", torch.ones(SIZE))
        self.double()
        setup(self)

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        return self.a(x).sum() * self.b(x).sum() + self.body(self, x, *others)


def given(seed: int = 1) -> Tensor:
    return torch.randn(4, SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def stepped(model: nn.Module, *args: Tensor) -> dict[str, Tensor]:
    """The loss and the gradients of a step."""
    model.zero_grad()
    loss = model(*args)
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    whole = {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in gradients.items()}
    return {"loss": loss.detach().clone()} | {name: gradient.clone() for name, gradient in whole.items()}


def check_alike(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, theirs in expected.items():
        torch.testing.assert_close(found[name], theirs, rtol=1e-9, atol=1e-12, msg=lambda text, n=name: f"{n}: {text}")


def check_after(body: Body, change: Change, setup: Change = nothing) -> None:
    """Before a change and after it, every rank steps as one process does.

    Raises:
        AutoshardError: it is refused.
    """
    model = Model(body, setup)
    plan = autoshard.plan(model, given(), mesh="a=2", hardware="cpu-gloo", constraints=["baseline ddp"], cache=False)
    ranks = [copy.deepcopy(model) for _ in range(2)]
    expected = []
    for then in (nothing, change):
        with torch.no_grad():
            then(model)
        expected.append(stepped(model, given()))

    def one(rank: int) -> list[dict[str, Tensor]]:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
        parallel = autoshard.parallelize(ranks[rank], plan, mesh, given())
        found = []
        for then in (nothing, change):
            with torch.no_grad():
                then(parallel)
            found.append(stepped(parallel, *autoshard.shard_inputs(plan, mesh, given())))
        return found

    with capturing_once(capture(Model(body, setup), (given(),), guarded=True)):
        results = run_ranks(2, one)
    for found in results:
        if isinstance(found, BaseException):
            raise found
        for ours, theirs in zip(found, expected, strict=True):
            check_alike(ours, theirs)


def put(name: str, value: Any) -> Change:
    """Sets an attribute."""
    return lambda model: setattr(model, name, value() if callable(value) else value)


def tied(model: Any) -> None:
    model.b.weight = model.a.weight


def untied(model: Any) -> None:
    model.b.weight = nn.Parameter(torch.ones(SIZE, SIZE, dtype=torch.float64))


def gain_of(name: str, value: float) -> Change:
    """Sets an attribute of a parameter or buffer."""
    return lambda model: setattr(model.get_parameter(name) if "." in name else model.get_buffer(name), "gain", value)


REFUSED: dict[str, tuple[Body, Change, Change]] = {
    "an attribute that a parameter had not": (
        lambda m, x: x.sum() * getattr(m.a.weight, "gain", 1.0),
        gain_of("a.weight", 2.0),
        nothing,
    ),
    "an attribute that a buffer had not": (
        lambda m, x: x.sum() * (2.0 if hasattr(m.table, "gain") else 1.0),
        gain_of("table", 2.0),
        nothing,
    ),
    "an attribute of a buffer": (lambda m, x: x.sum() * m.table.gain, gain_of("table", 2.0), gain_of("table", 1.0)),
    "the shape of a buffer": (lambda m, x: x.sum() * m.table.shape[0], put("table", lambda: torch.ones(6)), nothing),
    "the dtype of a buffer": (
        lambda m, x: x.sum() * (m.table.dtype == torch.float64),
        put("table", lambda: torch.ones(SIZE)),
        nothing,
    ),
    "a buffer": (lambda m, x: x.sum() * (m.table is not None), put("table", None), nothing),
    "the strides of a buffer": (
        lambda m, x: x.sum() * m.table.stride(0),
        put("table", lambda: torch.ones(2 * SIZE, dtype=torch.float64)[::2]),
        nothing,
    ),
    "the shape of a tensor in a list": (
        lambda m, x: x.sum() * m.listed[0].shape[0],
        put("listed", lambda: [torch.ones(5)]),
        put("listed", lambda: [torch.ones(3)]),
    ),
    "a tensor in a dict": (
        lambda m, x: x.sum() * (m.by_name["k"] is not None),
        lambda m: m.by_name.update(k=None),
        put("by_name", lambda: {"k": torch.ones(3)}),
    ),
    "the shape of a parameter that is not computed with": (
        lambda m, x: x.sum() * m.unread.shape[0],
        lambda m: setattr(m, "unread", nn.Parameter(torch.ones(5))),
        lambda m: setattr(m, "unread", nn.Parameter(torch.ones(3))),
    ),
    "a name among the attributes": (lambda m, x: x.sum() * ("flag" in vars(m)), put("flag", 1), nothing),
    "an attribute by its name": (lambda m, x: x.sum() * m.__dict__.get("flag", 1), put("flag", 3), nothing),
    "a parameter of two modules": (lambda m, x: x.sum(), untied, tied),
    "data that were assigned": (
        lambda m, x: x.sum(),
        lambda m: [setattr(p, "data", p.data.clamp(-0.1, 0.1)) for p in m.parameters()],
        nothing,
    ),
}


if torch.__version__ < "2.12":  # whose guards do not say which attribute was asked for
    for asked in ("an attribute that a parameter had not", "an attribute that a buffer had not"):
        del REFUSED[asked]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("asked", REFUSED)
def test_what_changes_is_noticed(asked: str) -> None:
    body, change, setup = REFUSED[asked]
    check_after(body, nothing, setup)
    with pytest.raises(PlanMismatchError):
        check_after(body, change, setup)


@pytest.mark.parametrize("asks", [True, False])
def test_deterministic_algorithms_are_looked_at_where_the_forward_asks_for_them(asks: bool) -> None:
    def asking(m: Any, x: Tensor) -> Tensor:
        return x.sum() * (2.0 if torch.are_deterministic_algorithms_enabled() else 1.0)

    with one_rank() as mesh:
        model = Model(asking if asks else lambda m, x: x.sum())
        parallel = autoshard.auto_parallelize(model, mesh, (given(),), hardware="cpu-gloo", cache=False)
        before = parallel(given())
        torch.use_deterministic_algorithms(True)
        try:
            if asks:
                with pytest.raises(PlanMismatchError, match="asks whether torch is to use deterministic algorithms"):
                    parallel(given())
            else:
                assert parallel(given()) == before
        finally:
            torch.use_deterministic_algorithms(False)


@pytest.mark.skipif(torch.__version__ < "2.12", reason="guards of torch 2.11 do not say which attribute was asked for")
def test_an_argument_with_an_attribute_that_the_forward_asks_for_is_refused() -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        return x.sum() * getattr(x, "gain", 1.0)

    with_gain = given()
    with_gain.gain = 2.0  # type: ignore[attr-defined]
    with pytest.raises(CaptureError, match=r"asks an argument for its attribute 'gain' at .*test_asked_of_tensors\.py"):
        capture(Model(body), (with_gain,))
    with one_rank() as mesh:
        parallel = autoshard.auto_parallelize(Model(body), mesh, (given(),), hardware="cpu-gloo", cache=False)
        assert parallel(given()) == Model(body)(given())
        with pytest.raises(InputError, match="x has an attribute 'gain'"):
            parallel(*autoshard.shard_inputs(parallel.plan, mesh, with_gain))


@pytest.mark.skipif(torch.__version__ < "2.12", reason="guards of torch 2.11 do not say which attribute was asked for")
@pytest.mark.parametrize("asks", [lambda x: getattr(x, "gain", 1.0), lambda x: 2.0 if hasattr(x, "gain") else 1.0])
def test_so_it_is_where_the_call_is_compiled(asks: Callable[[Tensor], float]) -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        return x.sum() * asks(x)

    with_gain, plain = given(), given()
    with_gain.gain = 2.0  # type: ignore[attr-defined]
    with one_rank() as mesh:
        parallel = autoshard.auto_parallelize(Model(body), mesh, (plain,), hardware="cpu-gloo", cache=False)
        placed = DTensor.from_local(given(), mesh, (Replicate(),))
        placed.gain = 2.0  # type: ignore[attr-defined]

        def set_within(x: Tensor) -> Any:
            x = x * 1.0
            x.gain = 2.0  # type: ignore[attr-defined]
            return parallel(x)

        calls: list[tuple[Callable[..., Any], Tensor]] = [
            (parallel, with_gain),
            (parallel, placed),
            (set_within, plain),
        ]
        for call, x in calls:
            compiled = torch.compile(call, backend="aot_eager")
            if call is parallel:
                assert compiled(plain) == Model(body)(plain)
            with pytest.raises(InputError, match="x has an attribute 'gain'"):
                compiled(x)
            torch._dynamo.reset()  # what was compiled with a break, it runs
            with pytest.raises(torch._dynamo.exc.Unsupported, match="x has an attribute 'gain'"):
                torch.compile(call, backend="aot_eager", fullgraph=True)(x)


CLASSES: dict[str, tuple[Callable[[Tensor], bool], type]] = {
    "type": (lambda x: type(x) is torch.Tensor, nn.Parameter),
    "__class__": (lambda x: x.__class__ is torch.Tensor, nn.Parameter),
    "a parameter": (lambda x: not isinstance(x, (list, nn.Parameter)), nn.Parameter),
    "a buffer": (lambda x: not isinstance(x, nn.Buffer), nn.Buffer),
}


@pytest.mark.parametrize("asked", CLASSES)
def test_of_which_class_an_argument_is_is_looked_at_where_that_is_asked(asked: str) -> None:
    asks, kind = CLASSES[asked]

    def body(m: Any, x: Tensor) -> Tensor:
        return x.sum() * (1.0 if asks(x) else 2.0)

    other = kind(given()).requires_grad_(False)
    with one_rank() as mesh:
        parallel = autoshard.auto_parallelize(Model(body), mesh, (given(),), hardware="cpu-gloo", cache=False)
        compiled = torch.compile(parallel, backend="aot_eager")
        for call in (parallel, compiled):
            assert call(given()) == call(other.detach()) == Model(body)(given())
            for x in (other, *autoshard.shard_inputs(parallel.plan, mesh, other)):
                with pytest.raises(InputError, match=f"x is a {kind.__name__}, and the forward asks"):
                    call(x)


@pytest.mark.parametrize("classes", [Tensor, (list, tuple), (Tensor, list), list])
def test_a_parameter_may_be_an_argument_where_what_is_asked_is_true_of_it_too(classes: Any) -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        return x.sum() * (1.0 if isinstance(x, classes) else 2.0)

    with one_rank() as mesh:
        parallel = autoshard.auto_parallelize(Model(body), mesh, (given(),), hardware="cpu-gloo", cache=False)
        assert parallel(nn.Parameter(given(), requires_grad=False)) == Model(body)(given())


@pytest.mark.parametrize("asks", [lambda x: x.grad, lambda x: x._base, lambda x: getattr(x, "grad", None)])
def test_what_gradient_an_argument_has_or_what_it_is_a_view_of_is_refused(asks: Callable[[Tensor], Any]) -> None:
    with pytest.raises(CaptureError, match=r"asks for .* of an argument at .*test_asked_of_tensors\.py"):
        capture(Model(lambda m, x: x.sum() * (1.0 if asks(x) is None else 2.0)), (given(),))


def doubled(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(2)


def converted(model: Any) -> None:
    model.to("cpu").double()
    model._apply(lambda tensor: tensor * 2)


def its_own_data(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data


@pytest.mark.parametrize("change", [doubled, converted, its_own_data])
def test_data_that_are_written_into_are_seen(change: Change) -> None:
    check_after(lambda m, x: x.sum(), change)


COMPILING: dict[str, Callable[[], bool]] = {
    "is_compiling": lambda: torch.compiler.is_compiling(),
    "is_dynamo_compiling": lambda: torch.compiler.is_dynamo_compiling(),
    "is_exporting": lambda: torch.compiler.is_exporting(),
    "in torch._dynamo": lambda: torch._dynamo.is_compiling(),
}


@pytest.mark.parametrize("asked", COMPILING)
def test_a_forward_is_not_told_that_it_is_compiled(asked: str) -> None:
    check_after(lambda m, x: x.sum() * (2 if COMPILING[asked]() else 1), nothing)


def test_it_is_where_it_cannot_be_captured_otherwise() -> None:
    def looks(m: Any, x: Tensor) -> Tensor:
        return x.sum() * (1 if torch.compiler.is_compiling() or bool((x > -1e9).all()) else 2)

    check_after(looks, nothing)


def number_by_id(m: Any, x: Tensor) -> Tensor:
    return torch.stack([m.ids.get(id(p), 0.5) * p.square().sum() for p in m.parameters()]).sum()


def number_by_parameter(m: Any, x: Tensor) -> Tensor:
    return torch.stack([m.factors["all"].get(p, 0.5) * p.square().sum() for p in m.parameters()]).sum()


def listed(m: Any, x: Tensor) -> Tensor:
    some = (p for p in m.parameters() if any(p is other for other in m.listed))
    return torch.stack([p.square().sum() for p in (*some, *m.listed)]).sum()


def in_a_frozenset(m: Any, x: Tensor) -> Tensor:
    return torch.stack([p.square().sum() for p in m.parameters() if p in m.some]).sum()


def each_once(m: Any, x: Tensor) -> Tensor:
    seen, found = set(), []
    for p in (*m.parameters(), *m.a.parameters()):
        if id(p) not in seen:
            found.append(p.square().sum())
            seen.add(id(p))
    return torch.stack(found).sum()


OBJECTS: dict[Body, Change] = {
    number_by_id: lambda m: setattr(m, "ids", {id(m.a.weight): 2.0}),
    number_by_parameter: lambda m: setattr(m, "factors", {"all": {m.a.weight: 2.0, m.b.bias: 3.0}}),
    listed: lambda m: setattr(m, "listed", [m.a.weight, m.b.bias]),
    in_a_frozenset: lambda m: setattr(m, "some", frozenset([m.a.weight])),
    each_once: nothing,
}
if torch.__version__ < "2.12":  # 2.11 refuses the capture: it wants one and the same set whenever it looks at a guard
    del OBJECTS[in_a_frozenset]


@pytest.mark.parametrize("body", OBJECTS, ids=lambda body: body.__name__)
def test_parameters_are_the_objects_that_they_are(body: Body) -> None:
    """A process of one rank parallelizes the very model that it planned."""
    model, alone = (Model(body, OBJECTS[body]) for _ in range(2))
    expected = stepped(alone, given())
    doubled(alone)
    plan = autoshard.plan(model, given(), mesh="a=1", hardware="cpu-gloo", cache=False)

    def one(rank: int) -> list[dict[str, Tensor]]:
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("a",))
        parallel = autoshard.parallelize(model, plan, mesh, given())
        found = [stepped(parallel, given())]
        doubled(parallel)
        return [*found, stepped(parallel, given())]

    (found,) = run_ranks(1, one)
    if isinstance(found, BaseException):
        raise found
    for ours, theirs in zip(found, (expected, stepped(alone, given())), strict=True):
        check_alike(ours, theirs)


ARGUMENTS: dict[str, Body] = {
    "two arguments": lambda m, x, y: x.sum() * (2 if x is y else 1),
    "an argument and a buffer": lambda m, x, y: x.sum() * (2 if y is not m.table else 1),
    "ids": lambda m, x, y: x.sum() * (2 if id(x) == id(y) else 1),
}


@pytest.mark.parametrize("asked", ARGUMENTS)
def test_which_object_an_argument_is_is_refused(asked: str) -> None:
    with pytest.raises(CaptureError, match=r"an argument.*another object"):
        capture(Model(ARGUMENTS[asked]), (given(), given()))


def test_torch_may_ask_which_object_an_argument_is() -> None:
    class Attends(nn.MultiheadAttention):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(q, k, v, need_weights=False)[0].sum()

    capture(Attends(SIZE, 2), tuple(torch.randn(2, 3, SIZE) for _ in range(3)))


STRIDES: dict[str, Body] = {
    "is_contiguous": lambda m, x: x.sum() * (2 if x.is_contiguous() else 1),
    "stride": lambda m, x: x.sum() * (x * 2).stride(0),
}


@pytest.mark.parametrize("asked", STRIDES)
def test_a_batch_that_lies_otherwise_is_refused_where_that_is_asked(asked: str) -> None:
    def refused(body: Body) -> AutoshardError | None:
        model = Model(body)
        plan = autoshard.plan(model, given(), mesh="a=1", hardware="cpu-gloo", cache=False)

        def one(rank: int) -> None:
            mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("a",))
            parallel = autoshard.parallelize(model, plan, mesh, given())
            stepped(parallel, given(2))
            stepped(parallel, given(2).t())

        (found,) = run_ranks(1, one)
        assert found is None or isinstance(found, AutoshardError)
        return found

    assert isinstance(refused(STRIDES[asked]), InputError)
    assert refused(lambda m, x: x.sum()) is None
