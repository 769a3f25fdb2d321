"""The space of a search: the choices of each axis space, and the combinations of them that are
legal.

A product of choices is legal if `algebra.legality` has no objection. The rules run once for each
combination of choices whose degrees do not matter, on a spec with as few other choices as possible.
The full candidate is checked again before it is derived.

The fields that a rule reads are not declared but observed (`Memo`, `OpenSpec`). A rule is a
function of the spec alone, so it takes the same path through two specs that are equal in the fields
that it has read so far.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum, auto
from functools import cache, cached_property
from itertools import groupby
from math import prod
from typing import Any, NoReturn

from ptrain.algebra.legality import (
    LEGALITY_CHECKS,
    SUPPORT_CHECKS,
    FaultsOf,
    breaks_none,
    is_sound,
)
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
from ptrain.units import group_by_key

# Spaces whose axes shard the operators of a block. The bytes and operators of a block are derived
# with their choice, so the search needs no formula for them.
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
# All micro-batches up to 16 samples are tried, and of larger ones those that are a quarter apart:
# neighbours have nearly equal figures, and the descent tries the divisors next to the best one.
_ALL_UP_TO, _APART = 16, 1.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One point of the space.

    Attributes:
        within: The choices of the axes within a block.
        pipeline: The choice of the pipeline.
        data: The choice of the data axes.
        micro: Samples of a micro-batch.
        kept: How blocks keep their activations.
    """

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
    """Return the spec with `number` micro-batches of `micro` samples."""
    return spec.with_fields(batch=replace(spec.batch, micro=micro, accumulate=number))


def kept_so(spec: Spec, kept: ActivationMode) -> Spec:
    """Return the spec with this activation mode for all blocks."""
    return spec.with_fields(activations=ActivationSpec(default=kept))


def ways_to_keep(away: Tier) -> tuple[ActivationMode, ...]:
    """Return the activation modes that a search tries, with offloaded activations on the tier
    `away`."""
    return tuple(replace(kept, tier=away) if kept.tier is Tier.HOST else kept for kept in KEPT)


