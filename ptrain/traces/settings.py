"""The settings whose traces are committed, and the format of their tables, which
`derivation.tables` reads.

Settings are the built-in families at dimensions that are distinct primes, so that every size in
bytes factors into one product of dimensions and a coefficient. With operators sharded over tp, the
rank's shard sizes are these primes, together with the full vocabulary if it is not a multiple of
them.

A table has `symbols`, `sizes` (flags, a coefficient, the symbols' exponents), and `parts`, which
are lists of events that other entries refer to by number. In a part, n + 1 is an allocation and -n
- 1 a free of size number n, a string is a boundary, and a list is a completed gradient with its
parameter. Its `work` is a table in the same format for computation. There, parts are lists of
numbers of `operators`, each with its kind or collective, its dtype (empty: the compute dtype) and
the numbers of its sizes.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ptrain.axes.context.attention import ContextKind, ContextPart
from ptrain.axes.context.run.slices import MicroBatchCut
from ptrain.axes.pipeline.stage_facts import TIED
from ptrain.axes.tensor.cost import TensorRank
from ptrain.derivation.tables import IN_ELEMENTS, IS_STATISTICS, Setting, values_of
from ptrain.facts.parameters import facts, roles_of
from ptrain.facts.stages import ENDS, Chain, Stage, divide_into_stages, layers_of
from ptrain.models.initialize import build_model, cast_module
from ptrain.models.units import Units, unit_modules
from ptrain.models.work import OperatorSizes, RecordedCollective
from ptrain.runtime.comm import Mesh
from ptrain.runtime.world import fake_world
from ptrain.spec.dials import ReduceScatterVia, UnitKind, UnitSize
from ptrain.spec.model import Family, ModelShape
from ptrain.spec.placement import Axis
from ptrain.spec.precision import DType
from ptrain.steps.step import ChunkedLoss, ContextParallel, CreateMesh, Keep, Parallelize
from ptrain.traces.layer_works import Computed, views_last
from ptrain.traces.rank_part import ContextSlices, RankPart, StageCuts

Coded = list[object]  # events as JSON
Make = Callable[[], dict[str, object]]  # makes a table within seconds

_WIDTH = 4  # bytes of an element in the first trace


class TableWriter:
    """A table under construction, in which equal sizes and parts share a number."""

    def __init__(self, symbols: Sequence[str]) -> None:
        self.symbols = tuple(symbols)
        self._sizes: dict[tuple[int, int, tuple[int, ...]], int] = {}
        self._parts: dict[str, int] = {}

    def size(
        self,
        num_bytes: int,
        values: Mapping[str, int],
        *,
        follows: bool,
        is_statistics: bool = False,
    ) -> int:
        """Return the number of a size, which is added if it is new.

        Args:
            num_bytes: The size.
            values: Primes of the dimensions; a symbol without a value is no factor.
            follows: Whether the size follows the compute dtype.
            is_statistics: Whether it holds statistics of fused attention.
        """
        of_unit = num_bytes // _WIDTH if follows else num_bytes
        coefficient, exponents = factorise_size(of_unit, self.symbols, values)
        # The only factors other than dimensions are item sizes and small powers of two. Any other
        # rest is a sum of products, which a table cannot express.
        assert coefficient & (coefficient - 1) == 0, f"{num_bytes} bytes are not a single product"
        flags = IN_ELEMENTS * follows | IS_STATISTICS * is_statistics
        return self._sizes.setdefault((flags, coefficient, exponents), len(self._sizes))

    def part(self, events: Iterable[object]) -> int:
        """Return the number of a list of events, which is added if it is new."""
        text = json.dumps(list(events), separators=(",", ":"))
        return self._parts.setdefault(text, len(self._parts))

    def table(self, **content: object) -> dict[str, object]:
        """Return the table as JSON, with `content` that refers to its parts."""
        return {
            "torch": torch.__version__.split("+")[0],
            "symbols": list(self.symbols),
            "sizes": [[flags, c, list(exponents)] for flags, c, exponents in self._sizes],
            **({"parts": [json.loads(part) for part in self._parts]} if self._parts else {}),
            **content,
        }


def factorise_size(
    size: int, symbols: Iterable[str], values: Mapping[str, int]
) -> tuple[int, tuple[int, ...]]:
    """Return coefficient and exponents of a size.

    Args:
        size: The size, in bytes or in elements.
        symbols: Symbols in the order of division.
        values: Value of each symbol, a prime. A symbol without a value is no factor.

    Returns:
        The coefficient, which no symbol's value divides, and the exponent of each symbol.
    """
    exponents = []
    for symbol in symbols:
        value, exponent = values.get(symbol, 0), 0
        while value and size and size % value == 0:
            size, exponent = size // value, exponent + 1
        exponents.append(exponent)
    return size, tuple(exponents)


# Distinct primes, none of which divides another dimension: a size then factors in one way. 67 rows
# of the vocabulary are not divisible by 3 ranks, as in models whose last shard is smaller.
TP, BATCH, SEQUENCE, FFN, VOCAB, UNEVEN = 3, 13, 17, 19, 23, 67
HEADS = {
    Family.LLAMA: {"repeats": 7, "kv_heads": 5, "pairs": 11},
    Family.GPT: {"heads": 5, "head_dim": 7},
}
_OVER_CONTEXT = {
    ContextKind.GATHER: ("ring", "before"),
    ContextKind.ULYSSES: ("ulysses",),
    ContextKind.HYBRID: ("ulysses",),
}
SMALLEST = UnitSize(kind=UnitKind.SUB_BLOCK)  # its boundaries serve units of any size
# A size that doubles from the first dtype to the second counts in elements of the compute dtype.
DTYPES = {DType.FP32: (torch.float32, torch.float64), DType.BF16: (torch.bfloat16,)}


@dataclass(frozen=True, slots=True)
class CutKind:
    """A kind of tensor parallelism, on which tables depend in addition to the model."""

    is_sequence: bool = False
    is_saved_cut: bool = False
    is_naive: bool = False
    loss_parallel: bool = True

    def step(self, shape: ModelShape) -> Parallelize:
        """Return the plan step that shards a model of this shape."""
        return Parallelize(
            axis=Axis.TP,
            roles=roles_of(shape),
            is_sequence=self.is_sequence,
            is_saved_cut=self.is_saved_cut,
            is_naive=self.is_naive,
            loss_parallel=self.loss_parallel,
        )


KINDS = tuple(
    replace(kind, loss_parallel=loss_parallel)
    for kind in (
        CutKind(),
        CutKind(is_sequence=True),
        CutKind(is_sequence=True, is_saved_cut=True),
        CutKind(is_naive=True),
    )
    for loss_parallel in (True, False)
)


def settings() -> Iterator[Setting]:
    """Yield every setting, unsharded and with every kind of tensor parallelism.

    Models with dropout have a second setting for GPUs, which save other tensors of dropout.
    """
    choices = itertools.product(Family, (False, True), (False, True), DTYPES, (BATCH, 1))
    for family, tied, special, compute, batch in choices:
        for kind in (None, *KINDS):
            shape = shape_of(family, kind, tied=tied, special=special)
            setting = of_shape(shape, kind, compute=compute, batch=batch, sequence=SEQUENCE)
            yield setting
            if shape.has_dropout:
                yield replace(setting, is_for_cuda=True)


def of_shape(
    shape: ModelShape, kind: CutKind | None, *, compute: DType, batch: int, sequence: int
) -> Setting:
    """Return a setting with `sequence` tokens per rank between the blocks.

    Args:
        shape: The shape of the model.
        kind: Kind of tensor parallelism. None for unsharded operators.
        compute: The compute dtype.
        batch: Samples of a micro-batch.
        sequence: Tokens of a sample that a rank has between blocks. With sequence parallelism the
            sample has `TP` times as many.
    """
    own = TensorRank(step=kind.step(shape), degree=TP, index=0) if kind else None
    slices = TP if kind is not None and kind.is_sequence else 1
    return Setting(shape=shape, batch=batch, sequence=slices * sequence, compute=compute, cut=own)


def shape_of(family: Family, kind: CutKind | None, *, tied: bool, special: bool) -> ModelShape:
    """Return a model shape in which every dimension of a rank is a prime.

    Args:
        family: The model family.
        kind: Kind of tensor parallelism over `TP` ranks. None for unsharded operators.
        tied: True if embedding and head share a tensor.
        special: True for grouped queries (Llama) or dropout (GPT).
    """
    primes, degree = HEADS[family], TP if kind else 1
    vocab = UNEVEN if kind is None or kind.loss_parallel else degree * VOCAB
    if family is Family.LLAMA:
        kv_heads = degree * primes["kv_heads"]
        heads, head_dim = kv_heads * (primes["repeats"] if special else 1), 2 * primes["pairs"]
    else:
        heads = kv_heads = degree * primes["heads"]
        head_dim = primes["head_dim"]
    return ModelShape(
        family=family,
        layers=1,
        hidden=heads * head_dim,
        heads=heads,
        kv_heads=kv_heads,
        ffn=degree * FFN,
        vocab=vocab,
        tied=tied,
        dropout=0.1 if special and family is Family.GPT else 0.0,
    )


def symbols(setting: Setting) -> Mapping[str, int]:
    """Return the primes whose products are the sizes, by symbol.

    A loss in chunks has other symbols, since it does not depend on the blocks.
    """
    if setting.loss.chunk is not None:
        return {symbol: value for symbol, value in values_of(setting).items() if value > 1}
    own = setting.cut
    names = (*HEADS[setting.family], "batch", "sequence", "ffn", "vocab")
    if own is not None:
        names += ("tp", "vocab_all") if own.step.loss_parallel else ("tp",)
    if setting.context is not None:
        names += _OVER_CONTEXT.get(setting.context.kind, ())
    values = setting.values
    return {name: values[name] for name in names if values[name] > 1}


WORK_NAMES = {"forward": "forward", "backward": "backward", "input": "inputs", "weight": "weights"}
# The compute dtype of the widest trace, in which it differs from fp32.
_COMPUTE = {DType.FP32: DType.FP64, DType.BF16: DType.BF16}


class WorkWriter:
    """The writer of a setting's computation; `values` are the primes of the dimensions."""

    def __init__(self, setting: Setting, dimensions: Sequence[str] = ()) -> None:
        self.values = symbols(setting)
        self.compute = _COMPUTE[setting.compute]
        self.writer = TableWriter(dimensions or tuple(self.values))
        self._operators: dict[str, int] = {}

    def passes(self, computed: Mapping[str, Computed]) -> dict[str, int]:
        """Return the number of each pass's list of operators."""
        return {
            WORK_NAMES[name]: self.writer.part(self.encode_operators(views_last(ran)))
            for name, ran in computed.items()
        }

    def encode_operators(self, computed: Computed) -> Coded:
        """Return the numbers of a list of operators."""
        return [self.number(what) for what in computed]

    def number(self, what: OperatorSizes | RecordedCollective) -> int:
        """Return the number of an operator or collective, which is added if it is new."""
        row: list[object]
        if isinstance(what, RecordedCollective):
            row = [what.collective, "", [self._size(what.payload, what.dtype)]]
            if what.axis:
                row = [what.operator.collective, *row[1:], what.axis]
        else:
            dtype = "" if what.dtype is self.compute else what.dtype
            dtypes = what.dtypes or (None,) * len(what.sizes)
            row = [what.kind, dtype, [*map(self._size, what.sizes, dtypes)]]
            row += ["", True] if what.is_whole else []
        text = json.dumps(row, separators=(",", ":"))
        return self._operators.setdefault(text, len(self._operators))

    def _size(self, size: int, dtype: DType | None) -> int:
        """Return the number of a size in bytes of elements with this dtype."""
        follows = dtype is self.compute
        own = size * _WIDTH // self.compute.itemsize if follows else size
        return self.writer.size(own, self.values, follows=follows)

    def table(self, **content: object) -> dict[str, object]:
        """Return the table as JSON, with `content` that refers to its passes."""
        operators = [json.loads(text) for text in self._operators]
        return self.writer.table(operators=operators, **content)


