"""The space of a search: what each room offers, and which of it is legal together.

A product of choices is legal where `algebra.legality` says so. The rules are asked once for each
combination of choices whose degrees do not matter, on a spec with as little beside it as can be;
of what is left the whole candidate is asked before it is derived.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from functools import cached_property
from itertools import groupby
from math import prod

from ptrain.algebra.open_spec import Memo, OpenSpec, make_memos
from ptrain.axes.candidates import (
    NOTHING_FIXED,
    AxisChoice,
    AxisSpace,
    FixedChoices,
    apply_choices,
    divisors,
)
from ptrain.axes.context.attention import SPACE as CONTEXT_SPACE
from ptrain.axes.data.candidates import SPACE as DATA_SPACE
from ptrain.axes.data.candidates import is_left_out
from ptrain.axes.expert.form import SPACE as EXPERT_SPACE
from ptrain.axes.pipeline.catalogue import SPACE as PIPELINE_SPACE
from ptrain.axes.tensor.cost import SPACE as TENSOR_SPACE
from ptrain.derivation.kernels import takes_peak_of
from ptrain.derivation.layers import is_tabulated
from ptrain.facts.model import ModelFacts
from ptrain.plan.lower import built_in_facts
from ptrain.selection.recompute import with_micro
from ptrain.spec.activations import ATTENTION_ONLY, NAMED_POLICIES, PLAIN, ActivationMode
from ptrain.spec.batch import Batch
from ptrain.spec.model import ModelShape
from ptrain.spec.pipeline import PipelineSpec, ScheduleName
from ptrain.spec.placement import EXPERT_AXES, SAMPLE_AXES, Axis, Factor, Placement, R, S, Tier
from ptrain.spec.spec import ActivationSpec, Spec
from ptrain.units import grouped

# Rooms whose axes cut what a block computes; whatever they choose, a block's bytes and operators
# are derived with it, and the search knows nothing of it.
WITHIN: tuple[AxisSpace, ...] = (TENSOR_SPACE, CONTEXT_SPACE, EXPERT_SPACE)
SPACES = (DATA_SPACE, PIPELINE_SPACE, *WITHIN)
SEARCHED_AXES = tuple(axis for axis in Axis if any(axis in space.axes for space in SPACES))

_POLICIES = (policy for policy in NAMED_POLICIES.values() if policy != ATTENTION_ONLY)
KEPT = (
    PLAIN,
    *(ActivationMode(policy=policy) for policy in _POLICIES),
    ActivationMode(tier=Tier.HOST),
)
_MOST_MICRO = 2**9  # samples of a micro-batch
_ALL_UP_TO, _APART = 16, 1.25  # of larger micro-batches those that are a quarter apart


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One point of the space: a choice of each room, samples that a rank computes at once, and how
    blocks keep their activations."""

    within: tuple[AxisChoice, ...]
    pipeline: AxisChoice
    data: AxisChoice
    micro: int
    kept: ActivationMode

    def placed(self, base: Spec) -> Spec:
        """Return the base with these choices of all axes."""
        return apply_choices(base, (self.pipeline, self.data, *self.within))

    def spec(self, base: Spec) -> Spec:
        """Return the base with these choices, micro-batch and activations."""
        return kept_so(with_micro(self.placed(base), self.micro), self.kept)


def batched(spec: Spec, micro: int, number: int) -> Spec:
    """Return the spec with so many micro-batches of so many samples."""
    return spec.with_fields(batch=replace(spec.batch, micro=micro, accumulate=number))


def kept_so(spec: Spec, kept: ActivationMode) -> Spec:
    """Return the spec with all blocks' activations kept so."""
    return spec.with_fields(activations=ActivationSpec(default=kept))


def ways_to_keep(away: Tier) -> tuple[ActivationMode, ...]:
    """Return how blocks may keep activations, where what is off the device is on a tier."""
    return tuple(replace(kept, tier=away) if kept.tier is Tier.HOST else kept for kept in KEPT)


