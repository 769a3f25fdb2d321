"""What the choices of the data axes say, one by one, whatever their degrees are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ptrain.axes.candidates import AxisChoice, chosen
from ptrain.axes.data.form import (
    form_of,
    has,
    joins_units,
    reduces_in_backward,
    tier_of,
    when_gathered,
)
from ptrain.costs import State
from ptrain.spec.dials import GatherAfterUpdate, GradientSync, UnitKind, UnitSize
from ptrain.spec.placement import CUT, Distribution, Factor, Tier
from ptrain.spec.spec import Spec
from ptrain.steps.wraps import Form

_THETA, _OMEGA, _GRADS = State.PARAMETERS, State.OPTIMIZER, State.GRADIENTS
SUB_BLOCK, _BUCKET, _MODEL = 2, 3, 4  # of what is joined layers follow from the sizes
_OF_KIND = {
    UnitKind.BLOCK: 0,
    UnitKind.BLOCKS: 1,
    UnitKind.SUB_BLOCK: SUB_BLOCK,
    UnitKind.MODEL: _MODEL,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DataWay:
    """What one choice says, whatever its degrees are: `cut` by state which of its axes cut it."""

    choice: AxisChoice
    form: Form
    cut: dict[State, tuple[bool, ...]]
    near: dict[State, bool]
    is_on_file: bool  # Omega
    is_made: bool
    is_brought: bool
    is_late: bool
    said_unit: UnitSize | None
    unit: int
    keeps_forward: bool
    keeps_backward: bool
    overlaps: bool
    gathers_beside: bool  # the update of other units
    ahead: int
    is_copied_back: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class FormOfTuples:
    """What tuples say by themselves, whatever the dials are; they have their form beside others."""

    factors: tuple[Factor, ...]
    form: Form
    cut: dict[State, tuple[bool, ...]]
    near: dict[State, bool]
    is_on_file: bool
    is_made: bool

    @classmethod
    def of(cls, spec: Spec, factors: tuple[Factor, ...]) -> FormOfTuples:
        """Return what those of some factors say that a spec has."""
        cut = {
            state: tuple(f.placement[state].distribution in CUT for f in factors)
            for state in (_THETA, _OMEGA, _GRADS)
        }
        return cls(
            factors=factors,
            form=form_of(spec),
            cut=cut,
            near={state: tier_of(factors, state) is Tier.DEVICE for state in cut},
            is_on_file=tier_of(factors, _OMEGA) is Tier.FILE,
            is_made=has(factors, _THETA, Distribution.MATERIALIZED),
        )


def ways_of(
    base: Spec, choices: Iterable[AxisChoice], beside: Sequence[AxisChoice]
) -> Iterator[DataWay]:
    """Yield what choices say beside others, which decide by which form they are executed."""
    said: FormOfTuples | None = None
    for choice in choices:
        spec = chosen(base, (choice, *beside))
        if said is None or said.factors is not choice.factors:
            said = FormOfTuples.of(spec, choice.factors)
        is_brought = said.is_made or any(said.cut[_THETA]) or not said.near[_THETA]
        unit = _BUCKET if joins_units(spec, said.form) else _OF_KIND[spec.unit_size.kind]
        ahead = (spec.prefetch or 0) if said.form is Form.FLAT else int(is_brought)
        yield DataWay(
            choice=choice,
            form=said.form,
            cut=said.cut,
            near=said.near,
            is_on_file=said.is_on_file,
            is_made=said.is_made,
            is_brought=is_brought,
            is_late=spec.sync.gradients is GradientSync.LAST,
            said_unit=spec.unit,
            unit=unit,
            keeps_forward=is_brought and not spec.sync.reshard_after_forward,
            keeps_backward=is_brought and not spec.sync.reshard_after_backward,
            overlaps=reduces_in_backward(spec, said.form, keeps_parts=any(said.cut[_GRADS])),
            gathers_beside=said.form is Form.FLAT
            and when_gathered(spec) is GatherAfterUpdate.DURING_UPDATE,
            ahead=0 if unit == _MODEL else ahead,
            is_copied_back=spec.offload.update is Tier.DEVICE,
        )
