"""Lowering: a plan and a captured graph become the module that one rank runs. Needs no solver."""

from .agree import agreed, bind, from_first_rank
from .batches import sampler, shard_inputs, shard_targets
from .board import open_board
from .checkpoints import save_parts
from .draws import Draws, Random, check_random
from .emitter import in_use, storages
from .failure import Failures
from .fill import weights_on_meta
from .heap import keep_freed_memory
from .identity import check_same_start, check_same_tensors, code_digest, plan_digest
from .inputs import Inputs
from .late_part import late_nodes
from .load import load_weights
from .local_program import LocalProgram, lower, scheduled
from .local_values import Results, Storage
from .match import check_device_mesh, check_graph, check_held_alike, check_mesh, check_order, mesh_of
from .module import ParallelModule, as_one_process, check_class, converted, manual_seed, plan_of
from .needs import check_redistributions
from .observe import CollectiveLog, MemoryLog, measure_collectives, measure_memory
from .other_batch import at_batch, batch_size, even_sizes, with_batch
from .rank import Rank
from .served_plan import ServedPlan
from .shards import shard_parameters
from .sketch import NODES
from .taken import check_untaken
from .travelling import bucket_name
from .verify import verify

__all__ = [
    "NODES",
    "CollectiveLog",
    "Draws",
    "Failures",
    "Inputs",
    "LocalProgram",
    "MemoryLog",
    "ParallelModule",
    "Random",
    "Rank",
    "Results",
    "ServedPlan",
    "Storage",
    "agreed",
    "at_batch",
    "batch_size",
    "even_sizes",
    "as_one_process",
    "bind",
    "bucket_name",
    "check_class",
    "check_device_mesh",
    "check_untaken",
    "check_graph",
    "check_held_alike",
    "check_mesh",
    "check_order",
    "check_random",
    "check_redistributions",
    "check_same_start",
    "check_same_tensors",
    "code_digest",
    "plan_digest",
    "converted",
    "from_first_rank",
    "in_use",
    "keep_freed_memory",
    "late_nodes",
    "load_weights",
    "lower",
    "manual_seed",
    "measure_collectives",
    "measure_memory",
    "mesh_of",
    "open_board",
    "plan_of",
    "sampler",
    "save_parts",
    "scheduled",
    "shard_inputs",
    "shard_parameters",
    "shard_targets",
    "storages",
    "verify",
    "with_batch",
    "weights_on_meta",
]
