"""What is predicted of a published run: seconds of a step and bytes that a rank reserves."""

from __future__ import annotations

import hashlib
import re
import sys
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import autoshard
from autoshard.plans import ShardingPlan, dump_plan, parse_plan
from autoshard.plans.plan import Execution, Redistribution
from autoshard.plans.simulation import Span, simulate
from autoshard.precision import is_cast
from cost_models import load_profile
from published_float8 import casts_s, in_float8
from published_memory import NARROW, WIDE, reserved_bytes, shard_bytes
from published_runs import Run

FITTING = (
    *("tt24-8b-128-eager", "tt24-8b-128-compile", "ttA-L2-13B-64-selectivelayer-b2"),
    *("mpt-70b-h100-256-ac", "mpt-30b-h100-512-ac", "mpt-30b-h100-128-ac", "mpt-13b-h100-128-ac"),
    *("mpt-70b-h100-32-ac", "mpt-30b-h100-32-ac", "mpt-13b-h100-64", "mpt-3b-h100-64"),
    *("mpt-70b-a10040-128-ac", "mpt-30b-a10040-128-ac"),
    *("kor-22b-8-full", "kor-22b-layer-sp", "kor-22b-layer-full", "kor-22b-layer-spsel"),
    # which could not be built when constants were fitted, so that none knows them
    *("tt25-70b-256-bf16-asynctp", "tt25-70b-256-float8-tensorwise-vanillatp"),
    *("tt25-70b-256-float8-tensorwise-asynctp", "tt24-70b-256-2D", "tt25-8b-h200-32", "tt25-8b-h200-64"),
)
"""The rows to which constants of the profiles may be fitted: those that can be built of the ids whose SHA-256 is
divisible by 3 (its first 8 digits), which was settled before anything was predicted. All other rows are validation.
"""

FUSED = 0.5
"""The part of the time of small operators (all but products and attention) that is left when a compiler fuses them.
Fitted to the fitting rows on ``h100-500w-hbm2e``.
"""


@dataclass(frozen=True)
class Prediction:
    """What is predicted of a run: seconds of a step, and bytes that a rank's allocator reserves."""

    run: Run
    step_s: float
    reserved_bytes: float

    @property
    def error(self) -> float | None:
        """Of the step time, relative to what was published; above 0 where it was predicted too slow."""
        published = self.run.published_s
        return published and self.step_s / published - 1

    @property
    def memory_error(self) -> float | None:
        """Of the memory; None where none was published."""
        published = self.run.published_bytes
        return None if published is None or self.run.is_one_layer else self.reserved_bytes / published - 1

    @property
    def per_token_s(self) -> tuple[float, float]:
        """Predicted and published GPU seconds of a token."""
        batch, sequence = self.run.batch
        share = self.run.devices / (batch * sequence * self.run.accumulated)
        return self.step_s * share, (self.run.published_s or float("nan")) * share

    @property
    def is_fitting(self) -> bool:
        """Whether constants were fitted to it."""
        return self.run.name in FITTING


def predict(run: Run, plans: Plans) -> Prediction:
    """The prediction of a run.

    Raises:
        CannotBuild: it cannot be built.
        AutoshardError: it cannot be planned.
    """
    layers = run.row.whole("layers")
    if run.is_one_layer:  # what a second layer adds
        one, two = (plans.of(run, layers + more) for more in range(2))
        seconds = _phases_s(two, run) - _phases_s(one, run)
        return Prediction(run, seconds, reserved_bytes(run, two) - reserved_bytes(run, one))
    plan = plans.of(run, layers)
    once_s = (plan.optimizer_s or 0.0) / run.ranks_of_a_state + _reduction_s(plan, run)
    return Prediction(run, run.accumulated * _phases_s(plan, run) + once_s, reserved_bytes(run, plan))


def _reduction_s(plan: ShardingPlan, run: Run) -> float:
    """Seconds in which replicas that were not planned reduce their gradients, in the dtype that they have."""
    if plan.mesh == run.mesh:
        return 0.0
    topology = load_profile(run.hardware).topology(run.mesh.axes, run.mesh.shape)
    width = WIDE if "reduce_dtype" in run.precision else NARROW
    return float(topology.collective_s("all_reduce", run.mesh.axes.index("dp"), shard_bytes(plan, width)))


