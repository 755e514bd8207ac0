"""The user's model as the module that a job trains: the same object, of a class made from its own.

As ``fully_shard`` of torch does, :func:`converted` gives the model a subclass of its class, in which only ``forward``
and copying are others. What autoshard keeps stands in one attribute, ``_autoshard``; everything else is the user's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import cache, partial, update_wrapper, wraps
from itertools import chain
from types import new_class
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..capture import exchange
from ..errors import AutoshardError, InputError, PlanMismatchError
from ..plans import ShardingPlan
from .adapter import CALL_HOOKS, break_graph, call_through, rank_in_job
from .agree import is_same_everywhere
from .cuts import are_look_alikes
from .draws import Draws
from .failure import Failures
from .fill import as_one_process_on, check_filled, emptied
from .left_behind import with_left
from .reads import check_reads
from .served_plan import ServedPlan
from .shard_steps import step_shards_of
from .shards import agree_on_replicas, cut_state, cut_what_parts_load
from .traced import UNCOMPILED, along, let_be_traced, way_of

_SLOT = "_autoshard"

INITIALISERS = ("init_weights", "init_states", "initialize_weights", "reset_parameters", "apply")
"""Methods by which models give themselves their first values, as torch, torchtitan and Hugging Face name them."""


class ParallelModule(nn.Module):
    """What :func:`autoshard.parallelize` adds to the class of a model; never made by itself.

    Submodules, parameters and buffers are where they were; parameters are DTensors placed as planned, and so are their
    gradients. ``plan`` is the plan that runs, the first of several; where the model has an attribute of that name, see
    :func:`plan_of`.

    Call it with plain tensors, which are this rank's shards (:func:`autoshard.shard_inputs` cuts a full batch), or with
    DTensors. A scalar result comes back as a plain tensor, equal on all ranks, whose value may be waited for when it is
    read (:mod:`autoshard.lowering.unread`); any other as a DTensor.

    Where the plan has several micro-batches, a call is one of them, and so many backwards make a step: gradients are
    complete after the last one (:mod:`autoshard.lowering.accumulation`).

    A model that was on the meta device is filled after it was made: with :func:`autoshard.load_weights`, or by its own
    initialisation, which runs as :func:`as_one_process` says if it has one of the usual names (``INITIALISERS``). Its
    first forward checks that nothing was forgotten, and gives all copies of a shard the values of the first copy.
    """

    # A call of a class of the user's own is part of what was captured, and must not run again around it.
    __call__ = nn.Module.__call__

    def __init_subclass__(cls, **options: Any) -> None:
        """Nothing: what a class of the user's does with its subclasses (registers them, say) is not for ours."""

    def to_empty(self, *, device: Any, recurse: bool = True) -> ParallelModule:
        """Makes tensors on the meta device real. Others keep their values, unlike with torch's own ``to_empty``, where
        buffers that the constructor computed are lost.
        """
        before = dict(self.named_buffers())
        self._apply(partial(emptied, device=device), recurse=recurse)
        exchange(self, [(buffer, self.get_buffer(name)) for name, buffer in before.items()])
        return self

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """As a module's. Whole plain tensors, as one process saves them, are cut, and so are DTensors on other meshes.

        Raises:
            InputError: the state holds shards of another rank.
        """
        return super().load_state_dict(cut_state(self, state_dict), *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> ParallelModule:
        """A module with tensors of its own that runs the same program on the same mesh.

        Gradients are not copied, as with any module: torch's own copy of a parameter that is a DTensor would have one.
        """
        memo |= {id(value): value for value in _served(self).shared}
        memo |= {
            id(p): nn.Parameter(p.detach().clone(), p.requires_grad) for p in self.parameters() if id(p) not in memo
        }
        copied = object.__new__(self.__class__)
        memo[id(self)] = copied
        for key in sorted(self.__dict__, key=lambda key: key == _SLOT):  # what looks at the modules of the copy is last
            copied.__dict__[key] = deepcopy(self.__dict__[key], memo)
        _refuse_parts(copied)
        step_shards_of(copied)
        let_be_traced(copied)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise InputError(
            "a parallel module cannot be pickled: it belongs to the processes of this job. Save its state_dict() with "
            "torch.distributed.checkpoint, and the plan with autoshard.write_plan"
        )


class Served:
    """All that a parallel module has beside what the user's model had: the plans it serves, and how its model was."""

    def __init__(
        self,
        model: nn.Module,
        plans: Sequence[ServedPlan],
        mesh: DeviceMesh,
        failures: Failures,
        draws: Draws | None,
    ) -> None:
        self.plans, self.draws = tuple(plans), draws
        self._look_alikes = [
            [k for k, other in enumerate(plans) if other is not one and are_look_alikes(one.plan, other.plan)]
            for one in plans
        ]
        self.mesh, self.failures = mesh, failures
        self._compared: list[ServedPlan] = []
        self._was_meta = any(tensor.is_meta for tensor in chain(model.parameters(), model.buffers()))
        self._model_class = type(model)
        # what the captured step has in it already: hooks of the model itself, a forward that was set on the object
        self._captured = {name: model.__dict__.get(name) for name in (*CALL_HOOKS, "forward")}

    @property
    def shared(self) -> tuple[Any, ...]:
        """What copies of a module have in common."""
        return *(value for plan in self.plans for value in plan.shared), self.mesh, self.failures

    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One step's forward on this rank.

        Raises:
            InputError: the call is not one that the plan was made for.
            PlanMismatchError: the model has changed since it was captured: its tensors, or the Python values, modes
                and hooks that its forward depends on.
            JobError: another rank failed or ended.
        """
        with self.failures.telling("the forward"):
            plan, given = self.chosen(module, args, kwargs)
            self._agree(plan)
            if plan not in self._compared:  # at the first call alone
                check_reads(given, self.mesh)
                self._compared.append(plan)
            return with_left(module, plan.left, plan.run(given, self._held(module, plan)))

    def taken(self, module: nn.Module, plan: ServedPlan) -> dict[str, torch.Tensor]:
        """What a plan takes of the model where the call was chosen before, with the checks of every call.

        Raises:
            as :meth:`call`.
        """
        with self._as_captured(module):
            plan.check_model()
        self._agree(plan)
        return self._held(module, plan)

    def _held(self, module: nn.Module, plan: ServedPlan) -> dict[str, torch.Tensor]:
        held = plan.held()
        if self._was_meta:
            check_filled(held)
            agree_on_replicas(module, self.mesh)
            self._was_meta = False
        return held

    def chosen(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[ServedPlan, dict[str, torch.Tensor]]:
        """The plan that a call runs, and the tensors of the call by name: of the plans that were made for it the first;
        one without a backward before the others where none can follow.
        """
        found: tuple[ServedPlan, dict[str, torch.Tensor]] | None = None
        objections: dict[int, AutoshardError] = {}
        for plan in self._in_turn(module):
            try:
                found = plan, self._given(module, plan, args, kwargs)
                break
            except (InputError, PlanMismatchError) as error:
                objections[self.plans.index(plan) + 1] = error
        if len(self.plans) == 1 and objections:
            raise objections[1]
        if found is None:
            said = "".join(
                f"\n  plan {number}, {self._served_by(number)}: {e}" for number, e in sorted(objections.items())
            )
            raise InputError(f"none of the {len(self.plans)} plans of this module was made for this call:{said}")
        self._refuse_look_alikes(module, found[0], args, kwargs)
        return found

    def _served_by(self, number: int) -> str:
        plan = self.plans[number - 1]
        return f"{'training' if plan.has_backward else 'evaluation'}, batch {plan.plan.batch}"

    def _given(
        self, module: nn.Module, plan: ServedPlan, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> dict[str, torch.Tensor]:
        with self._as_captured(module):
            plan.check_surroundings()
        return plan.inputs.of(args, kwargs)

    def _refuse_look_alikes(
        self, module: nn.Module, plan: ServedPlan, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Refuses shards that nobody can tell from those of another plan that may be run as well."""
        number = self.plans.index(plan)
        for its in self._look_alikes[number]:
            other = self.plans[its]
            if other.has_backward != plan.has_backward:
                continue  # which is meant, the mode says
            try:
                self._given(module, other, args, kwargs)
            except (InputError, PlanMismatchError):
                continue
            first, second = sorted((number + 1, its + 1))
            raise InputError(
                f"plans {first} and {second} of this module take shards of the same shapes on every "
                "rank, of other tensors or cut otherwise, and nothing says which these are: give what "
                "autoshard.shard_inputs returned as it is, which knows what it was cut for, or DTensors"
            )

    def _agree(self, plan: ServedPlan) -> None:
        number = self.plans.index(plan)
        if len(self.plans) > 1 and not is_same_everywhere([number], self.mesh):
            raise InputError(
                f"rank {rank_in_job()} is called with what plan {number + 1} of {len(self.plans)} was made for, other "
                "ranks with what another one was: give all ranks batches of one shape, in one mode"
            )

    def _in_turn(self, module: nn.Module) -> Sequence[ServedPlan]:
        """The plans as they are to be tried; of one nothing has to be asked, as every call comes by here."""
        if len(self.plans) == 1:
            return self.plans
        goes_back = torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters())
        return sorted(self.plans, key=lambda plan: plan.has_backward != goes_back)

    @contextmanager
    def _as_captured(self, module: nn.Module) -> Iterator[None]:
        """Inside, the module has the class, the hooks and the forward that it was captured with: the conditions of the
        capture are about these.
        """
        made, now = type(module), module.__dict__
        others = {name: value for name, value in self._captured.items() if value or now.get(name)}
        module.__class__ = self._model_class
        before = _put(now, others)
        try:
            yield
        finally:
            _put(now, before)
            module.__class__ = made


