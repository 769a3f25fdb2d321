"""Resolve `recompute: {budget: SIZE}` and `batch.micro: auto` from predictions, before anything is
built.

The policy is the one with least recomputation that fits the budget. The micro-batch is the largest
that fits. Since both come from predictions, they are identical on every rank.

Choosing the micro-batch is step 4 of the notes' recipe, which increases it on a device until memory
runs out; `ptrain simulate --rehearse` runs the predicted one on a device. The accumulation follows,
since the global batch is fixed (Theorem 3).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

from ptrain.algebra.legality import LocatedSpec, is_sound, require_runnable
from ptrain.axes.candidates import divisors
from ptrain.derivation.estimate import derive
from ptrain.derivation.kernels import unclaimed_figures
from ptrain.derivation.layers import is_tabulated
from ptrain.derivation.work import rank_operations
from ptrain.errors import Fault, input_error
from ptrain.plan.lower import built_in_facts, lower
from ptrain.selection.fit import fit
from ptrain.spec.activations import ATTENTION_ONLY, NAMED_POLICIES, PLAIN, ActivationMode, Policy
from ptrain.spec.model import Attention, ModelShape
from ptrain.spec.placement import DATA_AXES, Axis, Factor, M, R
from ptrain.spec.spec import ActivationSpec, Spec, require_auto_micro
from ptrain.spec.write import to_mapping
from ptrain.units import format_memory

_PLACE = "recompute.budget"
_MICRO = "batch.micro"
_NUMBER = "Set `batch.micro` to a number."
_SPARSE = (4, 3, 2)  # recompute every n-th block, tried before every block


def recompute_policies(spec: Spec) -> Iterator[tuple[str, Policy]]:
    """Yield name and policy of each recompute policy of the model, least recomputation first."""
    is_eager = isinstance(spec.model, ModelShape) and spec.model.attention is Attention.EAGER
    yield from (
        (name, policy)
        for name, policy in NAMED_POLICIES.items()
        if is_eager or policy != ATTENTION_ONLY
    )


def with_micro(spec: Spec, micro: int) -> Spec:
    """Return the spec with micro-batches of `micro` samples and the same global batch."""
    accumulate = max(1, spec.batch.global_samples // (micro * spec.data_degree))
    return spec.with_fields(batch=replace(spec.batch, micro=micro, accumulate=accumulate))


class ChosenDocument(NamedTuple):
    """A document's spec with choices filled in; faults keep the document's positions."""

    spec: Spec
    locate: Callable[[Fault], Fault]


def resolve_auto(document: LocatedSpec) -> Spec:
    """Return a legal spec whose `auto` micro-batch and recompute policy are resolved.

    Args:
        document: A loaded document (`ptrain.load`).

    Returns:
        The spec. The micro-batch is the largest that is predicted to fit the cluster's devices,
        the policy the one that recomputes least within `recompute.budget`.

    Raises:
        SpecError: The spec is illegal or not supported, or no value satisfies the memory limit.

    Example:
        >>> import ptrain
        >>> document = ptrain.load("8b-zero3", ["batch.micro=auto", "batch.global=64"])
        >>> ptrain.resolve_auto(document).batch.micro
        2
    """
    if document.spec.batch.micro_is_open:  # which of them are legal is seen once one is chosen
        document = ChosenDocument(spec=with_largest_micro(document.spec), locate=document.locate)
    spec = require_runnable(document)
    return spec if spec.activations.budget is None else _within(spec, spec.activations.budget)


def _within(spec: Spec, budget: int) -> Spec:
    """Return the first spec of the ladder whose peak fits the budget.

    A policy that is written together with the budget is only checked.

    Raises:
        SpecError: No policy fits, or the peaks are unknown.
    """
    reached: dict[int, Spec] = {}
    for candidate in ladder(spec) if spec.activations.is_open else (spec,):
        if not (is_tabulated(candidate) and is_sound(candidate)):
            continue
        if why := unclaimed_figures(candidate, built_in_facts(candidate)).get("peak"):
            raise input_error(
                _PLACE,
                f"the peaks are not claimed: {why}",
                "Use `activations=M` with `recompute=selective` or `recompute=full`, or use "
                "`device=cpu`.",
            )
        if (peak := derive(candidate).exact.peak_bytes()) is None:
            continue
        if peak <= budget:
            return candidate
        reached.setdefault(peak, candidate)
    if not reached:
        raise input_error(
            _PLACE,
            "not supported yet: choosing a policy from a budget if the peaks need a trace",
            "Use `activations=M` with `recompute=selective` or `recompute=full`.",
        )
    smallest = min(reached)
    name = _name(reached[smallest])
    if not spec.activations.is_open:
        raise input_error(
            _PLACE,
            f"{format_memory(budget)}: the given policy, {name}, has a peak of "
            f"{format_memory(smallest)}",
            f"Use `recompute={{budget: {budget}}}` without a policy, or a larger budget.",
        )
    raise input_error(
        _PLACE,
        f"{format_memory(budget)}: the smallest peak that recomputation reaches is "
        f"{format_memory(smallest)}, with {name}",
        f"Use a budget of {smallest} bytes or more, a smaller `batch.micro`, or `activations=O`.",
    )


def ladder(spec: Spec) -> list[Spec]:
    """Return the spec with each recompute policy, ordered by recomputed matrix operations.

    Ties keep the order of policies.
    """

    def again(rung: Spec) -> int:  # of the rank with most; 0 without a table
        return max((row.again for row in rank_operations(rung, lower(rung))), default=0)

    return sorted(_rungs(spec), key=again)


def _rungs(spec: Spec) -> Iterator[Spec]:
    """Yield the spec with each choice: no recomputation, each policy, and full every n-th block."""
    layers = spec.model.layers if isinstance(spec.model, ModelShape) else 0
    *cheaper, full = (None, *dict(recompute_policies(spec)).values())
    yield from (_with(spec, policy) for policy in cheaper)
    if spec.activations.every == 1:
        yield from (_with(spec, full, every=every) for every in _SPARSE if every < layers)
    yield _with(spec, full)


def _with(spec: Spec, policy: Policy | None, every: int | None = None) -> Spec:
    """Return the spec with a policy; without one, blocks and placements with M get R."""
    said = spec.activations
    chosen = ActivationSpec(
        default=_kept(said.default, policy),
        by_block=tuple((first, last, _kept(kept, policy)) for first, last, kept in said.by_block),
        every=(every or said.every) if policy else 1,
        budget=said.budget,
    )
    factors = spec.factors if policy else tuple(map(_plain, spec.factors))
    variant = replace(spec, activations=chosen, factors=factors)
    sync = spec.resolved.get("sync")
    is_written = isinstance(sync, dict) and "gradients" in sync
    return replace(variant, resolved=to_mapping(variant, sync_is_written=is_written))


def _kept(kept: ActivationMode, policy: Policy | None) -> ActivationMode:
    """Return a way to keep activations, with its policy replaced if it has one."""
    changed = PLAIN if policy is None else replace(kept, policy=policy)
    return kept if kept.policy is None else changed


def _plain(factor: Factor) -> Factor:
    """Return a data factor with R instead of M activations."""
    is_m = factor.placement.activations.distribution is M.distribution
    plain = factor._replace(placement=replace(factor.placement, activations=R))
    return plain if is_m and factor.axis in DATA_AXES else factor


def _name(spec: Spec) -> str:
    """Return the policy's name as in the resolved spec."""
    said = spec.resolved.get("recompute")
    words = dict(said) if isinstance(said, dict) else {}
    every = words.get("every", 1)
    name = str(words.get("policy") or f"keep: {words.get('keep')}")
    return name if every == 1 else f"{name} for every {every} blocks"