def model_of(setting: Setting, dtype: torch.dtype, *, is_meta: bool = False) -> nn.Module:
    """Return a setting's model with arbitrary weights, on which no size depends.

    Args:
        setting: The setting, whose shape and tokens define the model.
        dtype: Dtype of parameters and buffers.
        is_meta: True to build on the meta device, without memory. False builds on the CPU.
    """
    with torch.device("meta" if is_meta else "cpu"):
        model = build_model(setting.shape, sequence=setting.sequence)
    cast_module(model, dtype)
    return model


def part_of(
    setting: Setting,
    mesh: DeviceMesh | None,
    keep: Keep | None = None,
    *,
    has_learnt: bool = False,
) -> RankPart:
    """Return the rank's part of a setting.

    Args:
        setting: The setting.
        mesh: The mesh from `fake_mesh`. Not used by unsharded settings.
        keep: Activation modes of the blocks. None saves all activations.
        has_learnt: True if torch has already run these operators on an equal part, so that no
            unrecorded run is needed before the recording.
    """
    own, chunk, context = setting.cut, setting.loss.chunk, setting.context
    step = own.step if own else None
    assert step is None or isinstance(step, Parallelize), "no plan step shards it"
    return RankPart(
        batch=setting.batch,
        sequence=setting.sequence * (context.ulysses * context.ring_degree if context else 1),
        context=_slices_of(setting, context) if context else None,
        tensor=step,
        mesh=mesh if step else None,
        slices=own.degree if own and own.step.is_sequence else 1,
        keep=keep,
        loss=ChunkedLoss(tokens=chunk, fused=setting.loss.fused) if chunk else None,
        has_learnt=has_learnt,
    )


