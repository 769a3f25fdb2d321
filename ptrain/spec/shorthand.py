"""Expansion of short forms in a tree, in place, before it is checked.

A section defines the meaning of a value alone (`alone`), and a key whether a user's file may
contain its value (`file`). This module expands the short forms of the mesh and the placement: a
strategy name (its tuples and policies), `S*,S,S,R` (a tuple), one tuple on ep (for all non-expert
tensors), and `dp` (the data axis that its tuple belongs to). A short form that cannot be expanded
stays unchanged and gives a fault.
"""

from __future__ import annotations

import copy
import itertools
import os
from collections.abc import Sequence
from functools import cache
from typing import Any

from ptrain.cost import PLACED, State
from ptrain.errors import Fault
from ptrain.spec import slips
from ptrain.spec.activations import KEPT_MEANINGS
from ptrain.spec.dials import Reshard
from ptrain.spec.grammar import SpecRaw
from ptrain.spec.leaf import Leaf, Route, Section, UserFile, is_required, iter_keys, section_keys
from ptrain.spec.names import explain_missing, list_files, load_strategy
from ptrain.spec.placement import DATA_AXES, EXPERT_AXES, OF_EXPERTS, TOKEN_AXES, Axis, Placement, S
from ptrain.spec.text import Findings, SourceMark, Tree, to_flow_yaml

Mapping = dict[str, Any]
POLICIES = ("sync", "tensor", "pipeline", "context", "recompute")  # sections that a strategy sets
EXPERTS, REST = "experts", "rest"
_DATA = tuple(axis.value for axis in DATA_AXES)
_STATES = tuple(map(str, PLACED))
_AUTO = "auto"
_OPEN, _CHOOSE = "auto is only available in a search", "Run `ptrain select SPEC`."
_RESHARD = ("sync", "reshard_after_forward")


def expand_shorthands(tree: Tree) -> dict[Route, Fault]:
    """Expand all short forms of a tree in place.

    Args:
        tree: The tree, whose root is a mapping.

    Returns:
        A fault, by route, for each short form that cannot be expanded; it stays unchanged.
    """
    root, findings = tree.root, Findings(tree=tree)
    assert isinstance(root, dict), "a tree to expand is a mapping"
    for key, (spot, holds) in section_keys(SpecRaw).items():
        may_be_null = not isinstance(holds, Section) or holds.accepts_null or is_required(spot)
        if root.get(key, ...) is None and not may_be_null:
            del root[key]  # a section that is null is not written
    _expand_reshard(root, findings)
    # Strategies come first: they set tuples, which may name `dp` and lack policies that the next
    # steps expand.
    placement = root.get("placement")
    if isinstance(placement, str):
        _expand_placement(root, placement, findings)
    else:
        expand_tuples(placement, findings)
    _expand_data_axis(root, findings)
    for route, section in _short_sections():
        holder = tree.value_at(route[:-1])
        if not isinstance(holder, dict):
            continue
        if alone := _expand_bare_value(section, holder.get(route[-1]), root):
            holder[route[-1]] = alone
            for inner in alone:
                tree.move_marks(route, (*route, inner))
    for route, file in _file_keys():
        _read_file(tree.value_at(route[:-1]), route, file, findings)
    model = root.get("model")
    folder = model.get("pretrained") if isinstance(model, dict) else None
    if isinstance(model, dict) and isinstance(folder, str) and "\0" not in folder:
        # the same folder wherever the spec that ran lies
        path = tree.resolve_path(("model", "pretrained"), os.path.expanduser(folder))
        model["pretrained"] = os.path.realpath(path)
    return findings.faults


@cache
def _short_sections() -> tuple[tuple[Route, Section], ...]:
    """Return the sections that a value alone can abbreviate, each after the section around it."""
    sections = (
        (route, holds) for route, _, holds in iter_keys(SpecRaw) if isinstance(holds, Section)
    )
    return tuple((route, holds) for route, holds in sections if holds.alone)


def _expand_bare_value(holds: Leaf | Section, value: object, root: Mapping) -> Mapping:
    """Return the mapping that a single value abbreviates in a section, or {} if it is a mapping
    already."""
    if isinstance(value, dict) or not isinstance(holds, Section) or holds.alone is None:
        return {}
    return holds.alone(value, root)


@cache
def _file_keys() -> tuple[tuple[Route, UserFile], ...]:
    return tuple((route, holds.file) for route, _, holds in iter_keys(SpecRaw) if holds.file)