def inner_products(
    base: Spec, devices: int, written: FixedChoices = NOTHING_FIXED
) -> Iterator[tuple[int, tuple[AxisChoice, ...]]]:
    """Yield how many ranks the axes within a block take together, with a choice of each."""
    products: list[tuple[int, tuple[AxisChoice, ...]]] = [(1, ())]
    for space in WITHIN:
        products = [
            (ranks * size, (*choices, choice))
            for ranks, choices in products
            for size in space.sizes(base, devices // ranks, written)
            for choice in space.choices(base, size, written)
        ]
    yield from products


def micro_batches(base: Spec, data_ranks: int) -> Iterator[tuple[int, int]]:
    """Yield samples of a micro-batch, and how many of these a step has: the divisors of a rank's
    samples."""
    samples, left = divmod(base.batch.global_samples, data_ranks)
    if left or not samples:
        return
    yield from ((micro, samples // micro) for micro in divisors(samples) if micro <= _MOST_MICRO)


def apart(batches: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield the smaller of these micro-batches, and of the larger ones powers of two and those that
    are a quarter larger than the one before: of many divisors few fit, and neighbours are alike."""
    last = 0
    for micro, number in batches:
        is_power = micro & (micro - 1) == 0
        if micro <= _ALL_UP_TO or is_power or micro >= _APART * last:
            last = micro
            yield micro, number


class Through(Enum):
    """How a step goes through the ranks, as far as the other rooms see it."""

    ALONE = auto()
    WHOLE = auto()
    HALVES = auto()


@dataclass(frozen=True)
class Legality:
    """Which combinations of choices are legal and run, and are predicted. `scored`: the base whose
    tables are looked for, where those of its own are not."""

    base: Spec
    written: FixedChoices = NOTHING_FIXED
    scored: Spec | None = None
    open_specs: dict[tuple[object, ...], OpenSpec] = field(default_factory=dict)

    def pipeline(self, choice: AxisChoice, micro_batches: int) -> bool:
        """Of a schedule with so many micro-batches, of whole layers and no copies."""
        base = replace(self.base, routing=None)  # which is refused without the axes of experts
        batch = _batch(base, micro_batches, 1)
        kind = ("pipeline", choice.factors, choice.changes)
        if kind not in self.open_specs:
            self.open_specs[kind] = OpenSpec.with_open_fields(
                apply_choices(base, (choice,), batch), _NUMBERS
            )
        return self.open_specs[kind].is_sound(batch=batch)

    def within(
        self,
        choices: tuple[AxisChoice, ...],
        kept: ActivationMode,
        through: Through,
        *,
        several: bool,
    ) -> bool:
        """Of how blocks are cut and kept, of one sample or `several`; false too where no table
        tells what that allocates on the devices."""
        kind = ("within", choices, through)
        if (opened := self.open_specs.get(kind)) is None:
            tall = self._tall((THROUGH[through], *choices), _ENOUGH)
            opened = OpenSpec.with_open_fields(tall, ("activations", *_NUMBERS))
            self.open_specs[kind] = opened
        spec = kept_so(opened.spec, kept)
        spec = with_micro(spec, 2) if several else spec
        is_sound = opened.is_sound(activations=spec.activations, batch=spec.batch)
        return is_sound and self._is_predicted(spec)

    def _is_predicted(self, spec: Spec) -> bool:
        like = self._like(spec.with_fields(cluster=self.base.cluster))
        return is_tabulated(like) and not (
            like.is_for_cuda and not takes_peak_of(like, self._facts)
        )

    def data(
        self,
        choices: Iterable[AxisChoice],
        within: tuple[AxisChoice, ...],
        through: Through,
        *,
        many: bool,
    ) -> Iterator[AxisChoice]:
        """Yield which of these tuples and dials are legal, whatever the degrees are: beside axes
        within a block or none, and of one micro-batch or several. Not those of a dial that says
        what goes without saying."""
        number = _ENOUGH if many else 1
        for (_, names), alike in groupby(choices, _tuples_and_dials):
            first = next(alike)
            spec = self._tall((THROUGH[through], first, *within), number, self._even)
            opened = OpenSpec.with_open_fields(spec, names)
            if opened.rules is None:
                continue
            claims = [
                Memo(lambda spec: not is_left_out(spec, self.written), names),
                *make_memos(opened.rules, names),
            ]
            for choice in (first, *alike):
                values = dict(choice.changes)
                if all(claim.holds_of(opened.spec, values) for claim in claims):
                    yield choice

    @cached_property
    def _roomy(self) -> Spec:
        """The base with layers enough for any choices, on no cluster, which could have too few
        devices for them."""
        return replace(_with_layers(self.base), cluster=None)

    @cached_property
    def _facts(self) -> ModelFacts:
        """Those of the model that is scored, with room: no choice changes them but by its unit."""
        return built_in_facts(_with_layers(self.scored or self.base))

    @cached_property
    def _even(self) -> Spec:
        """The same with rows that any shards divide."""
        model = self._roomy.model
        if isinstance(model, ModelShape):
            vocab, ffn, width = (
                -(-rows // _ROWS) * _ROWS
                for rows in (model.vocab_rows, model.ffn, model.width_of_expert)
            )
            model = replace(model, vocab=vocab, vocab_multiple=1, ffn=ffn)
            model = replace(model, expert_ffn=model.expert_ffn and width)
        return replace(self._roomy, model=model)

    def _tall(
        self, choices: Iterable[AxisChoice], micro_batches: int, base: Spec | None = None
    ) -> Spec:
        choices = tuple(choices)
        ranks = prod(c.degree(axis) for c in choices for axis in SAMPLE_AXES)
        return apply_choices(base or self._roomy, choices, _batch(self.base, micro_batches, ranks))

    def _like(self, spec: Spec) -> Spec:
        """The spec as it is scored: what stands in for a model with experts has none."""
        if self.scored is None:
            return spec
        return without_experts(spec).with_fields(model=_with_layers(self.scored).model)


def without_experts(spec: Spec) -> Spec:
    """Return the spec without the axes along which ranks have experts of their own."""
    return spec.with_fields(factors=tuple(f for f in spec.factors if f.axis not in EXPERT_AXES))


def _with_layers(spec: Spec) -> Spec:
    """The spec with layers enough for any stages."""
    model = spec.model
    if isinstance(model, ModelShape) and model.layers < _LAYERS:
        model = replace(model, layers=_LAYERS)
    return replace(spec, model=model)


_LAYERS, _ENOUGH = 8, 4
_NUMBERS = ("batch.micro", "batch.accumulate", "batch.global_samples")
_ROWS = 2**12
STAGES = Placement(parameters=S, optimizer=S, gradients=S, activations=R)
_TWO = (Factor(axis=Axis.PP, degree=2, placement=STAGES),)
# Of each flow a schedule that takes any number of micro-batches.
THROUGH = {
    Through.ALONE: AxisChoice(changes=(("pipeline", PipelineSpec()),)),
    Through.WHOLE: AxisChoice(
        factors=_TWO, changes=(("pipeline", PipelineSpec(schedule=ScheduleName.GPIPE)),)
    ),
    Through.HALVES: AxisChoice(
        factors=_TWO, changes=(("pipeline", PipelineSpec(schedule=ScheduleName.ZBV)),)
    ),
}


def _batch(base: Spec, micro_batches: int, data_ranks: int) -> Batch:
    samples = micro_batches * data_ranks
    return replace(base.batch, micro=1, accumulate=micro_batches, global_samples=samples)


def _tuples_and_dials(choice: AxisChoice) -> tuple[tuple[Factor, ...], list[str]]:
    """A choice's tuples, and the names of its dials."""
    return choice.factors, [name for name, _ in choice.changes]


def through_of(choice: AxisChoice) -> Through:
    """Return how a step goes through the ranks of a choice of the pipeline's."""
    if not choice.factors:
        return Through.ALONE
    pipeline = next(value for name, value in choice.changes if name == "pipeline")
    return Through.HALVES if pipeline.is_in_halves else Through.WHOLE


def data_choices(
    base: Spec, written: FixedChoices = NOTHING_FIXED
) -> dict[tuple[Axis, ...], list[AxisChoice]]:
    """Return the choices of the data axes by the axes that they have, two ranks on each."""
    return grouped(
        (tuple(factor.axis for factor in choice.factors), choice)
        for power in range(len(DATA_SPACE.axes) + 1)
        for choice in DATA_SPACE.choices(base, 2**power, written)
        if all(factor.degree == 2 for factor in choice.factors)
    )


def sized(choice: AxisChoice, degrees: Sequence[int]) -> AxisChoice:
    """Return a choice with these degrees."""
    factors = zip(choice.factors, degrees, strict=True)
    own = tuple(factor._replace(degree=degree) for factor, degree in factors)
    return AxisChoice(
        factors=own, changes=choice.changes, follows_data_axis=choice.follows_data_axis
    )


def degrees_over(axes: int, ranks: int) -> Iterator[tuple[int, ...]]:
    """Yield every factorization of the ranks over so many axes, none of which has one alone."""
    if axes == 0 and ranks == 1:
        yield ()
    for first in divisors(ranks)[1:] if axes else ():
        yield from ((first, *rest) for rest in degrees_over(axes - 1, ranks // first))


def pipelines(
    base: Spec, ranks: int, written: FixedChoices = NOTHING_FIXED
) -> Iterator[tuple[int, tuple[AxisChoice, ...]]]:
    """Yield how many of so many ranks are left to the data axes, with the choices of the
    pipeline that leave these."""
    for size in PIPELINE_SPACE.sizes(base, ranks, written):
        yield ranks // size, tuple(PIPELINE_SPACE.choices(base, size, written))
