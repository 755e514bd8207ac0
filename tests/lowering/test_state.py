"""A model that changed since it was captured: what the captured step would ignore is refused, all else works."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.utils import parametrizations, parametrize
from torch.utils.flop_counter import FlopCounterMode

import autoshard
from autoshard.errors import CaptureError, InputError, PlanMismatchError

from ..one_process import one_rank
from .sessions import is_parity, refusal

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
Session = Callable[[nn.Module], Any]


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    with one_rank() as mesh:
        yield mesh


class Switch(nn.Module):
    """Asks for its mode, without doing anything else in the other."""

    def forward(self, x: Tensor) -> Tensor:
        return x if self.training else x * 1.0


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.switch = Switch()
        self.dropout = nn.Dropout(0.0)
        self.k = 3.0
        self.sizes = [1.0, 2.0]

    def scaled(self, x: Tensor) -> Tensor:
        return x * self.k

    def forward(self, x: Tensor) -> Tensor:
        for size in self.sizes:
            x = x * size
        return self.dropout(self.switch(self.scaled(self.linear(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.gain = 1.0
        self.register_buffer("kept", torch.ones(4))
        self.register_buffer("table", torch.ones(4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return (x * self.gain * self.table).sum()


def made(mesh: DeviceMesh, model: nn.Module) -> tuple[nn.Module, nn.Module]:
    """The parallel module, and the model as it was."""
    return autoshard.auto_parallelize(deepcopy(model), mesh, (X,)), model


@pytest.fixture(scope="module")
def original(mesh: DeviceMesh) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    return made(mesh, Model())


@pytest.fixture
def pair(original: tuple[nn.Module, nn.Module]) -> tuple[nn.Module, nn.Module]:
    return deepcopy(original[0]), deepcopy(original[1])


def trained(module: nn.Module) -> Tensor:
    """The loss of a step; what it leaves behind is compared as well."""
    loss: Tensor = module(X)
    loss.backward()
    return loss.detach()


def nothing(*args: Any) -> None:
    pass


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "an attribute": (lambda m: setattr(m, "gain", 5.0), "`model.gain == 1.0`"),
    "an attribute of a layer": (lambda m: setattr(m.layers[1], "k", 5), "`model.layers.1.k == 3.0`"),
    "the length of a list": (lambda m: m.layers[0].sizes.append(1.0), "len(model.layers.0.sizes) == 2"),
    "evaluation": (lambda m: m.eval(), "in the other mode"),
    "evaluation of one layer": (lambda m: m.layers[1].switch.eval(), "model.layers.1.switch.training == True"),
    "a dropout of something": (lambda m: setattr(m.layers[1].dropout, "p", 0.5), "`model.layers.1.dropout.p == 0.0`"),
    "another submodule": (lambda m: setattr(m.layers[0], "linear", nn.Linear(4, 4)), "the module layers.0.linear is"),
    "a submodule less": (lambda m: m.layers.pop(1), "the module layers.1 is"),
    "a submodule more": (lambda m: m.layers.append(Layer()), "model.layers"),
    "a hook of a layer": (lambda m: m.layers[0].register_forward_hook(nothing), "the hooks of a module changed"),
    "a pre-hook of a layer": (
        lambda m: m.layers[0].register_forward_pre_hook(nothing),
        "the hooks of a module changed",
    ),
    "a backward hook": (lambda m: m.layers[0].register_full_backward_hook(nothing), "the hooks of a module changed"),
    "a method": (lambda m: setattr(m.layers[0], "scaled", lambda x: x), "'scaled' not in"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_that_the_captured_step_would_ignore_is_refused(pair: tuple[nn.Module, nn.Module], what: str) -> None:
    change, text = CHANGES[what]
    parallel = pair[0]
    parallel(X)
    change(parallel)
    error = refusal(trained, parallel)
    assert isinstance(error, PlanMismatchError) and text in str(error), error


def test_the_mode_of_a_dropout_of_nothing_does_not_matter(pair: tuple[nn.Module, nn.Module]) -> None:
    def evaluated(module: Any) -> Tensor:
        for layer in module.layers:
            layer.dropout.eval()
        loss = trained(module)
        assert not any(layer.dropout.training for layer in module.layers)
        return loss

    assert is_parity(evaluated, pair)


def test_what_is_set_back_is_as_it_was(pair: tuple[nn.Module, nn.Module]) -> None:
    def there_and_back(module: Any) -> Tensor:
        module.gain = 2.0
        module.gain = 1.0
        module.eval()
        module.train()
        module.layers[0].register_forward_hook(nothing).remove()
        module.note = "a new attribute"
        del module.note
        return trained(module)

    assert is_parity(there_and_back, pair)


def test_an_attribute_set_on_the_module_is_set_on_the_model_it_was_made_from(mesh: DeviceMesh) -> None:
    model = Model()
    parallel = autoshard.auto_parallelize(model, mesh, (X,))
    parallel.gain, parallel.note = 2.0, "new"
    assert model.gain == parallel.gain == 2.0 and model.note == "new"
    parallel.eval()
    assert not model.training and not parallel.training
    del parallel.note
    assert not hasattr(model, "note") and not hasattr(parallel, "note")


def test_the_methods_of_a_class_stay_what_they_were(pair: tuple[nn.Module, nn.Module], monkeypatch) -> None:
    parallel = pair[0]
    with monkeypatch.context() as patch:
        patch.setattr(Layer, "scaled", lambda self, x: x)
        assert "Layer.scaled was replaced" in str(refusal(trained, parallel))
    with monkeypatch.context() as patch:
        patch.setattr(Layer.scaled, "__code__", (lambda self, x: x).__code__)
        assert "Layer.scaled was replaced" in str(refusal(trained, parallel))
    assert is_parity(trained, pair)


def test_evaluation_of_a_model_that_does_not_ask_for_it_needs_no_other_plan(mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    pair = made(mesh, nn.Sequential(nn.Linear(4, 4), nn.ReLU()))

    def evaluated(module: nn.Module) -> Any:
        with torch.no_grad():
            return module.eval()(X)

    assert is_parity(evaluated, pair)


def hooked(register: Callable[[Any], Any]) -> Session:
    """A step with a hook, and one after it."""

    def session(module: Any) -> list[Any]:
        handles = register(module)
        first = trained(module)
        for handle in handles:
            handle.remove()
        return [first, trained(module)]

    return session


def _double(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(2)


HOOKS: dict[str, Callable[[Any], list[Any]]] = {
    "forward": lambda m: [m.register_forward_hook(lambda module, inputs, output: output * 3)],
    "pre-forward": lambda m: [m.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 2,))],
    "backward": lambda m: [m.register_full_backward_pre_hook(lambda module, gradients: (gradients[0] * 2,))],
    "of parameters": lambda m: [p.register_hook(lambda gradient: gradient * 2) for p in m.parameters()],
    "of accumulated gradients": lambda m: [p.register_post_accumulate_grad_hook(_double) for p in m.parameters()],
}


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("what", HOOKS)
def test_hooks_of_the_module_itself_and_of_its_parameters_work(pair: tuple[nn.Module, nn.Module], what: str) -> None:
    assert is_parity(hooked(HOOKS[what]), pair)


def test_hooks_registered_before_the_capture_are_part_of_the_step(mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    model = Model()
    model.layers[0].register_forward_hook(lambda module, inputs, output: output * 3)
    model.register_forward_pre_hook(lambda module, inputs: (inputs[0] + 1,))
    assert is_parity(trained, made(mesh, model))


def backward_hook(model: Model) -> None:
    model.layers[0].register_full_backward_hook(nothing)


def gradient_hook(model: Model) -> None:
    model.layers[0].linear.weight.register_hook(lambda gradient: gradient * 2)


def accumulation_hook(model: Model) -> None:
    model.layers[0].linear.weight.register_post_accumulate_grad_hook(nothing)


@pytest.mark.parametrize("register", [backward_hook, gradient_hook, accumulation_hook])
def test_hooks_that_a_capture_would_lose_are_refused(mesh: DeviceMesh, register: Callable[[Model], None]) -> None:
    model = Model()
    register(model)
    with pytest.raises(CaptureError, match=r"layers\.0.* hook.*parallel module"):
        autoshard.auto_parallelize(model, mesh, (X,))


def test_hooks_of_all_modules_are_refused_and_torchs_own_counters_work(pair: tuple[nn.Module, nn.Module]) -> None:
    handle = nn.modules.module.register_module_forward_hook(lambda module, inputs, output: output)
    try:
        assert "a hook on all modules" in str(refusal(trained, pair[0]))
        with pytest.raises(CaptureError, match="a hook on all modules"):
            autoshard.plan(Model(), (X,), mesh="dp=1", hardware="cpu-gloo")
    finally:
        handle.remove()
    with FlopCounterMode(display=False) as counter:
        pair[0](X)
    assert counter.get_total_flops() > 0


class Asking(nn.Module):
    """Asks torch what only its surroundings decide."""

    def __init__(self, question: Callable[[nn.Linear], bool]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.question = question

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).sum()
        return y * 2 if self.question(self.linear) else y


def test_a_forward_that_asks_for_the_grad_mode_runs_in_that_of_its_capture(mesh: DeviceMesh) -> None:
    parallel, reference = made(mesh, Asking(lambda linear: torch.is_grad_enabled()))
    assert is_parity(trained, (parallel, reference))
    with torch.no_grad():
        assert "asks whether gradients are computed" in str(refusal(lambda m: m(X), parallel))


def test_a_forward_that_asks_which_parameters_are_trained_notices_when_they_change(mesh: DeviceMesh) -> None:
    parallel, reference = made(mesh, Asking(lambda linear: linear.bias.requires_grad))
    assert is_parity(trained, (parallel, reference))
    parallel.linear.bias.requires_grad_(False)
    assert "which parameters require gradients" in str(refusal(trained, parallel))


def test_a_forward_that_reads_the_environment_notices_when_it_changes(mesh: DeviceMesh, monkeypatch) -> None:
    parallel, reference = made(mesh, Asking(lambda linear: bool(os.environ.get("AUTOSHARD_TEST"))))
    assert is_parity(trained, (parallel, reference))
    monkeypatch.setenv("AUTOSHARD_TEST", "1")
    assert "the forward reads the environment" in str(refusal(trained, parallel))


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).t()


def symmetric() -> nn.Module:
    model = Layer()
    parametrize.register_parametrization(model.linear, "weight", Symmetric())
    return model


def spectral() -> nn.Module:
    model = Layer()
    parametrizations.spectral_norm(model.linear)
    return model


def compiled() -> nn.Module:
    model = Layer()
    model.linear = torch.compile(model.linear, backend="eager")  # type: ignore[assignment]
    return model


@pytest.mark.parametrize("make", [symmetric, spectral, compiled])
def test_parametrized_and_compiled_submodules_train_as_they_do(mesh: DeviceMesh, make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    pair = made(mesh, make())
    assert is_parity(lambda m: [m(X).square().mean().backward() for _ in range(2)], pair)


def shared_data() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = nn.Parameter(model[0].weight.data)
    return model


def view_of_a_parameter() -> nn.Module:
    model = Model()
    model.kept = model.layers[0].linear.weight.detach()[1]
    return model


def overlapping_buffers() -> nn.Module:
    model = Model()
    model.kept = torch.ones(6)[:4]
    model.register_buffer("more", model.kept[2:])
    return model


@pytest.mark.parametrize("make", [shared_data, view_of_a_parameter, overlapping_buffers])
def test_tensors_of_a_model_that_overlap_in_memory_are_refused(make: Callable[[], nn.Module]) -> None:
    with pytest.raises(CaptureError, match=r"are different tensors that share memory.*\.clone\(\)"):
        autoshard.plan(make(), (X,), mesh="dp=1", hardware="cpu-gloo")


class Tied(nn.Module):
    """One weight and one buffer, each under two names; the buffer is written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.b.weight = self.a.weight
        table = torch.ones(4, 2)
        self.register_buffer("u", table[:, 0])
        self.register_buffer("other", table[:, 1])
        self.b.register_buffer("v", self.u)

    def forward(self, x: Tensor) -> Tensor:
        self.u.add_(x.mean(0))
        return (self.b(self.a(x)) * self.b.v * self.other).sum()