def _read_file(section: object, route: Route, file: UserFile, findings: Findings) -> None:
    """Replace the name of a user's file with its contents, so that a run can be repeated from its
    spec alone. A relative name is relative to the spec, or to the working directory if an override
    sets it."""
    name = section.get(route[-1]) if isinstance(section, dict) else None
    if not isinstance(section, dict) or not isinstance(name, str):
        return
    if not name.lower().endswith(file.suffix):
        return
    value = file.read(findings.tree.resolve_path(route, name))
    if isinstance(value, str):
        findings.add(route, f"cannot read {name}: {value}", file.remedy)
    elif wrong := file.slip(value):
        findings.add(route, f"{name}: {wrong[0]}", wrong[1])
    else:
        section[route[-1]] = value


def _expand_reshard(root: Mapping, findings: Findings) -> None:
    """Move `reshard`, an alias, to `sync.reshard_after_forward`, where it overrides a strategy's
    policy."""
    value, policy = root.get("reshard"), root.get("sync", {})
    if not (isinstance(value, int) or value in list(Reshard)) or not isinstance(policy, dict):
        return  # left out, or invalid: the grammar reports that at the key itself
    written = policy.get(_RESHARD[1], value)
    if written == value and type(written) is type(value):
        root["sync"] = {**policy, _RESHARD[1]: root.pop("reshard")}
        findings.tree.move_marks(("reshard",), _RESHARD)
    else:
        findings.add(
            "reshard",
            f"alias of sync.reshard_after_forward, which is {str(written).lower()}",
            "Remove one of the two.",
        )


def _expand_placement(root: Mapping, name: str, findings: Findings) -> None:
    """Expand `placement: NAME` to all tuples and policies of the strategy."""
    named = load_strategy(name)
    if name == _AUTO:
        findings.add(
            "placement", _OPEN, f"Use a strategy name. To search for a placement: {_CHOOSE}"
        )
    elif named is None:
        wrong = _explain_missing_axis(name, root) or explain_missing(name, "strategy", "strategies")
        findings.add("placement", *wrong)
    else:
        root["placement"] = tuples = copy.deepcopy(named["placement"])
        _check_axes(root.get("mesh"), name, tuple(tuples), findings)
        for section in POLICIES:
            written = root.setdefault(section, {})
            if isinstance(written, dict) and not (
                section == "recompute"
                and any(key in written for key in ("policy", "keep", "budget"))
            ):
                root[section] = written = {**policy_of(named, section), **written}
            if written == {}:
                del root[section]


def _explain_missing_axis(text: str, root: Mapping) -> tuple[str, str] | None:
    """Return the finding and the remedy for four modes without an axis; None for other texts."""
    modes = [part.strip() for part in text.split(",")]
    if not any(slips.normalize_mode(mode) in KEPT_MEANINGS for mode in modes):
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


def _check_axes(mesh: object, name: str, axes: tuple[str, ...], findings: Findings) -> None:
    """Report a strategy whose axes differ from those of the mesh."""
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
    findings.add(
        "placement",
        f"{name} needs the {'axis' if len(axes) == 1 else 'axes'} {' and '.join(axes)}; the mesh "
        f"has {', '.join(present)}",
        f"Use `mesh: {{{mesh_text}}}`, or "
        + (f"`placement: {{{by_axis}}}`." if is_tuple else "one placement per axis."),
    )


def _expand_data_axis(root: Mapping, findings: Findings) -> None:
    """Rename `dp` in mesh and placement to dp_replicate or dp_shard, according to its tuple."""
    mesh, placement = root.get("mesh"), root.get("placement")
    if mesh == _AUTO:
        findings.add("mesh", _OPEN, f"Set the axes and their sizes. To search for them: {_CHOOSE}")
    if not isinstance(mesh, dict):
        return
    homes = _find_homes(placement)
    if "dp" in mesh and (both := [axis for axis in _DATA if axis in mesh]):
        findings.add(
            "mesh.dp",
            f"`dp` is an alias of a data axis, but {both[0]} is set too",
            f"Remove `dp` or `{both[0]}`.",
        )
    elif "dp" in mesh and len(homes) != 1:
        if mesh["dp"] == 1 and not homes:
            del mesh["dp"]
        else:
            finding = "`dp` is an alias of dp_replicate or dp_shard, but the placement has "
            finding += " and ".join(homes) if homes else "neither"
            findings.add("mesh.dp", finding, "Set the sizes of `dp_replicate` and `dp_shard`.")
    else:
        root["mesh"] = {homes[0] if axis == "dp" else axis: mesh[axis] for axis in mesh}
        tuples = placement if isinstance(placement, dict) else {}
        if "dp" in tuples and len(homes) == 1 and homes[0] not in tuples:
            tuples[homes[0]] = tuples.pop("dp")


def _find_homes(placement: object) -> list[str]:
    """Return the data axes to which the placement's tuples belong."""
    if not isinstance(placement, dict):
        return []
    if (written := placement.get("dp")) is None:
        return [axis for axis in _DATA if axis in placement]
    if not isinstance(written, dict):
        return []
    is_replicated = all(written.get(state) == "R" for state in _STATES[:3])
    return [_DATA[0 if is_replicated else 1]]


