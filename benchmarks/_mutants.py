"""Mutants of a file: mutmut's operators at every expression that runs, one change each.

mutmut's own visitor leaves out decorated functions (properties, caches, validators) and all that a
module or a class says outside of functions; here both are mutated. What is left out stands in
`_is_left_out` and `_is_wording`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import libcst as cst
from _mutant import Mutant
from libcst.metadata import MetadataWrapper, PositionProvider
from mutmut.mutation.mutators import mutation_operators

# The first is proved unreachable by the type checker; mutmut never mutates the other two.
_NEVER_MUTATED = ("assert_never", "len", "isinstance")


def places(root: Path, file: str) -> list[str]:
    """Return the function of every mutant of a file, by number."""
    return [change.function for change in _changes(root, file)[1]]


def mutants(root: Path, file: str, wanted: Collection[int]) -> Iterator[Mutant]:
    """Return the mutants of a file with these numbers."""
    module, changes = _changes(root, file)
    for number in sorted(wanted):
        change = changes[number]
        yield Mutant(
            file=file,
            number=number,
            function=change.function,
            line=change.line,
            statement=change.statement,
            operator=change.operator.removeprefix("operator_"),
            before=module.code_for_node(change.node),
            after=module.code_for_node(change.by),
            source=module.deep_replace(change.node, change.by).code,
        )


@cache
def _changes(root: Path, file: str) -> tuple[cst.Module, list[_Change]]:
    wrapper = MetadataWrapper(cst.parse_module((root / file).read_text(encoding="utf-8")))
    visitor = _Visitor()
    wrapper.visit(visitor)
    return wrapper.module, visitor.found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Change:
    node: cst.CSTNode
    by: cst.CSTNode
    operator: str
    function: str
    line: int
    statement: tuple[int, int]


class _Visitor(cst.CSTVisitor):
    """A visitor that collects the changes in the order of the file."""

    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self) -> None:
        super().__init__()
        self.found: list[_Change] = []
        self._names: list[str] = []  # of the classes and functions around
        self._bodies: list[tuple[cst.CSTNode, str]] = []  # of functions around, with their names
        self._statements: list[tuple[cst.CSTNode, tuple[int, int]]] = []

    def on_visit(self, node: cst.CSTNode) -> bool:
        if _is_left_out(node):
            return False
        self._enter(node)
        for kind, operator in mutation_operators:
            if isinstance(node, kind):
                for by in operator(node):
                    if not _is_wording(node) and not _drops_unreachable(node, by):
                        self._add(node, by, operator.__name__)
        return True

    def on_leave(self, original_node: cst.CSTNode) -> None:
        if _is_left_out(original_node):
            return
        for stack in (self._statements, self._bodies):
            if stack and stack[-1][0] is original_node:
                stack.pop()
        if isinstance(original_node, cst.FunctionDef | cst.ClassDef):
            self._names.pop()

    def _enter(self, node: cst.CSTNode) -> None:
        if isinstance(node, cst.FunctionDef | cst.ClassDef):
            self._names.append(node.name.value)
        if isinstance(node, cst.FunctionDef):
            self._name = ".".join(self._names)
            self._body = node.body
        if getattr(self, "_body", None) is node:
            self._bodies.append((node, self._name))
        head = _head(node)
        if head is not None:
            first, last = self._lines(node)[0], self._lines(head)[1]
            self._statements.append((node, (first, max(first, last))))

    def _add(self, node: cst.CSTNode, by: cst.CSTNode, operator: str) -> None:
        statement = self._statements[-1][1] if self._statements else (1, 1)
        self.found.append(
            _Change(
                node=node,
                by=by,
                operator=operator,
                function=self._bodies[0][1] if self._bodies else "",
                line=self._lines(node)[0] or statement[0],
                statement=statement,
            )
        )

    def _lines(self, node: cst.CSTNode) -> tuple[int, int]:
        position = self.get_metadata(PositionProvider, node, None)
        return (position.start.line, position.end.line) if position else (0, 0)


def _head(node: cst.CSTNode) -> cst.CSTNode | None:
    """Return the parts of a statement that run on its lines, without its block; None for an
    expression."""
    match node:
        case cst.SimpleStatementLine():
            return node
        case cst.If() | cst.While():
            return node.test
        case cst.For():
            return node.iter
        case cst.With():
            return node.items[-1]
        case cst.Match():
            return node.subject
        case cst.MatchCase():
            return node.guard or node.pattern
        case cst.FunctionDef() | cst.ClassDef():
            return node.name
        case cst.ExceptHandler():
            return node.type
        case _:
            return None


def _is_left_out(node: cst.CSTNode) -> bool:
    """Return True for annotations, decorators, and calls without behavior."""
    if isinstance(node, cst.Annotation | cst.Decorator | cst.Import | cst.ImportFrom):
        return True
    return (
        isinstance(node, cst.Call)
        and isinstance(node.func, cst.Name)
        and node.func.value in _NEVER_MUTATED
    )


def _is_wording(node: cst.CSTNode) -> bool:
    """Return True for prose, a text with a space: messages, help, notes. No test checks its
    wording."""
    return isinstance(node, cst.SimpleString) and " " in node.value


def _drops_unreachable(node: cst.CSTNode, by: cst.CSTNode) -> bool:
    """Return True if a `match` loses only its `assert_never` case."""
    if not isinstance(node, cst.Match) or not isinstance(by, cst.Match):
        return False
    last = cst.Module(body=[]).code_for_node(node.cases[-1])
    return "assert_never(" in last and node.cases[-1] not in by.cases