def converted(
    model: nn.Module, plans: Sequence[ServedPlan], mesh: DeviceMesh, failures: Failures, draws: Draws | None
) -> nn.Module:
    """Makes the model itself the parallel module of one plan or several, which draw random numbers by ``draws``.

    Raises:
        InputError: its class cannot have a subclass.
    """
    made = _class_of(model)
    served = Served(model, plans, mesh, failures, draws)
    try:
        model.__class__ = made
    except TypeError as error:
        raise _unfit(model, error) from error
    fresh = nn.Module().__dict__
    _put(model.__dict__, {**{name: fresh[name] for name in CALL_HOOKS}, "forward": None, _SLOT: served})
    _refuse_parts(model)
    cut_what_parts_load(model)
    step_shards_of(model)
    let_be_traced(model)
    return model


def plan_of(module: nn.Module) -> ShardingPlan:
    """The plan that a module runs; of several, the first.

    Raises:
        InputError: it is not one that :func:`autoshard.parallelize` made.
    """
    return _asked(module).plans[0].plan


def mesh_of_module(module: nn.Module) -> DeviceMesh:
    """The mesh that a module runs on.

    Raises:
        InputError: it is not one that :func:`autoshard.parallelize` made.
    """
    return _asked(module).mesh


def manual_seed(module: nn.Module, seed: int, step: int = 0) -> None:
    """Seeds the random numbers (dropout) that a parallel module draws; all ranks call it alike.

    A module is seeded when it is made, with what ``torch.manual_seed`` was given on the first rank of the mesh. To go
    on after a resume, give that seed and the number of forwards that have drawn before: on the same mesh, under the
    same plan, what is drawn is the same as without the interruption.

    Args:
        module: what :func:`autoshard.parallelize` made. One that draws nothing stays as it is.
        seed: any integer.
        step: forwards that have drawn numbers since the seed was set; each micro-batch has one.

    Raises:
        InputError: no plan runs in the module, or the ranks give different numbers.
    """
    draws = _asked(module).draws
    if draws is not None:
        draws.seed(seed, step)