def route_of(axis: str) -> Route:
    """Return the route of an axis's tuple; on ep, that is the tuple of all non-expert tensors."""
    return ("placement", axis, *((REST,) if axis in EXPERT_AXES else ()))


def fault_of_experts(placement: Placement) -> tuple[str, str] | None:
    """Return the finding and the remedy for a tuple of experts that is not S,S,S,S; None if
    it is."""
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


def expand_tuples(placement: object, findings: Findings) -> None:
    """Expand the tuples of a placement in place.

    Args:
        placement: The value of `placement`; anything but a mapping is left to the grammar.
        findings: Collects a fault for each tuple that cannot be expanded.
    """
    if not isinstance(placement, dict) or _report_split_modes(placement, ("placement",), findings):
        return
    for axis in placement:
        if axis in EXPERT_AXES:
            _expand_experts(placement, axis, findings)
        else:
            homes = _DATA if axis == "dp" else (axis,)
            _expand_tuple(placement, axis, ("placement", axis), homes, findings)


def _expand_tuple(
    holder: Mapping, key: str, at: Route, homes: Sequence[str], findings: Findings
) -> None:
    """Expand the tuple at `key` of `holder`.

    A strategy name means its tuple, if that belongs to one of the axes in `homes`. Faults are
    shown at route `at`.
    """
    value, usual = holder[key], f"`{key}: [{', '.join(usual_modes(key))}]`"
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, list):
        return
    modes = [part.strip() if isinstance(part, str) else part for part in parts]
    if isinstance(value, list) or len(modes) > 1 or modes[0] in KEPT_MEANINGS:
        if len(modes) == len(PLACED):
            holder[key] = dict(zip(_STATES, modes, strict=True))
            return
        finding = "a placement has 4 modes (parameters, optimizer, gradients, activations); got "
        findings.add(at, f"{finding}{len(modes)}", f"Use four modes: {usual}.")
    elif not homes:
        findings.add(
            at,
            f"experts need four modes, not a strategy name; got {value!r}",
            f"Use {usual}, or remove it.",
        )
    elif wrong := _expand_named_tuple(holder, key, at[1], homes):
        findings.add(at, *wrong)


def _expand_named_tuple(
    holder: Mapping, key: str, axis: str, homes: Sequence[str]
) -> tuple[str, str] | None:
    """Replace a strategy name with its tuple; return a finding and a remedy if that is
    impossible."""
    name = str(holder[key])
    if (named := load_strategy(name)) is None:
        return explain_missing(name, "strategy", "strategies")
    home, has_policy = [*named["placement"]], any(section in named for section in POLICIES)
    is_alone = len(holder) == 1 and key == axis
    whole = f"placement: {name}" if is_alone else _spell_out(named)
    if len(home) > 1:
        return f"{name} covers the axes {' and '.join(home)}", f"Use `{whole}`."
    if home[0] not in homes:
        use = whole if has_policy else f"placement: {{{home[0]}: {name}}}"
        return (
            f"{name} belongs to {home[0]}, not to {axis}",
            f"Use `{use}` and `mesh: {{{home[0]}: N}}`.",
        )
    if has_policy:
        either = f"placement: {name}` or `" * is_alone  # the name alone covers only its axes
        use = _spell_out(named, axis if axis in EXPERT_AXES else "")
        return f"{name} sets more than a placement", f"Use `{either}{use}`."
    holder[key] = copy.deepcopy(named["placement"][home[0]])
    return None


def _expand_experts(placement: Mapping, axis: str, findings: Findings) -> None:
    """Expand the entry of an expert axis to `experts` and `rest`.

    `ep: zero3` and `ep: {parameters: S*, …}` set the tuple of all non-expert tensors; experts have
    only one legal tuple. Modes next to `experts` and `rest` are moved into `rest`.
    """
    written, route = placement[axis], ("placement", axis)
    named = (load_strategy(written) or {}) if isinstance(written, str) else {}
    if [*named.get("placement", ())] == [axis] and not any(key in named for key in POLICIES):
        placement[axis] = copy.deepcopy(named["placement"][axis])
        return
    parts = written if isinstance(written, dict) else {REST: written}
    if written is None or not parts or _report_split_modes(parts, route, findings):
        return
    parts.setdefault(EXPERTS, {str(state): str(OF_EXPERTS[state]) for state in PLACED})
    placement[axis] = parts
    _expand_tuple(parts, EXPERTS, (*route, EXPERTS), (), findings)
    if beside := [state for state in _STATES if state in parts]:
        parts.setdefault(REST, {})
    if REST in parts:
        at = (*route, REST) if parts is written else route
        _expand_tuple(parts, REST, at, _DATA, findings)
    rest = parts.get(REST)
    if not isinstance(rest, dict):
        return
    for state in beside:
        if state in rest:
            findings.add(
                (*route, state),
                f"contradicts {REST}, which is the same placement: that of all non-expert tensors",
                f"Remove it, or use `{'.'.join((*route, REST, state))}={parts[state]}`.",
            )
        else:
            rest[state] = parts[state]
            findings.tree.move_marks((*route, state), (*route, REST, state))
        del parts[state]


