"""What the local graphs of the demo Llama copy, scheme by scheme: by which operators, how often, how much, and why.

    python benchmarks/copies.py

Copies are clones, concatenations, and tensors that are made contiguous; a view costs nothing but its call. One that is
an operator of the model is made without autoshard, too; the others take a tensor to another layout, or into a bucket.
Counted on the graphs of the first rank of four, forward and backward; nothing is run.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import fx

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import autoshard
from autoshard.capture import capture, captured_once, recomputed
from autoshard.constraints.baselines import baseline
from autoshard.lowering import Rank, lower
from autoshard.mesh import Mesh
from examples.llama import demo

SCHEMES = {"ddp": "dp=4", "fsdp": "dp=4", "tp": "tp=4", "sp": "tp=4", "fsdp+tp": "dp=2,tp=2", "optimum": "dp=2,tp=2"}

aten = torch.ops.aten
COPIES = {
    aten.clone.default: "clone",
    aten.contiguous.default: "contiguous",
    aten.cat.default: "concatenation",
    aten._foreach_copy_.default: "copies",
}


def nodes_of(scheme: str) -> Iterator[fx.Node]:
    """The nodes of both graphs of the first rank."""
    model, batch = demo()
    mesh = Mesh.parse(SCHEMES[scheme])
    constraints = () if scheme == "optimum" else baseline(scheme, mesh).constraints(mesh)
    with captured_once():
        plan = autoshard.plan(model, batch, mesh=mesh, hardware="cpu-gloo", constraints=constraints, cache=False)
        graph = recomputed(capture(model, batch), plan.recomputed)
    rank = Rank((0,) * mesh.ndim, torch.device("cpu"), {link: link for link in plan.links})
    program = lower(graph, plan, rank)
    assert program.backward is not None
    yield from program.forward.graph.nodes
    yield from program.backward.graph.nodes


def reason(node: fx.Node) -> str:
    """Why a copy is made."""
    label = node.meta["label"]
    if not label.is_copy:
        return "the model's own"
    if label.bucket is not None:
        return "out of a bucket" if node.target is aten.clone.default else "into a bucket"
    return "to another layout"


def copied(node: fx.Node) -> list[torch.Tensor]:
    """What a copy has in it."""
    sources = node.args[1] if node.target is aten._foreach_copy_.default else (node,)
    return [source.meta["val"] for source in sources]  # type: ignore[union-attr]


def main() -> int:
    """Prints the table."""
    table = Table(title="Copies of one step of the demo Llama on the first of 4 ranks")
    for heading, justify in (("scheme", "left"), ("why", "left"), ("operator", "left"), ("times", "right")):
        table.add_column(heading, justify=justify)  # type: ignore[arg-type]
    table.add_column("MiB", justify="right")
    for scheme in SCHEMES:
        times, sizes = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
        for node in nodes_of(scheme):
            if node.target in COPIES:
                key = reason(node), COPIES[node.target]
                times[key] += 1
                sizes[key] += sum(value.numel() * value.element_size() for value in copied(node))
        for why, operator in sorted(times):
            size = sizes[why, operator] / 2**20
            table.add_row(scheme, why, operator, str(times[why, operator]), f"{size:.1f}")
        table.add_section()
    Console(width=None if sys.stdout.isatty() else 100).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
