"""What a rank computes of one micro-batch, operator by operator: of a built-in model from the
committed tables (`traces.work_tables` makes them), of any other from its own traces.

Layers that are alike share one work, so that who adds up times adds up by kind of layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import groupby
from typing import Any, NamedTuple

from ptrain.axes.context.attention import ContextKind, ContextPart
from ptrain.cost import Collective
from ptrain.derivation import archive, blocks, tables
from ptrain.derivation.archive import TablePart
from ptrain.derivation.layers import is_tabulated
from ptrain.derivation.operations import setting_at
from ptrain.derivation.tables import Monomial, Setting, monomials
from ptrain.facts.model import (
    InnerCollective,
    LayerWork,
    ModelFacts,
    ModelWork,
    Operator,
    PassWork,
    WorkByKind,
)
from ptrain.spec.activations import PLAIN, Kept
from ptrain.spec.model import Attention, ModelShape
from ptrain.spec.precision import DType
from ptrain.spec.rates import OperatorKind
from ptrain.spec.spec import Spec
from ptrain.steps.step import Plan

_COLLECTIVES = {collective.value for collective in Collective}
_DROPS_IN_PARTS = "no table has the work of dropout on GPUs with sharded operators"
_FUSED_LOSS = "torch's fused loss is one operator, whose work is unknown"
_NO_TABLE = "the operators of the model are unknown: there is no table and no trace"


def model_work(spec: Spec, plan: Plan, facts: ModelFacts, index: int = 0) -> ModelWork | None:
    """Return what the rank at place `index` along the cutting axes computes of each layer of the
    model, in front of them and behind them; None where `why_unknown` says why."""
    if (traced := _traced(plan, facts, index)) is not None:
        return traced.model
    if why_unknown(spec, plan, facts):
        return None
    assert isinstance(spec.model, ModelShape), "a built-in model"
    setting = setting_at(spec, plan, index)
    activations, layers = spec.activations, spec.model.layers
    kept, modes = activations.of(layers), activations.distinct_of(layers)
    # copies between tiers are no operators: whatever the tier, the layer computes the same
    of_layer = {id(mode): _layer(setting, Kept(policy=mode.policy)) for mode in modes}
    front, behind = _ends(setting.without_context, is_staged=plan.pipeline is not None)
    return ModelWork(front=front, layers=tuple(of_layer[id(mode)] for mode in kept), behind=behind)


def why_unknown(spec: Spec, plan: Plan, facts: ModelFacts) -> str:
    """Return why nobody knows which operators the model runs; empty where tables or traces tell."""
    if _traced(plan, facts, 0) is not None:
        return ""
    shape = spec.model
    is_known = plan.context is None or is_tabulated(spec)
    if not isinstance(shape, ModelShape) or spec.loss.user_function or not is_known:
        return _NO_TABLE
    modes = spec.activations.distinct_of(shape.layers)
    if spec.loss.fused:
        return _FUSED_LOSS
    if spec.loss.chunk and (spec.tensor.is_naive or spec.pipeline.is_in_halves):
        return _NO_TABLE
    if not all(blocks.is_known(shape, mode) for mode in modes):
        return _NO_TABLE
    is_cut = plan.tensor is not None
    return _DROPS_IN_PARTS if spec.is_for_cuda and shape.drops and is_cut else ""


def _traced(plan: Plan, facts: ModelFacts, index: int) -> WorkByKind | None:
    """What was traced of the ranks at this place along the cutting axes, if something was."""
    if facts.part_works:
        return facts.part_works[index]
    is_cut = plan.cutting_axes or plan.pipeline is not None
    return None if is_cut else facts.work


class _Listed(NamedTuple):
    """An operator or a collective as a table has it: `sizes` are numbers; no dtype means that in
    which the model computes; `axis` and `is_whole` as of these."""

    kind: OperatorKind | Collective
    dtype: DType | None
    sizes: tuple[int, ...]
    axis: str = ""
    is_whole: bool = False

    def at(self, sizes: Sequence[int], compute: DType) -> Operator | InnerCollective:
        """Return it where a table's sizes are these."""
        own = tuple([sizes[number] for number in self.sizes])
        if isinstance(self.kind, Collective):
            return InnerCollective(self.kind, own[0], axis=self.axis)
        dimensions = (sum(own),) if self.kind.is_of_bytes else own
        return Operator(self.kind, self.dtype or compute, dimensions, is_whole=self.is_whole)


