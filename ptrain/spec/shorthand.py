"""Short forms, written out before validation: a strategy's name for its tuples, `S*,S,S,R` for a
tuple, `dp` for the data axis that its tuple belongs to, a file's name for the schedule in it,
`checkpoint: at_end`.

A short form that cannot be written out stays as it is and gives a fault.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from pathlib import Path

from ptrain.costs import PLACED
from ptrain.errors import Fault
from ptrain.spec import schedule_file, slips
from ptrain.spec.axis import DATA_AXES, TOKEN_AXES, Axis
from ptrain.spec.dials import Reshard
from ptrain.spec.leaf_mode import KEPT_MEANINGS
from ptrain.spec.names import missing, strategy
from ptrain.spec.text import Route, SourceMark, Tree, flow

Mapping = dict[str, object]
_DATA = tuple(axis.value for axis in DATA_AXES)
_AUTO = "auto"
_OPEN, _CHOOSE = "auto: a run has one, and only a search chooses it", "ptrain select SPEC"
_RESHARD = ("sync", "reshard_after_forward")
POLICIES = (
    "sync",
    "tensor",
    "pipeline",
    "context",
    "recompute",
)  # sections of a strategy beside its tuples


def expand_shorthands(tree: Tree) -> list[Fault]:
    """Write out every short form of `tree`, in place."""
    root = tree.root
    assert isinstance(root, dict), "a tree to expand is a mapping"
    faults: list[Fault] = []

    def fault(route: Route, finding: str, remedy: str = "", at: Route = ()) -> None:
        faults.append(mark_of(tree, at or route).fault(".".join(route), finding, remedy))

    _words(tree, root)
    _reshard(tree, root, fault)
    named = _whole_placement(root, fault)
    if not named:
        _tuples(tree, root, fault)
    _data_degree(root, fault)
    _small_forms(root)
    _schedule_file(tree, root, fault)
    return faults


def mark_of(tree: Tree, route: Route, *, key: bool = False) -> SourceMark:
    """Return where the value (or the key) of `route` stands, or else what encloses it."""
    table = tree.keys if key else tree.values
    while route and route not in table:
        route = route[:-1]
        table = tree.keys  # of what encloses a missing value its key is shown
    return table.get(route, SourceMark(source=tree.source))


_Report = Callable[..., None]


def _whole_placement(root: Mapping, fault: _Report) -> bool:
    """`placement: NAME`: all tuples of the strategy, and its policies."""
    name = root.get("placement")
    if not isinstance(name, str):
        return False
    if name == _AUTO:
        fault(("placement",), _OPEN, "name a strategy or its tuples, or have it chosen: " + _CHOOSE)
        return True
    tree_named = strategy(name)
    if tree_named is None:
        fault(
            ("placement",), *(_axis_missing(name, root) or missing(name, "strategy", "strategies"))
        )
        return True
    assert isinstance(tree_named.root, dict), "a strategy's file is a mapping"
    tuples = copy.deepcopy(tree_named.root["placement"])
    root["placement"] = tuples
    _sits_right(root.get("mesh"), name, tuple(tuples), fault)
    for section in POLICIES:
        policy, written = _policy(tree_named.root, section), root.setdefault(section, {})
        if isinstance(written, dict) and not (section == "recompute" and _says_what(written)):
            for key, value in policy.items():
                written.setdefault(key, value)
        if not written:
            del root[section]
    return True


def _axis_missing(text: str, root: Mapping) -> tuple[str, str] | None:
    """Finding and remedy for a tuple that stands for the whole placement."""
    modes = [part.strip() for part in text.split(",")]
    if not any(slips.mode(mode) in KEPT_MEANINGS for mode in modes):
        return None
    mesh = root.get("mesh")
    present = [axis for axis in mesh if axis in _DATA] if isinstance(mesh, dict) else []
    axis = present[0] if present else _DATA[1]
    return (
        "a tuple belongs to an axis, and none is named",
        f"write placement: {{{axis}: [{', '.join(modes)}]}}, or placement.{axis}={','.join(modes)}",
    )


def _sits_right(mesh: object, name: str, axes: tuple[str, ...], fault: _Report) -> None:
    if not isinstance(mesh, dict) or "dp" in mesh:
        return
    present = [axis for axis in mesh if mesh[axis] != 1 and axis in set(Axis)]
    wrong = [axis for axis in present if axis not in axes]
    absent = [axis for axis in axes if axis not in mesh]
    if not present or not (wrong or absent):
        return
    degree = mesh[wrong[0]] if wrong else 2
    mesh_text = ", ".join(f"{axis}: {mesh.get(axis, degree)}" for axis in axes)
    fault(
        ("placement",),
        f"{name} sits on {' and '.join(axes)}; the mesh has {', '.join(present)}",
        f"write mesh: {{{mesh_text}}}, or give one tuple per axis",
    )


def _tuples(tree: Tree, root: Mapping, fault: _Report) -> None:
    placement = root.get("placement")
    if not isinstance(placement, dict) or _cut_at_commas(tree, placement, fault):
        return
    for axis, value in placement.items():
        route = ("placement", axis)
        parts = value.split(",") if isinstance(value, str) else value
        if not isinstance(parts, list):
            continue
        modes = [part.strip() if isinstance(part, str) else part for part in parts]
        if isinstance(value, list) or len(modes) > 1 or modes[0] in KEPT_MEANINGS:
            if len(modes) == len(PLACED):
                placement[axis] = dict(zip(map(str, PLACED), modes, strict=True))
            else:
                finding = f"a tuple has 4 modes, for Θ, Ω, G, A; got {len(modes)}"
                fault(route, finding, f"write four: {axis}: [{', '.join(_usual(axis))}]")
        else:
            _named_tuple(placement, axis, str(value), fault)


def _cut_at_commas(tree: Tree, placement: Mapping, fault: _Report) -> bool:
    """`{dp_shard: S*,S,M,R}`: within braces YAML reads the modes after a comma as keys, which stand
    behind their axis."""
    keys = list(placement)
    strays = [key for key in keys if key in KEPT_MEANINGS and placement[key] is None]
    if not strays:
        return False
    first = keys.index(strays[0])
    axis, route = (keys[first - 1], ("placement", keys[first - 1])) if first else (_DATA[1], ())
    modes = _modes_at(tree.values.get(route)) or [
        str(placement[axis]) if first else "",
        *itertools.takewhile(strays.__contains__, keys[first:]),  # of equal keys the first is left
    ]
    if len(modes) != len(PLACED):
        modes = _usual(axis)
    fault(
        ("placement",),
        "within { } a comma ends the value, so the modes after it are keys",
        f"write a list: {{{axis}: [{', '.join(modes)}]}}",
        route,
    )
    return True


def _usual(axis: str) -> list[str]:
    """Return a legal tuple of the axis, as an example."""
    if axis == Axis.DP_REPLICATE:
        return ["R"] * len(PLACED)
    if axis in TOKEN_AXES:
        return ["R", "R", "R", "S"]
    return ["S*" if axis == Axis.DP_SHARD else "S", "S", "S", "R"]


def _modes_at(mark: SourceMark | None) -> list[str]:
    """The tuple that begins there, if the line has all of it."""
    rest = mark.text[mark.column - 1 :].split("}")[0] if mark and mark.line else ""
    modes = [part.strip() for part in rest.split(",")][: len(PLACED)]
    return modes if all(mode in KEPT_MEANINGS for mode in modes) else []


def _named_tuple(placement: Mapping, axis: str, name: str, fault: _Report) -> None:
    route = ("placement", axis)
    tree = strategy(name)
    if tree is None:
        fault(route, *missing(name, "strategy", "strategies"))
        return
    assert isinstance(tree.root, dict), "a strategy's file is a mapping"
    tuples = tree.root["placement"]
    home, alone = list(tuples), f"placement: {name}"
    is_alone, has_policy = len(placement) == 1, any(key in tree.root for key in POLICIES)
    if len(home) > 1:
        remedy = alone if is_alone else _written_out(tree.root)
        fault(route, f"{name} spans {' and '.join(home)}", f"write {remedy}")
    elif axis not in (home[0], "dp"):
        remedy = f"placement: {{{home[0]}: {name}}}"
        if has_policy:
            remedy = alone if is_alone else _written_out(tree.root)
        remedy = f"write {remedy} and mesh: {{{home[0]}: N}}"
        fault(route, f"{name} sits on {home[0]}, not on {axis}", remedy)
    elif has_policy:
        either = f"{alone}, or " * is_alone  # the name would say of no other axis
        remedy = f"write {either}{_written_out(tree.root)}"
        fault(route, f"{name} is more than a tuple", remedy)
    else:
        placement[axis] = copy.deepcopy(tuples[home[0]])


def _written_out(strategy: Mapping) -> str:
    """Return a strategy's tuples and policies as they are written beside those of other axes."""
    tuples = strategy["placement"]
    assert isinstance(tuples, dict), "a strategy places its axes"
    parts = [f"placement.{axis}: [{', '.join(modes.values())}]" for axis, modes in tuples.items()]
    sections = (key for key in POLICIES if key in strategy)
    parts += [f"{section}: {flow(_policy(strategy, section))}" for section in sections]
    return " and ".join(parts)