def _slices_of(setting: Setting, part: ContextPart) -> ContextSlices:
    """Return a rank's slices of the tokens, in a new fake world."""
    degree = part.ulysses * part.ring_degree
    step = ContextParallel(
        axis=Axis.CP,
        ulysses=part.ulysses,
        ring=part.ring_degree,
        sequence=degree * setting.sequence,
        is_balanced=part.num_chunks > 1,
        gathers=part.kind is ContextKind.GATHER,
    )
    if dist.is_initialized():
        dist.destroy_process_group()
    # Two replicas: an axis over all ranks would use the default group, which names no axis.
    mesh_step = CreateMesh(axes=(Axis.DP_REPLICATE, Axis.CP), degrees=(2, degree))
    mesh = Mesh(mesh_step, fake_world(part.before * part.ulysses, 2 * degree))
    cut = MicroBatchCut(samples=setting.batch, slices=degree)
    return ContextSlices(step, mesh, ReduceScatterVia.NATIVE, cut)


def cuts_of(setting: Setting, layers: tuple[int, ...]) -> StageCuts:
    """Return the stages of a setting's model, with these numbers of layers.

    Args:
        setting: The setting, whose model has as many layers as the stages together.
        layers: Number of layers of each stage, first to last.
    """
    shape = setting.shape
    assert shape.layers == sum(layers), "the stages do not cover all layers"
    whole = layers_of(
        facts(shape, setting.sequence).units,
        front=ENDS.front,
        tied=(TIED,) if shape.tied else (),
    )
    names = tuple(layer.name for layer in whole.layers)
    chain = Chain(layers=names, ends=ENDS, hidden=shape.hidden, tied=whole.tied)
    return StageCuts(stages=divide_into_stages(whole, layers), chain=chain)


def smallest_units(setting: Setting, stage: Stage | None = None) -> Units:
    """Return the smallest wrap units of a setting's model or of one stage.

    Args:
        setting: The setting.
        stage: The stage. None for the full model.
    """
    units = unit_modules(model_of(setting, torch.float32, is_meta=True), SMALLEST)
    return stage.stage_units(units) if stage else units


def fake_mesh() -> DeviceMesh:
    """Return a tp mesh of fake ranks, of which this process plays the first."""
    fake_world(0, TP)
    return init_device_mesh("cpu", (TP,), mesh_dim_names=(Axis.TP.value,))
