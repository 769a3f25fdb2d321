"""Short forms, written out before validation: a strategy's name for its tuples, `S*,S,S,R` for a
tuple, `dp` for the data axis that its tuple belongs to, a file's name for the schedule in it,
`checkpoint: at_end`.

A short form that cannot be written out stays as it is and gives a fault.
"""

from __future__ import annotations

import copy
import itertools
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from ptrain.cost import PLACED, State
from ptrain.errors import Fault
from ptrain.spec import routing, schedule_file, slips
from ptrain.spec.dials import Reshard
from ptrain.spec.grammar import SpecRaw
from ptrain.spec.leaf import KEPT_MEANINGS, Section, is_required, keys
from ptrain.spec.names import missing, strategy
from ptrain.spec.placement import DATA_AXES, EXPERT_AXES, OF_EXPERTS, TOKEN_AXES, Axis, Placement, S
from ptrain.spec.text import Route, SourceMark, Tree, flow

_AUTO = "auto"
_OPEN, _CHOOSE = "auto is only available in a search", "Run `ptrain select SPEC`."
_RESHARD = ("sync", "reshard_after_forward")


def expand_shorthands(tree: Tree) -> list[Fault]:
    """Write out every short form of `tree`, in place."""
    root = tree.root
    assert isinstance(root, dict), "a tree to expand is a mapping"
    faults: list[Fault] = []

    def fault(route: Route, finding: str, remedy: str = "", at: Route = ()) -> None:
        faults.append(mark_of(tree, at or route).fault(".".join(route), finding, remedy))

    _left_out(root)
    _words(tree, root)
    _reshard(tree, root, fault)
    named = _whole_placement(root, fault)
    if not named:
        expand_tuples(tree, root.get("placement"), fault)
    _data_degree(root, fault)
    _frozen_mode(tree, root)
    _small_forms(root)
    _schedule_file(tree, root, fault)
    _routing_file(tree, root, fault)
    _pretrained_folder(tree, root)
    return faults


def _left_out(root: Mapping) -> None:
    """A section that is null is not written, but where null is what it may be."""
    for key, (spot, holds) in keys(SpecRaw).items():
        is_section = isinstance(holds, Section) and not holds.null
        if is_section and not is_required(spot) and root.get(key, ...) is None:
            del root[key]


def mark_of(tree: Tree, route: Route, *, key: bool = False) -> SourceMark:
    """Return where the value (or the key) of `route` stands, or else what encloses it."""
    table = tree.keys if key else tree.values
    while route and route not in table:
        route = route[:-1]
        table = tree.keys  # of what encloses a missing value its key is shown
    return table.get(route, SourceMark(source=tree.source))


def _whole_placement(root: Mapping, fault: Report) -> bool:
    """`placement: NAME`: all tuples of the strategy, and its policies."""
    name = root.get("placement")
    if not isinstance(name, str):
        return False
    if name == _AUTO:
        fault(("placement",), _OPEN, "Use a strategy name. To search for a placement: " + _CHOOSE)
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
        policy, written = policy_of(tree_named.root, section), root.setdefault(section, {})
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
        "four modes need an axis",
        (
            f"Use `placement: {{{axis}: [{', '.join(modes)}]}}`, or "
            f"`placement.{axis}={','.join(modes)}`."
        ),
    )


def _sits_right(mesh: object, name: str, axes: tuple[str, ...], fault: Report) -> None:
    if not isinstance(mesh, dict) or "dp" in mesh:
        return
    present = [axis for axis in mesh if mesh[axis] != 1 and axis in set(Axis)]
    wrong = [axis for axis in present if axis not in axes]
    absent = [axis for axis in axes if axis not in mesh]
    if not present or not (wrong or absent):
        return
    degree = mesh[wrong[0]] if wrong else 2
    mesh_text = ", ".join(f"{axis}: {mesh.get(axis, degree)}" for axis in axes)
    by_axis = ", ".join(f"{axis}: {name}" for axis in present)
    is_tuple = len(axes) == 1 and axes[0] in _DATA and {*wrong} <= {*EXPERT_AXES}
    fault(
        ("placement",),
        f"{name} needs the {'axis' if len(axes) == 1 else 'axes'} {' and '.join(axes)}; the mesh "
        f"has {', '.join(present)}",
        f"Use `mesh: {{{mesh_text}}}`, or "
        + (f"`placement: {{{by_axis}}}`." if is_tuple else "one placement per axis."),
    )


