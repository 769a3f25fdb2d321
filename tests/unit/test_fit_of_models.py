"""The fit of user models: a large model that reads values has no peak, and a model with dropout has
the peak of a CPU."""

from __future__ import annotations

import json
import shlex
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ptrain.installed import torch_minor
from ptrain.models.modes import drops_out
from ptrain.spec.load import load
from ptrain.traces import tensor_parts
from ptrain.traces.facts import facts_of
from tests.models_external import Necks

# 0.7e9 parameters: above 2 GiB in fp32
LARGE = (
    "model={hf: LlamaForCausalLM, config: {vocab_size: 32000, hidden_size: 4096, "
    "intermediate_size: 14336, num_hidden_layers: 2, num_attention_heads: 32, "
    "num_key_value_heads: 32, max_position_embeddings: 4096}}"
)
SMALL = (
    "hidden_size: 32, intermediate_size: 48, num_hidden_layers: 1, num_attention_heads: 4, "
    "num_key_value_heads: 4, vocab_size: 261, max_position_embeddings: 64"
)
BATCH = "batch={global: 64, micro: 8, sequence: 4096}"
H100 = ("mesh.dp_shard=8", "cluster.preset=h100-8")


class Functional(Necks):
    """Drops out by a function, under a name that says nothing."""

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return F.dropout(super().forward(tokens_BT), 0.2, self.training)


def functional() -> nn.Module:
    return Functional(10, 2, 259)


MEASURE = "to measure the peak"


def test_a_large_model_of_transformers_fits_or_not_by_its_peak(ptrain):
    pytest.importorskip("transformers")
    record = json.loads(ptrain("predict", "zero3", LARGE, BATCH, *H100, "--json"))["fit"]
    assert record["fits"] is True and record["unknown"] is None
    assert 0 < record["resident_bytes"] < record["peak_bytes"] < record["device_memory"]
    text = ptrain("predict", "zero3", LARGE, BATCH, *H100, "cluster.device_memory=30 GiB")
    assert "Does not fit by " in text and "or more" not in text


@pytest.mark.skipif(
    torch_minor() in ("2.14", "2.15"), reason="from 2.14 on kernels take fewer key heads"
)
def test_where_a_gpu_has_no_kernel_for_groups_of_heads_no_fit_is_claimed(ptrain):
    """In 32 bits torch's attention on GPUs takes as many heads of keys as of queries, or goes
    operator by operator; on a CPU one kernel takes all."""
    pytest.importorskip("transformers")
    model = f"model={{hf: LlamaForCausalLM, config: {{{SMALL}}}}}"
    batch = "batch={global: 8, micro: 1, sequence: 16}"
    words = ("zero3", model, *H100, "precision.layout=fp32", batch)
    grouped = (*words, "model.config.num_key_value_heads=2")
    record = json.loads(ptrain("predict", *grouped, "--json"))["fit"]
    assert record["fits"] is None
    assert record["unknown"].startswith("for head_dim 8 in fp32, fewer key heads no known GPU")
    assert json.loads(ptrain("predict", *words, "--json"))["fit"]["fits"] is True


@pytest.fixture
def of_a_large_model_that_reads(ptrain, monkeypatch):
    monkeypatch.setattr(tensor_parts, "REAL_BYTES", 0)
    model = "model={target: 'tests.unit.test_simulation_models:reading'}"
    batch = "batch={global: 64, micro: 8, sequence: 16}"
    return partial(ptrain, "predict", "zero3", model, batch, *H100, "--allow-import")


def test_of_a_large_model_that_reads_values_no_fit_is_claimed(of_a_large_model_that_reads):
    text = of_a_large_model_that_reads()
    assert "\nFits" not in text and "to spare" not in text
    lines = text.splitlines()
    assert lines[1].startswith("Unknown whether it fits: ")
    assert "its code reads values" in lines[2]
    (command,) = (line for line in lines if MEASURE in line)
    assert shlex.split(command)[-2:] == ["--allow-import", "--rehearse"]
    record = json.loads(of_a_large_model_that_reads("--json"))["fit"]
    assert record["fits"] is None and record["peak_bytes"] is None
    assert 0 < record["resident_bytes"] < record["device_memory"]


def test_its_states_alone_may_be_too_large(of_a_large_model_that_reads):
    small = "cluster.device_memory=1 KiB"
    text = of_a_large_model_that_reads(small)
    assert "Does not fit by " in text and "or more" in text and "closer" not in text
    record = json.loads(of_a_large_model_that_reads(small, "--json"))
    assert record["fit"]["fits"] is False and record["fit"]["peak_bytes"] is None
    assert record["cheaper"] == []


def test_with_dropout_a_small_model_of_transformers_is_not_known_to_fit_on_a_gpu(ptrain):
    pytest.importorskip("transformers")
    batch = "batch={global: 8, micro: 1, sequence: 16}"
    for dropout, fits in ((0.0, True), (0.1, None)):
        model = f"model={{hf: llama, config: {{{SMALL}, attention_dropout: {dropout}}}}}"
        record = json.loads(ptrain("predict", "zero3", model, batch, *H100, "--json"))
        assert record["fit"]["fits"] is fits
        on_cpu = json.loads(ptrain("predict", "zero3", model, batch, *H100, "device=cpu", "--json"))
        assert on_cpu["fit"]["fits"] is True


def test_a_model_of_the_user_that_drops_out_by_a_function_is_known_by_its_trace(ptrain):
    target = "model={target: 'tests.unit.test_fit_of_models:functional'}"
    batch = "batch={global: 8, micro: 1, sequence: 16}"
    assert not drops_out(functional())
    assert facts_of(load("zero3", [target, batch]).spec).draws
    text = ptrain("predict", "zero3", target, batch, *H100, "--allow-import")
    (command,) = (line for line in text.splitlines() if MEASURE in line)
    words = shlex.split(command)
    assert words[-3:] == ["device=cuda", "--allow-import", "--rehearse"]


def test_without_dropout_nothing_is_drawn():
    plain = "model={target: 'tests.models_external:necks'}"
    assert not facts_of(load("zero3", [plain, "batch={global: 4, sequence: 16}"]).spec).draws


@pytest.mark.parametrize(
    ("module", "drops"),
    [
        (nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1)), True),
        (nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.0)), False),
        (nn.Sequential(nn.Dropout1d(0.5)), True),
        (nn.Linear(2, 2), False),
    ],
)
def test_dropout_is_seen_in_a_module(module, drops):
    assert drops_out(module) is drops


def test_dropout_is_larger_on_a_cpu_whose_mask_is_as_wide_as_its_input():
    """A GPU's kernel saves a mask of bytes, so its figures differ."""
    saved: list[Tensor] = []
    x = torch.ones(4, 4, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        F.dropout(x, 0.1)
    assert [each.dtype for each in saved] == [torch.float32]


def test_checkpointed_attention_saves_what_its_kernel_saves(ptrain):
    """The operator is not rerun in backward."""
    pytest.importorskip("transformers")
    model = f"model={{hf: LlamaForCausalLM, config: {{{SMALL}}}}}"
    batch = "batch={global: 8, micro: 1, sequence: 16}"
    selective = ("precision.layout=bf16", "activations=M", "recompute=selective")
    record = json.loads(ptrain("predict", "zero3", model, *H100, batch, *selective, "--json"))
    assert record["unclaimed"] == {} and record["fit"]["fits"] is True
