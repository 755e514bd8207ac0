"""One place for what is known of operators, and operators of the user's own."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import autoshard
from autoshard.capture import capture
from autoshard.errors import InputError, StrategyWarning
from autoshard.mesh import Mesh
from autoshard.ops import has, known, operator
from autoshard.strategies import Enumerator, Rulebook, Strategy, enumerate
from cost_models import OP_KINDS

ROOT = Path(__file__).parents[2]
aten = torch.ops.aten


@torch.library.custom_op("autoshard_ops_tests::halves", mutates_args=())
def halves(x: Tensor, weight: Tensor) -> Tensor:
    return x * weight / 2


@halves.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return torch.empty_like(x)


halves.register_autograd(
    lambda ctx, grad: (grad * ctx.saved_tensors[0] / 2, None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[1]),
)
NAME = "autoshard_ops_tests::halves"
NOT_INSTALLED = {"transformers"}


class Halving(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("weight", torch.arange(8.0))

    def forward(self, x: Tensor) -> Tensor:
        return halves(self.linear(x), self.weight).sum()


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Entries of a test are gone after it."""
    monkeypatch.setattr(operator, "_ENTRIES", dict(operator._ENTRIES))
    known.cache_clear()
    yield
    known.cache_clear()


def cuts(mesh: str = "a=2") -> set[str]:
    graph = capture(Halving(), (torch.ones(4, 8),))
    node = next(node for node in graph.nodes if node.name == "/halves")
    found = Enumerator(graph, Mesh.parse(mesh)).strategies(node)
    return {" ".join(str(p) for layout in (*s.inputs, s.outputs[0]) for p in layout or ()) for s in found}


def test_an_operator_of_the_users_own_has_the_rules_that_are_registered_and_right(registry: None) -> None:
    with pytest.warns(StrategyWarning, match="neither torch nor autoshard has a rule"):
        assert cuts() == {"R R R"}
    autoshard.register_operator(NAME, ["S(0), R -> S(0)", "S(1), S(0) -> S(1)", "S(1), R -> S(1)", "S(2), R -> S(2)"])
    assert cuts() == {"R R R", "S(0) R S(0)", "S(1) S(0) S(1)"}
    assert len(cuts("a=2,b=2")) > 5


def test_rules_that_the_process_has_checked_are_kept_until_another_says_how_an_operator_is_cut(registry: None) -> None:
    def found() -> tuple[Strategy, ...]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", StrategyWarning)
            return Enumerator(graph, Mesh.parse("a=2"), Rulebook.of_process()).strategies(node)

    graph = capture(Halving(), (torch.ones(4, 8),))
    node = next(node for node in graph.nodes if node.name == "/halves")
    with patch.object(enumerate, "_rules", wraps=enumerate._rules) as rules:
        whole = found()
        asked = rules.call_count
        assert found() == whole and rules.call_count == asked
        autoshard.register_operator(NAME, ["S(0), R -> S(0)"])
        assert len(found()) == 2 > len(whole) == 1


def test_rules_of_shapes_and_prices_are_taken(registry: None) -> None:
    seen: list[object] = []

    def rules(shapes: object) -> list[str]:
        seen.append(shapes)
        return ["P(sum), R -> P(sum)"]

    autoshard.register_operator(NAME, rules, kernel="reduction", flops=lambda inputs, outputs: 1e15)
    assert cuts() == {"R R R", "P(sum) R P(sum)"} and seen == [[(4, 8), (8,)]]
    plan = autoshard.plan(Halving(), (torch.ones(4, 8),), mesh="a=2")
    assert plan.compute_s > 1.0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("autoshard_ops_tests::thirds", ["S(0) -> S(0)"]), "torch has no operator 'autoshard_ops_tests::thirds'"),
        (("halves", ["S(0) -> S(0)"]), "write it as in mylib::rms"),
        (("aten::mm", ["S(0), R -> S(0)"]), "aten::mm has two entries"),
        ((NAME, ["S(0), R"]), "'S(0), R'"),
        ((NAME, ["S(0), X -> S(0)"]), "cannot read the placement 'X'"),
    ],
)
def test_what_cannot_be_registered_is_told(registry: None, arguments: tuple[str, list[str]], said: str) -> None:
    with pytest.raises(InputError, match=re.escape(said)):
        autoshard.register_operator(*arguments)


def test_a_kind_of_kernel_that_is_none_is_told(registry: None) -> None:
    with pytest.raises(InputError, match=r"'reductoin' is no kind of kernel.* did you mean 'reduction'"):
        autoshard.register_operator(NAME, ["R, R -> R"], kernel="reductoin")  # type: ignore[arg-type]


def test_a_rule_of_another_number_of_tensors_is_told_where_it_is_met(registry: None) -> None:
    autoshard.register_operator(NAME, ["S(0) -> S(0)"])
    with pytest.raises(InputError, match=r"'S\(0\) -> S\(0\)' of .*halves is of 1 tensors, but .* takes 2 at /halves"):
        cuts()


def test_an_operator_has_one_entry() -> None:
    with pytest.raises(ValueError, match="aten::tril has two entries"):
        operator.enter("tril", operator.Operator())


def test_an_overload_may_have_an_entry_of_its_own() -> None:
    assert known(aten.view.default).small_form is not None
    assert known(aten.view.dtype).small_form is None
    assert known(aten.max_pool2d_with_indices_backward.default).keeps is not None  # by its name
    assert known(aten.relu.default) == operator.Operator()


def test_every_entry_names_an_operator_of_torch_and_a_kind_of_kernel() -> None:
    """A misspelt one would never be found; of libraries that need not be installed, the zoo finds it."""
    for name, entry in operator._ENTRIES.items():
        namespace, _, rest = name.partition("::")
        if namespace in NOT_INSTALLED:
            continue
        short, _, overload = rest.partition(".")
        packet = getattr(getattr(torch.ops, namespace), short, None)
        assert packet is not None and (not overload or overload in packet.overloads()), name
        assert entry.kernel in OP_KINDS


def test_no_other_file_has_a_table_of_operators() -> None:
    """Adding an operator touches the file of its family; what capture rewrites is its own affair."""
    files = ("adapter", "addends", "capture", "joined_pieces", "by_numbers/known_numbers", "by_numbers/sorted_rows")
    own = {f"autoshard/capture/{name}.py" for name in files}
    found = []
    for path in sorted(ROOT.glob("autoshard/**/*.py")):
        name = str(path.relative_to(ROOT))
        if name.startswith("autoshard/ops/") or name in own:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.Set, ast.Dict, ast.Tuple, ast.List)):
                parts = node.keys if isinstance(node, ast.Dict) else node.elts
                if any(part is not None and ast.unparse(part).startswith(("aten.", "torch.ops.")) for part in parts):
                    found.append(f"{name}:{node.lineno}")
    assert found == []


def test_the_measured_kernels_are_of_the_kinds_that_operators_are_priced_as() -> None:
    from autoshard.measure.kernels import KERNELS

    for name, kernel in KERNELS.items():
        if isinstance(kernel.call, torch._ops.OpOverload):
            assert known(kernel.call).kernel == kernel.kind, name


def test_a_product_with_a_batch_is_a_product_everywhere() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return torch.baddbmm(x, x, y)

    (node,) = (n for n in capture(Model(), (torch.ones(2, 3, 3),) * 2).nodes if n.kind == "operator")
    assert has(node, "contraction") and has(node, "batched") and known(node.op).kernel == "matmul"


def test_the_example_of_the_documentation_runs() -> None:
    """In a process of its own: it defines operators."""
    (program,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "operators.md").read_text(), re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=120, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == "dp:S(0)\n"