def _data_degree(root: Mapping, fault: Report) -> None:
    """`mesh: {dp: N}` becomes dp_replicate or dp_shard, by its tuple."""
    mesh, placement = root.get("mesh"), root.get("placement")
    if mesh == _AUTO:
        fault(("mesh",), _OPEN, "Set the axes and their sizes. To search for them: " + _CHOOSE)
    if not isinstance(mesh, dict):
        return
    if "dp" not in mesh:
        _rename_tuple(placement)
        return
    both = [axis for axis in _DATA if axis in mesh]
    if both:
        fault(
            ("mesh", "dp"),
            f"`dp` is an alias of a data axis, but {both[0]} is set too",
            f"Remove `dp` or `{both[0]}`.",
        )
        return
    homes = _homes(placement) if isinstance(placement, dict) else []
    if len(homes) != 1:
        if mesh["dp"] == 1 and not homes:
            del mesh["dp"]
        else:
            finding = "`dp` is an alias of dp_replicate or dp_shard, but the placement has "
            finding += " and ".join(homes) if homes else "neither"
            fault(("mesh", "dp"), finding, "Set the sizes of `dp_replicate` and `dp_shard`.")
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


def _reshard(tree: Tree, root: Mapping, fault: Report) -> None:
    """`reshard` is another word for a key of `sync`, and stands above a strategy's policy."""
    value, policy = root.get("reshard"), root.get("sync", {})
    if not (isinstance(value, int) or value in list(Reshard)) or not isinstance(policy, dict):
        return  # left out, or no value of it: the grammar says so at its own place
    written = policy.get(_RESHARD[1], value)
    if written != value or type(written) is not type(value):
        shown = str(written).lower()
        fault(
            ("reshard",),
            f"alias of sync.reshard_after_forward, which is {shown}",
            "Remove one of the two.",
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


def _schedule_file(tree: Tree, root: Mapping, fault: Report) -> None:
    """`pipeline: {schedule: FILE.csv}`: the rows of the file, so that what ran can be rerun from
    its spec alone. A relative one stands beside the spec; one of the command line, where that is.
    """
    pipeline, route = root.get("pipeline"), ("pipeline", "schedule")
    written = pipeline.get("schedule") if isinstance(pipeline, dict) else None
    if not isinstance(written, str) or not written.lower().endswith(".csv"):
        return
    lines = schedule_file.read(_beside(tree, route, written))
    if isinstance(lines, str):
        fault(
            route,
            f"cannot read {written}: {lines}",
            "Use a file in torch's CSV format of compute actions, or a schedule name.",
        )
        return
    wrong = schedule_file.slip(lines)
    if wrong is not None:
        fault(route, f"{written}: {wrong[0]}", wrong[1])
        return
    assert isinstance(pipeline, dict), "as above"
    pipeline["schedule"] = lines


def _routing_file(tree: Tree, root: Mapping, fault: Report) -> None:
    """`routing: FILE.json`: the counts of the file, for the same reason, from the same place."""
    file, route = root.get("routing"), ("routing",)
    if not isinstance(file, str) or not file.lower().endswith(".json"):
        return
    counts = routing.read(_beside(tree, route, file))
    if isinstance(counts, str):
        fault(
            route,
            f"cannot read {file}: {counts}",
            f"Use a JSON file, {routing.FORM}, or a routing name.",
        )
    elif wrong := routing.slip(counts):
        fault(route, f"{file}: {wrong}", f"Use {routing.FORM}.")
    else:
        root["routing"] = counts


def _pretrained_folder(tree: Tree, root: Mapping) -> None:
    """`model: {pretrained: FOLDER}`: the same folder wherever the spec that ran lies."""
    model, route = root.get("model"), ("model", "pretrained")
    written = model.get("pretrained") if isinstance(model, dict) else None
    if isinstance(model, dict) and isinstance(written, str) and "\0" not in written:
        model["pretrained"] = os.path.realpath(_beside(tree, route, os.path.expanduser(written)))


def _beside(tree: Tree, route: Route, file: str) -> Path:
    """Return where a file stands that a key names: beside the spec, or where the command line is
    that names it."""
    is_in_file = tree.source and mark_of(tree, route).source == tree.source
    return (Path(tree.source).parent if is_in_file else Path()) / file


def _words(tree: Tree, root: Mapping) -> None:
    """`recompute: full` is {policy: full}; what is no word, the grammar refuses as one."""
    for section, key in WORDS.items():
        value = root.get(section)
        if isinstance(value, str | bool | int | float):
            root[section] = {key: value}
            for table in (tree.keys, tree.values):
                if (section,) in table:
                    table[(section, key)] = table[(section,)]


def _frozen_mode(tree: Tree, root: Mapping) -> None:
    """`frozen: R` is a mode on every data axis of the mesh, on which `frozen` stands for none."""
    mode, mesh, section = root.get("frozen"), root.get("mesh"), "frozen"
    if not isinstance(mode, str) or not isinstance(mesh, dict):
        return
    axes = [axis for axis in _DATA if mesh.get(axis, 1) != 1] or [_DATA[1]]
    root[section] = dict.fromkeys(axes, mode)
    for table in (tree.keys, tree.values):
        if (section,) in table:
            table.update({(section, axis): table[(section,)] for axis in axes})


def _says_what(recompute: Mapping) -> bool:
    """Whether it leaves nothing for a strategy to say."""
    return any(key in recompute for key in ("policy", "keep", "budget"))


Mapping = dict[str, object]
Report = Callable[..., None]  # (route, finding, remedy, where it stands instead)
POLICIES = (
    "sync",
    "tensor",
    "pipeline",
    "context",
    "recompute",
)  # sections of a strategy beside its tuples
WORDS = {"recompute": "policy", "loss": "kind"}  # what a word alone says of a section
EXPERTS, REST = "experts", "rest"
_DATA = tuple(axis.value for axis in DATA_AXES)
_STATES = tuple(map(str, PLACED))


def route_of(axis: str) -> Route:
    """Return where the tuple of an axis stands: on ep that of all but the experts."""
    return ("placement", axis, *((REST,) if axis in EXPERT_AXES else ()))


def fault_of_experts(placement: Placement) -> tuple[str, str] | None:
    """Return finding and remedy of a tuple of experts, of 625 none for one."""
    broken = next((state for state in PLACED if placement[state] != S), None)
    if broken is None:
        return None
    remedy = f"Use `placement.ep.experts={','.join(usual_modes(EXPERTS))}`."
    if placement.parameters.distribution is not S.distribution:
        remedy += " If all ranks hold all experts, use dp_shard instead of ep."
    return f"({placement}) for experts: {_WHY_SLICES[broken]}", remedy


_WHY_SLICES = {
    State.PARAMETERS: (
        "parameters must be S: each rank holds some experts in full in device "
        "memory, and tokens travel to them [Definition 2]"
    ),
    State.OPTIMIZER: (
        "optimizer must be S: only the rank that holds an expert has its "
        "gradient and updates it [Theorem 4, state consistency]"
    ),
    State.GRADIENTS: (
        "gradients must be S: the rank of an expert sees all of its tokens, so "
        "its gradient is complete and must not be reduced over ep [Theorem 3, "
        "gradient integrity]"
    ),
    State.ACTIVATIONS: (
        "activations must be S: they belong to the tokens that were sent to "
        "the expert [Definition 2]"
    ),
}


def expand_tuples(tree: Tree, placement: object, fault: Report) -> None:
    """Write out the tuples of a placement, in place."""
    if not isinstance(placement, dict) or _cut_at_commas(tree, placement, ("placement",), fault):
        return
    for axis in placement:
        if axis in EXPERT_AXES:
            _of_experts(tree, placement, axis, fault)
        else:
            homes = _DATA if axis == "dp" else (axis,)
            _expand(placement, ("placement", axis), homes, fault)


def _expand(holder: Mapping, route: Route, homes: Sequence[str], fault: Report) -> None:
    """Write out the tuple that stands at the last key of a route; by name, that of a strategy
    which sits on one of the axes that are its `homes`."""
    key, value = route[-1], holder[route[-1]]
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, list):
        return
    modes = [part.strip() if isinstance(part, str) else part for part in parts]
    if isinstance(value, list) or len(modes) > 1 or modes[0] in KEPT_MEANINGS:
        if len(modes) == len(PLACED):
            holder[key] = dict(zip(_STATES, modes, strict=True))
        else:
            fault(
                route,
                "a placement has 4 modes (parameters, optimizer, gradients, "
                f"activations); got {len(modes)}",
                f"Use four modes: `{key}: [{', '.join(usual_modes(key))}]`.",
            )
    elif homes:
        _named_tuple(holder, route, homes, fault)
    else:
        fault(
            route,
            f"experts need four modes, not a strategy name; got {value!r}",
            f"Use `{key}: [{', '.join(usual_modes(key))}]`, or remove it.",
        )