class _WorkTable(NamedTuple):
    """A way of a table; `passes` are lists of operators by their numbers."""

    content: Mapping[str, Any]
    sizes: tuple[Monomial, ...]
    operators: tuple[_Listed, ...]
    passes: tuple[tuple[int, ...], ...]

    @classmethod
    def read(cls, content: Mapping[str, Any]) -> _WorkTable:
        """Return a table as it is written."""
        return cls(
            content,
            monomials(dict(content)),
            tuple(
                _Listed(
                    Collective(name) if name in _COLLECTIVES else OperatorKind(name),
                    DType(dtype) if dtype else None,
                    tuple(sizes),
                    *more,
                )
                for name, dtype, sizes, *more in content["operators"]
            ),
            tuple(map(tuple, content.get("parts", ()))),
        )


@cache
def _table(part: TablePart, name: str, way: str) -> _WorkTable:
    content = archive.table(part, name)[way]
    return _WorkTable.read(content["work"] if part is TablePart.CONTEXT else content)


class _Evaluated:
    """A table at a setting's dimensions."""

    def __init__(self, part: TablePart, setting: Setting, values: Mapping[str, int]) -> None:
        self.table = _table(part, setting.name(part), setting.way(part))
        self._compute = setting.compute
        self._sizes = [size.bytes(values, self._compute.itemsize) for size in self.table.sizes]
        # Of what is equal at these dimensions one object, so that a look at it is enough.
        self._distinct: dict[Operator | InnerCollective, Operator | InnerCollective] = {}
        self._known: dict[int, Operator | InnerCollective] = {}
        self._repeated: dict[tuple[int, int], Operator | InnerCollective] = {}

    def work(self, numbers: Mapping[str, int]) -> LayerWork:
        """Return the passes with these numbers."""
        return LayerWork(**{name: self.of_pass([number]) for name, number in numbers.items()})

    def of_pass(self, numbers: Iterable[int]) -> PassWork:
        """Return the operators of parts one after the other, equal ones in a row as one."""
        parts = (self.table.passes[number] for number in numbers)
        of_pass = (self._operator(operator) for part in parts for operator in part)
        runs = ([*alike] for _, alike in groupby(of_pass, id))
        return tuple([self._times(run[0], len(run)) for run in runs])

    def of_groups(self, groups: Iterable[Sequence[int]], ranks: int) -> PassWork:
        """Return operators by number, how often each runs in a row and how many behind it run
        before it is awaited; what is sent over an axis is so over so many neighbours."""

        def entry(number: int, times: int, beside: int) -> Operator | InnerCollective:
            what = self._operator(number)
            if isinstance(what, Operator):
                return self._times(what, times)
            own = ranks if what.collective is not Collective.SEND else 0
            return what._replace(times=times, beside=beside, ranks=own)

        return tuple([entry(*group) for group in groups])

    def _operator(self, number: int) -> Operator | InnerCollective:
        """The operator with this number: of all that a table has few are in a way to keep."""
        if number not in self._known:
            operator = self.table.operators[number].at(self._sizes, self._compute)
            self._known[number] = self._distinct.setdefault(operator, operator)
        return self._known[number]

    def _times(
        self, operator: Operator | InnerCollective, times: int
    ) -> Operator | InnerCollective:
        if times == 1:
            return operator
        key = id(operator), times
        if key not in self._repeated:
            self._repeated[key] = operator._replace(times=times)
        return self._repeated[key]


@cache
def _block_table(setting: Setting) -> _Evaluated:
    return _Evaluated(TablePart.BLOCK_WORK, setting, setting.values)


