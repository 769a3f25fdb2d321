"""A trace on fake tensors equals the trace on real tensors: full models, stages, sharded
operators."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ptrain.cli.main import main
from ptrain.derivation.estimate import derive
from ptrain.facts.model import LayerWork, ModelFacts, WorkByKind
from ptrain.simulation.execute import simulate
from ptrain.spec.load import load
from ptrain.spec.spec import Spec
from ptrain.traces import facts, tensor_parts
from ptrain.traces.facts import facts_of
from tests.forked import patch_processes
from tests.models_external import Necks
from tests.unit.test_work import computing

LLAMA = (
    "{hf: LlamaForCausalLM, config: {hidden_size: 32, intermediate_size: 48, num_hidden_layers: 4, "
    "num_attention_heads: 4, num_key_value_heads: 2, vocab_size: 261, "
    "max_position_embeddings: 64}}"
)
MIXTRAL = (
    "{hf: mixtral, config: {hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2, "
    "num_attention_heads: 4, num_key_value_heads: 2, vocab_size: 261, num_local_experts: 4}}"
)
GPT2 = "{hf: GPT2LMHeadModel, config: {n_embd: 32, n_layer: 2, n_head: 4, vocab_size: 261}}"
NECKS = "{target: 'tests.models_external:necks'}"
READING = "{target: 'tests.unit.test_simulation_models:reading'}"
UNTABLED = ("activations=M", "recompute={keep: [norm]}")
DROPPING = "{target: 'tests.unit.test_traces_on_fake_tensors:dropping'}"
OURS = "{family: gpt, layers: 2, hidden: 32, heads: 4, vocab: 261}"  # of ours, without a table
NORMED = (
    "{layers: 2, hidden: 32, heads: 4, kv_heads: 2, ffn: 48, vocab: 261, head_dim: 16, "
    "qk_norm: true}"
)
BATCH = "batch={accumulate: 4, micro: 2, sequence: 16}"
nightly = pytest.mark.nightly


class Dropping(Necks):
    """Drops out by a function alone: no module says so."""

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return F.dropout(super().forward(tokens_BT), 0.1)


def dropping() -> nn.Module:
    return Dropping(10, 2, 259)


def spec_of(model: str, strategy: str, *changes: str) -> Spec:
    return load(strategy, [f"model={model}", BATCH, "device=cpu", *changes]).spec


def on_fake_tensors(spec: Spec, monkeypatch: pytest.MonkeyPatch) -> ModelFacts:
    """Here and in the processes that play the ranks of tp."""
    monkeypatch.setattr(tensor_parts, "REAL_BYTES", 0)
    monkeypatch.setattr(tensor_parts, "Popen", patch_processes(tensor_parts__REAL_BYTES=0))
    monkeypatch.setattr(tensor_parts, "_played_here", lambda request: [])
    tensor_parts._request_answers.cache_clear()
    return facts_of(spec)


@pytest.mark.parametrize(
    ("model", "strategy", "changes"),
    [
        (LLAMA, "zero3", ("loss.chunk=8", "activations=M")),
        pytest.param(LLAMA, "pp-1f1b", (), marks=nightly),
        (NECKS, "fsdp-mixed", ()),
        (DROPPING, "ddp", ()),
        (OURS, "zero3", UNTABLED),
        (LLAMA, "tp", ()),
        (NORMED, "tp", ("placement.tp=tp-sp", "device=cuda", "cluster.preset=h100-8")),
        pytest.param(GPT2, "zero3", (), marks=nightly),
        pytest.param(LLAMA, "zero3", ("activations=O",), marks=nightly),
        pytest.param(LLAMA, "pp-1f1b", ("pipeline.schedule=zbv",), marks=nightly),
        pytest.param(LLAMA, "tp-zero3", ("loss.chunk=8", "activations=O"), marks=nightly),
        pytest.param(LLAMA, "pp-zero3", ("mesh.tp=2", "placement.tp=tp"), marks=nightly),
    ],
)
def test_a_trace_on_fakes_is_the_one_on_real_tensors(
    model: str, strategy: str, changes: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    if "hf:" in model:
        pytest.importorskip("transformers")
    spec = spec_of(model, strategy, *changes)
    real = facts_of(spec)
    assert real.timeline is not None
    fake = on_fake_tensors(spec, monkeypatch)
    assert not fake.untraced
    for name in ModelFacts.__dataclass_fields__.keys() - {"work", "part_works"}:
        assert getattr(fake, name) == getattr(real, name), name
    assert [*map(without_front, works(fake))] == [*map(without_front, works(real))]


def works(facts: ModelFacts) -> tuple[WorkByKind, ...]:
    assert facts.work is not None
    return facts.work, *facts.part_works


def without_front(work: WorkByKind) -> list[LayerWork]:
    """In front of the layers transformers looks whether samples are packed, which no fake says; and
    a fake is not looked at as often as what it stands for."""
    model = work.to_model
    return [*map(without_views, (*model.layers, model.behind))]


def without_views(layer: LayerWork) -> LayerWork:
    passes = ("forward", "backward", "inputs", "weights")
    return LayerWork(**{name: computing(getattr(layer, name)) for name in passes})


def test_value_reads_leave_activations_and_peak_unknown_with_a_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = spec_of(READING, "zero3")
    read = on_fake_tensors(spec, monkeypatch)
    assert "its code reads values" in read.untraced
    undefined = derive(spec, read).exact.undefined
    assert undefined["activations"] == undefined["peak"] == read.untraced
    assert undefined.keys() == {"activations", "peak", "step_seconds"}


def test_a_class_of_transformers_that_reads_values_is_not_built_on_real_tensors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Experts that look up which tokens are theirs; real tensors would take the memory of all."""
    pytest.importorskip("transformers")
    monkeypatch.setattr(facts, "build_model", None)
    by_expert = mixtral("experts_implementation: eager")
    read = on_fake_tensors(spec_of(by_expert, "zero3"), monkeypatch)
    assert read.numel > 0 and "its code reads values" in read.untraced


