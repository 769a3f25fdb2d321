"""Makes the tables of what is computed: by one block, by how its activations are kept, and in front
of the blocks and behind them, of a whole model, of a first stage and of a last one.

A pass is a list of operators by their numbers in the table; each is its kind or collective, its
dtype (none: that in which the model computes) and the numbers of its sizes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from torch.distributed.device_mesh import DeviceMesh

from ptrain.derivation.blocks import VARIANTS
from ptrain.derivation.tables import Place, Setting
from ptrain.facts.operators import InnerCollective
from ptrain.models.work import OperatorSizes
from ptrain.spec.precision import DType
from ptrain.traces.block_tables import ATTENTIONS, LAYERS, BlockTable, alike
from ptrain.traces.coded import CodedTrace
from ptrain.traces.layer_works import Computed, LayerWorks, by_layer
from ptrain.traces.pass_tables import SEVERAL, PassTable
from ptrain.traces.settings import symbols
from ptrain.traces.table_format import Coded, TableWriter

_NAMES = {"forward": "forward", "backward": "backward", "input": "inputs", "weight": "weights"}


class WorkWriter:
    """Operators as a table numbers them. `values` are the primes of the dimensions."""

    def __init__(self, symbols: Sequence[str]) -> None:
        self.writer = TableWriter(symbols)
        self._operators: dict[str, int] = {}

    def passes(
        self, traced: Sequence[Mapping[str, Computed]], values: Mapping[str, int], compute: DType
    ) -> dict[str, int]:
        """Return the number of each pass's list; `traced` are the same passes in each dtype."""
        return {
            _NAMES[name]: self.writer.part(
                self.coded([passes[name] for passes in traced], values, compute)
            )
            for name in traced[0]
        }

    def coded(self, traced: Sequence[Computed], values: Mapping[str, int], compute: DType) -> Coded:
        """Return a list of operators, seen in each dtype, as numbers."""
        return [self._number(together, values, compute) for together in zip(*traced, strict=True)]

    def _number(
        self,
        together: Sequence[OperatorSizes | InnerCollective],
        values: Mapping[str, int],
        compute: DType,
    ) -> int:
        name, dtype, of_bytes = _described(together[0], compute)
        columns = zip(*map(_sizes, together), strict=True)
        sizes = [self._size(column, values, of_bytes=of_bytes) for column in columns]
        text = json.dumps([name, dtype, sizes], separators=(",", ":"))
        return self._operators.setdefault(text, len(self._operators))

    def _size(self, seen: Sequence[int], values: Mapping[str, int], *, of_bytes: bool) -> int:
        size, *wider = seen
        assert all(other in (size, 2 * size) for other in wider), "as wide, or twice"
        follows = of_bytes and any(other == 2 * size > 0 for other in wider)
        return self.writer.size(size, values, follows=follows)

    def table(self, **content: object) -> dict[str, object]:
        """Return the table as JSON, with what names its passes."""
        operators = [json.loads(text) for text in self._operators]
        return self.writer.table(operators=operators, **content)


def _described(what: OperatorSizes | InnerCollective, compute: DType) -> tuple[str, str, bool]:
    """Return kind or collective, dtype where it is another than the model's, and whether its sizes
    are bytes."""
    if isinstance(what, InnerCollective):
        return what.collective.value, "", True
    own = _TRACED[compute]
    return what.kind.value, "" if what.dtype is own else what.dtype.value, what.kind.is_of_bytes


_TRACED = {DType.FP32: DType.FP32, DType.FP64: DType.FP32, DType.BF16: DType.BF16}


def _sizes(what: OperatorSizes | InnerCollective) -> tuple[int, ...]:
    return (what.payload,) if isinstance(what, InnerCollective) else what.sizes


class BlockWorkTable:
    """The table of a block in the making."""

    def __init__(self, setting: Setting, mesh: DeviceMesh | None = None) -> None:
        self.setting, self.mesh = setting, mesh
        self.values = symbols(setting)
        self.writer = WorkWriter(tuple(self.values))

    def build(self) -> dict[str, object]:
        """Return the table as JSON. `halves` are those of a block whose backward pass is in halves,
        of which tables know the plain one alone."""
        blocks = BlockTable(self.setting, self.mesh)
        content: dict[str, object] = {
            attention.value: {
                name: self._of_block(by_layers(blocks.trace(attention, kept), LAYERS))
                for name, kept in VARIANTS
            }
            for attention in ATTENTIONS
        }
        if not self.setting.is_for_cuda:
            stage = PassTable(self.setting, self.mesh).stage(Place.MIDDLE, SEVERAL)
            halves = by_layers(stage[-1], SEVERAL, place=1)
            # the half of the weights has no boundaries, and what one layer does at its neighbour's
            # end is in the middle there and missing here
            content["halves"] = self._passes([of_dtype.layers[1] for of_dtype in halves])
        return self.writer.table(**content)

    def _of_block(self, works: Sequence[LayerWorks]) -> dict[str, int]:
        return self._passes([alike(of_dtype.layers) for of_dtype in works])

    def _passes(self, traced: Sequence[Mapping[str, Computed]]) -> dict[str, int]:
        return self.writer.passes(traced, self.values, self.setting.compute)


class EndWorkTable:
    """The table of what is in front of the blocks and behind them, in the making."""

    def __init__(self, setting: Setting, mesh: DeviceMesh | None = None) -> None:
        self.setting, self.mesh = setting, mesh
        self.values = symbols(setting)
        self.writer = WorkWriter(tuple(self.values))

    def build(self) -> dict[str, object]:
        """Return the table as JSON. A GPU's dropout is known of whole models alone."""
        traces = PassTable(self.setting, self.mesh)
        alone = by_layers(traces.alone(1), 1)
        content = {Place.ALONE: {"front": self._front(alone), "behind": self._behind(alone)}}
        if not self.setting.is_for_cuda:
            (first,) = traces.stage(Place.FIRST, 1)
            content[Place.FIRST] = {"front": self._front(by_layers(first, 1))}
            whole, halves = (by_layers(trace, 1, place=2) for trace in traces.stage(Place.LAST, 1))
            content[Place.LAST] = {"behind": self._behind(whole) | self._behind(halves)}
        return self.writer.table(**content)

    def _front(self, works: Sequence[LayerWorks]) -> dict[str, int]:
        return self._passes([of_dtype.front for of_dtype in works])

    def _behind(self, works: Sequence[LayerWorks]) -> dict[str, int]:
        return self._passes([of_dtype.behind for of_dtype in works])

    def _passes(self, traced: Sequence[Mapping[str, Computed]]) -> dict[str, int]:
        return self.writer.passes(traced, self.values, self.setting.compute)


def by_layers(trace: CodedTrace, layers: int, place: int = 0) -> list[LayerWorks]:
    """Return what each of a trace's recordings computed by layer, of `layers` from that with the
    number `place` on."""
    blocks = [f"blocks.{number}" for number in range(place, place + layers)]
    works = [by_layer(recording, trace.units, blocks) for recording in trace.recordings]
    known = [of_dtype for of_dtype in works if of_dtype is not None]
    assert len(known) == len(works), "the blocks are units"
    return known