@cache
def _layer(setting: Setting, kept: Kept) -> LayerWork:
    if setting.context is not None:
        return _over_context(setting, setting.context, kept)
    evaluated = _block_table(setting)
    content, attention = evaluated.table.content, setting.shape.attention
    entry = content[attention.value][blocks.variant(kept)]
    is_plain = kept == PLAIN and attention is Attention.SDPA
    halves = content.get("halves", {}) if is_plain else {}
    in_parts = {name: halves[name] for name in ("inputs", "weights") if name in halves}
    work = evaluated.work({**entry, **in_parts})
    return _each_by_itself(work, setting) if setting.cut and setting.cut.step.is_naive else work


def _over_context(setting: Setting, part: ContextPart, kept: Kept) -> LayerWork:
    """A layer of a rank that attends to the tokens of others."""
    evaluated = _Evaluated(TablePart.CONTEXT, setting, setting.values)
    entry = evaluated.table.content[blocks.variant(kept)]
    ranks = part.ring if part.kind is ContextKind.GATHER else part.ulysses
    passes = (unrolled(entry[name][part.place], part) for name in ("forward", "backward"))
    forward, backward = (evaluated.of_groups(groups, ranks) for groups in passes)
    return LayerWork(forward=forward, backward=backward)


def unrolled(written: Mapping[str, Any], part: ContextPart) -> Iterator[list[int]]:
    """Yield a pass with as many hops as there are places before its own and behind it: a table has
    the fewest, and what each more puts in where; behind all others what only looks."""
    before, behind = (
        own - least for own, least in zip((part.before, part.behind), written["least"], strict=True)
    )
    own_before, own_behind = dict(written["before"]), dict(written["behind"])
    for at, group in enumerate([*written["base"], None]):
        yield from own_before.get(at, []) * before
        yield from own_behind.get(at, []) * behind
        if group is not None:
            yield group
    number, views, more_before, more_behind = written["views"]
    yield [number, views + before * more_before + behind * more_behind, 0]


def _each_by_itself(work: LayerWork, setting: Setting) -> LayerWork:
    """The layer's work where each column operator sums the gradient of its input by itself: of the
    same operators and bytes, as often more as there are others in its sub-block: two of attention's
    three, and the gate beside the MLP's first."""
    more = 2 + setting.shape.activation.is_gated
    (hidden,) = {
        item._replace(times=1) for item in work.forward if isinstance(item, InnerCollective)
    }
    sums = (hidden._replace(times=more),)
    inputs = work.inputs + sums if work.inputs else ()
    return work._replace(backward=work.backward + sums, inputs=inputs)


@cache
def _ends(setting: Setting, *, is_staged: bool) -> tuple[LayerWork, LayerWork]:
    """What is in front of the layers and what is behind them. A stage has a head of its own,
    whatever it is tied to. Nobody waits for the gradient of tokens: of the front the half of the
    weights is the whole."""
    if is_staged:
        setting = replace(setting, shape=replace(setting.shape, tied=False))
    evaluated = _Evaluated(TablePart.END_WORK, setting, setting.values)
    content = evaluated.table.content
    front, behind = content["front"], content["behind"]
    if is_staged:
        front = {**front, "weights": front["backward"]}
        behind = {**content.get("halves", {}), **behind}
    if setting.loss.chunk is None:
        return evaluated.work(front), evaluated.work(behind)
    return evaluated.work(front), _in_chunks(setting)


def _in_chunks(setting: Setting) -> LayerWork:
    """What is behind the layers where the loss is in chunks."""
    values = tables.values_of(setting)
    evaluated = _Evaluated(TablePart.LOSS_WORK, setting, values)
    listed = evaluated.table.content["rest" if values["rest"] else "even"]
    chunks = tables.full_chunks(setting)
    return LayerWork(
        **{
            name: evaluated.of_pass(tables.parts_of(listed[name], chunks))
            for name in ("forward", "backward")
        }
    )
