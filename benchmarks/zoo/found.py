"""What was found, as files: one for each member and mesh, and one for the operators of each member.

They are committed, in ``benchmarks/zoo/found``, so that the page is of results that somebody can look up. A file of
cells says the commit that was run; keys are sorted and every cell is a line, so that a difference is read cell by cell.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autoshard.atomic_write import write_whole

OK, NONE, OPEN, FAILED = "ok", "none", "open", "failed"
FOUND = Path(__file__).parent / "found"
ROOT = Path(__file__).parents[2]
_CODE = ("autoshard", "cost_models", "solver", "tests", "benchmarks", ":!benchmarks/zoo/found")
_OF_OPERATORS = ("count", "lack", "name", "sources")


@dataclass(frozen=True)
class Found:
    """The cells of a member, and its operators by the audit.

    ``commits`` are those that were run, by mesh. ``missing`` are the meshes of which its process wrote nothing; what
    that said last is ``last``.
    """

    name: str
    cells: tuple[dict[str, Any], ...]
    operators: tuple[dict[str, Any], ...]
    commits: Mapping[str, str]
    missing: tuple[str, ...] = ()
    last: str = ""

    @property
    def failed(self) -> list[str]:
        """What failed, in words."""
        words = [f"{c['mesh']} {c['what']}: {c['detail']}".strip() for c in self.cells if c["outcome"] == FAILED]
        return [*words, *(f"{mesh}: its process ended: {self.last}" for mesh in self.missing)]

    @property
    def meshes(self) -> list[str]:
        """On which it was planned."""
        return list(dict.fromkeys(cell["mesh"] for cell in self.cells if cell["mesh"]))


def file_of(folder: Path, name: str, mesh: str) -> Path:
    """Where the cells of a member on a mesh are kept."""
    return folder / f"{name}.{short(mesh)}.json"


def short(mesh: str) -> str:
    """``2x4`` for ``a=2,b=4``."""
    return "x".join(part.split("=")[1] for part in mesh.split(","))


def commit_of_code() -> str:
    """The commit that runs, with ``+`` where files that a run depends on differ from it."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    return git("rev-parse", "--short=7", "HEAD") + "+" * bool(git("status", "--porcelain", "--", *_CODE))


def keep_cells(folder: Path, name: str, mesh: str, commit: str, cells: Sequence[Mapping[str, Any]]) -> None:
    """Writes the cells of a member on a mesh; those without a mesh are of the member."""
    rows = [{**cell, "detail": _anywhere(cell["detail"]), "cpu_s": round(cell["cpu_s"], 1)} for cell in cells]
    _write(file_of(folder, name, mesh), "cells", rows, commit)


def keep_operators(folder: Path, name: str, commit: str, operators: Sequence[Mapping[str, Any]]) -> None:
    """Writes what the page says of the operators of a member."""
    rows = [{key: operator[key] for key in _OF_OPERATORS} for operator in operators]
    _write(_operators_of(folder, name), "operators", sorted(rows, key=json.dumps), commit)


def read_found(folder: Path, name: str, meshes: Sequence[str] | None = None, last: Sequence[str] = ()) -> Found:
    """What was found of a member, by one process or by several.

    Args:
        meshes: on which; by default on all of which there is a file.
        last: the last line of the process that should have written of them.
    """
    paths = sorted(folder.glob(f"{name}.*.json"), key=lambda path: (len(path.name), path.name))
    if meshes is not None:
        paths = [file_of(folder, name, mesh) for mesh in meshes]
    read = [json.loads(path.read_text()) for path in paths if path.exists() and path != _operators_of(folder, name)]
    of_model = next(([cell for cell in each["cells"] if not cell["mesh"]] for each in read), [])
    on_meshes = [cell | {"commit": each["commit"]} for each in read for cell in each["cells"] if cell["mesh"]]
    kept = _operators_of(folder, name)
    operators = json.loads(kept.read_text())["operators"] if kept.exists() else []
    missing = tuple(mesh for mesh in meshes or () if not file_of(folder, name, mesh).exists())
    commits = {cell["mesh"]: cell["commit"] for cell in on_meshes}
    return Found(name, (*of_model, *on_meshes), tuple(operators), commits, missing, "".join(last))


def _operators_of(folder: Path, name: str) -> Path:
    return folder / f"{name}.operators.json"


def _write(path: Path, what: str, rows: Sequence[Mapping[str, Any]], commit: str) -> None:
    lines = ",\n".join(json.dumps(row, sort_keys=True) for row in rows)
    write_whole(path, f'{{"commit": {json.dumps(commit)},\n"{what}": [\n{lines}\n]}}\n'.encode())


def _anywhere(detail: str) -> str:
    """A message without the folders of the machine that it was written on."""
    return re.sub(r"/\S*/site-packages/", "", detail).replace(f"{ROOT}/", "")
