"""Planted waste: each kind, in modules that free by a call and by a name."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

COUNTED = """\
class Gradients:
    def __init__(self, bench):
        self.bench = bench
        self.whole = None

    def open(self):
        self.whole = self.bench.new(self.buffer.padded, self.dtype)

    def whole_again(self, held, into):
        return self.buffer.gather_part(held, self.cut, self.over, State.GRADIENTS, into)

    def close(self):
        self.bench.drop(self.whole)
        self.whole = None
        return sum(self.bench.new(size) for size in self.sizes)
"""
NAMED = """\
class Gradients:
    def __init__(self, room):
        self.room = room
        self.whole = self.room.zeros(self.numel, self.dtype, State.PARAMETERS)

    def finish(self, held):
        held = self.room.reduce_scatter(held, self.part, self.cut, self.via)
        gathered = gather_part(held, self.now, exclude_axes(self.cut, self.now))
        self.whole, is_done = None, True
        self.whole = None
        self.keep(held)
        del held
        self.room.free_storage(self.state.pop(name))
        self.value = self.nothing
"""
PLANTED = {
    "extra temporary": (
        "planted = self.bench.new(self.buffer.padded, self.dtype)\n"
        "self.whole = self.bench.new(self.buffer.padded, self.dtype)\n"
        "self.bench.drop(planted)",
        "planted = self.bench.new(held.numel, held.dtype, held.tier)\n"
        "value = self.buffer.gather_part(held, self.cut, self.over, State.GRADIENTS, into)\n"
        "self.bench.drop(planted)\n"
        "return value",
    ),
    "late release": ("self.whole = None\nself.bench.drop(self.whole)", "pass"),
    "doubled collective": (
        "self.bench.drop(self.buffer.gather_part(held, self.cut, self.over, State.GRADIENTS))\n"
        "return self.buffer.gather_part(held, self.cut, self.over, State.GRADIENTS, into)",
    ),
    "wider dtype": (
        "self.whole = self.bench.new(self.buffer.padded, "
        "type(self.dtype).FP32 if self.dtype.itemsize < 4 else type(self.dtype).FP64)",
    ),
    "larger group": (
        "return self.buffer.gather_part(held, self.cut, self.buffer.axes, State.GRADIENTS, into)",
    ),
    "wrong state": (
        "return self.buffer.gather_part(held, self.cut, self.over, State.ACTIVATIONS, into)",
    ),
}
ZEROS = "self.whole = self.room.zeros(self.numel, self.dtype, State.PARAMETERS)"
REDUCE = "self.room.reduce_scatter(held, self.part, self.cut, self.via)"
GATHER = "gather_part(held, self.now, exclude_axes(self.cut, self.now))"
EMPTY = "self.room.free_storage(self.state.pop(name))"
TWIN = "planted = self.room.cast(held, self.room.dtype(held), copy=True)\n"
WIDER = "type(self.dtype).FP32 if self.dtype.itemsize < 4 else type(self.dtype).FP64"
PLANTED_BY_NAME = {
    "extra temporary": (
        f"{ZEROS.replace('self.whole', 'planted')}\n{ZEROS}\ndel planted",
        f"{TWIN}held = {REDUCE}\ndel planted",
        f"{TWIN}gathered = {GATHER}\ndel planted",
    ),
    "late release": (
        f"planted = held\nheld = {REDUCE}",
        "self.whole, is_done = (self.whole, True)",
        "self.keep(held)\nself.whole = None",
        "pass",
        f"{EMPTY}\ndel held",
        "pass",
        EMPTY.replace(".pop(name)", "[name]"),
        f"self.value = self.nothing\n{EMPTY}",
        "pass",
        "pass",
    ),
    "doubled collective": (
        f"{REDUCE}\nheld = {REDUCE}",
        f"{GATHER}\ngathered = {GATHER}",
    ),
    "wider dtype": (ZEROS.replace("self.dtype", WIDER),),
    "larger group": (
        f"held = {REDUCE.replace('self.cut', 'self.cuts.axes')}",
        "gathered = gather_part(held, self.now, self.cuts.axes)",
        "gathered = gather_part(held, self.now, tuple(self.cut))",
    ),
    "wrong state": (ZEROS.replace("PARAMETERS", "OPTIMIZER"),),
}


@pytest.fixture(scope="module")
def modules(benchmark_module: Callable[[str], ModuleType]) -> dict[str, ModuleType]:
    names = ("_mutant", "_waste", "waste", "mutation")
    return {name: benchmark_module(name) for name in names}


def planted_changes(modules, folder: Path, source: str) -> dict[str, tuple[str, ...]]:
    """By kind what stands in the place of statements."""
    (folder / "life.py").write_text(source, encoding="utf-8")
    mutants = modules["_waste"].of_module(folder, "life.py")
    return {
        kind: tuple(mutant.after for mutant in mutants if mutant.operator == kind)
        for kind in modules["_waste"].KINDS
    }


def test_waste_is_planted_where_memory_is_freed_by_a_call(modules, tmp_path):
    assert planted_changes(modules, tmp_path, COUNTED) == PLANTED


def test_waste_is_planted_where_memory_is_freed_by_forgetting_its_name(modules, tmp_path):
    assert planted_changes(modules, tmp_path, NAMED) == PLANTED_BY_NAME


def test_extra_and_late_frees_on_a_tape_are_planted(modules, tmp_path):
    source = (
        "def start(self, size):\n    self.tape.add(size)\n    self.tape.spike(size)\n"
        "    self.tape.add(-size)\n    self.buffer = 0\n"
    )
    rises = planted_changes(modules, tmp_path, source)
    assert rises["extra temporary"] == (
        "self.tape.add(size)\nself.tape.spike(size)",
        "self.tape.add(size)\nself.tape.spike(size)\nself.tape.add(-size)",
    )
    assert rises["late release"] == ("self.buffer = 0\nself.tape.add(-size)", "pass")


def test_a_mutant_is_the_file_with_one_named_change(modules, tmp_path):
    (tmp_path / "life.py").write_text(COUNTED, encoding="utf-8")
    mutants = modules["_waste"].of_module(tmp_path, "life.py")
    release = next(mutant for mutant in mutants if mutant.after == "pass")
    assert (release.function, release.line, release.statement) == ("Gradients.close", 13, (13, 13))
    assert release.source == COUNTED.replace("self.bench.drop(self.whole)", "pass")
    lines = modules["_mutant"].changed_lines(tmp_path, release)
    assert lines == ("self.bench.drop(self.whole)", "pass")
    assert len({mutant.name for mutant in mutants}) == len(mutants)


@pytest.mark.parametrize("source", [COUNTED, NAMED])
def test_every_mutant_is_another_program(modules, tmp_path, source):
    (tmp_path / "life.py").write_text(source, encoding="utf-8")
    for mutant in modules["_waste"].of_module(tmp_path, "life.py"):
        changed, unchanged = (ast.dump(ast.parse(text)) for text in (mutant.source, source))
        assert changed != unchanged, mutant.name


def test_the_draw_depends_on_its_seed_and_covers_every_kind(modules, tmp_path):
    for number in range(8):
        (tmp_path / f"life{number}.py").write_text(COUNTED, encoding="utf-8")
    waste = modules["waste"]
    first, again, other = (waste.draws(tmp_path, ["*.py"], seed) for seed in (1, 1, 2))
    names = [
        [mutant.name for _, mutant in waste.next_mutants(draws, 18)]
        for draws in (first, again, other)
    ]
    assert names[0] == names[1] != names[2]
    assert [draw.every - len(draw.to_come) for draw in first] == [3] * 6
    assert len(waste.next_mutants(first, 10**6)) == sum(draw.every for draw in first) - 18


def test_the_page_separates_excluded_from_surviving_mutants(modules):
    waste, mutant = modules["waste"], modules["_mutant"].Mutant
    mutants = [
        mutant(
            file="life.py",
            number=number,
            function="f",
            line=1,
            statement=(1, 1),
            operator="late release",
            before="",
            after="",
            source="",
        )
        for number in range(5)
    ]
    draw = waste.Draw(
        kind="late release",
        every=9,
        to_come=[],
        chosen=mutants[:4],
        aside={"changes no prediction": mutants[4:]},
    )
    words = ("killed", "timeout", "survived")
    rows = {m.name: {"verdict": word} for m, word in zip(mutants, words, strict=False)}
    verdicts = modules["mutation"].Found(every=9, sampled=mutants[:4], verdicts=rows)
    assert list(waste.table([draw], verdicts))[2:] == ["| late release | 9 | 1 | 4 | 2 | 1 | 1 |"]
