"""The dependencies between the packages of ptrain/, counted in the sources of a commit."""

from __future__ import annotations

import ast
import io
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from _machine import RESULTS, ROOT, commit, fresh, this_command
from _script import Script, table_head, table_row

from tests.source_tree import SourceTree

MAX_COLUMNS = 100  # of a line

# By the room of an axis: the members of `Axis`, then the attributes of a plan and of a spec.
AXES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "data": (("DP_REPLICATE", "DP_SHARD"), ()),
    "tensor": (("TP",), ("tensor",)),
    "pipeline": (("PP",), ("pipeline",)),
    "context": (("CP",), ("context",)),
    "expert": (("EP",), ("expert",)),
}
OWNERS = ("plan", "spec")
MODES = ("R", "S", "S_STAR", "M", "OFFLOADED")
WRAPS = {"LocalGradients", "Replicate", "FullyShard", "FlatUnits"}
DECLARES_AXES, DECLARES_MODES = "ptrain/spec/placement.py", "ptrain/spec/placement.py"


@dataclass(frozen=True, slots=True)
class Row:
    """One measure: its name, its value in the tree and the design's target, as texts."""

    measure: str
    value: str
    target: str = ""


class House:
    """The counts of one checkout."""

    def __init__(self, root: Path) -> None:
        self.tree = SourceTree(root)

    @cached_property
    def axis_files(self) -> dict[str, list[str]]:
        """Return by axis the files that name it outside of its package."""
        return {axis: sorted(self._files_with(axis)) for axis in AXES}

    def _files_with(self, axis: str) -> Iterator[str]:
        for path in self.tree.modules.values():
            file = self.tree.short(path)
            is_home = file.startswith(f"ptrain/axes/{axis}/") or file == DECLARES_AXES
            if not is_home and any(names_axis(n, axis) for n in ast.walk(self.tree.parsed(path))):
                yield file

    def files_naming(self, kind: str, letters: Sequence[str] = ()) -> list[str]:
        """Return the files with a member of the enum `kind`, or an import of one of these letters
        from the module of modes."""
        files = []
        for path in self.tree.modules.values():
            nodes = ast.walk(self.tree.parsed(path))
            file = self.tree.short(path)
            if file != DECLARES_MODES and any(_names_mode(n, kind, letters) for n in nodes):
                files.append(file)
        return files

    def wrap_places(self) -> list[tuple[str, int]]:
        """Return file and line of every `isinstance` and `case` that names a wrapper kind."""
        return [
            (file, line)
            for path in self.tree.modules.values()
            if not (file := self.tree.short(path)).startswith("ptrain/axes/data/")
            for line in sorted(_lines_with_wraps(self.tree.parsed(path)))
        ]

    def lines(self, paths: Sequence[Path]) -> int:
        """Return the total number of lines of these files."""
        return sum(path.read_text(encoding="utf-8").count("\n") for path in paths)

    def room_lines(self) -> dict[str, int]:
        """Return the lines of each package, the largest first."""
        lines = {
            room: self.lines([self.tree.modules[module] for module in modules])
            for room, modules in self.tree.rooms.items()
        }
        return dict(sorted(lines.items(), key=lambda item: -item[1]))

    def tables(self) -> list[Path]:
        """Return the package's files other than Python, byte code and pages."""
        files = (self.tree.root / "ptrain").rglob("*")
        skipped = (".py", ".pyc", ".typed", ".md")
        return [path for path in files if path.is_file() and path.suffix not in skipped]

    def settings(self) -> list[str]:
        """Return the classes named as settings: the dependencies of a table."""
        return [
            node.name
            for path in self.tree.modules.values()
            for node in ast.walk(self.tree.parsed(path))
            if isinstance(node, ast.ClassDef) and node.name.endswith("Setting")
        ]

    def readers(self) -> list[str]:
        """Return the files that look up a table: `archive.table(…)`."""
        return [
            self.tree.short(path)
            for path in self.tree.modules.values()
            if any(map(_looks_up, ast.walk(self.tree.parsed(path))))
        ]

    def rows(self) -> list[Row]:
        """Return the table."""
        tree = self.tree
        source, tests = (
            [path for path in tree.python_files if tree.short(path).startswith(f"{folder}/")]
            for folder in ("ptrain", "tests")
        )
        num_source, num_tests = self.lines(source), self.lines(tests)
        places, tables = self.wrap_places(), self.tables()
        long_lines = [
            line
            for path in tree.python_files
            for line in path.read_text(encoding="utf-8").splitlines()
            if len(line) > MAX_COLUMNS
        ]
        named = {file for files in self.axis_files.values() for file in files}
        longest = max(source, key=lambda path: self.lines([path]))
        function = max(
            ((length, tree.short(p), name) for p in source for name, length in tree.functions(p)),
        )
        return [
            Row("files that name an axis outside its room", str(len(named))),
            *(Row(f"– of these {axis}", str(len(fs))) for axis, fs in self.axis_files.items()),
            Row("files that name a mode", str(len(self.files_naming("Distribution", MODES)))),
            Row("files that name a tier", str(len(self.files_naming("Tier")))),
            Row("places that ask for a wrap's kind", str(len(places)), "0"),
            Row("– files with such a place", str(len({file for file, _ in places})), "0"),
            Row("pairs of rooms that import each other", str(len(tree.mutual_imports())), "0"),
            Row("class names that stand twice", str(len(tree.repeated_classes())), "≤ 15"),
            Row("lines of ptrain/", f"{num_source:,}", "≤ 43,000"),
            Row("lines of tests/", f"{num_tests:,}"),
            Row("test : source", f"{num_tests / num_source:.2f}"),
            Row("tables: files", str(len(tables)), "1"),
            Row("tables: bytes", f"{sum(p.stat().st_size for p in tables):,}", "≤ 400,000"),
            Row("tables: classes of settings", str(len(self.settings())), "1"),
            Row("tables: files that read the archive", str(len(self.readers()))),
            Row(f"lines above {MAX_COLUMNS} columns", str(len(long_lines)), "0"),
            Row("longest file", f"{self.lines([longest])} ({tree.short(longest)})", "≤ 400"),
            Row("longest function", f"{function[0]} ({function[1]}, {function[2]})", "≤ 60"),
        ]


