"""Waste planted into the modules that say what a unit of a model goes through: six kinds, found in
the syntax tree wherever such a call, a release, a dtype, a group or a state stands.

A module frees memory in one of two ways. `COUNTED`: by a call, `bench.drop(piece)`, of what `new`
gave. `NAMED`: by forgetting its name, `self.whole = None` or `del part`, after which nothing holds
the tensor. `of_module` reads off the source which of the two it is, and with it how a temporary is
made and where it goes. A mutant is one change of one simple statement; a swap changes two.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from _mutant import Mutant

KINDS = (
    "extra temporary",
    "late release",
    "doubled collective",
    "wider dtype",
    "larger group",
    "wrong state",
)
TEMPORARY = "planted"  # the name of what is allocated for nothing

# By the name of a method: the place of its argument that names the group's axes.
SENDS = {"send": 1, "all_reduce": 1}
GATHERS = {"gather_part": 2, "start_gather": 2, "all_gather": 2}
SCATTERS = {"reduce_scatter": 2, "start_reduce_scatter": 2}
COLLECTIVES = SENDS | GATHERS | SCATTERS
STARTED = ("start_gather", "start_reduce_scatter")  # begun: a `wait` gives what they make
ALLOCATIONS = ("new", "new_empty", "zeros", "empty_like", "zeros_like", "scalar_like")
COPIES = ("cast", "copy_to_tier", "permute")
DTYPE_PLACES = {
    "new": 1,
    "new_empty": 1,
    "zeros": 1,
    "zeros_like": 1,
    "scalar_like": 1,
    "cast": 1,
    "kept": 1,
}
GROUP_WORDS = ("axes", "over", "group")  # keywords that name the group
LESS = "exclude_axes"  # the function that removes axes from others
RELEASES = ("drop", "release", "_drop_buffer", "free", "free_storage")
NOTHING = "nothing"  # an empty tensor, put where a full one was
TRAINING_STATES = ("PARAMETERS", "OPTIMIZER", "GRADIENTS", "ACTIVATIONS")
SIMPLE = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Delete, ast.Expr, ast.Return)
Steps = tuple[str | int, ...]  # from a node to one below it: fields, and places in their lists
_ITERATES = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Lambda)


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """How a module allocates and frees. In the templates `room` is what allocates, `piece` what is
    copied, `value` what goes."""

    clone: str
    drop: str
    frees_by_name: bool


COUNTED = Style(
    clone="{room}.new({piece}.numel, {piece}.dtype, {piece}.tier)",
    drop="{room}.drop({value})",
    frees_by_name=False,
)
NAMED = Style(
    clone="{room}.cast({piece}, {room}.dtype({piece}), copy=True)",
    drop="del {value}",
    frees_by_name=True,
)


@dataclass(frozen=True, slots=True)
class Change:
    """What stands in the place of a statement, and of the next where `last` is that one."""

    kind: str
    statements: tuple[str, ...]
    last: ast.stmt | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """A simple statement with what is around it: its function, the statement after it in its block,
    and the expressions for what allocates and for the axes of the mesh and of the buffer."""

    style: Style
    function: str
    statement: ast.stmt
    following: ast.stmt | None
    room: str
    mesh_axes: str
    cut_axes: str


def of_module(root: Path, file: str) -> list[Mutant]:
    """Every mutant of a file, in the order of its lines. Each is a program."""
    source = (root / file).read_text(encoding="utf-8")
    lines, mutants = source.splitlines(keepends=True), []
    for place in _places(ast.parse(source)):
        first, last = place.statement.lineno, place.statement.end_lineno or 0
        for change in _changes(place):
            until = last if change.last is None else change.last.end_lineno or last
            indent = " " * place.statement.col_offset
            text = "\n".join(change.statements)
            planted = "".join(f"{indent}{line}\n" for line in text.splitlines())
            mutants.append(
                Mutant(
                    file=file,
                    number=len(mutants),
                    function=place.function,
                    line=first,
                    statement=(first, last),
                    operator=change.kind,
                    before="".join(lines[first - 1 : until]).strip(),
                    after=text,
                    source="".join([*lines[: first - 1], planted, *lines[until:]]),
                )
            )
    for mutant in mutants:
        ast.parse(mutant.source)  # one that is no program is a fault of this module
    return mutants


def _places(tree: ast.Module) -> Iterator[Place]:
    names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    style = COUNTED if names & {"drop", "tape"} else NAMED
    for function, text, node in _functions(tree):
        if style is NAMED:
            room = "self.room" if "self.room" in text else "room"
            mesh_axes = "self.axes" if "self.axes" in text else "self.cuts.axes"
            mesh_axes = "self.step.axes" if "self.step" in text else mesh_axes
        elif "self.bench" in text:
            room, mesh_axes = "self.bench", "self.bench.step.axes"
        else:
            room, mesh_axes = "self", "self.step.axes"
        cut_axes = "self.axes"
        for holder in ("self.buffer", "self.cuts"):
            cut_axes = f"{holder}.axes" if holder in text else cut_axes
        for block in _blocks(node):
            for statement, following in pairwise([*block, None]):
                if isinstance(statement, SIMPLE):
                    yield Place(style, function, statement, following, room, mesh_axes, cut_axes)


def _functions(tree: ast.Module) -> Iterator[tuple[str, str, ast.FunctionDef]]:
    """The functions of a module and the methods of its classes, by name, with the source of what
    they are in."""
    for node in tree.body:
        inner = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
        text = ast.unparse(node)
        for function in inner:
            if isinstance(function, ast.FunctionDef):
                yield prefix + function.name, text, function


def _blocks(node: ast.AST) -> Iterator[Sequence[ast.stmt]]:
    for name in ("body", "orelse", "finalbody"):
        block = getattr(node, name, [])
        if isinstance(block, list):
            yield block
            for inner in block:
                yield from _blocks(inner)
    for inner in [*getattr(node, "cases", []), *getattr(node, "handlers", [])]:
        yield from _blocks(inner)


def _changes(place: Place) -> Iterator[Change]:
    yield from _temporaries(place)
    yield from _late(place)
    yield from _doubled(place)
    yield from _wider(place)
    yield from _larger(place)
    yield from _mistagged(place)


def _temporaries(place: Place) -> Iterator[Change]:
    """One more tensor while the statement runs: a twin of what it allocates, or of what it copies
    or sends. It is there before, and goes after."""
    for name, owner, call in _calls(place.statement):
        if name in ALLOCATIONS:
            allocation = ast.unparse(call)
        elif name in COPIES or len(call.args) > COLLECTIVES.get(name, len(call.args)):
            piece = ast.unparse(call.args[0])
            allocation = place.style.clone.format(room=_room(place, owner), piece=piece)
        elif owner.endswith("tape") and not isinstance(call.args[0], ast.UnaryOp):
            yield from _spikes(place, call, owner)
            continue
        else:
            continue
        drop = place.style.drop.format(room=place.room, value=TEMPORARY)
        yield Change(
            "extra temporary", (f"{TEMPORARY} = {allocation}", *_around(place.statement, drop))
        )


def _room(place: Place, owner: str) -> str:
    """What allocates beside a call of `owner`: the room itself, or that of its cuts."""
    last = owner.rpartition(".")[2]
    if place.style.frees_by_name and last in ("room", "cuts"):
        return owner if last == "room" else f"{owner}.room"
    return place.room


def _spikes(place: Place, call: ast.Call, room: str) -> Iterator[Change]:
    """Of what is written to a tape as a size: as much again, gone at once."""
    if _name(call) in ("add", "spike"):
        size = ast.unparse(call.args[0])
        negative = ast.unparse(ast.UnaryOp(ast.USub(), call.args[0]))
        before, after = ast.unparse(place.statement), f"{room}.spike({size})"
        if _name(call) == "spike":
            before, after = f"{room}.add({size})", f"{before}\n{room}.add({negative})"
        yield Change("extra temporary", (before, after))


def _around(statement: ast.stmt, drop: str) -> tuple[str, ...]:
    """The statement, then the release; of a `return` the value is there before."""
    if isinstance(statement, ast.Return) and statement.value is not None:
        return f"value = {ast.unparse(statement.value)}", drop, "return value"
    return ast.unparse(statement), drop


def _late(place: Place) -> Iterator[Change]:
    """A release comes after the next statement, or not at all. Where names free, what a name meant
    before it was given anew lives on to the function's end."""
    if place.style.frees_by_name:
        for old in _overwritten(place.statement):
            yield Change("late release", (f"{TEMPORARY} = {old}", ast.unparse(place.statement)))
        yield from _stays(place)
    if not _is_release(place):
        return
    statement, following = place.statement, place.following
    if isinstance(following, ast.Assign | ast.AugAssign | ast.Expr | ast.If | ast.For):
        swapped = (ast.unparse(following), ast.unparse(statement))
        yield Change("late release", swapped, following)
    yield Change("late release", ("pass",))


