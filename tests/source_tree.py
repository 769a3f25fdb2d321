"""The sources of a checkout as syntax trees: modules, imports, packages and classes. It uses only
the standard library and imports nothing of ptrain."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

FOLDERS = ("ptrain", "tests", "benchmarks", "docs", "launch")  # that hold Python
BASE = "base"  # the room of the modules beside the packages, which stands below all others
AXES, TORCH_HALF = "axes", "run"
USERS = {"ptrain", "ptrain.__main__", "ptrain.testing"}  # entries: they are in no room

_Node = TypeVar("_Node", bound=ast.AST)


class SourceTree:
    """A checkout at `root`. A file is read once, on first use."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._parsed: dict[Path, ast.Module] = {}
        self._imports: dict[str, tuple[str, ...]] = {}
        self._nodes: dict[Path, dict[type[ast.AST], list[Any]]] = {}

    @cached_property
    def modules(self) -> dict[str, Path]:
        """Return the modules of the package by full name, ordered by path."""
        return {self.name_of(path): path for path in sorted((self.root / "ptrain").rglob("*.py"))}

    @cached_property
    def oracles(self) -> dict[str, Path]:
        """Return the modules of closed forms by full name: `tests.oracles.tensor`."""
        folder = self.root / "tests" / "oracles"
        return {self.name_of(path): path for path in sorted(folder.rglob("*.py"))}

    @cached_property
    def python_files(self) -> list[Path]:
        """Return the files of the package, tests, benchmarks and launchers."""
        return [path for folder in FOLDERS for path in sorted((self.root / folder).rglob("*.py"))]

    @cached_property
    def rooms(self) -> dict[str, list[str]]:
        """Return the modules of each layer. A layer is a package with its subpackages: `spec`,
        `verification`. An axis is a separate layer (`axes/data`), and so is the torch half of a
        layer (`axes/data/run`); top-level modules form the layer `base`."""
        rooms: dict[str, list[str]] = {}
        for module in self.modules:
            room = self.room_of(module)
            if room is not None:
                rooms.setdefault(room, []).append(module)
        return dict(sorted(rooms.items()))

    def room_of(self, module: str) -> str | None:
        """Return the layer of a module; None for an entry point, which uses all layers."""
        if module in USERS:
            return None
        folders = self.modules[module].parent.relative_to(self.root / "ptrain").parts
        depth = 2 if folders[:1] == (AXES,) else 1
        depth += folders[depth : depth + 1] == (TORCH_HALF,)
        return "/".join(folders[:depth]) or BASE

    def name_of(self, path: Path) -> str:
        """Return the full name of a file's module."""
        parts = path.relative_to(self.root).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    def short(self, path: Path) -> str:
        """Return the path relative to the root."""
        return path.relative_to(self.root).as_posix()

    def parsed(self, path: Path) -> ast.Module:
        """Return the syntax tree of a file."""
        if path not in self._parsed:
            self._parsed[path] = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
        return self._parsed[path]

    def nodes(self, path: Path, *kinds: type[_Node]) -> Iterator[_Node]:
        """Return all nodes of these kinds in a file, kind by kind. A file is walked once."""
        if path not in self._nodes:
            nodes: dict[type[ast.AST], list[Any]] = {}
            for node in ast.walk(self.parsed(path)):
                nodes.setdefault(type(node), []).append(node)
            self._nodes[path] = nodes
        for kind in kinds:
            yield from self._nodes[path].get(kind, ())

    def imports(self, module: str) -> tuple[str, ...]:
        """Every module that an import statement of `module`, one of the package or an oracle,
        names, those for types only included. A relative import raises AssertionError."""
        if module not in self._imports:
            self._imports[module] = tuple(self._imported(module))
        return self._imports[module]

    def _imported(self, module: str) -> Iterator[str]:
        known = self.modules | self.oracles
        path = known[module]
        for node in self.nodes(path, ast.Import):
            yield from (alias.name for alias in node.names)
        for node in self.nodes(path, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno}: a relative import"
            assert node.module
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                yield submodule if submodule in known else node.module

    def functions(self, path: Path) -> Iterator[tuple[str, int]]:
        """Yield the name of every function of a file and its number of lines without docstring."""
        for node in self.nodes(path, ast.FunctionDef, ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if ast.get_docstring(node, clean=False) is not None:
                text = node.body[0]
                lines -= (text.end_lineno or text.lineno) - text.lineno + 1
            yield node.name, lines

    def statements(self, path: Path) -> int:
        """Return the number of statements of a file. Docstrings and other constant statements do
        not count, so the number does not depend on them, on comments or on line breaks."""
        return sum(
            isinstance(node, ast.stmt)
            and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
            for node in ast.walk(self.parsed(path))
        )

    def statements_by_package(self) -> dict[str, int]:
        """Return the statements of each package by path, in alphabetical order after the total of
        `ptrain`. An axis is a separate package; `ptrain/axes` are the modules outside of the
        axes."""
        totals = Counter[str]()
        for path in self.modules.values():
            number = self.statements(path)
            totals["ptrain"] += number
            folders = path.relative_to(self.root).parent.parts
            if len(folders) > 1:
                totals["/".join(folders[: 3 if folders[1] == AXES else 2])] += number
        return dict(sorted(totals.items()))

    def modules_with_one_importer(self) -> list[str]:
        """Return the modules that exactly one other module of the package imports, without
        packages."""
        importers: dict[str, set[str]] = {}
        for module in self.modules:
            for imported in self.imports(module):
                importers.setdefault(imported, set()).add(module)
        return [
            module
            for module, path in self.modules.items()
            if path.name != "__init__.py" and len(importers.get(module, ())) == 1
        ]

    def modules_below(self, lines: int) -> list[str]:
        """Return the modules with fewer lines, without packages, which have only a docstring."""
        return [
            module
            for module, path in self.modules.items()
            if path.name != "__init__.py" and path.read_text(encoding="utf-8").count("\n") < lines
        ]

    def mutual_imports(self) -> set[tuple[str, str]]:
        """Return the pairs of layers that import each other, each pair in alphabetical order.
        Importing a package counts as importing its layer."""
        edges = {
            (room, self.room_of(imported))
            for room, modules in self.rooms.items()
            for module in modules
            for imported in self.imports(module)
            if imported in self.modules
        }
        return {
            (room, other)
            for room, other in edges
            if other is not None and room < other and (other, room) in edges
        }

    def repeated_classes(self) -> dict[str, list[str]]:
        """Return the class names that several modules of the package define, with the modules."""
        homes: dict[str, set[str]] = {}
        for module, path in self.modules.items():
            for node in self.nodes(path, ast.ClassDef):
                homes.setdefault(node.name, set()).add(module)
        return {name: sorted(homes[name]) for name in sorted(homes) if len(homes[name]) > 1}
