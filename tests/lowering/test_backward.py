"""Whatever is done with the results of a parallel module, its parameters get the gradients of the model, or autoshard
says why not.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import autoshard
from autoshard.capture import capture
from autoshard.errors import AutoshardError, BackwardError, InputError
from autoshard.plans import dump_plan, parse_plan

from ..one_process import one_rank
from .sessions import Model, both, differences, example, full, is_parity, loss_of, outcome_of, refusal, state_of

Session = Callable[[nn.Module], Any]


def body(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Two heads on a trunk. Backward reads the trunk's result, both matrices, the buffer and the first result."""
    m.count.add_(1)
    trunk = (x @ m.v).relu()
    return (trunk @ m.w * m.scale).exp(), trunk + m.bias


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    with one_rank() as mesh:
        yield mesh


@pytest.fixture(scope="module")
def made(mesh: DeviceMesh) -> tuple[nn.Module, Model]:
    return both(body, mesh)


@pytest.fixture
def pair(made: tuple[nn.Module, nn.Module]) -> tuple[nn.Module, nn.Module]:
    """The two modules, fresh; copies of a parallel module are parallel modules."""
    return copy.deepcopy(made[0]), copy.deepcopy(made[1])


def _one_head(m: nn.Module) -> None:
    m(example())[1].sum().backward()


def _twice_retained(m: nn.Module) -> None:
    loss = loss_of(m(example()))
    loss.backward(retain_graph=True)
    loss.backward()


def _head_after_head(m: nn.Module) -> None:
    y, z = m(example())
    y.sum().backward(retain_graph=True)
    z.sum().backward()


def _two_steps_in_the_other_order(m: nn.Module) -> None:
    first, second = m(example()), m(2 * example())
    loss_of(second[0]).backward()
    loss_of(first[1]).backward()


def _accumulated_and_clipped(m: nn.Module) -> Any:
    for k in range(3):
        loss_of(m(example() * (k + 1))).backward()
    norm = full(nn.utils.clip_grad_norm_(m.parameters(), 0.1))
    clipped = state_of(m)
    m.zero_grad(set_to_none=False)
    _one_head(m)
    return norm, clipped


def _gradients_of_some(m: Any) -> Any:
    y, z = m(example())
    return [full(g) for g in torch.autograd.grad(loss_of((y, z)), (m.w, m.bias))]


def _unused_gives_none(m: Any) -> Any:
    found = torch.autograd.grad(m(example())[1].sum(), (m.v, m.w, m.bias), allow_unused=True)
    return [None if g is None else full(g) for g in found]


def _without_gradients(m: nn.Module) -> Any:
    with torch.no_grad():
        quiet = m(example())
    with torch.inference_mode():
        silent = m(example())
    return quiet, [full(value).clone() for value in silent]


def _frozen_later(m: Any) -> None:
    m.w.requires_grad_(False)
    loss_of(m(example())).backward()


def _hooks_and_retained_gradients(m: nn.Module) -> Any:
    seen: list[Tensor] = []
    y, z = m(example())
    y.retain_grad()
    z.register_hook(lambda gradient: seen.append(full(gradient).clone()))
    loss_of((y, z)).backward()
    return full(y.grad), seen


def _with_offloading(m: nn.Module) -> None:
    with torch.autograd.graph.save_on_cpu():
        results = m(example())
    loss_of(results).backward()


def _checkpointed(m: nn.Module) -> None:
    loss_of(checkpoint(m, example(), use_reentrant=False)).backward()


def _checkpointed_with_its_loss(m: nn.Module) -> None:
    checkpoint(lambda x: loss_of(m(x)).exp().log(), example(), use_reentrant=False).backward()


def _checkpointed_reentrantly(m: nn.Module) -> None:
    def loss(x: Tensor, _: Tensor) -> Tensor:
        y, z = m(x)
        return (y * z).sum()

    checkpoint(loss, example(), torch.ones((), requires_grad=True), use_reentrant=True).backward()


