"""The implementation (form) of a placement on the data axes.

It follows from modes, layout and optimizer only.

The plan is built from it, and the rules about options use it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ptrain.axes.data.cost import in_memory, lies_in_group_order
from ptrain.cost import State
from ptrain.errors import SpecError, input_error
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
    exclude_axes,
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
    """Return True if gradients are reduced during backward.

    By default they are, with two exceptions among flat units. Full gradients are reduced by the
    update, and a rank would be left with a part of them. With consumed gradients (G = M), each
    unit's update within backward waits for the reduction.

    Args:
        spec: The spec.
        form: The form of the data axes.
        keeps_parts: The tuples shard the stored gradients.
    """
    if spec.overlap is not None:
        return spec.overlap is Overlap.BACKWARD
    if form is not Form.FLAT:
        return True
    is_used_up = has_distribution(data_factors(spec), State.GRADIENTS, Distribution.MATERIALIZED)
    return keeps_parts and not is_used_up


def when_gathered(spec: Spec) -> GatherAfterUpdate:
    """Return when flat units that were updated in shards are all-gathered.

    By default, the gather of a unit overlaps with the update of later units, and all gathers are
    waited for at the end. The default is blocking if the gather needs a second buffer, because all
    units would hold one at once. It is also blocking for consumed gradients (G = M), where
    backward would end before parameters are complete.
    """
    if spec.gather_after_update is not None:
        return spec.gather_after_update
    factors = data_factors(spec)
    is_used_up = has_distribution(factors, State.GRADIENTS, Distribution.MATERIALIZED)
    if spec.overlap is Overlap.NONE or is_used_up or not _is_gathered_in_place(factors):
        return GatherAfterUpdate.BLOCKING
    return GatherAfterUpdate.DURING_UPDATE


def units_ahead(spec: Spec, form: Form) -> int | None:
    """Return the number of units gathered ahead of their use; None for the default of torch's
    implementation.

    By default, flat units that are gathered unit by unit prefetch the next one during compute,
    except in a pipeline, whose passes the prefetched unit would not outlive.
    """
    if spec.prefetch is not None or form is not Form.FLAT:
        return spec.prefetch
    is_alone = spec.overlap is Overlap.NONE or spec.degree(Axis.PP) > 1
    return int(comes_by_unit(spec) and not is_alone)


def comes_by_unit(spec: Spec) -> bool:
    """Return True if parameters are gathered or made unit by unit for use."""
    factors = (*data_factors(spec), *frozen_factors(spec))
    brought = has_distribution(factors, State.PARAMETERS, *CUT, Distribution.MATERIALIZED)
    return brought or tier_of(factors, State.PARAMETERS) is not Tier.DEVICE


def _is_gathered_in_place(factors: tuple[Factor, ...]) -> bool:
    """Return True if updated shards are in the device's parameters, in the order of their group."""
    theta, omega, gradients = (_axes_with(factors, state, *CUT) for state in MODEL_STATES)
    missing = exclude_axes(_axes_with(factors, State.OPTIMIZER, Distribution.SHARDED), theta)
    is_made = has_distribution(factors, State.PARAMETERS, Distribution.MATERIALIZED)
    if not missing or is_made or tier_of(factors, State.PARAMETERS) is not Tier.DEVICE:
        return False
    return lies_in_group_order(in_memory((*theta, *omega, *gradients)), theta, missing)


def _axes_with(
    factors: tuple[Factor, ...], state: State, *distributions: Distribution
) -> tuple[Axis, ...]:
    """Return the axes on which a state has one of these distributions."""
    return tuple(f.axis for f in factors if f.placement[state].distribution in distributions)


def joins_units(spec: Spec, form: Form) -> bool:
    """Return True if neighbouring flat units are joined until they fill a bucket.

    This is done only if nothing is gathered, cast or consumed by unit, so that units determine the
    number of collectives only.

    - An update of full matrices finds its matrices by unit.
    - Experts are reduced over fewer ranks than their neighbours.
    - A model that is not built in may skip a block, which then has no update; in a joint buffer it
      would decay.
    """
    return spec.unit is None and may_join_units(spec, form)