def names_axis(node: ast.AST, axis: str) -> bool:
    """Return True if a node names the axis in one of the four ways listed by --help."""
    members, parts = AXES[axis]
    match node:
        case ast.Attribute(value=ast.Name(id="Axis"), attr=attr):
            return attr in members
        case ast.Attribute(value=ast.Name(id=owner) | ast.Attribute(attr=owner), attr=attr):
            return attr in parts and owner in OWNERS
        case ast.Name(id="DATA_AXES" | "REDUCED_AXES"):
            return axis == "data"
        case ast.ImportFrom(module=module, names=names):
            full = [f"{module}.{alias.name}" for alias in names]
            return any(f"{name}.".startswith(f"ptrain.axes.{axis}.") for name in full)
        case ast.Constant(value=str() as text):
            return text in {member.lower() for member in members}
        case _:
            return False


def _looks_up(node: ast.AST) -> bool:
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Name(id="archive"), attr="read_table")):
            return True
        case _:
            return False


def _names_mode(node: ast.AST, kind: str, letters: Sequence[str]) -> bool:
    match node:
        case ast.Attribute(value=ast.Name(id=name)):
            return name == kind
        case ast.ImportFrom(module="ptrain.spec.placement", names=names):
            return any(alias.name in letters for alias in names)
        case _:
            return False


def _lines_with_wraps(tree: ast.Module) -> Iterator[int]:
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id="isinstance"), args=[_, kinds]):
                inner, line = ast.walk(kinds), node.lineno
            case ast.match_case(pattern=pattern):
                inner, line = ast.walk(pattern), pattern.lineno
            case _:
                continue
        if any(isinstance(name, ast.Name) and name.id in WRAPS for name in inner):
            yield line


def table(houses: dict[str, House]) -> Iterator[str]:
    """Return one row per measure, one column per checkout, then the target and the packages."""
    measures = [house.rows() for house in houses.values()]
    yield from table_head("measure", *houses, "target")
    for rows in zip(*measures, strict=True):
        yield table_row(rows[0].measure, *(measure.value for measure in rows), rows[0].target)
    rooms = [house.room_lines() for house in houses.values()]
    for room in dict.fromkeys(room for lines in rooms for room in lines):
        counts = (f"{lines[room]:,}" if room in lines else "–" for lines in rooms)
        yield f"| lines of {room} | {' | '.join(counts)} | |"


def lists(house: House) -> Iterator[str]:
    """Return the names behind the counts of one checkout."""
    pairs = (f"{room} ↔ {other}" for room, other in sorted(house.tree.mutual_imports()))
    yield f"Pairs of rooms that import each other: {', '.join(pairs) or 'none'}."
    yield ""
    yield f"Class names that stand twice: {', '.join(house.tree.repeated_classes()) or 'none'}."
    for axis, files in house.axis_files.items():
        names = ", ".join(file.removeprefix("ptrain/") for file in files)
        yield ""
        yield f"Files outside axes/{axis} that name it: {names or 'none'}."


def unpacked(name: str, folder: Path, repository: Path = ROOT) -> House:
    """Return the counts of a commit, whose files are written to `folder`."""
    command = ["git", "-C", str(repository), "archive", name]
    archive = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(folder, filter="data")
    return House(folder)


def page(houses: dict[str, House], commits: Sequence[str]) -> str:
    """Return the table, and the names behind the last column's counts."""
    names = " and ".join(f"`{name}` ({title})" for title, name in zip(houses, commits, strict=True))
    *_, (title, last) = houses.items()
    return "\n".join(
        [
            "# house: how the rooms of ptrain/ depend on each other",
            "",
            f"Counted by `{' '.join(this_command())}` on {time.strftime('%Y-%m-%d')} in {names}, "
            "as `benchmarks/house.py --help` defines it.",
            "",
            *table(houses),
            "",
            f"By name, {title}:",
            "",
            *lists(last),
        ]
    )


def main() -> None:
    parser = Script("house").parser(has_page=False)
    parser.add_argument("--against", metavar="COMMIT", help="the column `before`")
    parser.add_argument("--write", action="store_true", help="keep the page in benchmarks/results/")
    args = parser.parse_args()
    now, day = commit(), time.strftime("%Y-%m-%d")
    with tempfile.TemporaryDirectory() as folder:
        if args.against:
            houses = {"before": unpacked(args.against, Path(folder)), "after": House(ROOT)}
            text = page(houses, [args.against, now])
        else:
            text = page({"before": House(ROOT)}, [now])
    print(text)
    if args.write:
        name = f"house_against_{args.against}_{day}" if args.against else f"house_{day}"
        with fresh(RESULTS / f"{name}.md").open("x", encoding="utf-8") as file:
            file.write(text + "\n")


if __name__ == "__main__":
    main()