@contextmanager
def as_one_process(module: nn.Module) -> Iterator[None]:
    """Inside, what is done to the parameters of a parallel module gives them the values that one process would have.

    Operators work on whole parameters, one at a time, and every rank keeps its block; a rank holds its shards and the
    largest parameter at most. Random numbers are drawn from the default generators as they are on the mesh's first
    rank, or from generators that are given, which all ranks seed alike. All ranks do the same inside.

    The methods of the model that initialise it (``init_weights``, ``init_states``, ``initialize_weights``,
    ``reset_parameters`` and ``apply``) run so by themselves; this is for functions and loops of the user's own.

    Raises:
        InputError: no plan runs in the module, a parameter is on the meta device still, or ranks give different values.
    """
    served = _asked(module)
    with as_one_process_on(module, served.plans[0].plan, served.mesh):
        yield


def _asked(module: nn.Module) -> Served:
    if not isinstance(module, ParallelModule):
        raise InputError(f"{type(module).__name__} runs no plan: autoshard.parallelize has not made it")
    return _served(module)


class _PlanAttribute:
    """``module.plan``; an attribute that the user sets goes before it."""

    def __get__(self, module: nn.Module | None, owner: type) -> Any:
        return self if module is None else plan_of(module)


def check_class(model: nn.Module) -> None:
    """Checks that a model can be made a parallel module.

    Raises:
        InputError: its class cannot have a subclass, or it is a parallel module already.
    """
    if isinstance(model, ParallelModule):
        raise InputError("the model is a parallel module already: build it again to parallelize it under another plan")
    _class_of(model)