def _of_experts(tree: Tree, placement: Mapping, axis: str, fault: Report) -> None:
    """`ep: zero3` and `ep: {parameters: S*, …}` are the tuple of all but the experts, who have one
    alone; what is written beside both, by state, is the rest's."""
    written, route = placement[axis], ("placement", axis)
    if isinstance(written, str) and (own := _own_tuples(written, axis)):
        placement[axis] = own
        return
    if written is None or (isinstance(written, dict) and not written):
        return
    parts = written if isinstance(written, dict) else {REST: written}
    if _cut_at_commas(tree, parts, route, fault):
        return
    parts.setdefault(EXPERTS, {str(state): str(OF_EXPERTS[state]) for state in PLACED})
    placement[axis] = parts
    _expand(parts, (*route, EXPERTS), (), fault)
    if any(state in parts for state in _STATES):
        parts.setdefault(REST, {})
    if REST in parts:
        at = route if parts is not written else (*route, REST)
        _expand(parts, (*route, REST), _DATA, lambda _, *words: fault(at, *words))
    rest = parts.get(REST)
    if isinstance(rest, dict):
        _states_of_rest(tree, parts, rest, route, fault)


def _states_of_rest(tree: Tree, parts: Mapping, rest: Mapping, route: Route, fault: Report) -> None:
    """A state that stands beside both tuples is the rest's, where it does not say it itself."""
    for state in [state for state in _STATES if state in parts]:
        if state in rest:
            fault(
                (*route, state),
                f"contradicts {REST}, which is the same placement: that of all non-expert tensors",
                f"Remove it, or use `{'.'.join((*route, REST, state))}={parts[state]}`.",
            )
        else:
            rest[state] = parts[state]
            _move_marks(tree, (*route, state), (*route, REST, state))
        del parts[state]


