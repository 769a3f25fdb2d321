"""Other legal specs of the same job over its data ranks: other tuples, other factorizations of as
many ranks, other micro-batches, slices of the tokens on tp; and what to write after the SPEC for
them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import product

from ptrain.algebra.legality import check, executed, is_sound
from ptrain.axes.data.form import tier_of
from ptrain.axes.data.rules import DATA
from ptrain.costs import PLACED
from ptrain.spec.axis import DATA_AXES, Axis, Factor
from ptrain.spec.dials import (
    GradientSync,
    SyncPolicy,
)
from ptrain.spec.keys import dials
from ptrain.spec.names import listing, strategy
from ptrain.spec.offload import Offload
from ptrain.spec.placement import OFFLOADED, S_STAR, Distribution, Mode, Placement, R, S, Tier
from ptrain.spec.spec import Spec
from ptrain.spec.text import flow
from ptrain.spec.tuples import POLICIES, modes_of

# Tuples that are tried in place of the spec's own: what needs no other layout or optimizer. Those
# with states on the host begin with the fewest there.
_ON_DEVICE = tuple(
    Placement(parameters=parameters, optimizer=optimizer, gradients=gradients)
    for parameters, optimizer, gradients in product((R, S_STAR), (R, S), (R, S))
)
_ON_HOST = tuple(
    Placement(parameters=parameters, optimizer=OFFLOADED, gradients=gradients)
    for parameters, gradients in product(
        (R, S_STAR, Mode(Distribution.GATHERED, Tier.HOST)), (S, OFFLOADED)
    )
)


def on_device(spec: Spec) -> Iterator[Spec]:
    """Every tuple over every factorization of the data ranks; one axis before two. `obeying` says
    which of them are legal."""
    tuples = _fit_for(spec, _ON_DEVICE)
    for degrees in _factorizations(spec.data_degree):
        axes = [
            (axis, degree) for axis, degree in zip(DATA_AXES, degrees, strict=True) if degree > 1
        ]
        for chosen in product(tuples, repeat=len(axes)):
            yield _placed(
                spec,
                tuple(
                    Factor(axis=axis, degree=degree, placement=placement)
                    for (axis, degree), placement in zip(axes, chosen, strict=True)
                ),
            )


def on_host(spec: Spec) -> Iterator[Spec]:
    """Legal tuples that keep states on the host, all data ranks on the one axis that shards."""
    if spec.data_degree == 1:
        return
    for placement in _fit_for(spec, _ON_HOST):
        factor = Factor(axis=Axis.DP_SHARD, degree=spec.data_degree, placement=placement)
        if legal := obeying(_placed(spec, (factor,))):
            yield legal


def _fit_for(spec: Spec, tuples: tuple[Placement, ...]) -> tuple[Placement, ...]:
    """The tuples, or the nearest ones that the optimizer takes, with the activations that the
    spec's own tuples have: M and O there are the rank's."""
    own = next((f.placement.activations for f in spec.factors if _says_how_it_keeps(f)), R)
    kept = (replace(placement, activations=own) for placement in tuples)
    return tuple(dict.fromkeys(DATA.nearest(placement, spec.optimizer) for placement in kept))


def _says_how_it_keeps(factor: Factor) -> bool:
    return factor.axis in DATA_AXES and factor.placement.activations != R


def _placed(spec: Spec, factors: tuple[Factor, ...]) -> Spec:
    """The spec with these factors of the data ranks."""
    others = tuple(factor for factor in spec.factors if factor.axis not in DATA_AXES)
    changed = _with_factors(spec, (*factors, *others))
    if tuples_of(changed) != tuples_of(spec):
        changed = replace(changed, offload=_of_activations(spec))
    return changed


def obeying(spec: Spec) -> Spec | None:
    """The spec, if it is legal and runs. What refuses only a dial of the job's own is no reason not
    to offer a tuple: it is set back."""
    faults = check(spec)
    places = [f"{fault.place}." for fault in faults]
    for dial in dials():
        if f"{dial.place}." in places:
            spec = dial.set(spec, dial.dial.free)
    if any(place.startswith("offload.") for place in places):
        spec = replace(spec, offload=Offload())
    if faults and check(spec):
        return None
    return None if executed(spec) else spec


def _of_activations(spec: Spec) -> Offload:
    """What is left of `offload` where no other state is off the device: the folder of files."""
    return Offload(path=spec.offload.path if Tier.FILE in spec.activations.tiers else None)


def _factorizations(number: int) -> Iterator[tuple[int, int]]:
    """Yield (dp_replicate, dp_shard): all ranks on dp_shard first, then those with both above 1."""
    yield 1, number
    yield from (
        (replicas, number // replicas) for replicas in range(2, number) if number % replicas == 0
    )


def _with_factors(spec: Spec, factors: tuple[Factor, ...]) -> Spec:
    """The sync policy follows the gradients' mode as it does where none is written."""
    order = list(Axis)
    factors = tuple(sorted(factors, key=lambda factor: order.index(factor.axis)))
    sync = spec.sync
    if _whole_gradients(factors) != _whole_gradients(spec.factors):
        late = _whole_gradients(factors)
        sync = replace(sync, gradients=GradientSync.LAST if late else GradientSync.EVERY)
    return replace(spec, factors=factors, sync=sync)


