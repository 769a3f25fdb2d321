"""Which form executes a tuple of the data axes: it follows from the modes of the states, the layout
and the optimizer alone. The plan is made from it, and the rules about dials ask it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ptrain.axes.data.cost import in_memory, lies_in_group_order
from ptrain.cost import State
from ptrain.errors import SpecError, refused
from ptrain.facts.model import ModelFacts
from ptrain.spec.dials import GatherAfterUpdate, Overlap, Reshard
from ptrain.spec.model import ModelShape
from ptrain.spec.placement import (
    CUT,
    EXPERT_AXES,
    REDUCED_AXES,
    S_STAR,
    TIER_DISTANCE,
    Axis,
    Distribution,
    Factor,
    M,
    Mode,
    R,
    S,
    Tier,
    without,
)
from ptrain.spec.spec import Spec
from ptrain.steps.step import Plan
from ptrain.steps.wraps import Form, FullyShard

MODEL_STATES = (State.PARAMETERS, State.OPTIMIZER, State.GRADIENTS)
_WHOLE = (R, R, R)
_FULLY_SHARDED = (S_STAR, S, S)
_MATERIALIZED = (M, S, S)
_SPREAD_UPDATE = (R, S, R)


def reduces_in_backward(spec: Spec, form: Form, *, keeps_parts: bool) -> bool:
    """Return whether gradients are reduced while the backward pass goes on. Where the spec does not
    say, they are; but for flat units that keep them whole: what reduces those is the update, and a
    rank would be left with a part of them; and for those whose update waits for it within the
    backward pass (G = M). `keeps_parts`: the tuples cut what is kept."""
    if spec.overlap is not None:
        return spec.overlap is Overlap.BACKWARD
    if form is not Form.FLAT:
        return True
    is_used_up = has(data_factors(spec), State.GRADIENTS, Distribution.MATERIALIZED)
    return keeps_parts and not is_used_up


def when_gathered(spec: Spec) -> GatherAfterUpdate:
    """Return when flat units that were updated in parts become whole. Where the spec does not say,
    a unit's gather goes on while those behind it are updated, and all are awaited at the end; but
    where it needs room beside parameters, which all units would have at once, and where gradients
    are used up (G = M): backward would be over before parameters are whole."""
    if spec.gather_after_update is not None:
        return spec.gather_after_update
    factors = data_factors(spec)
    is_used_up = has(factors, State.GRADIENTS, Distribution.MATERIALIZED)
    if spec.overlap is Overlap.NONE or is_used_up or not _is_gathered_in_place(factors):
        return GatherAfterUpdate.BLOCKING
    return GatherAfterUpdate.DURING_UPDATE


def units_ahead(spec: Spec, form: Form) -> int | None:
    """Return how many units are gathered ahead of their use; None for what torch's part does by
    itself. Where the spec does not say, flat units that come by unit bring the next one beside what
    is computed; but in a pipeline, whose passes they do not outlive."""
    if spec.prefetch is not None or form is not Form.FLAT:
        return spec.prefetch
    is_alone = spec.overlap is Overlap.NONE or spec.degree(Axis.PP) > 1
    return int(comes_by_unit(spec) and not is_alone)


def comes_by_unit(spec: Spec) -> bool:
    """Whether parameters are brought to the device, or made, by unit for their use."""
    factors = (*data_factors(spec), *frozen_factors(spec))
    brought = has(factors, State.PARAMETERS, *CUT, Distribution.MATERIALIZED)
    return brought or tier_of(factors, State.PARAMETERS) is not Tier.DEVICE


def _is_gathered_in_place(factors: tuple[Factor, ...]) -> bool:
    """Whether updated parts lie in parameters, on the device, as their group gathers them."""
    theta, omega, gradients = (_axes_of(factors, state, *CUT) for state in MODEL_STATES)
    missing = without(_axes_of(factors, State.OPTIMIZER, Distribution.SHARDED), theta)
    is_made = has(factors, State.PARAMETERS, Distribution.MATERIALIZED)
    if not missing or is_made or tier_of(factors, State.PARAMETERS) is not Tier.DEVICE:
        return False
    return lies_in_group_order(in_memory((*theta, *omega, *gradients)), theta, missing)


def _axes_of(
    factors: tuple[Factor, ...], state: State, *distributions: Distribution
) -> tuple[Axis, ...]:
    return tuple(f.axis for f in factors if f.placement[state].distribution in distributions)


def joins_units(spec: Spec, form: Form) -> bool:
    """Return whether neighbouring flat units are one, until they fill a bucket: where nothing is
    brought, made whole or used up by unit, all that units still decide is how many collectives
    there are. An update of whole tensors knows matrices by their unit, and experts are summed over
    fewer ranks than what stands beside them. Models that are not built in may skip a block, which
    then has no update: in one buffer with others it would decay."""
    return spec.unit is None and may_join_units(spec, form)


def may_join_units(spec: Spec, form: Form) -> bool:
    """Return whether they are one where the spec says nothing of a unit."""
    if not isinstance(spec.model, ModelShape) or form is not Form.FLAT or places_frozen(spec):
        return False
    factors = data_factors(spec)
    return (
        spec.optimizer.row.is_elementwise
        and not _have_experts(factors)
        and all(mode in (R, S) for factor in factors for mode in modes(factor))
        and all(factor.placement.parameters == R for factor in factors)
    )


def data_factors(spec: Spec) -> tuple[Factor, ...]:
    """The axes of more than one rank whose tuples are those of data axes, outermost first."""
    return tuple([f for f in spec.factors if f.axis in REDUCED_AXES and f.degree > 1])


def modes(factor: Factor) -> tuple[Mode, Mode, Mode]:
    """(Theta, Omega, G) of one factor."""
    placement = factor.placement
    return (placement.parameters, placement.optimizer, placement.gradients)


def frozen_factors(spec: Spec) -> tuple[Factor, ...]:
    """The data axes, each with the mode of frozen parameters for Theta: that which is written, and
    else that of all others; where these are made of masters, as the masters are."""
    return tuple([_of_frozen(spec, factor) for factor in data_factors(spec)])


def _of_frozen(spec: Spec, factor: Factor) -> Factor:
    placement, mode = factor.placement, spec.frozen.of(factor.axis)
    if mode is None and placement.parameters == M:
        is_cut = placement.optimizer.distribution in CUT
        mode = replace(S_STAR if is_cut else R, tier=placement.optimizer.tier)
    if mode is None:
        return factor
    return factor._replace(placement=replace(placement, parameters=mode))


def places_frozen(spec: Spec) -> bool:
    """Return whether frozen parameters have another place than all others."""
    if not spec.frozen.is_written:  # of most: a search asks of thousands
        return False
    written = spec.frozen.written()
    return any(
        factor.placement.parameters != written.get(factor.axis, factor.placement.parameters)
        for factor in data_factors(spec)
    )


def whole_axes(factors: tuple[Factor, ...]) -> tuple[Axis, ...]:
    """The axes on which Theta, Omega and G are all whole, on the device."""
    return tuple(factor.axis for factor in factors if modes(factor) == _WHOLE)


def tier_of(factors: tuple[Factor, ...], state: State) -> Tier:
    """The tier farthest from the device that any axis asks for."""
    tiers = (factor.placement[state].tier for factor in factors)
    return max(tiers, key=TIER_DISTANCE.__getitem__, default=Tier.DEVICE)


def has(factors: tuple[Factor, ...], state: State, *distributions: Distribution) -> bool:
    """Return whether the state has one of these distributions on some axis."""
    return any(factor.placement[state].distribution in distributions for factor in factors)


def form_of(spec: Spec) -> Form:
    """Return the form that executes the data axes of a legal spec."""
    layout, factors = spec.precision.layout, data_factors(spec)
    if places_frozen(spec):  # torch's parts give all parameters one place
        return Form.FLAT
    if layout.is_plain:
        if not factors:
            return Form.LOCAL
        # torch's DDP takes no DTensors, which are what an operator that is cut has
        is_cut = spec.degree(Axis.TP) > 1 or _have_experts(factors)
        # and it waits for autograd to accumulate, which halves of a backward pass do not do
        in_halves = spec.degree(Axis.PP) > 1 and spec.pipeline.is_in_halves
        if len(whole_axes(factors)) == len(factors) and not is_cut and not in_halves:
            return Form.REPLICATE
        # torch's spread update is one for all tensors of a module, and a rank may have two stages
        is_one = not is_cut and spec.degree(Axis.PP) == 1
        if is_one and _has_torch_s_spread_update(spec, factors):
            return Form.SPREAD_UPDATE
    # FSDP2 casts gradients to what they are reduced in, and back to the dtype of the shards
    if layout.keeps_own_dtype and _replicas_around(factors, _FULLY_SHARDED):
        return Form.FULLY_SHARD
    is_made_of_masters = layout.gradients is layout.master and not layout.keeps_both
    # what no axis shards has no masters apart from its parameters, of which experts would be made
    is_made_of_masters &= _shards_experts(factors)
    if is_made_of_masters and _replicas_around(factors, _MATERIALIZED):
        return Form.MATERIALIZE
    return Form.FLAT


def _replicas_around(factors: tuple[Factor, ...], inner: tuple[Mode, Mode, Mode]) -> bool:
    """Whether axes with these modes stand innermost, and everything is whole on the others."""
    whole = whole_axes(factors)
    sharded = tuple(factor.axis for factor in factors if modes(factor) == inner)
    if not sharded or whole + sharded != tuple(factor.axis for factor in factors):
        return False
    # fully_shard shards over some axis; experts are on no axis that gives ranks others
    return any(axis not in EXPERT_AXES for axis in sharded) or not without(whole, EXPERT_AXES)


def _shards_experts(factors: tuple[Factor, ...]) -> bool:
    """Whether some axis but those that give ranks experts of their own shards, or none does."""
    whole = (*whole_axes(factors), *EXPERT_AXES)
    return not _have_experts(factors) or any(factor.axis not in whole for factor in factors)


def _have_experts(factors: tuple[Factor, ...]) -> bool:
    """Whether ranks have experts of their own, which are summed over fewer axes than the rest: one
    DistributedDataParallel sums all alike."""
    return any(factor.axis in EXPERT_AXES for factor in factors)


def _has_torch_s_spread_update(spec: Spec, factors: tuple[Factor, ...]) -> bool:
    """ZeroRedundancyOptimizer spreads over replicas, and updates the parameters themselves."""
    layout = spec.precision.layout
    return (
        [factor.axis for factor in factors] == [Axis.DP_REPLICATE]
        and modes(factors[0]) == _SPREAD_UPDATE
        and layout.master is None
        and layout.moments is layout.parameters
        and spec.optimizer.row.is_elementwise
    )


# Frozen parameters, which are used and trained by nobody: what executes them.


def require_executed(spec: Spec, plan: Plan, facts: ModelFacts) -> None:
    """Raises SpecError for frozen parameters where nothing executes them, or where what is held and
    sent for them is not derived."""
    frozen = [tensor.name for unit in facts.units for tensor in unit.frozen]
    require_any(spec, bool(frozen))
    if not frozen:
        return
    for where, names, remedy in (*_cut(plan, frozen), *_idle(plan, facts)):
        raise _not_yet(where, names, remedy)


def require_any(spec: Spec, is_any: bool) -> None:
    """Raises SpecError where a spec says where frozen parameters are, unless there is one."""
    if spec.frozen.is_written and not is_any:
        raise refused(
            "frozen",
            "the model has no frozen parameter (requires_grad=False)",
            "Remove `frozen`, or freeze parameters in the function of `model.target`.",
        )


_TAKE_IDLE = (Form.LOCAL, Form.FLAT)  # torch's wrappers expect a gradient in every stage
_Refusal = tuple[str, Sequence[str], str]  # where, which of them, and the remedy


def _cut(plan: Plan, frozen: Sequence[str]) -> Iterator[_Refusal]:
    """Yield axes on which nobody has tried them."""
    if plan.tensor is not None and plan.tensor.is_saved_cut:
        yield (
            "with sequence-parallel activations that tp saves as shards",
            frozen,
            "Use `placement.tp=S,S,S,S`.",
        )
    if plan.context is not None:
        yield "over cp", frozen, "Remove `mesh.cp`."
    if plan.experts is not None:
        yield "over ep", frozen, "Remove `mesh.ep`."


def _idle(plan: Plan, facts: ModelFacts) -> Iterator[_Refusal]:
    """Yield units and stages of which nothing is trained."""
    trained = {tensor.name for tensor in facts.trained}
    for stage in plan.stages:
        own = [*stage.tensors, *(name for name, _ in stage.copied)]
        if own and not trained & {*own} and plan.form not in _TAKE_IDLE:
            remedy = "Remove `mesh.pp`, or use a placement with flat units, such as zero2."
            yield "in a pipeline stage without trained parameters", own, remedy
    passed = [t.name for unit in facts.units if facts.is_passed_by(unit) for t in unit.tensors]
    if passed and isinstance(plan.wrap, FullyShard):
        where = "in a unit before the first trained parameter, which fully_shard skips in backward,"
        if not isinstance(plan.wrap.sync.reshard_after_forward, bool | Reshard):
            yield f"{where} with smaller shards", passed, "Use `sync.reshard_after_forward=true`."
        if plan.pipeline is not None and plan.wrap.sync.reshard_after_backward:
            yield f"{where} with freeing after each pass of a stage", passed, "Remove `sync`."


def _not_yet(where: str, frozen: Sequence[str], remedy: str) -> SpecError:
    first, *others = frozen
    more = f" and {len(others)} more" if others else ""
    return refused(
        "placement", f"not supported yet: frozen parameters {where}: {first}{more}", remedy
    )