def may_join_units(spec: Spec, form: Form) -> bool:
    """Return True if units are joined by default, if the spec does not set `unit`."""
    if not isinstance(spec.model, ModelShape) or form is not Form.FLAT or places_frozen(spec):
        return False
    factors = data_factors(spec)
    return (
        spec.optimizer.is_elementwise
        and not _have_experts(factors)
        and all(mode in (R, S) for factor in factors for mode in state_modes(factor))
        and all(factor.placement.parameters == R for factor in factors)
    )


def data_factors(spec: Spec) -> tuple[Factor, ...]:
    """Return the axes with several ranks and tuples of a data axis, outermost first."""
    return tuple([f for f in spec.factors if f.axis in REDUCED_AXES and f.degree > 1])


def state_modes(factor: Factor) -> tuple[Mode, Mode, Mode]:
    """Return the modes of parameters, optimizer state and gradients on one axis."""
    placement = factor.placement
    return (placement.parameters, placement.optimizer, placement.gradients)


def frozen_factors(spec: Spec) -> tuple[Factor, ...]:
    """Return the data axes with the mode of frozen parameters in place of that for parameters."""
    return tuple([_frozen_factor(spec, factor) for factor in data_factors(spec)])


def _frozen_factor(spec: Spec, factor: Factor) -> Factor:
    """Return an axis with the mode of frozen parameters.

    The default is the mode of all parameters. If these are cast from masters (M), it is the
    placement of the masters.
    """
    placement, mode = factor.placement, spec.frozen.mode_on(factor.axis)
    if mode is None and placement.parameters == M:
        is_cut = placement.optimizer.distribution in CUT
        mode = replace(S_STAR if is_cut else R, tier=placement.optimizer.tier)
    if mode is None:
        return factor
    return factor._replace(placement=replace(placement, parameters=mode))


def places_frozen(spec: Spec) -> bool:
    """Return True if frozen parameters are placed differently from all others."""
    if not spec.frozen.is_written:  # fast path: a search calls this thousands of times
        return False
    written = spec.frozen.modes_by_axis()
    return any(
        factor.placement.parameters != written.get(factor.axis, factor.placement.parameters)
        for factor in data_factors(spec)
    )


def whole_axes(factors: tuple[Factor, ...]) -> tuple[Axis, ...]:
    """Return the axes that replicate parameters, optimizer state and gradients on the device."""
    return tuple(factor.axis for factor in factors if state_modes(factor) == _WHOLE)


def tier_of(factors: tuple[Factor, ...], state: State) -> Tier:
    """Return the tier of a state that is farthest from the device on any axis."""
    tiers = (factor.placement[state].tier for factor in factors)
    return max(tiers, key=TIER_DISTANCE.__getitem__, default=Tier.DEVICE)


def has_distribution(
    factors: tuple[Factor, ...], state: State, *distributions: Distribution
) -> bool:
    """Return True if a state has one of these distributions on some axis."""
    return any(factor.placement[state].distribution in distributions for factor in factors)


def form_of(spec: Spec) -> Form:
    """Return the form that executes the data axes of a legal spec."""
    layout, factors = spec.precision.layout, data_factors(spec)
    if places_frozen(spec):  # torch's wrappers have one placement for all parameters
        return Form.FLAT
    if layout.is_plain:
        if not factors:
            return Form.LOCAL
        # DDP rejects DTensors, which sharded operators have
        is_cut = spec.degree(Axis.TP) > 1 or _have_experts(factors)
        # DDP waits for autograd's accumulation, which a backward pass in halves does not run
        in_halves = spec.degree(Axis.PP) > 1 and spec.pipeline.is_in_halves
        if len(whole_axes(factors)) == len(factors) and not is_cut and not in_halves:
            return Form.REPLICATE
        # ZeroRedundancyOptimizer covers all tensors of one module, but a rank may have two stages
        is_one = not is_cut and spec.degree(Axis.PP) == 1
        if is_one and _fits_zero_redundancy(spec, factors):
            return Form.SPREAD_UPDATE
    # FSDP2 casts gradients to the dtype of their reduction, and back to the dtype of the shards.
    if layout.keeps_own_dtype and _is_inner_placement(factors, _FULLY_SHARDED):
        return Form.FULLY_SHARD
    is_made_of_masters = layout.gradients is layout.master and not layout.keeps_both
    # parameters that no axis shards have no separate masters from which experts could be cast
    is_made_of_masters &= _shards_experts(factors)
    if is_made_of_masters and _is_inner_placement(factors, _MATERIALIZED):
        return Form.MATERIALIZE
    return Form.FLAT