def _copied(m: Any) -> Any:
    other = copy.deepcopy(m)
    with torch.no_grad():
        other.w.mul_(2)
    loss_of(other(example())).backward()
    return m(example()), state_of(other)


def _compiled(m: nn.Module) -> None:
    loss_of(torch.compile(m, backend="aot_eager", fullgraph=True)(example())).backward()


def _scaled(m: nn.Module) -> Any:
    scaler, optimizer = torch.amp.GradScaler("cpu"), torch.optim.SGD(m.parameters(), lr=0.1)
    scaler.scale(full(loss_of(m(example())))).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    return [full(p.detach()) for p in m.parameters()], scaler.get_scale()


def _changed_results_that_nothing_reads(m: nn.Module) -> Any:
    _, z = m(example())
    z.mul_(3)
    z.sum().backward()
    return z


def _created_graph(m: nn.Module) -> None:
    m(example())[0].sum().backward(create_graph=True)


PARITY: dict[str, Session] = {
    name.strip("_").replace("_", " "): session
    for name, session in globals().copy().items()
    if name.startswith("_") and callable(session) and getattr(session, "__module__", "") == __name__
}


@pytest.mark.parametrize("name", PARITY)
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True", "ignore:.*torch.jit.*is deprecated")
def test_a_session_ends_as_with_the_model(name: str, pair: tuple[nn.Module, nn.Module]) -> None:
    assert is_parity(PARITY[name], pair)


def _head_after_head_without_retaining(m: nn.Module) -> None:
    """The heads share no operator of the backward that reads anything saved."""
    y, z = m(example())
    y.sum().backward()
    z.sum().backward()


def test_heads_that_share_nothing_saved_go_backward_one_by_one(mesh: DeviceMesh) -> None:
    assert is_parity(_head_after_head_without_retaining, both(lambda m, x: (x @ m.w * m.scale, x @ m.v), mesh))


def changed(what: Callable[[nn.Module, Tensor, Tensor, Tensor], Any]) -> Session:
    """A session that changes something in place between forward and backward."""

    def session(m: nn.Module) -> None:
        x = example()
        y, z = m(x)
        loss = y.sum() + z.sum()
        with torch.no_grad():
            what(m, x, y, z)
        loss.backward()

    return session


def stepped(make: Callable[[Any], torch.optim.Optimizer]) -> Session:
    def step(m: nn.Module, *_: Tensor) -> None:
        for parameter in m.parameters():
            parameter.grad = torch.ones_like(parameter)
        make(m.parameters()).step()

    return changed(step)


CHANGED: dict[str, tuple[Session, str]] = {
    "a result": (changed(lambda m, x, y, z: y.mul_(2)), "result 0 was changed in place"),
    "a view of a result": (changed(lambda m, x, y, z: y[0].zero_()), "result 0 was changed in place"),
    "its shard": (changed(lambda m, x, y, z: (y.to_local() if isinstance(y, DTensor) else y).mul_(2)), "result 0 was"),
    "the input": (changed(lambda m, x, y, z: x.add_(1)), "input x was changed in place"),
    "a buffer": (changed(lambda m, x, y, z: m.scale.add_(1)), "buffer scale was changed in place"),
    "a parameter": (changed(lambda m, x, y, z: m.w.add_(1)), "parameter w was changed in place"),
    "SGD": (stepped(lambda p: torch.optim.SGD(p, lr=0.1)), "an optimizer's step changes parameters"),
    "SGD on lists": (stepped(lambda p: torch.optim.SGD(p, lr=0.1, foreach=True)), "parameter w was changed in place"),
    "AdamW": (stepped(lambda p: torch.optim.AdamW(p)), "parameter w was changed in place"),
}


