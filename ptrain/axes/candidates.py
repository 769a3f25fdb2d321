"""The search space of an axis: the degrees that it may have in a job, and its options at a degree.

An axis package (`axes/data`, `axes/tensor`, …) describes all of its axes at once. The search
combines one choice per package without knowledge of the axes, so a new axis only adds a space.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from ptrain.spec.activations import ActivationMode
from ptrain.spec.batch import Batch
from ptrain.spec.placement import DATA_AXES, Axis, Factor, Placement, Tier
from ptrain.spec.spec import Spec

# An option: the tuples of some axes, and fields of a spec with their values.
AxisOption = tuple[tuple[Placement, ...], tuple[tuple[str, Any], ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedChoices:
    """The parts of a candidate that the spec sets, so that no axis package chooses them.

    Attributes:
        degrees: Degrees by axis.
        tuples: Placement tuples by axis.
        values: Values by dotted field (`unit`, `sync.gradients`).
        kept: The modes in which blocks may keep activations.
    """

    degrees: tuple[tuple[Axis, int], ...] = ()
    tuples: tuple[tuple[Axis, Placement], ...] = ()
    values: tuple[tuple[str, Any], ...] = ()
    kept: tuple[ActivationMode, ...] = ()

    @property
    def overrides(self) -> tuple[str, ...]:
        """The tuples and fields that are set, in spec syntax."""
        placed = (f"placement.{axis}={placement}" for axis, placement in self.tuples)
        return (*placed, *(f"{path}={_value_text(value)}" for path, value in self.values))

    def degree(self, axis: Axis) -> int | None:
        """Return the degree that the spec sets for the axis, or None."""
        return dict(self.degrees).get(axis)

    def value(self, path: str, offered: Any) -> Any:
        """Return the value of a field: as set in the spec, otherwise as `offered`.

        If the spec sets fields inside it, they replace the fields of `offered`.
        """
        values: Mapping[str, Any] = dict(self.values)
        inner = {p.partition(".")[2]: v for p, v in values.items() if p.startswith(f"{path}.")}
        return values.get(path, replace(offered, **inner) if inner else offered)

    @property
    def offload_tier(self) -> Tier:
        """The tier to which a search offloads."""
        tier: Tier = self.value("offload.tier", Tier.HOST)
        return tier

    def sets_field(self, path: str) -> bool:
        """Return True if the spec sets a field whose dotted name starts with `path`."""
        return any(written.startswith(path) for written, _ in self.values)

    def degrees_to_try(self, axis: Axis, devices: int, offered: Iterable[int]) -> tuple[int, ...]:
        """Return the degrees to try for an axis.

        Args:
            axis: The axis.
            devices: The number of devices, which the degree must divide.
            offered: The degrees to try if the spec sets none.

        Returns:
            The degree that the spec sets, if it divides the devices (empty if not), or `offered`.
        """
        if (degree := self.degree(axis)) is None:
            return tuple(offered)
        return (degree,) if devices % degree == 0 else ()

    def agreeing_options(
        self, axes: tuple[Axis, ...], ways: Iterable[AxisOption], also: Iterable[str] = ()
    ) -> tuple[AxisOption, ...]:
        """Return the options on these axes that agree with the spec.

        If none agrees, all options are returned with the spec's tuples and values in place of
        theirs.

        Args:
            axes: The axes of the tuples in each option.
            ways: The options.
            also: Fields that no option sets, but that the spec may set.
        """
        ways = tuple(ways)
        more = tuple((path, value) for path, value in self.values if path in also)
        held = tuple(self._apply_written(axes, way) for way in ways)
        agreeing = tuple(way for way, other in zip(ways, held, strict=True) if way == other)
        return tuple(
            (placements, (*changes, *more))
            for placements, changes in dict.fromkeys(agreeing or held)
        )

    def _apply_written(self, axes: tuple[Axis, ...], way: AxisOption) -> AxisOption:
        tuples, (placements, changes) = dict(self.tuples), way
        return (
            tuple(tuples.get(axis, p) for axis, p in zip(axes, placements, strict=True)),
            tuple((name, self.value(name, offered)) for name, offered in changes),
        )


def _value_text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


NOTHING_FIXED = FixedChoices()


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisChoice:
    """A choice for some axes: their factors, and `changes` of other fields of the spec.

    If `follows_data_axis`, the factors place parameters, optimizer state and gradients like the
    innermost data axis, whatever its degree.
    """

    factors: tuple[Factor, ...] = ()
    changes: tuple[tuple[str, Any], ...] = field(default=(), hash=False)
    follows_data_axis: bool = False

    def degree(self, axis: Axis) -> int:
        """Return the number of ranks along an axis; 1 if the choice does not have it."""
        return next((factor.degree for factor in self.factors if factor.axis is axis), 1)

    @property
    def num_sharing_ranks(self) -> int:
        """The number of further ranks over which the data axis's states are sharded; 1 unless
        `follows_data_axis`."""
        return prod(factor.degree for factor in self.factors) if self.follows_data_axis else 1

    def placed_factors(self, states: Placement) -> Iterator[Factor]:
        """Yield the factors; if `follows_data_axis`, with the placement `states` except for
        activations."""
        for factor in self.factors:
            own = replace(states, activations=factor.placement.activations)
            yield factor._replace(placement=own) if self.follows_data_axis else factor


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisSpace:
    """The search space of an axis package.

    Attributes:
        axes: The axes of the package.
        sizes: Yields the numbers of ranks that the axes may take together, for a number of devices.
        choices: Yields the choices at a number of ranks that agree with the spec's written fields.
        tuples: The tuples that the search tries on each axis by default.
    """

    axes: tuple[Axis, ...]
    sizes: Callable[[Spec, int, FixedChoices], Iterable[int]]
    choices: Callable[[Spec, int, FixedChoices], Iterable[AxisChoice]]
    tuples: Mapping[Axis, tuple[Placement, ...]]


def single_axis_space(
    axis: Axis,
    sizes: Callable[[Spec, int, FixedChoices], Iterable[int]],
    ways: Callable[[Spec, int], Iterable[AxisOption]],
    tuples: tuple[Placement, ...],
    *,
    follows: bool = False,
) -> AxisSpace:
    """Return the search space of a package with one axis.

    Args:
        axis: The axis.
        sizes: Yields its possible degrees for a number of devices.
        ways: Yields the options at a degree.
        tuples: The tuples that the search tries by default.
        follows: True to place states like the innermost data axis, unless the spec sets the tuple.
    """

    def choices(spec: Spec, ranks: int, written: FixedChoices) -> Iterator[AxisChoice]:
        if ranks == 1:
            yield AxisChoice()
            return
        # A tuple in the spec takes precedence over the placement of the data axis.
        is_led = follows and axis not in dict(written.tuples)
        for (placement,), changes in written.agreeing_options((axis,), ways(spec, ranks)):
            factor = Factor(axis=axis, degree=ranks, placement=placement)
            yield AxisChoice(factors=(factor,), changes=changes, follows_data_axis=is_led)

    return AxisSpace(axes=(axis,), sizes=sizes, choices=choices, tuples={axis: tuples})


_ORDER = {axis: place for place, axis in enumerate(Axis)}


def apply_choices(spec: Spec, choices: Iterable[AxisChoice], batch: Batch | None = None) -> Spec:
    """Return the spec with one choice per package, axes in the order of `Axis`, outermost first.

    Args:
        spec: The spec that provides all other fields.
        choices: One choice per axis package.
        batch: A batch that replaces the spec's.
    """
    factors: list[Factor] = []
    changes: dict[str, Any] = {"batch": batch or spec.batch}
    choices = tuple(choices)
    states = (
        _data_placement(choices) if any(choice.follows_data_axis for choice in choices) else None
    )
    for choice in choices:
        own = choice.factors if states is None else choice.placed_factors(states)
        # An axis of one rank has no groups and no effect.
        factors += [factor for factor in own if factor.degree > 1]
        changes |= choice.changes
    factors.sort(key=lambda factor: _ORDER[factor.axis])
    return spec.with_fields(factors=tuple(factors), trivial_factors=(), **changes)


def _data_placement(choices: Iterable[AxisChoice]) -> Placement | None:
    """Return the placement on the innermost data axis, even if its degree is 1; None
    without one."""
    data = [f for choice in choices for f in choice.factors if f.axis in DATA_AXES]
    return max(data, key=lambda factor: _ORDER[factor.axis]).placement if data else None


def divisors(number: int) -> tuple[int, ...]:
    """Return the divisors of a number, in ascending order."""
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return tuple(sorted({*small, *(number // n for n in small)}))