def _data_degree(root: Mapping, fault: _Report) -> None:
    """`mesh: {dp: N}` becomes dp_replicate or dp_shard, by its tuple."""
    mesh, placement = root.get("mesh"), root.get("placement")
    if mesh == _AUTO:
        fault(("mesh",), _OPEN, "write axes and degrees, or have them chosen: " + _CHOOSE)
    if not isinstance(mesh, dict):
        return
    if "dp" not in mesh:
        _rename_tuple(placement)
        return
    both = [axis for axis in _DATA if axis in mesh]
    if both:
        remedy = f"remove dp or {both[0]}"
        fault(("mesh", "dp"), f"dp stands for a data axis, and {both[0]} is given too", remedy)
        return
    homes = _homes(placement) if isinstance(placement, dict) else []
    if len(homes) != 1:
        if mesh["dp"] == 1 and not homes:
            del mesh["dp"]
        else:
            finding = "dp stands for dp_replicate or dp_shard, and the placement names "
            finding += " and ".join(homes) if homes else "neither"
            fault(("mesh", "dp"), finding, "write the degrees of dp_replicate and dp_shard")
        return
    root["mesh"] = {homes[0] if axis == "dp" else axis: mesh[axis] for axis in mesh}
    _rename_tuple(placement)


def _rename_tuple(placement: object) -> None:
    """The tuple of `dp` becomes that of the axis it belongs to."""
    homes = _homes(placement) if isinstance(placement, dict) and "dp" in placement else []
    if isinstance(placement, dict) and len(homes) == 1 and homes[0] not in placement:
        placement[homes[0]] = placement.pop("dp")