def frugal(spec: Spec) -> Iterator[Spec]:
    """The same tuples, with no parameters kept that could be given back, none gathered ahead and
    no sum of gradients whole that could be cut; nothing where it is so already."""
    late = _whole_gradients(spec.factors)
    sync = SyncPolicy(gradients=GradientSync.LAST if late else GradientSync.EVERY)
    changed = replace(spec, sync=sync, prefetch=0 if spec.prefetch else spec.prefetch)
    if changed != spec and not check(changed):
        yield changed


def sliced(spec: Spec) -> Iterator[Spec]:
    """The same tuples, with activations that every rank of tp has whole in slices of the tokens."""
    for activations in (S, S_STAR):
        factors = tuple(
            replace(factor, placement=replace(factor.placement, activations=activations))
            if factor.axis is Axis.TP and factor.placement.activations == R
            else factor
            for factor in spec.factors
        )
        changed = replace(spec, factors=factors)
        if changed != spec and is_sound(changed):
            yield changed


def is_offloaded(spec: Spec) -> bool:
    """Return whether any state lies off the device."""
    tiers = {tier_of(spec.factors, state) for state in PLACED} | spec.activations.tiers
    return tiers != {Tier.DEVICE}


def _whole_gradients(factors: tuple[Factor, ...]) -> bool:
    return all(
        factor.placement.gradients.distribution is Distribution.REPLICATED
        for factor in factors
        if factor.axis in DATA_AXES
    )


def with_micro(spec: Spec, micro: int) -> Spec:
    """The same global batch in micro-batches of `micro` samples."""
    accumulate = spec.batch.global_samples // (micro * spec.data_degree)
    return replace(spec, batch=replace(spec.batch, micro=micro, accumulate=accumulate))


def overrides(before: Spec, after: Spec) -> Iterator[str]:
    """The dotlist that makes `after` of `before`."""
    if _degrees(before) != _degrees(after):
        mesh = ", ".join(f"{axis}: {degree}" for axis, degree in _degrees(after))
        yield f"mesh={{{mesh}}}"
    if tuples_of(before) != tuples_of(after):
        yield f"placement={_written(after)}"
        if (policy := before.resolved.get("recompute", "full")) != "full":
            yield f"recompute={flow(policy)}"  # a strategy's name may have said it
    for dial in dials():
        if dial.of(before) != dial.of(after):
            yield dial.override
    yield from _offload(before, after)
    if before.sync.gradients is not after.sync.gradients and _says_when(before):
        yield f"sync.gradients={after.sync.gradients}"
    if before.batch.global_samples != after.batch.global_samples:
        yield f"batch.global={after.batch.global_samples}"
    if before.batch != after.batch:
        yield f"batch.micro={after.batch.micro}"
        yield f"batch.accumulate={after.batch.accumulate}"
    if before.cluster and after.cluster and before.cluster.devices != after.cluster.devices:
        yield f"cluster.devices={after.cluster.devices}"


def _offload(before: Spec, after: Spec) -> Iterator[str]:
    """A tier for O may be written, which the resolved spec has in its modes."""
    moves = tuples_of(before) != tuples_of(after) and is_offloaded(before)
    if before.offload == after.offload and not moves:
        return
    path = {"path": after.offload.path} if after.offload.path is not None else {}
    yield f"offload={flow(path)}"
    if (kept := before.resolved.get("activations")) is not None:
        yield f"activations={flow(kept)}"


def _says_when(spec: Spec) -> bool:
    """Whether the spec says itself when gradients are reduced, else that follows its placement."""
    sync = spec.resolved.get("sync")
    return not spec.resolved or (isinstance(sync, dict) and "gradients" in sync)


def _written(spec: Spec) -> str:
    """A strategy's name where its tuples have one, else the tuples."""
    tuples = {str(axis): str(placement) for axis, placement in tuples_of(spec)}
    for name, named in _named_tuples().items():
        if named == tuples:
            return name
    return "{" + ", ".join(f"{axis}: [{modes}]" for axis, modes in tuples.items()) + "}"


@cache
def _named_tuples() -> dict[str, dict[str, str]]:
    """Return by name the tuples of the strategies that are these and nothing more."""
    tuples = {}
    for name in listing("strategies"):
        tree = strategy(name)
        if tree and isinstance(tree.root, dict) and not {*POLICIES} & {*tree.root}:
            placement = tree.root["placement"]
            tuples[name] = {axis: ",".join(modes_of(own)) for axis, own in placement.items()}
    return tuples


def _degrees(spec: Spec) -> tuple[tuple[Axis, int], ...]:
    return tuple((factor.axis, factor.degree) for factor in spec.factors)


def tuples_of(spec: Spec) -> tuple[tuple[Axis, Placement], ...]:
    """Each axis with its tuple."""
    return tuple((factor.axis, factor.placement) for factor in spec.factors)