def test_what_is_tied_stays_tied_and_what_only_shares_a_storage_does_not_matter(mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    parallel, reference = made(mesh, Tied())
    assert parallel.u is parallel.b.v and parallel.a.weight is parallel.b.weight
    assert is_parity(lambda m: [trained(m), trained(m)], (parallel, reference))


def test_lazy_parameters_and_gradients_that_would_be_lost_are_refused(mesh: DeviceMesh) -> None:
    with pytest.raises(CaptureError, match="weight has no shape yet; call the model once"):
        autoshard.plan(nn.Sequential(nn.LazyLinear(3)), (X,), mesh="dp=1", hardware="cpu-gloo")
    model = Model()
    model(X).backward()
    with pytest.raises(InputError, match=r"linear\.weight has a gradient, which would be lost"):
        autoshard.auto_parallelize(model, mesh, (X,))


def test_an_optimizer_made_before_its_model_was_parallelized_says_so(mesh: DeviceMesh) -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parallel = autoshard.auto_parallelize(model, mesh, (X,))
    parallel(X).backward()
    with pytest.raises(InputError, match=r"layers\.0\.linear\.weight as it was before its model was parallelized"):
        optimizer.step()
    torch.optim.SGD(parallel.parameters(), lr=0.1).step()


def test_a_parameter_of_two_models_is_refused_by_the_second(mesh: DeviceMesh) -> None:
    first, second = Model(), Model()
    second.layers[0].linear.weight = first.layers[0].linear.weight
    autoshard.auto_parallelize(deepcopy(first), mesh, (X,))  # a copy has parameters of its own
    autoshard.auto_parallelize(first, mesh, (X,))
    with pytest.raises(InputError, match="is a parallel module already"):
        autoshard.auto_parallelize(first, mesh, (X,))
    before = list(second.parameters())
    with pytest.raises(InputError, match=r"layers\.0\.linear\.weight is one .* parallelized before.* into one module"):
        autoshard.auto_parallelize(second, mesh, (X,))
    assert all(a is b for a, b in zip(before, second.parameters(), strict=True))


def test_attributes_of_parameters_stay(mesh: DeviceMesh) -> None:
    model = Model()
    model.layers[0].linear.weight.decay = False  # type: ignore[assignment]
    parallel: Any = autoshard.auto_parallelize(model, mesh, (X,))
    assert parallel.layers[0].linear.weight.decay is False


class Extra(Model):
    """Saves more than its tensors."""

    def get_extra_state(self) -> Any:
        return {"gain": self.gain}

    def set_extra_state(self, state: Any) -> None:
        self.loaded = state


def test_a_state_dict_has_the_keys_of_the_models_own_and_loads_into_it(mesh: DeviceMesh) -> None:
    model: Any = Extra()
    model.register_state_dict_post_hook(lambda module, state, prefix, metadata: state.update({f"{prefix}hook": 1}))
    reference = deepcopy(model)
    parallel: Any = autoshard.auto_parallelize(model, mesh, (X,))
    saved = parallel.state_dict()
    assert list(saved) == list(reference.state_dict()) and "table" not in saved
    assert list(nn.Sequential(parallel).state_dict()) == list(nn.Sequential(reference).state_dict())
    saved.pop("hook")
    parallel.load_state_dict(saved)
    assert model.loaded == {"gain": 1.0}
    whole = {key: value.full_tensor() if hasattr(value, "full_tensor") else value for key, value in saved.items()}
    reference.load_state_dict(whole)


def test_parts_of_a_module_and_modules_around_it_load_whole_tensors(mesh: DeviceMesh) -> None:
    parallel: Any = autoshard.auto_parallelize(Model(), mesh, (X,))
    reference, other = Model(), {name: value + 1 for name, value in Model().state_dict().items()}
    for ours, theirs in ((parallel, reference), (deepcopy(parallel), deepcopy(reference))):
        for module in (ours, theirs):
            nn.Sequential(module).load_state_dict({f"0.{name}": value for name, value in other.items()})
            module.layers[0].load_state_dict({"linear.weight": torch.ones(4, 4)}, strict=False)
        assert all(torch.equal(_whole(ours.get_parameter(n)), p) for n, p in theirs.named_parameters())
        with pytest.raises(RuntimeError, match=r"size mismatch for linear\.weight"):
            ours.layers[0].load_state_dict({"linear.weight": torch.ones(3)}, strict=False)


def test_a_copy_has_parameters_of_its_own_and_no_gradients(original: tuple[nn.Module, nn.Module]) -> None:
    for module in original:
        twin = deepcopy(module)
        trained(twin)
        again = deepcopy(twin)
        assert all(p.grad is not None for p in twin.parameters())
        assert all(p.grad is None for p in again.parameters())
        trained(again)
        assert not {id(p) for p in twin.parameters()} & {id(p) for p in again.parameters()}
        for ours, theirs in zip(again.parameters(), twin.parameters(), strict=True):
            assert torch.equal(_whole(ours), _whole(theirs)) and torch.equal(_whole(ours.grad), _whole(theirs.grad))


def _whole(value: Any) -> Tensor:
    whole: Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
    return whole