def _homes(placement: Mapping) -> list[str]:
    """The data axes that the placement's tuples belong to."""
    written = placement.get("dp")
    if written is None:
        return [axis for axis in _DATA if axis in placement]
    if not isinstance(written, dict):
        return []
    states = [str(state) for state in PLACED[:3]]
    replicated = all(written.get(state) == "R" for state in states)
    return [_DATA[0] if replicated else _DATA[1]]


def _reshard(tree: Tree, root: Mapping, fault: _Report) -> None:
    """`reshard` is another word for a key of `sync`, and stands above a strategy's policy."""
    value, policy = root.get("reshard"), root.get("sync", {})
    if not (isinstance(value, int) or value in list(Reshard)) or not isinstance(policy, dict):
        return  # left out, or no value of it: the grammar says so at its own place
    written = policy.get(_RESHARD[1], value)
    if written != value or type(written) is not type(value):
        shown = str(written).lower()
        fault(
            ("reshard",),
            f"another word for sync.reshard_after_forward, which says {shown}",
            "remove one of the two",
        )
        return
    root["sync"] = {**policy, _RESHARD[1]: root.pop("reshard")}
    for table in (tree.keys, tree.values):
        if ("reshard",) in table:
            table[_RESHARD] = table[("reshard",)]


def _small_forms(root: Mapping) -> None:
    if root.get("checkpoint") == "at_end":
        root["checkpoint"] = {"at_end": True}
    seconds = root.get("timeout")
    if isinstance(seconds, int | float) and not isinstance(seconds, bool):
        root["timeout"] = {"step": seconds}
    via = root.get("reduce_scatter")
    if via == "stock" or isinstance(via, bool):
        root["reduce_scatter"] = "all_to_all" if via is True else "native"


def _schedule_file(tree: Tree, root: Mapping, fault: _Report) -> None:
    """`pipeline: {schedule: FILE.csv}`: the rows of the file, so that what ran can be rerun from
    its spec alone. A relative one stands beside the spec; one of the command line, where that is.
    """
    pipeline, route = root.get("pipeline"), ("pipeline", "schedule")
    written = pipeline.get("schedule") if isinstance(pipeline, dict) else None
    if not isinstance(written, str) or not written.lower().endswith(".csv"):
        return
    is_in_file = tree.source and mark_of(tree, route).source == tree.source
    lines = schedule_file.read((Path(tree.source).parent if is_in_file else Path()) / written)
    if isinstance(lines, str):
        remedy = "name a file in torch's CSV format of compute actions, or a schedule"
        fault(route, f"cannot read {written}: {lines}", remedy)
        return
    wrong = schedule_file.slip(lines)
    if wrong is not None:
        fault(route, f"{written}: {wrong[0]}", wrong[1])
        return
    assert isinstance(pipeline, dict), "as above"
    pipeline["schedule"] = lines


_WORDS = {"recompute": "policy", "loss": "kind"}


def _words(tree: Tree, root: Mapping) -> None:
    """`recompute: full` is {policy: full}; what is no word, the grammar refuses as one."""
    for section, key in _WORDS.items():
        value = root.get(section)
        if isinstance(value, str | bool | int | float):
            root[section] = {key: value}
            for table in (tree.keys, tree.values):
                if (section,) in table:
                    table[(section, key)] = table[(section,)]


def _policy(strategy: Mapping, section: str) -> Mapping:
    """What a strategy's file says in a section, a word written out."""
    value = strategy.get(section, {})
    return value if isinstance(value, dict) else {_WORDS[section]: value}


def _says_what(recompute: Mapping) -> bool:
    """Whether it leaves nothing for a strategy to say."""
    return any(key in recompute for key in ("policy", "keep", "budget"))