@pytest.mark.parametrize("what", CHANGED)
def test_what_the_backward_needs_is_not_changed_unseen(what: str, pair: tuple[nn.Module, nn.Module]) -> None:
    session, text = CHANGED[what]
    assert isinstance(outcome_of(session, pair[1])[1], RuntimeError), "torch refuses, too"
    error = refusal(session, pair[0])
    assert isinstance(error, BackwardError) and text in str(error) and ".clone()" in str(error)


def test_a_result_that_shares_memory_in_the_model_is_not_changed_unseen_through_another(mesh: DeviceMesh) -> None:
    def views(m: Any, x: Tensor) -> Any:
        y = x @ m.w
        return y, y[0], m.w.t(), y[1:]

    def through(number: int, change: Callable[[Any, Any], Any]) -> Session:
        def session(m: nn.Module) -> None:
            results = m(example())
            with torch.no_grad():
                change(m, results)
            results[number].sum().backward()

        return session

    parallel, _ = both(views, mesh)
    for session, text in [
        (through(1, lambda m, r: r[0].mul_(2)), "result 0 was changed"),
        (through(0, lambda m, r: r[1].mul_(2)), "result 1 was changed"),
        (through(2, lambda m, r: m.w.mul_(2)), "parameter w was changed"),
    ]:
        error = refusal(session, parallel)
        assert text in str(error) and "shares its memory" in str(error)
    results = parallel(example())
    results[1].mul_(2).sum().backward()  # seen by nobody but the loss


def test_a_buffer_that_a_second_forward_changes_counts_for_the_first_backward_as_it_was(mesh: DeviceMesh) -> None:
    """torch refuses here; the graph of the plan has kept the value."""

    def counted(m: Any, x: Tensor) -> Tensor:
        m.count.add_(1)
        return x @ m.w * m.count

    parallel, reference = both(counted, mesh)
    first, _ = parallel(example()), parallel(example())
    for results in (first, reference(example())):
        loss_of(results).backward()
    assert torch.allclose(full(parallel.w.grad), reference.w.grad)


def _again(m: nn.Module) -> None:
    y, z = m(example())
    loss = y.sum() + z.sum()
    loss.backward()
    loss.backward()


def _again_through_one_head(m: nn.Module) -> None:
    y, _ = m(example())
    y.sum().backward()
    y.sum().backward()


def _gradient_penalty(m: Any) -> None:
    y, _ = m(example())
    (gradient,) = torch.autograd.grad(y.sum(), m.w, create_graph=True)
    (y.sum() + (gradient * gradient).sum()).backward()


def _hessian(m: Any) -> Any:
    (gradient,) = torch.autograd.grad(m(example())[0].sum(), m.w, create_graph=True)
    return torch.autograd.grad(gradient.sum(), m.v, allow_unused=True)


def _many_gradients_at_once(m: Any) -> Any:
    loss = m(example())[0]
    return torch.autograd.grad(loss, m.w, torch.stack([torch.ones_like(loss)] * 2), is_grads_batched=True)


def _plain_gradient(m: nn.Module) -> None:
    m(example())[0].backward(torch.ones(4, 4))


