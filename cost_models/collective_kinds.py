"""The kinds of collectives, in the order in which everything lists them. The only list: prices, plans, constraints and
measurements take it from here.
"""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

RedistributionKind: TypeAlias = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]
"""What takes a tensor from one layout to another: the collectives of a plan."""

CollectiveKind: TypeAlias = Literal[RedistributionKind, "broadcast"]
"""What is priced and measured: broadcasts, too, by which ranks agree on parameters before the first step."""

REDISTRIBUTION_KINDS: tuple[RedistributionKind, ...] = get_args(RedistributionKind)
COLLECTIVE_KINDS: tuple[str, ...] = get_args(CollectiveKind)
