"""Lowering: a plan and a captured graph become the module that one rank runs. Needs no solver."""

from .agree import from_first_rank
from .match import mesh_of
from .observe import CollectiveLog, measure_collectives
from .parallelize import parallelize
from .shards import shard_inputs

__all__ = [
    "CollectiveLog",
    "from_first_rank",
    "measure_collectives",
    "mesh_of",
    "parallelize",
    "shard_inputs",
]