def test_experts_by_grouped_products_are_traced_on_fakes_as_on_real_tensors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("transformers")
    spec = spec_of(mixtral("num_experts_per_tok: 2"), "zero3")
    assert facts_of(spec).timeline == on_fake_tensors(spec, monkeypatch).timeline


def mixtral(field: str) -> str:
    fields = f"num_hidden_layers: 2, num_local_experts: 4, {field}"
    config = LLAMA.partition("config: ")[2].replace("num_hidden_layers: 4", fields)
    return "{hf: MixtralForCausalLM, config: " + config


class Halting(torch.autograd.Function):
    """The identity, of which no fake knows the backward pass."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        raise RuntimeError("no fake of this")


class Halted(Necks):
    def forward(self, tokens_BT: Tensor) -> Tensor:
        return Halting.apply(super().forward(tokens_BT))


def halted_model() -> nn.Module:
    return Halted(10, 2, 259)


def test_operators_whose_backward_fake_tensors_cannot_run_are_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read = on_fake_tensors(
        spec_of("{target: 'tests.unit.test_traces_on_fake_tensors:halted_model'}", "zero3"),
        monkeypatch,
    )
    assert "no fake of this" in read.untraced


def test_where_a_model_runs_on_real_tensors_next_nothing_of_it_runs_on_fakes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tensor_parts, "REAL_BYTES", 0)
    for model in (NECKS, OURS):
        spec = spec_of(model, "zero3", *(UNTABLED if model == OURS else ()))
        untraced = facts.facts_of(spec, runs_fakes=False)
        assert untraced.timeline is None and "a training does not run" in untraced.untraced


def test_with_a_torch_of_which_nothing_is_known_fakes_trace_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tensor_parts.torch, "__version__", "2.99.0")
    read = on_fake_tensors(spec_of(NECKS, "zero3"), monkeypatch)
    assert read.timeline is None and "not 2.99.0" in read.untraced


def test_the_prediction_of_a_large_model_equals_its_simulation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = spec_of(NECKS, "zero3")
    predicted = derive(spec, on_fake_tensors(spec, monkeypatch)).exact.of_rank(1)
    assert set(predicted.peak) == set(simulate(spec, 1, allow_import=True).estimate.peak)


@pytest.fixture
def all_are_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make each trace on real tensors count as slow, in the processes that play ranks too."""
    monkeypatch.setattr(tensor_parts, "QUICK_BYTES", 0)
    monkeypatch.setattr(tensor_parts, "Popen", patch_processes(tensor_parts__QUICK_BYTES=0))
    monkeypatch.setattr(tensor_parts, "_played_here", lambda request: [])
    tensor_parts._request_answers.cache_clear()


@pytest.mark.parametrize(
    ("model", "strategy"),
    [
        (MIXTRAL, "zero3"),
        pytest.param(LLAMA, "tp", marks=pytest.mark.nightly),  # 20 s: it plays all ranks twice
        (NECKS, "fsdp-mixed"),
    ],
)
def test_a_model_slow_on_real_tensors_is_predicted_on_fake_ones(
    model: str, strategy: str, request: pytest.FixtureRequest
) -> None:
    if "hf:" in model:
        pytest.importorskip("transformers")
    spec, lines = spec_of(model, strategy), list[str]()
    real = derive(spec, facts_of(spec)).exact
    request.getfixturevalue("all_are_slow")
    fake = derive(spec, facts_of(spec, progress=lines.append)).exact
    assert not lines, "no trace on real tensors was announced"
    assert fake.memory == real.memory and fake.peak == real.peak
    assert fake.traffic == real.traffic and fake.by_data == real.by_data


@pytest.mark.parametrize("runs_fakes", [True, False])
@pytest.mark.usefixtures("all_are_slow")
def test_a_trace_on_real_tensors_is_announced_if_it_is_slow(runs_fakes: bool) -> None:
    """Fakes cannot run this code, or may not: then real tensors trace it, as a small one."""
    lines: list[str] = []
    read = facts_of(spec_of(READING, "zero3"), runs_fakes=runs_fakes, progress=lines.append)
    assert not read.untraced and read.timeline is not None
    (line,) = lines
    assert line.startswith("tracing Reading (") and "with real tensors" in line


@pytest.mark.usefixtures("all_are_slow")
def test_the_line_of_a_slow_trace_is_no_part_of_a_record(capsys: pytest.CaptureFixture) -> None:
    words = ["predict", "zero3", f"model={READING}", BATCH, "--allow-import"]
    assert main(words) == 0
    assert "tracing Reading (" in capsys.readouterr().err
    assert main([*words, "--json"]) == 0
    assert capsys.readouterr().err == ""


def test_a_few_million_parameters_or_many_tokens_are_slow_on_real_tensors() -> None:
    mode = tensor_parts.create_fake_mode()
    for sizes, batch, is_quick in (
        ((10, 2, 259), "batch={global: 2, micro: 2, sequence: 16}", True),
        ((4096, 2, 4096), "batch={global: 2, micro: 2, sequence: 16}", False),
        ((512, 2, 259), "batch={global: 64, micro: 64, sequence: 4096}", False),
    ):
        with mode:
            module = Necks(*sizes)
        spec = load("ddp", ["mesh={dp: 1}", f"model={NECKS}", batch]).spec
        assert tensor_parts.FakeModel(spec, module, mode).is_quick is is_quick