def _pairs(statement: ast.stmt) -> Iterator[tuple[Steps, ast.expr, ast.expr]]:
    """What a statement names: the path to each value, its target, and it."""
    match statement:
        case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=values)):
            for index, (target, value) in enumerate(zip(targets, values, strict=False)):
                yield ("value", "elts", index), target, value
        case ast.Assign(targets=[target], value=value):
            yield ("value",), target, value


def _overwritten(statement: ast.stmt) -> Iterator[str]:
    """The names that a statement gives to what it makes of the very things of those names: in
    `held = room.copy_to_tier(held, ...)` it is `held`."""
    for _, target, value in _pairs(statement):
        if isinstance(target, ast.Name | ast.Attribute):
            name = ast.unparse(target)
            used = (node for node in ast.walk(value) if isinstance(node, ast.Name | ast.Attribute))
            if any(ast.unparse(node) == name for node in used):
                yield name


def _stays(place: Place) -> Iterator[Change]:
    """What a statement takes out of a dictionary, or gives up beside naming another thing, stays
    there too."""
    for path in _paths(place.statement):
        match _at(place.statement, path):
            case ast.Call(func=ast.Attribute(attr="pop", value=owner), args=[key]):
                text = f"{ast.unparse(owner)}[{ast.unparse(key)}]"
                yield _replaced(place, path, "late release", text)
    for path, target, value in _pairs(place.statement):
        if len(path) > 1 and isinstance(value, ast.Constant) and value.value is None:
            yield _replaced(place, path, "late release", ast.unparse(target))