def _phases_s(plan: ShardingPlan, run: Run) -> float:
    """Seconds of one forward and backward."""
    casts, profile = 0.0, load_profile(run.hardware)
    if run.in_float8:
        plan, casts = in_float8(plan, profile), FUSED * casts_s(run, profile)
    if run.compiled:
        plan = replace(plan, execution=tuple(replace(e, predicted_ns=_fused_ns(e)) for e in plan.execution))
    if run.gathers_once:
        plan = replace(plan, redistributions=tuple(r for r in plan.redistributions if not _gathers_again(r)))
    simulated = simulate(plan)
    in_pieces_ns = sum(map(_beside_products_ns, simulated.spans)) if run.is_asynchronous else 0
    step_ns, hidden_ns = simulated.step_ns - in_pieces_ns, simulated.hidden_ns + in_pieces_ns
    return (step_ns + profile.contention * hidden_ns) / 1e9 + casts - (plan.optimizer_s or 0.0)


def _beside_products_ns(span: Span) -> int:
    """What of a span runs beside a product where tensor parallelism is asynchronous: its gathers and reduce-scatters
    of activations, which are waited for where they stand otherwise.
    """
    if span.lane != "tp" or not isinstance(span.what, Redistribution):
        return 0
    return span.took_ns if span.what.collectives[span.step].kind in ("all_gather", "reduce_scatter") else 0


def _gathers_again(entry: Redistribution) -> bool:
    """Whether it gathers a parameter, or what it is cast to, for the backward."""
    is_weight = is_cast(entry.tensor) or "/" not in entry.tensor
    gathers = {collective.kind for collective in entry.collectives} == {"all_gather"}
    return entry.phase == "backward" and is_weight and gathers


def _fused_ns(entry: Execution) -> int:
    return entry.predicted_ns if is_product(entry.name) else round(entry.predicted_ns * FUSED)


def is_product(operator: str) -> bool:
    """Whether an operator, by its name in a plan, is a product of matrices or attention."""
    role = operator.rpartition("/")[2].removeprefix("bwd.").removeprefix("again.")
    return bool(re.match(r"(mm|addmm|bmm|matmul|linear|attention)", role))


class Plans:
    """Plans of runs, each made once: runs that differ in what a compiler does have the same."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder, self._made = folder, dict[str, ShardingPlan]()

    def of(self, run: Run, layers: int) -> ShardingPlan:
        """The plan of a run with so many layers."""
        profile = load_profile(run.hardware)
        asked = (run.planned_mesh, run.constraints, run.precision, run.planned_batch, layers, profile.fingerprint)
        dims = [run.row.text(name) for name in ("model", "d_model", "heads", "kv_heads", "ffn", "vocab")]
        key = hashlib.sha256(repr((asked, dims)).encode()).hexdigest()[:16]
        if key not in self._made:
            path = self._folder and self._folder / f"{key}.yaml"
            if path and path.exists():
                plan = parse_plan(path.read_text(), str(path))
            else:
                plan = _plan(run, layers)
                if path:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_text(dump_plan(plan))
            self._made = {key: plan}  # rows of one plan stand one after the other: it need not stay in memory
        return self._made[key]


def _plan(run: Run, layers: int) -> ShardingPlan:
    model, arguments = run.model(layers)
    largest = max(sum(p.numel() for p in layer.parameters()) for layer in _layers(model))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a plan is good enough whose gap is not closed
        return autoshard.plan(
            model,
            arguments,
            mesh=run.planned_mesh,
            hardware=run.hardware,
            constraints=run.constraints,
            checkpointing="none",
            bucket=4 * largest,  # FSDP moves a layer at a time
            **run.precision,  # type: ignore[arg-type]
        )


def _layers(model: object) -> Iterable[object]:
    return next(child for child in model.children() if len(list(child.children())) and hasattr(child, "append"))  # type: ignore[attr-defined]