def _class_of(model: nn.Module) -> type:
    try:
        return _made(type(model), not hasattr(model, "plan"))  # type: ignore[arg-type]  # classes are hashable
    except TypeError as error:
        raise _unfit(model, error) from error


@cache
def _made(owner: type, has_plan: bool) -> type:
    """The class of parallel modules for a class of models, under the same name."""

    @partial(torch.compiler.disable, reason=UNCOMPILED)
    def untraced(self: ParallelModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return _served(self).call(self, args, kwargs)

    def forward(self: ParallelModule, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            way = way_of(self, args, kwargs)
            if not way.refusal:
                return along(way, self, args, kwargs)
            break_graph(way.refusal)
        return untraced(self, args, kwargs)

    def new(cls: type, *args: Any, **kwargs: Any) -> Any:
        """``type(model)(...)``, as averages and teachers are made, is a model as the user's class makes it."""
        return owner(*args, **kwargs) if cls is made else object.__new__(cls)

    body: dict[str, Any] = {
        "__new__": new,
        "__module__": owner.__module__,
        "__qualname__": owner.__qualname__,
        "__doc__": owner.__doc__,
        # with the signature of the user's, and without the marks that decorators set on it
        "forward": update_wrapper(forward, owner.forward, updated=()),  # type: ignore[attr-defined]
    }
    body |= {name: _initialising(getattr(owner, name)) for name in INITIALISERS if callable(getattr(owner, name, None))}
    if has_plan:
        body["plan"] = _PlanAttribute()
    made = new_class(owner.__name__, (ParallelModule, owner), exec_body=lambda namespace: namespace.update(body))
    return made


def _initialising(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def run(self: ParallelModule, *args: Any, **kwargs: Any) -> Any:
        with as_one_process(self):
            return method(self, *args, **kwargs)

    return run


def _unfit(model: nn.Module, error: TypeError) -> InputError:
    name = f"{type(model).__module__}.{type(model).__qualname__}"
    return InputError(
        f"autoshard runs a model as an object of a subclass of its class, and {name} cannot have one ({error}); put "
        "the model into a module of your own that calls it, and plan that"
    )


def _served(module: nn.Module) -> Served:
    found: Served = module.__dict__[_SLOT]
    return found


def _put(attributes: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Sets attributes, and takes away those that are to be None; returns what they were."""
    before = {name: attributes.get(name) for name in values}
    for name, value in values.items():
        if value is None:
            attributes.pop(name, None)
        else:
            attributes[name] = value
    return before


def _refuse_parts(module: nn.Module) -> None:
    """From here on, a call of a submodule that has parameters is refused: the plan is one for the whole model."""
    for path, part in module.named_modules():
        if part is not module and next(part.parameters(), None) is not None:
            call_through(part, partial(_refuse, path))


def _refuse(path: str, *args: Any, **kwargs: Any) -> NoReturn:
    raise InputError(
        f"the submodule {path} of a parallel module was called by itself, but its parameters are shards, and the plan "
        "is one for the whole model: call the module that autoshard.parallelize returned, or let the model return what "
        "is wanted of its parts"
    )