def _report_split_modes(tuples: Mapping, above: Route, findings: Findings) -> bool:
    """Report modes that YAML read as keys, and return True if there are any.

    In `{dp_shard: S*,S,M,R}` a comma ends the value, so the modes after it become keys that follow
    the axis.
    """
    keys = list(tuples)
    strays = [key for key in keys if key in KEPT_MEANINGS and tuples[key] is None]
    if not strays:
        return False
    first = keys.index(strays[0])
    axis, route = (keys[first - 1], (*above, keys[first - 1])) if first else (_DATA[1], ())
    modes = _read_modes_at(findings.tree.values.get(route)) or [
        str(tuples[axis]) if first else "",
        *itertools.takewhile(strays.__contains__, keys[first:]),  # equal modes are one key
    ]
    if len(modes) != len(PLACED):
        modes = usual_modes(axis)
    findings.add(
        above,
        "inside { } a comma ends the value, so the modes after it are read as keys",
        f"Use a list: `{{{axis}: [{', '.join(modes)}]}}`.",
        at=route,
    )
    return True


def two_ranks(axis: str) -> str:
    """Return the overrides that add an axis of two ranks to a mesh, as a remedy."""
    return f"use `mesh.{axis}=2` with `placement.{axis}={','.join(usual_modes(axis))}`."


def usual_modes(axis: str) -> list[str]:
    """Return a legal tuple of the axis, as an example for remedies."""
    return _USUAL.get(axis, "S,S,S,R").split(",")


_USUAL: dict[str, str] = {
    **dict.fromkeys((Axis.DP_REPLICATE, *EXPERT_AXES, REST), "R,R,R,R"),
    **dict.fromkeys(TOKEN_AXES, "R,R,R,S"),
    Axis.DP_SHARD: "S*,S,S,R",
    EXPERTS: str(OF_EXPERTS),
}


def _read_modes_at(mark: SourceMark | None) -> list[str]:
    """Return the four modes that start at a position, if its line contains all of them."""
    rest = mark.text[mark.column - 1 :].split("}")[0] if mark and mark.line else ""
    modes = [part.strip() for part in rest.split(",")][: len(PLACED)]
    return modes if all(mode in KEPT_MEANINGS for mode in modes) else []


def _spell_out(strategy: Mapping, at: str = "") -> str:
    """Return a strategy's tuples and policies in file syntax; `at` replaces the axis of its only
    tuple."""
    tuples = strategy["placement"]
    assert isinstance(tuples, dict), "a strategy places its axes"
    parts = [
        f"placement.{at or axis}: [{', '.join(modes_of(modes))}]" for axis, modes in tuples.items()
    ]
    sections = (key for key in POLICIES if key in strategy)
    parts += [f"{section}: {to_flow_yaml(policy_of(strategy, section))}" for section in sections]
    return "` and `".join(parts)


def modes_of(written: Mapping) -> list[str]:
    """Return the modes of an expanded tuple; on ep, of the tuple for non-expert tensors."""
    modes = written.get(REST, written)
    assert isinstance(modes, dict), "a strategy writes its tuples out"
    return [str(mode) for mode in modes.values()]


def policy_of(strategy: Mapping, section: str) -> Mapping:
    """Return a section of a strategy's file, with a short form expanded."""
    value = strategy.get(section, {})
    _, holds = section_keys(SpecRaw)[section]
    return value if isinstance(value, dict) else _expand_bare_value(holds, value, strategy)


@cache
def placement_names(axis: str) -> dict[str, str]:
    """Return strategy names by placement, for strategies that only place states on this axis.

    The shortest name of a placement wins. The name is what `placement.AXIS` accepts.
    """
    names: dict[str, str] = {}
    # Lines that show other axes or sections, so that most files need not be parsed.
    others = (*(f"\n{key}:" for key in POLICIES), *(f"\n  {a}: {{" for a in Axis if a != axis))
    for name, path in sorted(list_files("strategies").items(), key=lambda item: len(item[0])):
        is_named = f"{axis}:" in (text := path.read_text(encoding="utf-8"))
        named = load_strategy(name) if is_named and not any(o in text for o in others) else None
        if named and not {*POLICIES} & {*named} and named["placement"].keys() == {axis}:
            names.setdefault(",".join(modes_of(named["placement"][axis])), name)
    return names