def _is_inner_placement(factors: tuple[Factor, ...], inner: tuple[Mode, Mode, Mode]) -> bool:
    """Return True if the innermost axes have these modes and all others replicate everything."""
    whole = whole_axes(factors)
    sharded = tuple(factor.axis for factor in factors if state_modes(factor) == inner)
    if not sharded or whole + sharded != tuple(factor.axis for factor in factors):
        return False
    # fully_shard needs an axis that shards; on axes that give ranks different experts, experts are
    # not sharded
    return any(axis not in EXPERT_AXES for axis in sharded) or not exclude_axes(whole, EXPERT_AXES)


def _shards_experts(factors: tuple[Factor, ...]) -> bool:
    """Return True if some axis shards experts, or if there are none.

    Axes along which ranks have different experts do not count.
    """
    whole = (*whole_axes(factors), *EXPERT_AXES)
    return not _have_experts(factors) or any(factor.axis not in whole for factor in factors)


def _have_experts(factors: tuple[Factor, ...]) -> bool:
    """Return True if ranks have different experts, whose gradients are reduced over fewer axes.

    One DistributedDataParallel reduces all gradients over the same ranks.
    """
    return any(factor.axis in EXPERT_AXES for factor in factors)


def _fits_zero_redundancy(spec: Spec, factors: tuple[Factor, ...]) -> bool:
    """Return True if torch's ZeroRedundancyOptimizer can execute the placement.

    It spreads the update over replicas, and updates the parameters themselves.
    """
    layout = spec.precision.layout
    return (
        [factor.axis for factor in factors] == [Axis.DP_REPLICATE]
        and state_modes(factors[0]) == _SPREAD_UPDATE
        and layout.master is None
        and layout.moments is layout.parameters
        and spec.optimizer.is_elementwise
        and spec.optimizer.is_uniform  # it assigns tensors to owners group by group
    )


# Support for frozen parameters, which are used but not trained.


def require_executed(spec: Spec, plan: Plan, facts: ModelFacts) -> None:
    """Require that frozen parameters are supported with this plan.

    Args:
        spec: The resolved spec.
        plan: The plan, some of whose axes and parts do not support frozen parameters.
        facts: The units of the model. If none has a frozen parameter, the spec must not place any.

    Raises:
        SpecError: Frozen parameters are not executed there, their memory and traffic are not
            derived, or the spec places frozen parameters and there are none.
    """
    frozen = [tensor.name for unit in facts.units for tensor in unit.frozen]
    require_any(spec, bool(frozen))
    if not frozen:
        return
    for where, names, remedy in (*_unsupported_axes(plan, frozen), *_untrained_parts(plan, facts)):
        raise _unsupported_error(where, names, remedy)


def require_any(spec: Spec, is_any: bool) -> None:
    """Require a frozen parameter if the spec places frozen parameters.

    Raises:
        SpecError: There is none.
    """
    if spec.frozen.is_written and not is_any:
        raise input_error(
            "frozen",
            "the model has no frozen parameter (requires_grad=False)",
            "Remove `frozen`, set `model.lora_rank`, or freeze parameters in your `model.target`.",
        )


_TAKE_IDLE = (Form.LOCAL, Form.FLAT)  # torch's wrappers expect a gradient in every stage
_Refusal = tuple[str, Sequence[str], str]  # place, names of parameters, remedy


def _unsupported_axes(plan: Plan, frozen: Sequence[str]) -> Iterator[_Refusal]:
    """Yield the axes with which frozen parameters are not supported yet."""
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


def _untrained_parts(plan: Plan, facts: ModelFacts) -> Iterator[_Refusal]:
    """Yield the units and stages without trained parameters that the form does not support."""
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


def _unsupported_error(where: str, frozen: Sequence[str], remedy: str) -> SpecError:
    """Return the error for frozen parameters that are not supported."""
    first, *others = frozen
    more = f" and {len(others)} more" if others else ""
    return input_error(
        "placement", f"not supported yet: frozen parameters {where}: {first}{more}", remedy
    )