def with_largest_micro(spec: Spec) -> Spec:
    """Return the spec with the largest micro-batch that fits.

    If none fits, it gets the smallest legal one, so that the usual message reports the excess. If
    none is legal, the spec is returned unchanged, and its faults give the reason.

    Raises:
        SpecError: The device memory or the peaks are unknown.
    """
    if spec.cluster is None:
        raise input_error(
            _MICRO,
            "auto: the device memory is unknown",
            f"{_NUMBER} Or name a cluster, for example `cluster.preset=h100-8`.",
        )
    if not isinstance(spec.model, ModelShape):
        raise input_error(
            _MICRO, "not supported yet: auto for a model whose peaks need a trace", _NUMBER
        )
    require_auto_micro(spec)
    if spec.activations.budget is not None:
        raise input_error(
            _MICRO,
            "not supported yet: auto together with recompute.budget, which is also "
            "chosen by the peak",
            f"{_NUMBER} Or use `recompute=selective` or `recompute=full`.",
        )
    tries = "; `ptrain simulate SPEC --rehearse` runs it on a GPU" if spec.is_for_cuda else ""
    smallest = spec
    for candidate in _candidates(spec):
        memory_fit = fit(candidate, derive(candidate).exact)
        if memory_fit.unknown and not memory_fit.fits_device:
            raise input_error(_MICRO, f"auto: the peaks are unknown: {memory_fit.why}", _NUMBER)
        # offloaded states on a host of unknown memory are the same for all micro-batches
        if memory_fit.fits_device and memory_fit.fits is not False:
            return _because(candidate, f"the largest with a predicted peak that fits{tries}")
        smallest = _because(candidate, "the smallest; none fits")
    return smallest


def _candidates(spec: Spec) -> Iterator[Spec]:
    """Yield legal specs with each micro-batch and the same global batch, the largest first."""
    said = spec.resolved["batch"]
    assert isinstance(said, dict), "a section"
    samples = spec.batch.global_samples // spec.data_degree
    # With fewer micro-batches than ranks, a pipeline computes less than it waits.
    least = min(spec.degree(Axis.PP), samples)
    sizes = [micro for micro in divisors(samples) if samples // micro >= least] if samples else []
    for micro in reversed(sizes):
        variant = with_micro(spec, micro)
        batch = replace(variant.batch, micro_is_open=False)
        resolved = spec.resolved | {"batch": said | {"micro": micro}}
        candidate = replace(variant, batch=batch, resolved=resolved)
        if is_sound(candidate):
            yield candidate


def _because(spec: Spec, choice: str) -> Spec:
    """Return the spec with the reason for its micro-batch."""
    return replace(spec, batch=replace(spec.batch, micro_choice=choice))
