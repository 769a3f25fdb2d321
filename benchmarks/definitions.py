"""Draw definitions of ptrain by a seed, as a reader sees them who does not read their bodies.

Whoever knows PyTorch and not this code explains each one in a sentence; who knows the code counts
how many explanations are right. The same seed draws other definitions once files have changed, so
the list is written before a change of names and docstrings, and drawn again by name after it.
"""

from __future__ import annotations

import argparse
import ast
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from _machine import ROOT

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
SEED, NUMBER = 20261129, 60


@dataclass(frozen=True, slots=True)
class Place:
    """A definition, given by its file and its path within it."""

    file: Path
    path: str
    node: Definition

    def text(self) -> str:
        """Return the signature and the docstring, without the body."""
        shown = ast.parse(ast.unparse(self.node)).body[0]
        assert isinstance(shown, Definition)
        documentation = ast.get_docstring(shown)
        fields = [line for line in shown.body if isinstance(line, ast.AnnAssign)]
        body: list[ast.stmt] = [ast.Expr(ast.Constant(documentation))] if documentation else []
        is_class = isinstance(shown, ast.ClassDef)
        shown.body = [*body, *(fields if is_class else []), ast.Expr(ast.Constant(...))]
        return ast.unparse(ast.fix_missing_locations(shown))


def definitions(root: Path) -> Iterator[Place]:
    """Yield every function and class of the package, special methods left out."""
    for file in sorted(root.joinpath("ptrain").rglob("*.py")):
        yield from _within(file.relative_to(root), ast.parse(file.read_text()), "")


def _within(file: Path, parent: ast.AST, prefix: str) -> Iterator[Place]:
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, Definition) and not node.name.startswith("__"):
            yield Place(file, f"{prefix}{node.name}", node)
        inner = f"{prefix}{node.name}." if isinstance(node, Definition) else prefix
        yield from _within(file, node, inner)


def main() -> None:
    """Print the drawn definitions, numbered."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=SEED, help=f"Default: {SEED}.")
    parser.add_argument("--number", type=int, default=NUMBER, help=f"Default: {NUMBER}.")
    arguments = parser.parse_args()
    everything = list(definitions(ROOT))
    drawn = random.Random(arguments.seed).sample(everything, arguments.number)
    print(f"{arguments.number} of {len(everything)} definitions, seed {arguments.seed}")
    for number, place in enumerate(drawn, 1):
        print(f"\n{number}. {place.file}: {place.path}\n\n{place.text()}")


if __name__ == "__main__":
    main()
