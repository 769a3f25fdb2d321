"""The sources of a checkout as syntax trees: its modules, what they import, the rooms they stand in
and the classes they define. Pure: the standard library only, and nothing of ptrain is imported."""

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
    """A checkout at `root`. Files are read once, when they are first needed."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._parsed: dict[Path, ast.Module] = {}
        self._imports: dict[str, tuple[str, ...]] = {}
        self._nodes: dict[Path, dict[type[ast.AST], list[Any]]] = {}

    @cached_property
    def modules(self) -> dict[str, Path]:
        """The modules of the package by their full names, in the order of their paths."""
        return {self.name_of(path): path for path in sorted((self.root / "ptrain").rglob("*.py"))}

    @cached_property
    def oracles(self) -> dict[str, Path]:
        """The modules of closed forms, by their full names: `tests.oracles.tensor`."""
        folder = self.root / "tests" / "oracles"
        return {self.name_of(path): path for path in sorted(folder.rglob("*.py"))}

    @cached_property
    def python_files(self) -> list[Path]:
        """The package, its tests, its benchmarks and its launchers."""
        return [path for folder in FOLDERS for path in sorted((self.root / folder).rglob("*.py"))]

    @cached_property
    def rooms(self) -> dict[str, list[str]]:
        """The modules of each room. A room is a package with those below it: `spec`,
        `verification`. An axis is a room of its own (`axes/data`), and so is the torch half of a
        room (`axes/data/run`); the modules beside the packages are the room `base`."""
        rooms: dict[str, list[str]] = {}
        for module in self.modules:
            room = self.room_of(module)
            if room is not None:
                rooms.setdefault(room, []).append(module)
        return dict(sorted(rooms.items()))

    def room_of(self, module: str) -> str | None:
        """The room in which a module stands; None for an entry, which uses all rooms."""
        if module in USERS:
            return None
        folders = self.modules[module].parent.relative_to(self.root / "ptrain").parts
        depth = 2 if folders[:1] == (AXES,) else 1
        depth += folders[depth : depth + 1] == (TORCH_HALF,)
        return "/".join(folders[:depth]) or BASE

    def name_of(self, path: Path) -> str:
        """The full name of the module that a file holds."""
        parts = path.relative_to(self.root).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    def short(self, path: Path) -> str:
        """The path from the root."""
        return path.relative_to(self.root).as_posix()

    def parsed(self, path: Path) -> ast.Module:
        """The syntax tree of a file."""
        if path not in self._parsed:
            self._parsed[path] = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
        return self._parsed[path]

    def nodes(self, path: Path, *kinds: type[_Node]) -> Iterator[_Node]:
        """Every node of these kinds in a file, kind after kind. A file is walked once."""
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
        """The number of statements of a file. Docstrings and other constants that stand alone are
        none: what is counted depends neither on them nor on comments and line breaks."""
        return sum(
            isinstance(node, ast.stmt)
            and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
            for node in ast.walk(self.parsed(path))
        )

    def statements_by_package(self) -> dict[str, int]:
        """The statements of each package by its path, in alphabetical order, the whole of `ptrain`
        first. An axis is a package of its own; `ptrain/axes` are the modules beside the axes."""
        totals = Counter[str]()
        for path in self.modules.values():
            number = self.statements(path)
            totals["ptrain"] += number
            folders = path.relative_to(self.root).parent.parts
            if len(folders) > 1:
                totals["/".join(folders[: 3 if folders[1] == AXES else 2])] += number
        return dict(sorted(totals.items()))

    def modules_with_one_importer(self) -> list[str]:
        """The modules that exactly one other module of the package imports; packages are none."""
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
        """The modules with fewer lines; packages, which hold a docstring alone, are none."""
        return [
            module
            for module, path in self.modules.items()
            if path.name != "__init__.py" and path.read_text(encoding="utf-8").count("\n") < lines
        ]

    def mutual_imports(self) -> set[tuple[str, str]]:
        """The pairs of rooms that import each other, each pair in alphabetical order. A package
        that is imported whole counts as its room."""
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
        """The names of classes that two or more modules of the package define, with the modules."""
        homes: dict[str, set[str]] = {}
        for module, path in self.modules.items():
            for node in self.nodes(path, ast.ClassDef):
                homes.setdefault(node.name, set()).add(module)
        return {name: sorted(homes[name]) for name in sorted(homes) if len(homes[name]) > 1}