def _is_release(place: Place) -> bool:
    statement = place.statement
    match statement:
        case ast.Assign(value=ast.Attribute(attr=name)):
            return place.style.frees_by_name and name == NOTHING
        case ast.Expr(value=ast.Call(func=ast.Attribute(attr=name, value=owner), args=args)):
            is_size = name == "add" and ast.unparse(owner).endswith("tape")
            return name in RELEASES or (is_size and isinstance(args[0], ast.UnaryOp))
        case ast.Delete():
            return place.style.frees_by_name
        case ast.Assign(value=ast.Constant(value=None), targets=[*targets]):
            is_kept = all(isinstance(target, ast.Attribute) for target in targets)
            is_first = place.function.endswith(".__init__")
            return place.style.frees_by_name and is_kept and not is_first
        case _:
            return False


def _doubled(place: Place) -> Iterator[Change]:
    """A collective, once for nothing and then as it was; what the first gives goes at once."""
    for name, owner, call in _calls(place.statement):
        if name not in COLLECTIVES:
            continue
        again = deepcopy(call)
        if not place.style.frees_by_name and name in GATHERS:  # into a tensor of its own
            again.args = again.args[:4]
            again.keywords = [word for word in again.keywords if word.arg != "into"]
        text = ast.unparse(again)
        if not place.style.frees_by_name and name not in SENDS:
            text = f"{owner}.wait({text})" if name in STARTED else text
            text = place.style.drop.format(room=place.room, value=text)
        yield Change("doubled collective", (text, ast.unparse(place.statement)))


