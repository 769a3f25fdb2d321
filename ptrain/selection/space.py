"""The space of a search: what each room offers, and which of it is legal together.

A product of choices is legal where `algebra.legality` says so. No rule looks at all that a candidate
is made of, so that the rules are asked once for each combination of what they look at, on a spec
with as little beside it as can be, and not once for each candidate.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from ptrain.algebra.legality import check, executed
from ptrain.axes.candidates import AxisChoice, AxisSpace, chosen
from ptrain.axes.data.candidates import SPACE as DATA_SPACE
from ptrain.axes.data.candidates import says_the_usual
from ptrain.axes.pipeline.candidates import SPACE as PIPELINE_SPACE
from ptrain.axes.tensor.candidates import SPACE as TENSOR_SPACE
from ptrain.derivation.activations import is_tabulated
from ptrain.spec.activations import FULL, PLAIN, SELECTIVE, Kept
from ptrain.spec.axis import Axis, Factor
from ptrain.spec.model import ModelShape
from ptrain.spec.pipeline import PipelineSpec, ScheduleName
from ptrain.spec.placement import S_STAR, Distribution, Placement, R, S, Tier
from ptrain.spec.spec import ActivationSpec, Spec

# Rooms whose axes cut what a block computes; whatever they choose, a block's bytes and operators
# are derived with it, and the search knows nothing of it.
WITHIN: tuple[AxisSpace, ...] = (TENSOR_SPACE,)

KEPT = (PLAIN, Kept(policy=SELECTIVE), Kept(policy=FULL), Kept(tier=Tier.HOST))
_MICRO = tuple(2**power for power in range(10))


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One point of the space: a choice of each room, samples that a rank computes at once, and how
    blocks keep their activations."""

    within: tuple[AxisChoice, ...]
    pipeline: AxisChoice
    data: AxisChoice
    micro: int
    kept: Kept

    def spec(self, base: Spec) -> Spec:
        """Return the base with this in it."""
        spec = chosen(base, (self.pipeline, self.data, *self.within))
        return kept_so(with_batch(spec, self.micro), self.kept)