REFUSED: dict[str, tuple[Session, type[AutoshardError], str]] = {
    "a second backward": (_again, BackwardError, "retain_graph=True"),
    "a second backward through one head": (_again_through_one_head, BackwardError, "retain_graph=True"),
    "a gradient penalty": (_gradient_penalty, BackwardError, "first derivatives only"),
    "a Hessian": (_hessian, BackwardError, "first derivatives only"),
    "many gradients at once": (_many_gradients_at_once, BackwardError, "one at a time"),
    "a plain tensor as the gradient of a DTensor": (_plain_gradient, BackwardError, "distribute the gradient"),
    "vmap": (lambda m: torch.func.vmap(m)(torch.stack([example()] * 2)), InputError, "torch.func"),
    "jacrev": (lambda m: torch.func.jacrev(lambda x: full(m(x)[0]))(example()), InputError, "torch.func"),
    "jit": (lambda m: torch.jit.trace(m, (example(),)), InputError, "torch.jit.trace"),
    "pickle": (pickle.dumps, InputError, "state_dict"),
    "a shallow copy": (copy.copy, InputError, "state_dict"),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated")
@pytest.mark.parametrize("what", REFUSED)
def test_what_a_plan_cannot_do_is_refused(what: str, pair: tuple[nn.Module, nn.Module]) -> None:
    session, kind, text = REFUSED[what]
    error = refusal(session, pair[0])
    assert isinstance(error, kind) and text in str(error)


def test_no_gradient_shares_memory_with_another_or_with_the_one_given(mesh: DeviceMesh) -> None:
    parallel, _ = both(lambda m, x: (m.v + m.w, m.bias.expand(2, -1)), mesh)
    y, z = parallel(example())
    given = torch.ones_like(y)
    torch.autograd.backward([y, z], [given, torch.ones_like(z)])
    gradients = [p.grad.to_local() for p in parallel.parameters() if p.grad is not None]
    assert len(gradients) == 3
    owners = [tensor.untyped_storage().data_ptr() for tensor in (given.to_local(), *gradients)]
    assert len(set(owners)) == len(owners)
    parallel.v.grad.zero_()
    assert full(parallel.w.grad).eq(1).all() and full(given).eq(1).all()


@pytest.mark.parametrize("through", [(0,), (1,), (0, 1)])
def test_infinities_in_a_head_that_is_not_used_stay_there(mesh: DeviceMesh, through: tuple[int, ...]) -> None:
    """The other head's gradient is 0 * inf where it is computed with a zero: autograd does not compute it."""

    def heads(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        trunk = x @ m.v
        return trunk.sum(), ((trunk - trunk) * m.bias).sqrt().sum()

    def session(m: nn.Module) -> None:
        results = m(example())
        sum(results[k] for k in through).backward()  # type: ignore[union-attr]

    parallel, reference = both(heads, mesh)
    assert is_parity(session, (parallel, reference))
    assert (0 not in through or len(through) == 2) == bool(full(parallel.v.grad).isnan().any())


def test_a_backward_of_some_results_runs_a_part_of_the_operators(mesh: DeviceMesh) -> None:
    parallel, _ = both(body, mesh)
    backwards = parallel._autoshard.plans[0].step.backwards
    whole, first, second = (backwards.of(frozenset(used)) for used in ((0, 1), (0,), (1,)))
    count = {k: len(part.graph.graph.nodes) for k, part in enumerate((whole, first, second))}
    assert max(count[1], count[2]) < count[0]
    assert second.needed < whole.needed and first.needed <= whole.needed


def test_a_graph_created_for_gradients_leaves_them_usable(pair: tuple[nn.Module, nn.Module]) -> None:
    results = [torch.autograd.grad(m(example())[0].sum(), m.w, create_graph=True)[0] for m in pair]
    assert results[0].requires_grad
    assert not list(differences([r.detach() for r in results[:1]], [r.detach() for r in results[1:]]))


def test_checkpointing_a_module_that_draws_random_numbers_is_refused(mesh: DeviceMesh) -> None:
    parallel, _ = both(lambda m, x: nn.functional.dropout(x @ m.w, 0.5), mesh)

    def session(m: nn.Module) -> None:
        checkpoint(lambda x: m(x).exp().sum(), example(), use_reentrant=False).backward()

    error = refusal(session, parallel)
    assert isinstance(error, InputError) and "checkpoint" in str(error)


def test_inputs_of_inference_mode_are_refused_where_the_backward_needs_them(pair: tuple[nn.Module, nn.Module]) -> None:
    with torch.inference_mode():
        x = example()
    error = refusal(lambda m: m(x), pair[0])
    assert isinstance(error, InputError) and "inference_mode" in str(error)
    with torch.no_grad():
        pair[0](x)


@pytest.mark.parametrize("where", [nullcontext, torch.no_grad])
def test_backward_runs_wherever_it_is_called(where: Any, pair: tuple[nn.Module, nn.Module]) -> None:
    def session(m: nn.Module) -> None:
        loss = loss_of(m(example()))
        with where():
            loss.backward()

    assert is_parity(session, pair)


def test_hooks_of_a_parameter_that_no_gradient_reaches_are_not_called(mesh: DeviceMesh) -> None:
    for module in both(lambda m, x: (x @ m.v + (x @ m.w).detach()).sum(), mesh):
        called: list[Tensor] = []
        module.w.register_hook(called.append)
        with torch.inference_mode():
            module(example())
        module(example()).backward()
        assert not called and module.w.grad is None and module.v.grad is not None


def test_a_hook_of_a_parameter_that_a_backward_leaves_out_is_named(mesh: DeviceMesh) -> None:
    """Torch would call it with None, where one process does not call it."""
    module, _ = both(lambda m, x: ((x @ m.v).sum(), (x @ m.w).sum()), mesh)
    called: list[Tensor] = []
    hook = module.w.register_hook(called.append)
    with pytest.raises(BackwardError, match=r"parameter w has a hook, and this backward does not reach it.* 0 alone"):
        module(example())[0].backward()
    assert not called
    hook.remove()
    module(example())[0].backward()
    assert module.w.grad is None and module.v.grad is not None


def test_a_plan_from_its_file_is_for_the_model_that_writes_in_place(mesh: DeviceMesh) -> None:
    """Autograd keeps a copy of what ``clamp_`` changes, in the midst of the forward; here the backward makes it."""

    class Clamped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(4, 4, generator=torch.Generator().manual_seed(0)))

        def forward(self, x: Tensor) -> Tensor:
            y = x @ self.w
            y.clamp_(-0.5, 0.8)
            return torch.renorm(y, 2, 0, 1.0).sum()

    model = Clamped()
    plan = autoshard.plan(model, (example(),), mesh="dp=1", hardware="cpu-gloo")
    operators = [node for _, node in capture(model, (example(),)).of_kind("operator")]
    phases = [node.phase for node in operators]
    assert phases == sorted(phases, reverse=True) and "/bwd.clone" in {node.name for node in operators}
    parallel = autoshard.parallelize(copy.deepcopy(model), parse_plan(dump_plan(plan)), mesh, (example(),))
    for module in (parallel, model):
        module(example()).backward()
    assert torch.equal(full(parallel.w.grad), model.w.grad)


def test_results_that_only_frozen_parameters_reach_want_no_gradient(mesh: DeviceMesh) -> None:
    for module in both(lambda m, x: ((x @ m.v).sum(), (x @ m.w).sum()), mesh):
        module.v.requires_grad_(False)
        frozen, trained = module(example())
        assert (frozen.requires_grad, trained.requires_grad) == (False, True)
        (frozen + trained).backward()
        assert module.v.grad is None and module.w.grad is not None


class Steps(nn.Module):
    """A result whose gradient for a parameter is zero whatever the parameter is, beside one that has none of it."""

    def __init__(self) -> None:
        super().__init__()
        self.v, self.w = (nn.Parameter(torch.linspace(-2, 2, 8)) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return (x * self.v).sum(), (x * self.w.floor()).sum()


@pytest.mark.parametrize("results", [(0,), (1,), (0, 1)])
def test_a_gradient_of_zeros_is_there_where_its_result_got_one(mesh: DeviceMesh, results: tuple[int, ...]) -> None:
    x, model = torch.ones(4, 8), Steps()
    parallel = autoshard.auto_parallelize(copy.deepcopy(model), mesh, (x,))
    for each in (model, parallel):
        made = each(x)
        torch.stack([full(made[k]) if isinstance(made[k], DTensor) else made[k] for k in results]).sum().backward()
    for (name, expected), found in zip(model.named_parameters(), parallel.parameters()):
        assert (expected.grad is None) == (found.grad is None), name
        assert expected.grad is None or torch.equal(full(found.grad), expected.grad)