def _wider(place: Place) -> Iterator[Change]:
    """The next wider dtype (fp32 of two bytes, else fp64), or twice the bytes of an element."""
    for path in _paths(place.statement):
        node = _at(place.statement, path)
        if isinstance(node, ast.Call) and _name(node) in DTYPE_PLACES:
            for dtype in _arguments(node, DTYPE_PLACES[_name(node)], ("dtype",)):
                wider = "(type({0}).FP32 if {0}.itemsize < 4 else type({0}).FP64)"
                yield _replaced(place, (*path, *dtype), "wider dtype", wider)
        elif isinstance(node, ast.Attribute) and node.attr == "itemsize":
            yield _replaced(place, path, "wider dtype", "(2 * {0})")


def _larger(place: Place) -> Iterator[Change]:
    """All axes that there are instead of those that are given, and these without any left out."""
    for path in _paths(place.statement):
        node = _at(place.statement, path)
        if isinstance(node, ast.Call) and _name(node) in COLLECTIVES:
            is_of_mesh = _name(node) in SENDS or place.style.frees_by_name
            axes = place.mesh_axes if is_of_mesh else place.cut_axes
            for group in _arguments(node, COLLECTIVES[_name(node)], GROUP_WORDS):
                if ast.unparse(_at(node, group)) != axes:
                    yield _replaced(place, (*path, *group), "larger group", axes)
        elif isinstance(node, ast.Call) and _name(node) == LESS:
            yield _replaced(place, path, "larger group", f"tuple({ast.unparse(node.args[0])})")


def _mistagged(place: Place) -> Iterator[Change]:
    """Another state: the next one in the order of the paper."""
    for path in _paths(place.statement):
        match _at(place.statement, path):
            case ast.Attribute(value=ast.Name(id="State"), attr=attr) if attr in TRAINING_STATES:
                other = (TRAINING_STATES.index(attr) + 1) % len(TRAINING_STATES)
                text = f"State.{TRAINING_STATES[other]}"
                yield _replaced(place, path, "wrong state", text)


def _paths(node: ast.AST, path: Steps = ()) -> Iterator[Steps]:
    """To every node below, in the order of the source."""
    yield path
    for name, value in ast.iter_fields(node):
        children = enumerate(value) if isinstance(value, list) else [(None, value)]
        for index, child in children:
            if isinstance(child, ast.AST):
                step = (name,) if index is None else (name, index)
                yield from _paths(child, (*path, *step))


def _at(node: ast.AST, path: Steps) -> ast.AST:
    for step in path:
        node = node[step] if isinstance(step, int) else getattr(node, step)
    return node


def _replaced(place: Place, path: Steps, kind: str, by: str) -> Change:
    """The statement with another expression at the end of a path; `{0}` in it is what was there."""
    statement, last = deepcopy(place.statement), path[-1]
    parent = _at(statement, path[:-1])
    expression = ast.parse(by.format(ast.unparse(_at(statement, path))), mode="eval").body
    if isinstance(last, int):
        parent[last] = expression
    else:
        setattr(parent, last, expression)
    return Change(kind, (ast.unparse(statement),))


def _arguments(call: ast.Call, place: int, words: Sequence[str]) -> Iterator[Steps]:
    """To the argument at this place, or with one of these keywords."""
    if len(call.args) > place:
        yield "args", place
    for index, word in enumerate(call.keywords):
        if word.arg in words:
            yield "keywords", index, "value"


def _name(call: ast.Call) -> str:
    """Of what is called, without what it is of."""
    return getattr(call.func, "attr", getattr(call.func, "id", ""))


def _calls(statement: ast.stmt) -> Iterator[tuple[str, str, ast.Call]]:
    """The calls of methods that a statement makes once, with the method's name and what it is of:
    those that it iterates over are none. A collective may be called by a name of its own."""
    stack: list[ast.AST] = [statement]
    while stack:
        node = stack.pop()
        match node:
            case ast.Call(func=ast.Attribute(attr=name, value=owner)):
                yield name, ast.unparse(owner), node
            case ast.Call(func=ast.Name(id=name)) if name in COLLECTIVES:
                yield name, "", node
        if not isinstance(node, _ITERATES):
            stack.extend(reversed(list(ast.iter_child_nodes(node))))
