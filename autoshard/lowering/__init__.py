"""Lowering: a plan and a captured graph become the module that one rank runs. Needs no solver."""

from .agree import bind, from_first_rank, shared_seed
from .emitter import storages
from .inputs import Inputs
from .match import check_graph, check_mesh, mesh_of
from .module import ParallelModule
from .observe import CollectiveLog, MemoryLog, measure_collectives, measure_memory
from .program import LocalProgram, Rank, lower
from .shards import shard_inputs, shard_parameters
from .verify import verify

__all__ = [
    "CollectiveLog",
    "Inputs",
    "LocalProgram",
    "MemoryLog",
    "ParallelModule",
    "Rank",
    "bind",
    "check_graph",
    "check_mesh",
    "from_first_rank",
    "lower",
    "measure_collectives",
    "measure_memory",
    "mesh_of",
    "shard_inputs",
    "shard_parameters",
    "shared_seed",
    "storages",
    "verify",
]