def _own_tuples(name: str, axis: str) -> object:
    """Return what a strategy has on this axis, where it sits on no other and says no more."""
    tree = strategy(name)
    root = tree.root if tree else None
    if not isinstance(root, dict) or any(key in root for key in POLICIES):
        return None
    tuples = root["placement"]
    return copy.deepcopy(tuples[axis]) if list(tuples) == [axis] else None


def _move_marks(tree: Tree, route: Route, to: Route) -> None:
    """What stood at one route is looked for at another."""
    for table in (tree.keys, tree.values):
        if route in table:
            table[to] = table[route]


def _cut_at_commas(tree: Tree, tuples: Mapping, above: Route, fault: Report) -> bool:
    """`{dp_shard: S*,S,M,R}`: within braces YAML reads the modes after a comma as keys, which stand
    behind their axis."""
    keys = list(tuples)
    strays = [key for key in keys if key in KEPT_MEANINGS and tuples[key] is None]
    if not strays:
        return False
    first = keys.index(strays[0])
    axis, route = (keys[first - 1], (*above, keys[first - 1])) if first else (_DATA[1], ())
    modes = _modes_at(tree.values.get(route)) or [
        str(tuples[axis]) if first else "",
        *itertools.takewhile(strays.__contains__, keys[first:]),  # of equal keys the first is left
    ]
    if len(modes) != len(PLACED):
        modes = usual_modes(axis)
    fault(
        above,
        "inside { } a comma ends the value, so the modes after it are read as keys",
        f"Use a list: `{{{axis}: [{', '.join(modes)}]}}`.",
        route,
    )
    return True


