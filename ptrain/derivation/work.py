"""What a rank computes of one micro-batch, operator by operator: of a built-in model from the
committed tables (`traces.work_tables` makes them), of any other from its own traces.

Layers that are alike share one work, so that who adds up times adds up by kind of layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import Any

from ptrain.costs import Collective
from ptrain.derivation import archive, blocks
from ptrain.derivation.archive import TablePart
from ptrain.derivation.operations import setting_at
from ptrain.derivation.tables import Monomial, Place, Setting, monomials
from ptrain.facts.model import ModelFacts
from ptrain.facts.operators import InnerCollective, LayerWork, ModelWork, Operator, PassWork
from ptrain.spec.activations import PLAIN, Kept
from ptrain.spec.model import Attention, ModelShape
from ptrain.spec.precision import DType
from ptrain.spec.rates import OperatorKind
from ptrain.spec.spec import Spec
from ptrain.steps.step import Plan

_COLLECTIVES = {collective.value for collective in Collective}
_DROPS_IN_PARTS = "no table holds what dropout computes on GPUs where operators are cut"
_NO_TABLE = "no table and no trace says which operators the model runs"


def model_work(spec: Spec, plan: Plan, facts: ModelFacts, index: int = 0) -> ModelWork | None:
    """Return what the rank at place `index` along tp computes of each layer of the model, in front
    of them and behind them; None where `why_unknown` says why."""
    if why_unknown(spec, plan, facts):
        return None
    assert isinstance(spec.model, ModelShape), "a built-in model"
    setting = setting_at(spec, plan, index)
    kept = spec.activations.of(spec.model.layers)
    of_layer = {mode: _layer(setting, mode) for mode in {*kept}}
    front, behind = _ends(setting, is_staged=plan.pipeline is not None)
    return ModelWork(front=front, layers=tuple(of_layer[mode] for mode in kept), behind=behind)


def why_unknown(spec: Spec, plan: Plan, facts: ModelFacts) -> str:
    """Return why nobody knows which operators the model runs; empty where tables or traces tell."""
    shape = spec.model
    if not isinstance(shape, ModelShape) or spec.loss.user_function or spec.loss.chunk:
        return _NO_TABLE
    if not all(blocks.is_known(shape, mode) for mode in spec.activations.of(shape.layers)):
        return _NO_TABLE
    is_cut = plan.tensor is not None or plan.pipeline is not None
    return _DROPS_IN_PARTS if spec.is_for_cuda and shape.drops and is_cut else ""


@dataclass(frozen=True, slots=True)
class _Listed:
    """An operator or a collective as a table has it: `sizes` are numbers; no dtype means that in
    which the model computes."""

    kind: OperatorKind | Collective
    dtype: DType | None
    sizes: tuple[int, ...]

    def at(self, sizes: Sequence[int], compute: DType, times: int) -> Operator | InnerCollective:
        """Return so many of them, where a table's sizes are these."""
        own = tuple([sizes[number] for number in self.sizes])
        if isinstance(self.kind, Collective):
            return InnerCollective(self.kind, own[0], times)
        dimensions = (sum(own),) if self.kind.is_of_bytes else own
        return Operator(self.kind, self.dtype or compute, dimensions, times)


@dataclass(frozen=True, slots=True)
class _WorkTable:
    """A way of a table: its `passes` are lists of (number of an operator, times in a row)."""

    content: Mapping[str, Any]
    sizes: tuple[Monomial, ...]
    operators: tuple[_Listed, ...]
    passes: tuple[tuple[tuple[int, int], ...], ...]

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
                )
                for name, dtype, sizes in content["operators"]
            ),
            tuple(
                tuple((number, len([*alike])) for number, alike in groupby(part))
                for part in content["parts"]
            ),
        )


@cache
def _table(part: TablePart, name: str, way: str) -> _WorkTable:
    return _WorkTable.read(archive.table(part, name)[way])


class _Evaluated:
    """A table at a setting's dimensions."""

    def __init__(self, part: TablePart, setting: Setting) -> None:
        self.table = _table(part, setting.name(part), setting.way(part))
        values, self._compute = setting.values, setting.compute
        itemsize = setting.compute.itemsize
        self._sizes = [size.bytes(values, itemsize) for size in self.table.sizes]
        self._known: dict[tuple[int, int], Operator | InnerCollective] = {}

    def work(self, numbers: Mapping[str, int]) -> LayerWork:
        """Return the passes with these numbers."""
        return LayerWork(**{name: self._pass(number) for name, number in numbers.items()})

    def _pass(self, number: int) -> PassWork:
        return tuple([self._at(*pair) for pair in self.table.passes[number]])

    def _at(self, number: int, times: int) -> Operator | InnerCollective:
        known = self._known.get((number, times))
        if known is None:
            known = self.table.operators[number].at(self._sizes, self._compute, times)
            self._known[number, times] = known
        return known


@cache
def _block_table(setting: Setting) -> _Evaluated:
    return _Evaluated(TablePart.BLOCK_WORK, setting)


@cache
def _layer(setting: Setting, kept: Kept) -> LayerWork:
    evaluated = _block_table(setting)
    content, attention = evaluated.table.content, setting.shape.attention
    entry = content[attention.value][blocks.variant(kept)]
    is_plain = kept == PLAIN and attention is Attention.SDPA
    halves = content.get("halves", {}) if is_plain else {}
    in_parts = {name: halves[name] for name in ("inputs", "weights") if name in halves}
    return evaluated.work({**entry, **in_parts})


@cache
def _ends(setting: Setting, *, is_staged: bool) -> tuple[LayerWork, LayerWork]:
    """What is in front of the layers and what is behind them. Nobody waits for the gradient of
    tokens: of the front the half of the weights is the whole."""
    evaluated = _Evaluated(TablePart.END_WORK, setting)
    content = evaluated.table.content
    first, last = (Place.FIRST, Place.LAST) if is_staged else (Place.ALONE, Place.ALONE)
    front = content[first]["front"]
    front = {**front, "weights": front["backward"]} if is_staged else front
    return evaluated.work(front), evaluated.work(content[last]["behind"])
