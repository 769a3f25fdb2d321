"""The work of operators in a recording, compared with hand-counted bytes, torch's counter and new
recordings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from ptrain.axes.context.run.apply import GatheredCore, RingCore
from ptrain.cost import Collective
from ptrain.derivation.estimate import derive
from ptrain.derivation.work import model_work
from ptrain.facts.model import (
    InnerCollective,
    LayerWork,
    ModelFacts,
    ModelWork,
    Operator,
    PassWork,
)
from ptrain.models.ledger import OperatorMode
from ptrain.models.work import OperatorSizes, is_opaque, sizes_of
from ptrain.runtime.comm import TagRegistry
from ptrain.runtime.world import fake_world
from ptrain.spec.cluster import OperatorKind
from ptrain.spec.dials import ReduceScatterVia
from ptrain.spec.load import load
from ptrain.spec.precision import DType
from ptrain.traces.facts import read_facts
from ptrain.traces.layer_works import pass_work
from ptrain.traces.record import Recorder
from tests.flops import NOT_REGISTERED
from tests.pure.test_work import flops, parts, spec_of
from tests.unit import test_chain


class Computed(OperatorMode):
    """What was computed while it was entered."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[OperatorSizes] = []
        self.is_opaque = False

    def run_operator(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = function(*args, **kwargs)
        self.operators += sizes_of(function, args, kwargs, result)
        self.is_opaque |= is_opaque(function)
        return result


def record_work(run: Callable[[], object]) -> list[Operator]:
    with Computed() as seen:
        run()
    return [ran.operator for ran in seen.operators]


X = torch.zeros(4, 8)  # 128 bytes
ROW, COLUMN = torch.zeros(8), torch.zeros(4, 1)
INDEX = torch.zeros(6, dtype=torch.int64)  # 48 bytes
TABLE = torch.zeros(100, 8)
K = OperatorKind

BY_HAND: dict[str, tuple[Callable[[], object], list[tuple[OperatorKind | int, ...]]]] = {
    "sum": (lambda: X + X, [(K.POINTWISE, 3 * 128)]),
    "sum-of-a-number": (lambda: X + 1, [(K.POINTWISE, 2 * 128)]),
    "sum-in-place": (lambda: X.add_(ROW), [(K.POINTWISE, 128 + 32 + 128)]),
    "product-with-what-is-repeated": (
        lambda: X * COLUMN.expand(4, 8),
        [(K.VIEW,), (K.POINTWISE, 128 + 16 + 128)],
    ),
    "views": (lambda: X.t().unsqueeze(0).expand(3, -1, -1).detach()[1:], [(K.VIEW,)] * 5),
    "nothing-in-particular": (lambda: torch.empty_like(X), [(K.VIEW,)]),
    "zeros": (lambda: torch.zeros_like(X), [(K.COPY, 128)]),
    "clone": (lambda: X.t().clone(), [(K.VIEW,), (K.COPY, 2 * 128)]),
    "cast": (lambda: X.to(torch.bfloat16), [(K.COPY, 128 + 64)]),
    "copy": (lambda: X.copy_(ROW), [(K.COPY, 32 + 128)]),
    "concatenation": (lambda: torch.cat([X, X]), [(K.COPY, 2 * 256)]),
    "gelu": (lambda: F.gelu(X), [(K.ACTIVATION, 2 * 128)]),
    "softmax": (lambda: X.softmax(-1), [(K.SOFTMAX, 2 * 128)]),
    "mean": (lambda: X.mean(-1), [(K.NORM, 128 + 16)]),
    "layer-norm": (lambda: F.layer_norm(X, (8,), ROW, ROW), [(K.NORM, 128 + 64 + 128 + 32)]),
    # of the table the rows that are named
    "embedding": (lambda: F.embedding(INDEX, TABLE), [(K.INDEX, 192 + 48 + 192)]),
    "dropout": (lambda: torch.native_dropout(X, 0.1, True), [(K.DRAW, 128 + 128 + 32)]),
    "scatter": (
        lambda: TABLE.index_put_((INDEX,), torch.ones(6, 8), accumulate=True),
        [(K.COPY, 192), (K.INDEX, 48 + 3 * 192)],
    ),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_bytes_are_those_that_an_operator_reads_and_writes(name: str):
    run, expected = BY_HAND[name]
    assert [(ran.kind, *ran.dimensions) for ran in record_work(run)] == expected


def test_integers_are_moved_as_fp32_is():
    assert record_work(lambda: INDEX + INDEX) == [Operator(K.POINTWISE, DType.FP32, (3 * 48,))]


def backward(function: Callable[..., Tensor], *shapes: tuple[int, ...]) -> None:
    function(*(torch.zeros(shape, requires_grad=True) for shape in shapes)).sum().backward()


PRODUCTS: dict[str, Callable[[], object]] = {
    "mm": lambda: torch.zeros(3, 5) @ torch.zeros(5, 7),
    "addmm": lambda: F.linear(torch.zeros(2, 3, 5), torch.zeros(7, 5), torch.zeros(7)),
    "bmm": lambda: torch.zeros(2, 3, 5) @ torch.zeros(2, 5, 7),
    "backward": lambda: backward(torch.matmul, (2, 3, 5), (2, 5, 7)),
    "conv1d": lambda: backward(F.conv1d, (2, 6, 9), (4, 6, 3)),
    "conv2d": lambda: backward(F.conv2d, (2, 6, 9, 8), (4, 6, 3, 2)),
    "conv-transposed": lambda: backward(F.conv_transpose1d, (2, 6, 9), (6, 4, 3)),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_have_the_operations_that_torch_counts(name: str):
    with FlopCounterMode(display=False) as counter:
        PRODUCTS[name]()
    ran = [operator for operator in record_work(PRODUCTS[name]) if operator.kind is K.PRODUCT]
    assert ran and sum(operator.flops for operator in ran) == counter.get_total_flops()


def test_a_convolution_in_groups_is_a_product_for_each():
    """torch's counter takes the gradient of such a weight for that of one without groups."""

    def grouped(x: Tensor, weight: Tensor) -> Tensor:
        return F.conv1d(x, weight, groups=2)

    ran = record_work(lambda: backward(grouped, (2, 6, 9), (4, 3, 3)))
    assert [operator.dimensions for operator in ran if operator.kind is K.PRODUCT] == [
        (2, 2 * 7, 3 * 3, 2),
        (2, 2 * 7, 2, 3 * 3),
        (2, 3 * 3, 2 * 7, 2),
    ]


def test_a_custom_operator_has_unknown_work():
    @torch.library.custom_op("theirs::double", mutates_args=())
    def double(x: Tensor) -> Tensor:
        return x * 2

    with Computed() as seen:
        double(X)
    assert seen.is_opaque
    with Computed() as seen:
        X.mul(2)
    assert not seen.is_opaque


# -- tables against recordings


KEPT = ("R", "full", "selective", "attention", "mixture", "chunk")
DEFAULT = {("llama", "sdpa", "mixture"), ("gpt-dropout", "eager", "chunk")}


def cases() -> Iterator[Any]:
    models = ("llama", "llama-mha", "gpt", "gpt-dropout")
    for case in product(models, ("sdpa", "eager"), KEPT):
        marks = () if case in DEFAULT else pytest.mark.nightly
        yield pytest.param(*case, marks=marks, id="-".join(case))


def without_views(layer: LayerWork) -> LayerWork:
    """Without the halves of backward, which the trace of a whole model lacks, and without views:
    what is around a layer looks at its tensors too."""
    return LayerWork(forward=computing(layer.forward), backward=computing(layer.backward))


def computing(work: PassWork) -> PassWork:
    return tuple(item for item in work if not is_view(item))


def is_view(item: Operator | InnerCollective) -> bool:
    return isinstance(item, Operator) and item.kind is OperatorKind.VIEW


def views(work: PassWork) -> int:
    return sum(item.times for item in work if is_view(item))


@pytest.mark.parametrize(("model", "attention", "kept"), list(cases()))
def test_the_tables_equal_a_new_recording(model: str, attention: str, kept: str):
    """At dimensions of no table, and in another dtype."""
    spec = spec_of(model, kept, "whole", attention=attention)
    derivation = derive(spec)
    told = model_work(spec, derivation.plan, derivation.facts)
    recorded = read_facts(spec).work
    assert told is not None and recorded is not None
    pairs = zip(parts(told), parts(recorded.to_model), strict=True)
    assert all(without_views(table) == without_views(recording) for table, recording in pairs)


@pytest.mark.parametrize("model", ["llama", "gpt"])
def test_the_tables_count_the_views_of_a_layer(model: str):
    """Except for two or three at its boundary."""
    spec = spec_of(model, "R", "whole")
    derivation = derive(spec)
    told = model_work(spec, derivation.plan, derivation.facts)
    recorded = read_facts(spec).work
    assert told is not None and recorded is not None
    for table, recording in zip(told.layers, recorded.to_model.layers, strict=True):
        for work, other in (
            (table.forward, recording.forward),
            (table.backward, recording.backward),
        ):
            assert views(work) > 30
            assert views(work) == pytest.approx(views(other), abs=3)


# -- models that are not built in


def of_facts(facts: ModelFacts) -> ModelWork:
    (work,) = facts.part_works
    return work.to_model


def test_the_stages_of_a_model_compute_the_work_of_the_full_model():
    """Layer by layer; torch counts the same for forward and backward together."""
    spec = test_chain.spec_of({"target": "tests.models_external:pairs"})
    facts = read_facts(spec, allow_import=True)
    assert facts.work is not None
    work, alone = of_facts(facts), facts.work.to_model
    assert len(work.layers) == len(alone.layers) == len(facts.blocks)
    assert [without_views(layer) for layer in work.layers] == [
        without_views(layer) for layer in alone.layers
    ]
    assert computing(work.front.forward) == computing(alone.front.forward)
    assert model_work(spec, derive(spec, facts).plan, facts) == work
    model = test_chain.build_model_of(spec)
    with FlopCounterMode(display=False, custom_mapping=NOT_REGISTERED) as counter:
        logits = model(torch.zeros(1, 16, dtype=torch.int64))
        logits.sum().backward()
    own = sum(flops((part.forward, part.backward)) for part in parts(alone))
    assert own == counter.get_total_flops()


def test_a_model_without_unit_layers_attributes_all_work_to_the_first_unit():
    spec = load(
        {
            "model": {"target": "tests.models_external:pairs"},
            "mesh": {"dp_replicate": 1},
            "batch": {"global": 1, "micro": 1, "sequence": 16},
            "unit": "model",
        }
    ).spec
    facts = read_facts(spec, allow_import=True)
    assert facts.work is not None
    first, *others = facts.work.to_model.layers
    assert first.forward and not any(layer.forward for layer in others)


def passes_over_context(
    core_of: Callable[[dist.ProcessGroup], nn.Module],
) -> tuple[PassWork, PassWork]:
    """Forward and backward of a core on the second of two places, with the sum that follows."""
    world = fake_world(1, 2)
    try:
        core = core_of(dist.new_group([0, 1], group_desc="mesh_cp"))
        heads = [torch.randn(1, 2, 8, 4, requires_grad=True) for _ in range(3)]
        with Recorder(core, heads) as recorder:
            attended = core(*heads).sum()
            recorder.end("forward")
            attended.backward()
            recorder.end("backward")
    finally:
        world.close()
    works = recorder.recording().works
    forward, backward = (
        pass_work([work.record for _, work in works[name]]) for name in ("forward", "backward")
    )
    return forward, backward


def test_a_hop_of_a_ring_is_awaited_after_the_overlapped_product():
    passes = passes_over_context(partial(RingCore, scale=None, is_balanced=False))
    for work, kind, hops in zip(passes, (K.ATTENTION, K.ATTENTION_BACKWARD), (1, 3), strict=True):
        sent = [place for place, item in enumerate(work) if isinstance(item, InnerCollective)]
        assert len(sent) == hops and all(work[place].axis == "cp" for place in sent)
        products = [place for place, item in enumerate(work) if is_of(item, kind)]
        first = sent[0]
        hidden = range(first + 1, first + 1 + work[first].beside)
        assert products[0] in hidden and products[1] not in hidden  # its keys are the message
        # a block on the diagonal is causal, the others are whole
        assert [work[place].is_whole for place in products] == [False, True]
    *_, home = (work[place] for place in sent)
    assert home.beside < 4  # nothing but what ends the pass


@pytest.mark.parametrize(
    ("via", "home"),
    [
        (ReduceScatterVia.NATIVE, Collective.REDUCE_SCATTER),
        (ReduceScatterVia.ALL_TO_ALL, Collective.ALL_TO_ALL),
    ],
)
def test_gathered_keys_and_their_gradients_take_the_time_of_a_collective_over_cp(
    via: ReduceScatterVia, home: Collective
) -> None:
    core_of = partial(GatheredCore, scale=None, via=via, registry=TagRegistry())
    passes = passes_over_context(core_of)
    for work, collective in zip(passes, (Collective.ALL_GATHER, home), strict=True):
        (sent,) = (item for item in work if isinstance(item, InnerCollective))
        assert (sent.collective, sent.axis) == (collective, "cp")
        assert sent.payload == 2 * 2 * (1 * 2 * 8 * 4) * 4  # ranks x K and V x elements x fp32


def is_of(item: Operator | InnerCollective, kind: OperatorKind) -> bool:
    return isinstance(item, Operator) and item.kind is kind