def two_ranks(axis: str) -> str:
    """Return the overrides that give a mesh an axis of two ranks."""
    return f"use `mesh.{axis}=2` with `placement.{axis}={','.join(usual_modes(axis))}`."


def usual_modes(axis: str) -> list[str]:
    """Return a legal tuple of the axis, as an example."""
    if axis in (Axis.DP_REPLICATE, *EXPERT_AXES, REST):
        return ["R"] * len(PLACED)
    if axis == EXPERTS:
        return str(OF_EXPERTS).split(",")
    if axis in TOKEN_AXES:
        return ["R", "R", "R", "S"]
    return ["S*" if axis == Axis.DP_SHARD else "S", "S", "S", "R"]


def _modes_at(mark: SourceMark | None) -> list[str]:
    """The tuple that begins there, if the line has all of it."""
    rest = mark.text[mark.column - 1 :].split("}")[0] if mark and mark.line else ""
    modes = [part.strip() for part in rest.split(",")][: len(PLACED)]
    return modes if all(mode in KEPT_MEANINGS for mode in modes) else []


def _named_tuple(holder: Mapping, route: Route, homes: Sequence[str], fault: Report) -> None:
    key = route[-1]
    name, axis = str(holder[key]), route[1]
    tree = strategy(name)
    if tree is None:
        fault(route, *missing(name, "strategy", "strategies"))
        return
    assert isinstance(tree.root, dict), "a strategy's file is a mapping"
    tuples = tree.root["placement"]
    home, alone = list(tuples), f"placement: {name}"
    is_alone = len(holder) == 1 and len(route) == len(("placement", axis))
    has_policy = any(section in tree.root for section in POLICIES)
    if len(home) > 1:
        remedy = alone if is_alone else _written_out(tree.root)
        fault(route, f"{name} covers the axes {' and '.join(home)}", f"Use `{remedy}`.")
    elif home[0] not in homes:
        remedy = f"placement: {{{home[0]}: {name}}}"
        if has_policy:
            remedy = alone if is_alone else _written_out(tree.root)
        remedy = f"Use `{remedy}` and `mesh: {{{home[0]}: N}}`."
        fault(route, f"{name} belongs to {home[0]}, not to {axis}", remedy)
    elif has_policy:
        either = f"{alone}` or `" * is_alone  # the name would say of no other axis
        at = axis if axis in EXPERT_AXES else ""
        remedy = f"Use `{either}{_written_out(tree.root, at)}`."
        fault(route, f"{name} sets more than a placement", remedy)
    else:
        holder[key] = copy.deepcopy(tuples[home[0]])


def _written_out(strategy: Mapping, at: str = "") -> str:
    """Return a strategy's tuples and policies as they are written beside those of other axes; its
    only tuple `at` an axis that it is not of."""
    tuples = strategy["placement"]
    assert isinstance(tuples, dict), "a strategy places its axes"
    parts = [
        f"placement.{at or axis}: [{', '.join(modes_of(modes))}]" for axis, modes in tuples.items()
    ]
    sections = (key for key in POLICIES if key in strategy)
    parts += [f"{section}: {flow(policy_of(strategy, section))}" for section in sections]
    return "` and `".join(parts)


def modes_of(written: Mapping) -> list[str]:
    """Return the modes of a tuple that is written out; on ep, of that of all but the experts."""
    modes = written.get(REST, written)
    assert isinstance(modes, dict), "a strategy writes its tuples out"
    return [str(mode) for mode in modes.values()]


def policy_of(strategy: Mapping, section: str) -> Mapping:
    """Return what a strategy's file says in a section, a word written out."""
    value = strategy.get(section, {})
    return value if isinstance(value, dict) else {WORDS[section]: value}