def inner_products(
    base: Spec, devices: int, written: FixedChoices = NOTHING_FIXED
) -> Iterator[tuple[int, tuple[AxisChoice, ...]]]:
    """Yield the number of ranks of the axes within a block, and a choice of each of these axes.

    Args:
        base: The spec of the job.
        devices: The number of devices.
        written: The choices that the spec sets.
    """
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
    """Yield the samples of a micro-batch and the number of micro-batches in a step. The samples are
    the divisors of a rank's samples, up to 512."""
    samples, left = divmod(base.batch.global_samples, data_ranks)
    if left or not samples:
        return
    yield from ((micro, samples // micro) for micro in divisors(samples) if micro <= _MOST_MICRO)


def apart(batches: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield some of these micro-batches: all small ones, all powers of two, and larger ones that
    differ by at least a quarter."""
    last = 0
    for micro, number in batches:
        is_power = micro & (micro - 1) == 0
        if micro <= _ALL_UP_TO or is_power or micro >= _APART * last:
            last = micro
            yield micro, number


class Through(Enum):
    """The flow of a step through the ranks, as far as it matters to other choices: without a
    pipeline, with a pipeline, or with one whose backward passes run in halves."""

    ALONE = auto()
    WHOLE = auto()
    HALVES = auto()


@dataclass(frozen=True)
class Legality:
    """The check if combinations of choices are legal, supported and predicted.

    Attributes:
        base: The spec of the job.
        scored: The spec whose tables are used: the base, or the one with a stand-in.
        written: The choices that the spec sets.
    """

    base: Spec
    scored: Spec
    written: FixedChoices = NOTHING_FIXED

    def pipeline(self, choice: AxisChoice, micro_batches: int) -> bool:
        """Return True if a pipeline choice is legal with this number of micro-batches, without
        other axes."""
        # illegal without the axes of experts, and without the devices of the other axes
        base = replace(self.base, routing=None, cluster=None)
        return is_sound(apply_choices(base, (choice,), _batch(base, micro_batches, 1)))

    def within(
        self,
        choices: tuple[AxisChoice, ...],
        kept: ActivationMode,
        through: Through,
        *,
        several: bool,
    ) -> bool:
        """Return True if choices within a block are legal and predicted.

        Args:
            choices: The choices.
            kept: How blocks keep their activations.
            through: The flow of a step through the ranks.
            several: True if a micro-batch has several samples.
        """
        spec = kept_so(self._tall((THROUGH[through], *choices), _ENOUGH), kept)
        spec = with_micro(spec, 2) if several else spec
        return is_sound(spec) and self._is_predicted(spec)

    def _is_predicted(self, spec: Spec) -> bool:
        like = without_experts(spec)
        like = like.with_fields(cluster=self.base.cluster, model=_with_layers(self.scored).model)
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
        """Yield the legal choices of the data axes. Dials with their default value are left out.

        Args:
            choices: The choices. Their degrees do not matter.
            within: The choices within a block, or none.
            through: The flow of a step through the ranks.
            many: True if a step has several micro-batches.
        """
        number = _ENOUGH if many else 1
        # Adjacent choices with equal tuples and dials share a spec. Only the rules that read the
        # dials are checked again for each of them.
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
        """The base with enough layers for any choice. It has no cluster, which could have too few
        devices."""
        return replace(_with_layers(self.base), cluster=None)

    @cached_property
    def _facts(self) -> ModelFacts:
        """The facts of the model that is scored, with enough layers. Choices do not change them."""
        return built_in_facts(_with_layers(self.scored))

    @cached_property
    def _even(self) -> Spec:
        """The base with dimensions that any number of shards divides."""
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


def without_experts(spec: Spec) -> Spec:
    """Return the spec without the axes over which experts are distributed."""
    return spec.with_fields(factors=tuple(f for f in spec.factors if f.axis not in EXPERT_AXES))


def _with_layers(spec: Spec) -> Spec:
    """Return the spec with enough layers for any stages."""
    model = spec.model
    if isinstance(model, ModelShape) and model.layers < _LAYERS:
        model = replace(model, layers=_LAYERS)
    return replace(spec, model=model)


# Two layers for each of the stages below, and more micro-batches than their ranks. Both schedules
# accept these, so legality depends on the choices alone.
_LAYERS, _ENOUGH = 8, 4
_ROWS = 2**12  # a multiple of all smaller powers of two of shards
STAGES = Placement(parameters=S, optimizer=S, gradients=S, activations=R)
_TWO = (Factor(axis=Axis.PP, degree=2, placement=STAGES),)
# A schedule for each flow that accepts any number of micro-batches.
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
    """Return the tuples of a choice, and the names of its dials."""
    return choice.factors, [name for name, _ in choice.changes]


def through_of(choice: AxisChoice) -> Through:
    """Return the flow of a step through the ranks of a pipeline choice."""
    if not choice.factors:
        return Through.ALONE
    pipeline = next(value for name, value in choice.changes if name == "pipeline")
    return Through.HALVES if pipeline.is_in_halves else Through.WHOLE


def data_choices(
    base: Spec, written: FixedChoices = NOTHING_FIXED
) -> dict[tuple[Axis, ...], list[AxisChoice]]:
    """Return the choices of the data axes by their axes, with two ranks on each axis."""
    return group_by_key(
        (tuple(factor.axis for factor in choice.factors), choice)
        # Degrees are set later (`sized`). Two ranks on each of n axes are 2^n ranks.
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
    """Yield every factorization of `ranks` over `axes` axes, with at least two ranks on each."""
    if axes == 0 and ranks == 1:
        yield ()
    for first in divisors(ranks)[1:] if axes else ():
        yield from ((first, *rest) for rest in degrees_over(axes - 1, ranks // first))


def pipelines(
    base: Spec, ranks: int, written: FixedChoices = NOTHING_FIXED
) -> Iterator[tuple[int, tuple[AxisChoice, ...]]]:
    """Yield the number of ranks that remain for the data axes, and the pipeline choices that leave
    it.

    Args:
        base: The spec of the job.
        ranks: The number of ranks without those of axes within a block.
        written: The choices that the spec sets.
    """
    for size in PIPELINE_SPACE.sizes(base, ranks, written):
        yield ranks // size, tuple(PIPELINE_SPACE.choices(base, size, written))


# -- rules that are evaluated as rarely as possible

_READ, _BATCH = "fields that were read", "batch."


@dataclass(frozen=True, slots=True)
class OpenSpec:
    """A spec without cluster that has undecided fields, and the `rules` that read some of them.

    All other rules have been checked already; `rules` is None if one of those is broken.
    """

    spec: Spec
    rules: tuple[FaultsOf, ...] | None

    @classmethod
    def with_open_fields(cls, spec: Spec, names: Iterable[str]) -> OpenSpec:
        """Return the open spec in which the fields `names` are undecided.

        Args:
            spec: The spec that provides all other fields.
            names: Names of fields such as `unit`, or of batch fields such as `batch.accumulate`.
        """
        # A cluster limits the number of devices, which undecided degrees would exceed or not.
        spec = spec.with_fields(cluster=None)
        return cls(spec, _find_open_rules(spec, frozenset(names)))

    def is_sound(self, **changes: Any) -> bool:
        """Return True if the spec with these values for its undecided fields is legal and
        can run."""
        return self.rules is not None and breaks_none(self.spec.with_fields(**changes), self.rules)


class Memo:
    """A memoized claim about specs that differ only in the fields `names`.

    It is evaluated once per combination of values of the fields that it reads.
    """

    def __init__(self, claim: Callable[[Spec], bool], names: Iterable[str]) -> None:
        self._claim, self._names = claim, frozenset(names)
        # By the fields that were read, then by the ids of their values. The values are stored, too,
        # because the id of a freed object can be reused.
        self._known: dict[tuple[str, ...], dict[tuple[int, ...], tuple[bool, list[Any]]]] = {}

    def holds_of(self, spec: Spec, values: Mapping[str, Any]) -> bool:
        """Return True if the claim holds for `spec` with other `values` for the fields of this
        memo.

        Args:
            spec: The spec that provides all other fields, which must be equal in all calls.
            values: The values of all fields of this memo. They are compared by identity.
        """
        # A rule takes few different paths, so that a few sets of names cover all calls.
        for names, known in self._known.items():
            answer = known.get(tuple([id(values[name]) for name in names]))
            if answer is not None:
                return answer[0]
        noting = _copy_as(_recording_spec(self._names), spec)
        read: list[str] = []
        noting.__dict__.update(values, **{_READ: read})
        is_so = self._claim(noting)
        names = tuple(dict.fromkeys(read))
        answer = is_so, [values[name] for name in names]
        self._known.setdefault(names, {})[tuple(map(id, answer[1]))] = answer
        return answer[0]


def make_memos(rules: Iterable[FaultsOf], names: Iterable[str]) -> list[Memo]:
    """Return a memo per rule: the claim that specs which differ in these fields do not break it."""

    def claim(faults: FaultsOf) -> Callable[[Spec], bool]:
        return lambda spec: breaks_none(spec, (faults,))

    return [Memo(claim(faults), names) for faults in rules]


def _find_open_rules(spec: Spec, names: frozenset[str]) -> tuple[FaultsOf, ...] | None:
    """Return the rules that read an undecided field, or None if another rule is broken.

    A rule that reads no undecided field has the same result for all values of these fields.
    """
    silent, looking = _hide_fields(spec, names), []
    for faults in (*LEGALITY_CHECKS, *SUPPORT_CHECKS):
        try:
            if not breaks_none(silent, (faults,)):
                return None
        except _WithheldError:
            looking.append(faults)
    return tuple(looking)


def _copy_as(kind: type[Spec], spec: Spec) -> Spec:
    """Return a copy of the spec as an instance of a subclass, without calling `__init__`."""
    other = object.__new__(kind)
    other.__dict__.update(spec.__dict__)
    return other


class _WithheldError(Exception):
    """Raised when a rule reads an undecided field."""


def _hide_fields(spec: Spec, names: frozenset[str]) -> Spec:
    """Return the spec with undecided fields, of it or of its batch, that raise when they
    are read."""
    of_batch = {name for name in names if name.startswith(_BATCH)}
    silent = _copy_as(_silent_spec(names - of_batch), spec)
    if of_batch:
        parts = frozenset(name.removeprefix(_BATCH) for name in of_batch)
        batch = object.__new__(_silent_batch(parts))
        for part in fields(Batch):
            if part.name not in parts:
                object.__setattr__(batch, part.name, getattr(spec.batch, part.name))
        silent.__dict__["batch"] = batch
    return silent


@cache
def _silent_spec(names: frozenset[str]) -> type[Spec]:
    return type("_SilentSpec", (Spec,), _hidden_properties(names))


@cache
def _silent_batch(names: frozenset[str]) -> type[Batch]:
    return type("_SilentBatch", (Batch,), _hidden_properties(names))


def _hidden_properties(names: Iterable[str]) -> dict[str, Any]:
    """Return properties for these names that raise `_WithheldError`."""

    def refuse(_: object) -> NoReturn:
        raise _WithheldError

    return dict.fromkeys(names, property(refuse))


@cache
def _recording_spec(names: frozenset[str]) -> type[Spec]:
    """Return a subclass of Spec that records reads of these fields."""

    def noted(name: str) -> property:
        def value(spec: Spec) -> Any:
            spec.__dict__[_READ].append(name)
            return spec.__dict__[name]

        return property(value)

    return type("_NotingSpec", (Spec,), {name: noted(name) for name in names})