def with_batch(spec: Spec, micro: int) -> Spec:
    """Return the spec with its samples in micro-batches of so many."""
    accumulate = max(1, spec.batch.global_samples // (micro * spec.data_degree))
    return replace(spec, batch=replace(spec.batch, micro=micro, accumulate=accumulate))


def kept_so(spec: Spec, kept: Kept) -> Spec:
    """Return the spec with all blocks' activations kept so."""
    return replace(spec, activations=ActivationSpec(default=kept))


def inner_products(base: Spec, devices: int) -> Iterator[tuple[int, tuple[AxisChoice, ...]]]:
    """Yield how many ranks the axes within a block take together, with a choice of each."""
    products: list[tuple[int, tuple[AxisChoice, ...]]] = [(1, ())]
    for space in WITHIN:
        products = [
            (ranks * size, (*choices, choice))
            for ranks, choices in products
            for size in space.sizes(base, devices // ranks)
            for choice in space.choices(base, size)
        ]
    yield from products


def micro_batches(base: Spec, data_ranks: int) -> Iterator[tuple[int, int]]:
    """Yield samples of a micro-batch, and how many of these a step has: powers of two, and all of a
    rank's samples at once."""
    samples, left = divmod(base.batch.global_samples, data_ranks)
    if left or not samples:
        return
    yield from ((micro, samples // micro) for micro in _MICRO if samples % micro == 0)


class Flow:
    """How a step goes through the ranks, as far as the data axes see it."""

    ALONE, WHOLE, HALVES = range(3)


@dataclass(frozen=True)
class Legality:
    """Which combinations of choices are legal and run, and are predicted. Each question is asked
    once."""

    base: Spec
    known: dict[tuple[object, ...], bool] = field(default_factory=dict)

    def pipeline(self, choice: AxisChoice, micro_batches: int) -> bool:
        """Of a schedule with so many micro-batches, of whole layers and no copies."""
        key = ("pipeline", choice, choice.changes, micro_batches)
        return self._asked(key, _sized(chosen(self.base, (choice,)), micro_batches))

    def within(self, choices: tuple[AxisChoice, ...], kept: Kept, flow: int) -> bool:
        """Of how blocks are cut and kept; false too where no table tells what that allocates."""
        spec = chosen(self._tall, (_FLOWS[flow], *choices))
        spec = kept_so(_sized(spec, _ENOUGH), kept)
        key = ("within", choices, kept, flow)
        return is_tabulated(spec) and self._asked(key, spec)

    def data(self, choice: AxisChoice, *, is_cut: bool, flow: int, many: bool) -> bool:
        """Of tuples and dials, whatever the degrees are: beside an axis within a block or none, and
        of one micro-batch or several."""
        factors = tuple(replace(factor, degree=2) for factor in choice.factors)
        small = replace(choice, factors=factors)
        key = ("data", factors, choice.changes, is_cut, flow, many)
        if key in self.known:
            return self.known[key]
        spec = chosen(self._tall, (_FLOWS[flow], small, *(self._cut if is_cut else ())))
        spec = _sized(spec, _ENOUGH if many else 1)
        return self._asked(key, spec) and not self._is_usual(key, spec)

    def _is_usual(self, key: tuple[object, ...], spec: Spec) -> bool:
        if says_the_usual(spec):
            self.known[key] = False
            return True
        return False

    def shards(self, choices: tuple[AxisChoice, ...], shards: int) -> bool:
        """Of tensors that are cut within a block and into so many shards over the data axes, each
        by its rows."""
        if shards == 1 or not choices:
            return True
        placement = Placement(parameters=S_STAR, optimizer=S, gradients=S)
        factor = Factor(axis=Axis.DP_SHARD, degree=shards, placement=placement)
        spec = chosen(self._tall, (AxisChoice(factors=(factor,)), *choices))
        return self._asked(("shards", choices, shards), _sized(spec, 1))

    @property
    def _tall(self) -> Spec:
        """With layers enough for any flow."""
        model = self.base.model
        is_low = isinstance(model, ModelShape) and model.layers < _LAYERS
        return replace(self.base, model=replace(model, layers=_LAYERS)) if is_low else self.base

    @property
    def _cut(self) -> tuple[AxisChoice, ...]:
        """The smallest cut of a block that is one."""
        products = inner_products(self.base, self.base.cluster.devices if self.base.cluster else 8)
        return min(
            ((ranks, choices) for ranks, choices in products if ranks > 1),
            key=lambda product: product[0],
            default=(1, ()),
        )[1]

    def _asked(self, key: tuple[object, ...], spec: Spec) -> bool:
        if key not in self.known:
            spec = replace(spec, cluster=None, device="cuda" if spec.is_for_cuda else spec.device)
            self.known[key] = not (check(spec) or executed(spec))
        return self.known[key]


_LAYERS, _ENOUGH = 8, 4
_STAGES = Placement(parameters=S, optimizer=S, gradients=S, activations=R)
_TWO = (Factor(axis=Axis.PP, degree=2, placement=_STAGES),)
# Of each flow a schedule that takes any number of micro-batches.
_FLOWS = {
    Flow.ALONE: AxisChoice(changes=(("pipeline", PipelineSpec()),)),
    Flow.WHOLE: AxisChoice(
        factors=_TWO, changes=(("pipeline", PipelineSpec(schedule=ScheduleName.GPIPE)),)
    ),
    Flow.HALVES: AxisChoice(
        factors=_TWO, changes=(("pipeline", PipelineSpec(schedule=ScheduleName.ZBV)),)
    ),
}


def _sized(spec: Spec, micro_batches: int) -> Spec:
    batch = replace(
        spec.batch,
        micro=1,
        accumulate=micro_batches,
        global_samples=micro_batches * spec.data_degree,
    )
    return replace(spec, batch=batch)


def flow_of(choice: AxisChoice) -> int:
    """Return the flow of a choice of the pipeline's."""
    if not choice.factors:
        return Flow.ALONE
    pipeline = next(value for name, value in choice.changes if name == "pipeline")
    return Flow.HALVES if pipeline.is_in_halves else Flow.WHOLE


def row_shards(choice: AxisChoice) -> int:
    """Return over how many data ranks parameters are cut."""
    shards = 1
    for factor in choice.factors:
        if factor.placement.parameters.distribution is not Distribution.REPLICATED:
            shards *= factor.degree
    return shards


def outer_products(
    base: Spec, ranks: int
) -> Iterator[tuple[int, int, Iterable[AxisChoice], Iterable[AxisChoice]]]:
    """Yield how many of so many ranks the pipeline takes, how many are left to the data axes, and
    the choices of both."""
    for size in PIPELINE_SPACE.sizes(base, ranks):
        left = ranks // size
        if left in DATA_SPACE.sizes(base, left):
            yield size, left, PIPELINE_SPACE.choices(base, size), DATA_SPACE.choices(base, left)
