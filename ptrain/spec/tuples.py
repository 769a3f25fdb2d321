"""Short forms of tuples, written out: a strategy's name for its tuple, `S*,S,S,R` for a mapping,
and on ep the tuple of all else for that and the experts'."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence

from ptrain.cost import PLACED, State
from ptrain.spec.leaf import KEPT_MEANINGS
from ptrain.spec.names import missing, strategy
from ptrain.spec.placement import DATA_AXES, EXPERT_AXES, OF_EXPERTS, TOKEN_AXES, Axis, Placement, S
from ptrain.spec.text import Route, SourceMark, Tree, flow

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
