"""`recompute: {budget: SIZE}`: the policy that computes least again and fits. Pure: it is chosen
from predictions, before anything is built, and so alike on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from ptrain.algebra.legality import Located, is_sound, require
from ptrain.derivation.estimate import derive
from ptrain.derivation.layers import is_tabulated
from ptrain.derivation.operations import operations
from ptrain.derivation.workspaces import unclaimed
from ptrain.errors import Fault, refused
from ptrain.plan.lower import lower, own_facts
from ptrain.selection.micro import with_largest_micro
from ptrain.spec.activations import ATTENTION_ONLY, FULL, PLAIN, SELECTIVE, Kept, Policy
from ptrain.spec.model import Attention, ModelShape
from ptrain.spec.placement import DATA_AXES, Factor, M, R, Tier
from ptrain.spec.spec import ActivationSpec, Spec
from ptrain.spec.write import to_mapping
from ptrain.units import format_bytes

_PLACE = "recompute.budget"
_DEVICE = frozenset({Tier.DEVICE})
_TEMPORARY = 0.001  # an offload copies through the device: a share of the peak that is no finding
_SPARSE = (4, 3, 2)  # every n-th block, before every one


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenDocument:
    """A document's spec with what was chosen for it; its faults stand where the document's do."""

    spec: Spec
    locate: Callable[[Fault], Fault]


def settled(document: Located) -> Spec:
    """The document's spec, legal and with its micro-batch and its policy chosen. Raises SpecError
    where it is not legal or does not run, where nobody knows which micro-batch fits, and where
    nothing keeps its budget."""
    if document.spec.batch.micro_is_open:  # which of them are legal is seen once one is chosen
        document = ChosenDocument(spec=with_largest_micro(document.spec), locate=document.locate)
    spec = require(document)
    return spec if spec.activations.budget is None else _within(spec, spec.activations.budget)


def useless_modes(spec: Spec, peak: int | None) -> tuple[str, ...]:
    """Return a warning if the modes of activations raise a built-in model's predicted `peak`."""
    plain = spec.but(activations=ActivationSpec())
    is_known = all(map(is_tabulated, (spec, plain))) and is_sound(plain)
    if (
        peak is None
        or not is_known
        or not any(not mode.is_plain for mode in spec.activations.modes)
    ):
        return ()
    least = derive(plain, is_timed=False).exact.peak_bytes()
    if least is None or peak <= least * (1 + _TEMPORARY * (spec.activations.tiers != _DEVICE)):
        return ()
    rise = f"raises the peak from {format_bytes(least)} to {format_bytes(peak)}"
    why = (
        "the peak is in the backward pass of one block, when all its activations are on "
        "the device again"
    )
    return (f"activations: recomputation or offloading {rise}: {why}. Use `activations=R`.",)


def _within(spec: Spec, budget: int) -> Spec:
    """The first of the ladder whose predicted peak, over all ranks and phases, is in the budget; a
    policy that is written beside the budget must be."""
    reached: dict[int, Spec] = {}
    for candidate in ladder(spec) if spec.activations.is_open else (spec,):
        if not (is_tabulated(candidate) and is_sound(candidate)):
            continue
        _require_claimed(candidate)
        peak = derive(candidate).exact.peak_bytes()
        if peak is None:
            continue
        if peak <= budget:
            return candidate
        reached.setdefault(peak, candidate)
    if not reached:
        finding = "not supported yet: choosing a policy from a budget if the peaks need a trace"
        raise refused(
            _PLACE, finding, "Use `activations=M` with `recompute=selective` or `recompute=full`."
        )
    smallest = min(reached)
    name = _name(reached[smallest])
    if not spec.activations.is_open:
        raise refused(
            _PLACE,
            f"{format_bytes(budget)}: the given policy, {name}, has a peak of "
            f"{format_bytes(smallest)}",
            f"Use `recompute={{budget: {budget}}}` without a policy, or a larger budget.",
        )
    raise refused(
        _PLACE,
        f"{format_bytes(budget)}: the smallest peak that recomputation reaches is "
        f"{format_bytes(smallest)}, with {name}",
        f"Use a budget of {smallest} bytes or more, a smaller `batch.micro`, or `activations=O`.",
    )


def _require_claimed(spec: Spec) -> None:
    """Raises SpecError where the peaks that decide are not claimed of the spec's device."""
    if why := unclaimed(spec, own_facts(spec)).get("peak"):
        remedy = (
            "Use `activations=M` with `recompute=selective` or `recompute=full`, or use "
            "`device=cpu`."
        )
        raise refused(_PLACE, f"the peaks are not claimed: {why}", remedy)


def ladder(spec: Spec) -> list[Spec]:
    """The same spec with each policy for its blocks that are M, by how much is computed again: the
    operations of matrix products, and in order of what is cheap beside them where these are as
    many."""
    return sorted(_rungs(spec), key=_again)


def _rungs(spec: Spec) -> Iterator[Spec]:
    said = spec.activations
    yield _with(spec, None)
    yield _with(spec, SELECTIVE)
    if isinstance(spec.model, ModelShape) and spec.model.attention is Attention.EAGER:
        yield _with(spec, ATTENTION_ONLY)
    if said.every == 1:
        for every in _SPARSE:
            if isinstance(spec.model, ModelShape) and every < spec.model.layers:
                yield _with(spec, FULL, every=every)
    yield _with(spec, FULL)


def _again(spec: Spec) -> int:
    """Operations of a step that the rank with most of them repeats; 0 where no table tells."""
    return max((row.again for row in operations(spec, lower(spec))), default=0)


def _with(spec: Spec, policy: Policy | None, every: int | None = None) -> Spec:
    """Return the spec with this choice, written as such: without a policy what was M is R, in the
    tuples too."""
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


def _kept(kept: Kept, policy: Policy | None) -> Kept:
    if kept.policy is None:
        return kept
    return PLAIN if policy is None else replace(kept, policy=policy)


def _plain(factor: Factor) -> Factor:
    is_m = factor.placement.activations.distribution is M.distribution
    if factor.axis not in DATA_AXES or not is_m:
        return factor
    return replace(factor, placement=replace(factor.placement, activations=R))


def _name(spec: Spec) -> str:
    """The policy as the resolved spec says it."""
    said = spec.resolved.get("recompute")
    words = dict(said) if isinstance(said, dict) else {}
    every = words.get("every", 1)
    name = str(words.get("policy") or f"keep: {words.get('keep')}")
    return name if every == 1 else f"{name} for every {every} blocks"
