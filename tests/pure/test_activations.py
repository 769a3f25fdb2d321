"""Activations from the committed tables: polynomials, and their sums."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from ptrain.cost import State
from ptrain.derivation.estimate import derive
from ptrain.spec.load import load
from ptrain.spec.model import Family, ModelShape
from ptrain.spec.precision import DType
from ptrain.timeline import Boundary, Complete, Mark, Run
from tests.pure.build import ODD_SHAPE, setting
from tests.saved_tensors import saved_bytes, torch_version
from tests.timelines import model_timeline

LLAMA_8B = ModelShape(
    family=Family.LLAMA,
    layers=32,
    hidden=4096,
    heads=32,
    kv_heads=8,
    ffn=14336,
    vocab=128256,
)
GPT = ModelShape(
    family=Family.GPT, layers=4, hidden=64, heads=4, kv_heads=4, ffn=256, vocab=97, tied=True
)


@pytest.mark.parametrize("shape", [ODD_SHAPE, GPT], ids=["llama", "gpt"])
@pytest.mark.parametrize("compute", [DType.FP32, DType.FP64, DType.BF16], ids=str)
def test_every_layer_saves_the_same(shape, compute):
    sizes = [
        saved_bytes(model_timeline(setting(replace(shape, layers=layers), compute)))
        for layers in (1, 2, 3, 10)
    ]
    block = sizes[1] - sizes[0]
    assert sizes[2] - sizes[1] == block > 0
    assert sizes[3] - sizes[0] == 9 * block


def test_dropout_on_gpus_keeps_only_a_mask_of_one_byte_per_element():
    """After the embedding, after each attention and after each mlp; fused attention keeps none,
    but is another kernel: flash with a seed of 24 bytes for cudnn with one of 16."""
    gpt2 = ["model.preset=gpt2-124m", "mesh.dp_replicate=8", "precision.layout=zero16"]
    batch, cluster = "batch={accumulate: 1, micro: 8, sequence: 1024}", "cluster.preset=h100-8"
    specs = [
        load("ddp", [*gpt2, batch, cluster, f"model.dropout={rate}"]).spec for rate in (0, 0.1)
    ]
    plain, dropping = (derive(spec).exact.bytes_of(State.ACTIVATIONS, 0) for spec in specs)
    assert plain == 4_409_088_004 + 12 * 16
    assert dropping - plain == (1 + 2 * 12) * 8 * 1024 * 768 + 12 * (24 - 16)


@pytest.mark.parametrize("preset", ["tp", "tp-sp", "pp-gpipe", "pp-zbv"])
def test_on_gpus_the_peak_of_dropout_in_sharded_models_is_predicted_and_not_claimed(preset):
    batch = "batch={accumulate: 4, micro: 1, sequence: 16}"
    words = ["model.preset=gpt-tiny", "model.dropout=0.1", batch, "device=cuda"]
    exact = derive(load(preset, words).spec).exact
    assert not exact.undefined.keys() & {"activations", "peak"}
    assert {"activations", "peak"} <= exact.unclaimed.keys()
    on_cpu = derive(load(preset, [*words, "device=cpu"]).spec).exact
    assert exact.bytes_of(State.ACTIVATIONS) < on_cpu.bytes_of(State.ACTIVATIONS)


def test_fp64_doubles_floating_point_storage_but_not_tokens():
    single = saved_bytes(model_timeline(setting(GPT)))
    double = saved_bytes(model_timeline(setting(GPT, DType.FP64)))
    targets = 2 * 8 * 8  # a contiguous copy of the int64 targets
    assert double - targets == 2 * (single - targets)


def test_every_gradient_completes_once_between_the_boundaries_of_its_unit():
    played = model_timeline(setting(ODD_SHAPE))
    inside: list[int] = []
    seen = []
    for item in played.backward:
        match item:
            case Boundary(Mark.PRE_BACKWARD, unit):
                inside.append(unit)
            case Boundary(Mark.POST_BACKWARD, unit):
                inside.remove(unit)
            case Complete(parameter, size):
                seen.append(parameter)
                unit = int(parameter.split(".")[1]) if parameter.startswith("blocks") else 3
                assert unit in inside and size > 0
    assert not inside
    assert len(seen) == len(set(seen)) == 3 * 9 + 3


def test_a_micro_batch_leaves_only_its_gradients():
    for shape in (ODD_SHAPE, GPT):
        played = model_timeline(setting(shape))
        runs = sum(i.net for i in (*played.forward, *played.backward) if isinstance(i, Run))
        kept = sum(i.size for i in played.backward if isinstance(i, Complete) and not i.cloned)
        assert runs == kept


def test_the_traced_version_of_torch_is_stated():
    assert torch_version(setting(ODD_SHAPE)).startswith("2.")


def test_80_layers_take_at_most_10_milliseconds():
    shape = replace(LLAMA_8B, layers=80)
    best = float("inf")
    for _ in range(5):
        start = time.process_time()
        model_timeline(setting(shape, DType.BF16, sequence=4096))
        best = min(best, time.process_time() - start)
    assert best <= 0.010
