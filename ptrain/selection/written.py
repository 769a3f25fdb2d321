"""What a spec writes of what a search else chooses, and what it leaves open: `auto`, or nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from ptrain.axes.candidates import Written
from ptrain.cost import State
from ptrain.errors import refused
from ptrain.selection.space import SEARCHED_AXES, ways_to_keep
from ptrain.spec.activations import Kept
from ptrain.spec.keys import Offload, dials
from ptrain.spec.placement import DATA_AXES, Axis, R, Tier
from ptrain.spec.spec import Spec
from ptrain.spec.text import flow

AUTO = "auto"
_BATCH = ("batch.micro", "batch.accumulate")
# Sections that say something of a candidate.
OF_CANDIDATES = (
    *("placement", *_BATCH, "activations", "recompute", "offload"),
    *("sync", "reshard", "pipeline", "context", "unit", "overlap", "prefetch"),
    *("gather_after_update", "bucket", "reduce_scatter"),
)
_HOW = ("policy", "keep")  # of recompute, what is computed again

Said = Mapping[str, Any]
LoadWith = Callable[[Sequence[str], Sequence[str]], Spec]


def is_open(said: Said) -> bool:
    """Return whether something is left to be chosen: an `auto` of the mesh, of the micro-batch or
    of what else a candidate says."""
    return any(True for _ in _autos(said.get("mesh"), ("mesh",))) or any(_open_places(said))


def _open_places(said: Said) -> Iterator[str]:
    for place in OF_CANDIDATES:
        yield from _autos(at(said, place), tuple(place.split(".")))


def _autos(value: object, route: tuple[str, ...]) -> Iterator[str]:
    """The places at which nothing but `auto` stands, the outermost ones."""
    if _is_auto(value):
        yield ".".join(route)
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _autos(inner, (*route, key))


def _is_auto(value: object) -> bool:
    if isinstance(value, dict):
        return bool(value) and all(_is_auto(inner) for inner in value.values())
    return value == AUTO


def at(said: Any, place: str) -> Any:
    """Return what stands at a place; None where nothing does."""
    for key in place.split("."):
        said = said.get(key) if isinstance(said, dict) else None
    return said


def numbers(said: Said) -> Iterator[str]:
    """Yield a constraint for each number that is written: degrees of the mesh, samples of a
    micro-batch, micro-batches of a step."""
    mesh = said.get("mesh")
    yield from (
        f"mesh.{axis}={degree}"
        for axis, degree in (mesh if isinstance(mesh, dict) else {}).items()
        if isinstance(degree, int)
    )
    yield from (
        f"{place}={at(said, place)}" for place in _BATCH if isinstance(at(said, place), int)
    )


def unnamed(said: Said) -> Iterator[str]:
    """Yield a constraint for each axis that a mesh does not name: it has one rank."""
    mesh = said.get("mesh")
    named = mesh if isinstance(mesh, dict) else {axis.value for axis in SEARCHED_AXES}
    yield from (
        f"mesh.{axis}=1"
        for axis in SEARCHED_AXES
        if axis.value not in named and not ("dp" in named and axis in DATA_AXES)
    )


def written_of(said: Said, load_with: LoadWith) -> Written:
    """Return what is written of tuples, dials and activations. `load_with` gives the spec with
    overrides and without some places. Raises SpecError for what is wrong with it, and for what no
    candidate can say."""
    mesh, open_places = said.get("mesh"), set(_open_places(said))
    placement = said.get("placement")
    placed = [
        axis
        for axis in SEARCHED_AXES
        if at(placement, axis.value) is not None and f"placement.{axis}" not in open_places
    ]
    of_one_rank = flow({axis.value: 1 for axis in placed})
    more = ("activations=M",) if _recomputes(said) and not _says_activations(said) else ()
    probe = load_with((f"mesh={of_one_rank}", *more), (*_BATCH, *sorted(open_places)))
    degrees = mesh.items() if isinstance(mesh, dict) else ()
    return Written(
        degrees=tuple(
            (Axis(axis), degree)
            for axis, degree in degrees
            if axis in set(Axis) and isinstance(degree, int)
        ),
        tuples=tuple((f.axis, f.placement) for f in probe.trivial_factors),
        values=tuple(_values(said, probe)),
        kept=_kept(said, probe),
    )


def _values(said: Said, probe: Spec) -> Iterator[tuple[str, Any]]:
    """Dials, the schedule and what is said of it, and where offloaded state is updated."""
    for section in ("sync", "pipeline"):
        for spot in fields(getattr(probe, section)):
            if _is_said(said, f"{section}.{spot.name}"):
                yield f"{section}.{spot.name}", getattr(getattr(probe, section), spot.name)
    yield from (
        (dial.path[0], dial.of(probe))
        for dial in dials()
        if len(dial.path) == 1 and _is_said(said, dial.place)
    )
    if probe.context is not None:
        yield "context", probe.context
    if _is_said(said, "offload.tier"):
        yield "offload.tier", _away(said)
    if probe.offload != Offload():
        yield "offload", probe.offload


def _is_said(said: Said, place: str) -> bool:
    return at(said, place) not in (None, AUTO)


def _away(said: Said) -> Tier:
    """Where O is."""
    return Tier(at(said, "offload.tier")) if _is_said(said, "offload.tier") else Tier.HOST


def _recomputes(said: Said) -> bool:
    how = [at(said, f"recompute.{key}") for key in _HOW]
    return any(value not in (None, AUTO, "none") for value in how)


def _says_activations(said: Said) -> bool:
    """At the top of the spec, or by a tuple of a data axis."""
    tuples = (at(said, f"placement.{axis}.{State.ACTIVATIONS}") for axis in DATA_AXES)
    return _is_said(said, "activations") or any(mode not in (None, str(R)) for mode in tuples)


def _kept(said: Said, probe: Spec) -> tuple[Kept, ...]:
    """How blocks may keep activations: as it is written; where M says no policy, or `none` is the
    policy of whatever mode, as the search tries it. None where nothing is written."""
    activations = probe.activations
    if activations.budget is not None or activations.by_block or activations.every != 1:
        place = "activations" if activations.by_block else "recompute"
        raise refused(
            place,
            "not supported yet: a search with per-block activation modes or a recomputation budget",
            f"Use `{place}=auto`, or one policy for all blocks.",
        )
    says_how = any(_is_said(said, f"recompute.{key}") for key in _HOW)
    offered = ways_to_keep(_away(said))
    if not _says_activations(said):
        if not says_how:
            return ()
        if not _recomputes(said):
            return _alike(kept for kept in offered if kept.policy is None)
    default = activations.default
    if default.policy is not None and not says_how:
        return _alike([k for k in offered if k.policy and k.tier is default.tier] or [default])
    return (default,)


def _alike(kept: Iterable[Kept]) -> tuple[Kept, ...]:
    return tuple(kept)
