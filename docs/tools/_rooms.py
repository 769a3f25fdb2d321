"""The table of the rooms of ptrain/: what each says of itself, and how much there is to read."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from _machine import ROOT
from _script import table

from tests.source_tree import SourceTree

# In the order of reading, which is that of the imports.
ROOMS = (
    *("spec", "facts", "rates", "steps", "runtime", "optimizers"),
    *(
        "axes",
        "axes/data",
        "axes/tensor",
        "axes/pipeline",
        "axes/context",
        "axes/expert",
        "activations",
    ),
    *("algebra", "plan", "derivation", "selection", "report", "xray"),
    *("internals", "models", "data", "interpreter", "traces", "meters", "train"),
    *("calibration", "simulation", "verification", "verification/updates"),
    *("charts", "convert", "cli"),
)
STEP = 500  # lines: the nearest multiple, so that a small change leaves the page true


def rooms() -> str:
    """Every room: what its package's docstring says, and about how many lines."""
    tree = SourceTree(ROOT)

    def rows() -> Iterator[Sequence[str]]:
        for room in ROOMS:
            package = ROOT / "ptrain" / room
            about = ast.get_docstring(tree.parsed(package / "__init__.py"))
            assert about, f"{room} does not say what it is"
            inner = [ROOT / "ptrain" / other for other in ROOMS if other.startswith(f"{room}/")]
            files = [
                path
                for path in package.rglob("*.py")
                if path.name != "__init__.py" and not any(map(path.is_relative_to, inner))
            ]
            lines = sum(path.read_text(encoding="utf-8").count("\n") for path in files)
            yield f"`{room}/`", about, _about(lines)

    return table(["package", "content", "lines, about"], rows())


def _about(lines: int) -> str:
    return f"{max(1, round(lines / STEP)) * STEP:,}"


TABLES = {"rooms": rooms}
