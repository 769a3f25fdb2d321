"""The committed tables equal traces of any shape to the byte, and a trace is exact."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from ptrain.cost import Phase, State
from ptrain.errors import SpecError
from ptrain.facts.parameters import facts
from ptrain.meters.memory import MemoryMeter
from ptrain.models.cross_entropy import token_loss_sum
from ptrain.models.initialize import build_model, cast_module
from ptrain.models.units import unit_modules
from ptrain.spec.activations import FULL, ActivationMode
from ptrain.spec.load import load
from ptrain.spec.model import ExternalModel, ModelShape
from ptrain.spec.precision import ZERO16, DType
from ptrain.spec.spec import ActivationSpec
from ptrain.timeline import Complete
from ptrain.traces.facts import facts_of, module_facts, read_facts
from tests.models_external import Necks, necks
from tests.pure.build import ODD_SHAPE, make_spec, setting
from tests.saved_tensors import saved_bytes
from tests.timelines import model_timeline
from tests.unit.shapes import SHAPES, SMALL_GPT, trace_shape
from tests.unit.test_memory import Holder

TORCH = {DType.FP32: torch.float32, DType.FP64: torch.float64, DType.BF16: torch.bfloat16}
COMPUTE = [
    pytest.param(dtype, marks=pytest.mark.nightly if dtype is DType.FP64 else ()) for dtype in TORCH
]
DROPOUT = [replace(SMALL_GPT, dropout=0.1), replace(SMALL_GPT, dropout=0.2, tied=False)]
WIDE_HEADS = replace(ODD_SHAPE, hidden=48, heads=6, kv_heads=2, layers=2)
TIED_HEADS = replace(ODD_SHAPE, kv_heads=3, tied=True)


def text(shape: ModelShape) -> str:
    return f"{shape.family}-{shape.layers}x{shape.heads}/{shape.kv_heads}-{shape.tied}"


@pytest.mark.parametrize("compute", COMPUTE, ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, *DROPOUT, WIDE_HEADS, TIED_HEADS], ids=text)
def test_a_table_gives_the_trace_of_another_shape_to_the_byte(shape, compute):
    for batch, sequence in ((2, 16), (1, 9), (3, 33)):
        seen = trace_shape(shape, TORCH[compute], batch=batch, sequence=sequence)
        derived = model_timeline(setting(shape, compute, batch=batch, sequence=sequence))
        assert derived.forward == seen.forward
        assert derived.backward == seen.backward


@pytest.mark.parametrize("shape", SHAPES, ids=text)
def test_gradients_complete_in_the_order_that_the_facts_state(shape):
    seen = trace_shape(shape, torch.float32)
    order = [item.parameter for item in seen.backward if isinstance(item, Complete)]
    assert tuple(order) == facts(shape, 16).gradient_order


def test_the_tracers_hooks_allocate_nothing():
    """The meter counts the same bytes without hooks on the model."""
    model = build_model(ODD_SHAPE, sequence=16)
    cast_module(model, torch.float32)
    tokens = torch.zeros(2, 17, dtype=torch.int64)
    held = [(State.PARAMETERS, tensor) for tensor in model.parameters()]
    held += [(State.OTHER, tensor) for tensor in (*model.buffers(), tokens)]
    base = sum(tensor.untyped_storage().nbytes() for _, tensor in held)
    with MemoryMeter(Holder(*held)) as meter:
        meter.phase(Phase.FORWARD, 0)
        loss = token_loss_sum(model(tokens[:, :-1]), tokens[:, 1:]) / 32
        meter.phase(Phase.BACKWARD, 0)
        loss.backward()
        del loss
    seen = trace_shape(ODD_SHAPE, torch.float32)
    level = highest = 0
    for item in seen.forward:
        highest = max(highest, level + getattr(item, "rise", 0))
        level += getattr(item, "net", 0)
    rows = {row.state: row.device_bytes for row in meter.footprints()}
    peaks = {row.phase: row.device_bytes for row in meter.peaks()}
    assert rows[State.ACTIVATIONS] == saved_bytes(seen)
    assert peaks[Phase.FORWARD] == base + highest


@pytest.mark.parametrize("layers", [1, 2])
def test_a_built_in_model_read_as_a_foreign_one_has_the_same_facts(layers):
    shape = replace(ODD_SHAPE, layers=layers)
    spec = make_spec({}, model=shape, layout=ZERO16)
    read, stated = module_facts(build_model(shape, sequence=16), spec), facts(shape, 16)
    assert read.units == stated.units
    assert read.buffers == stated.buffers
    assert read.gradient_order == stated.gradient_order
    assert read.timeline is not None
    derived = model_timeline(setting(shape, DType.BF16, sequence=16))
    assert (read.timeline.forward, read.timeline.backward) == (derived.forward, derived.backward)


class Nudged(Necks):
    """Adds one scalar to all logits, so that the gradient of what it sums is a view of a scalar."""

    def __init__(self) -> None:
        super().__init__(10, 2, 259)
        self.nudge = nn.Parameter(torch.zeros(7))

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens_BT) + self.nudge.sum()


def test_a_gradient_that_autograd_has_to_copy_is_a_copy_in_the_trace():
    seen = module_facts(Nudged(), make_spec({})).timeline
    assert seen is not None
    completions = [item for item in seen.backward if isinstance(item, Complete)]
    copies = [(item.parameter, item.size) for item in completions if item.cloned]
    assert copies == [("nudge", 7 * 4)]


def test_an_external_models_facts_come_from_the_module():
    spec = make_spec({}, model=ExternalModel(target="tests.models_external:necks"))
    read = facts_of(spec)
    model = necks()
    assert read.unit_modules == unit_modules(model)
    assert {tensor.name: tensor.shape for tensor in read.tensors} == {
        name: tuple(parameter.shape) for name, parameter in model.named_parameters()
    }
    assert sorted(read.gradient_order) == sorted(name for name, _ in model.named_parameters())


def test_blocks_that_the_module_lacks_are_rejected_as_it_is_read():
    kept = ActivationSpec(by_block=((1, 5, ActivationMode(policy=FULL)),))
    spec = make_spec({}, model=ExternalModel(target="tests.models_external:necks"))
    with pytest.raises(SpecError, match="blocks 1-5, but the model has 2, from 0 to 1"):
        facts_of(replace(spec, activations=kept))


def test_blocks_that_both_halves_of_backward_recompute_are_rejected_before_the_trace():
    words = ["pipeline.schedule=zero-bubble", "activations=M", "recompute=selective"]
    with pytest.raises(SpecError, match="both would recompute blocks with activations M"):
        read_facts(load("pp-zero2", words).spec)


def test_reading_facts_imports_nothing_that_was_not_allowed():
    spec = make_spec({}, model=ExternalModel(target="tests.models_external:necks"))
    with pytest.raises(Exception, match="allow"):
        read_facts(spec)


def test_tracing_leaves_the_random_numbers_and_the_gradients_alone():
    spec = make_spec({}, model=ODD_SHAPE)
    model = necks()
    torch.manual_seed(3)
    before = torch.get_rng_state()
    module_facts(model, spec)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(parameter.grad is None for parameter in model.parameters())
