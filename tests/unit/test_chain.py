"""The facts that the pipeline axis reads from a user model, and the models it rejects."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ptrain.axes.pipeline.run.cut import CalledOnce, part_of, run_stage
from ptrain.axes.pipeline.stage_facts import stage_facts, stages_of
from ptrain.errors import SpecError
from ptrain.facts.model import net_bytes
from ptrain.facts.stages import Chain, Ends
from ptrain.interpreter.construction import stages_of_module
from ptrain.models.chain import chain_of_module, sample_tokens
from ptrain.models.facts import untraced_facts
from ptrain.models.initialize import build_model
from ptrain.spec.load import load
from ptrain.spec.spec import Spec
from ptrain.timeline import Complete, Kind
from ptrain.traces.facts import read_facts
from ptrain.traces.stage_parts import stage_traces
from tests import models_staged
from tests.gloo.test_own_pipeline import GROUPED, MODELS, SIZES
from tests.models_external import Carriers, Necks, Pairs

OTHERS: dict[str, dict[str, Any]] = {
    "gemma": {"hf": "gemma", "config": GROUPED | {"head_dim": 8}},
    "cohere": {"hf": "cohere", "config": SIZES},
    "granite": {"hf": "granite", "config": SIZES | {"embedding_multiplier": 12.0}},
    "gpt2": {"hf": "gpt2", "config": {"n_embd": 32, "n_layer": 4, "n_head": 4, "vocab_size": 260}},
    "unplanned": {"target": "tests.models_external:pairs", "arguments": {"planned": False}},
}


def spec_of(model: dict[str, Any], **sections: Any) -> Spec:
    if "hf" in model:
        pytest.importorskip("transformers")
    mapping = {
        "model": model,
        "mesh": {"pp": 2},
        "placement": {"pp": "S,S,S,R"},
        "batch": {"accumulate": 2, "micro": 1, "sequence": 16},
    }
    return load(mapping | sections).spec


def build_model_of(spec: Spec) -> nn.Module:
    return build_model(spec.model, sequence=16, allow_import=True)


def rejection_of(spec: Spec, module: nn.Module | None = None) -> tuple[str, str, str]:
    with pytest.raises(SpecError) as raised:
        if module is None:
            read_facts(spec, allow_import=True)
        else:
            stages_of_module(spec, module, untraced_facts(module, spec))
    (fault,) = raised.value.faults
    return fault.place, fault.finding, fault.remedy


def planned_model(module: nn.Module, *names: str) -> nn.Module:
    module.pp_plan = names  # type: ignore[assignment]
    return module


def test_a_plan_of_transformers_names_embedding_and_head():
    spec = spec_of(MODELS["tied"])
    assert chain_of_module(build_model_of(spec), spec) == Chain(
        layers=tuple(f"model.layers.{index}" for index in range(4)),
        ends=Ends(front=("model.embed_tokens",), behind=("model.norm", "lm_head")),
        hidden=SIZES["hidden_size"],
        tied=(("model.embed_tokens.weight", "lm_head.weight"),),
    )


def test_dropout_after_the_embedding_belongs_to_the_embedding():
    spec = spec_of(MODELS["neox"])
    found = chain_of_module(build_model_of(spec), spec)
    assert found is not None
    assert found.ends.front == ("gpt_neox.embed_in", "gpt_neox.emb_dropout")
    assert found.ends.behind[0] == "gpt_neox.final_layer_norm"
    assert not found.tied


@pytest.mark.parametrize(
    "plan", [("table", "layers", "head"), {"table": 0, "layers": 1, "head": 2}]
)
@pytest.mark.parametrize("tied", [False, True])
def test_a_user_module_names_its_parts_by_an_attribute(plan, tied):
    spec = spec_of(MODELS["pairs"])
    module = planned_model(Pairs(16, 3, 260, tied), *plan)
    assert chain_of_module(module, spec) == Chain(
        layers=("layers.0", "layers.1", "layers.2"),
        ends=Ends(front=("table",), behind=("head",)),
        hidden=16,
        tied=(("table.weight", "head.weight"),) if tied else (),
    )


def test_without_pp_the_model_is_not_inspected():
    spec = spec_of(OTHERS["unplanned"], mesh={}, placement={})
    assert chain_of_module(build_model_of(spec), spec) is None


@pytest.mark.parametrize("model", [*MODELS, *OTHERS, "tied-split"])
def test_stages_one_after_the_other_give_the_models_logits(model):
    section = {**MODELS, **OTHERS}.get(model, MODELS["tied"])
    split = [3, 1] if model == "tied-split" else "parameters"
    spec = spec_of(section, pipeline={"split": split})
    module = build_model_of(spec).double().eval()
    facts = untraced_facts(module, spec)
    assert facts.chain is not None
    stages = stages_of(spec, facts)
    tokens = torch.arange(3, 19).reshape(1, 16)
    given, names = (tokens,), []
    for index in range(len(stages)):
        part = part_of(module, stages, index, facts.chain)
        names += [name for name, _ in part.named_parameters()]
        x = part(*given)
        given = (x, tokens)
    torch.testing.assert_close(x, module(tokens), rtol=0, atol=1e-12)
    copies = [copy for _, copy in facts.chain.tied]
    own = [name for name, _ in module.named_parameters()]
    assert sorted(names) == sorted([*own, *copies])


def test_a_copy_of_a_tied_tensor_is_independent():
    spec = spec_of(MODELS["tied"])
    module = build_model_of(spec)
    facts = untraced_facts(module, spec)
    assert facts.chain is not None
    stages = stages_of(spec, facts)
    first, last = (part_of(module, stages, index, facts.chain) for index in range(2))
    table = first.get_parameter("model.embed_tokens.weight")
    copy = last.get_parameter("lm_head.weight")
    assert torch.equal(table, copy) and table.data_ptr() != copy.data_ptr()


def test_buffers_of_other_stages_are_excluded():
    spec = spec_of(OTHERS["gemma"])
    module = build_model_of(spec)
    facts = untraced_facts(module, spec)
    if not any(name.endswith("embed_scale") for name, _ in facts.buffers):
        pytest.skip("this transformers scales outside the embedding")
    assert facts.chain is not None
    stages = stages_of(spec, facts)
    for stage in stages:
        part = part_of(module, stages, stage.index, facts.chain)
        predicted = dict(stage_facts(spec, facts, stage).buffers)
        assert predicted.keys() == dict(part.named_buffers()).keys()


class Counted(Pairs):
    """Adds a number in place, as masks are made."""

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        ones = torch.zeros(1, dtype=torch.float32).add_(1)
        logits: torch.Tensor = super().forward(tokens_BT) * ones
        return logits


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_every_stage_is_traced_and_leaves_nothing_but_its_gradients(schedule):
    spec = spec_of(MODELS["pairs"], pipeline={"schedule": schedule})
    module = planned_model(Counted(16, 3, 260, tied=True), "table", "layers", "head")
    facts = untraced_facts(module, spec)
    first, last = (trace.passes for trace in stage_traces(module, spec, facts))
    hidden, logits = (16 * size * 4 for size in (16, 260))
    assert (first.output, first.hidden, last.output, last.hidden) == (hidden, 0, logits, hidden)
    for stage, passes in zip(stages_of(spec, facts), (first, last), strict=True):
        whole = passes.items[Kind.BACKWARD]
        halves = (*passes.items.get(Kind.INPUT, ()), *passes.items.get(Kind.WEIGHT, ()))
        done = [item for item in whole if isinstance(item, Complete)]
        assert {item.parameter for item in done} == {*stage.tensors}
        kept = sum(map(net_bytes, passes.items[Kind.FORWARD])) - passes.output - passes.hidden
        scalar = 4 * (stage.index > 0)  # its loss
        assert kept + sum(map(net_bytes, whole)) == scalar
        if schedule == "zero-bubble":
            assert kept + sum(map(net_bytes, halves)) == scalar
    assert all(parameter.grad is None for parameter in module.parameters())


class Repeated(Pairs):
    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        x_BTC = self.table(tokens_BT)
        for layer in (*self.layers, self.layers[0]):
            x_BTC = layer(x_BTC)
        logits: torch.Tensor = self.head(x_BTC)
        return logits


def model_with_shared_weight() -> nn.Module:
    model = Pairs(16, 2, 260, tied=False)
    model.layers[1].up.weight = model.layers[0].up.weight
    return planned_model(model, "table", "layers", "head")


def staged_spec(kind: str, **arguments: Any) -> Spec:
    target = {"target": "tests.models_staged:staged", "arguments": {"kind": kind, **arguments}}
    return spec_of(target)


@pytest.mark.parametrize("tied", [False, True])
def test_a_container_in_a_plan_means_its_called_modules(tied):
    spec = spec_of({"target": "tests.models_staged:contained", "arguments": {"tied": tied}})
    chain = chain_of_module(build_model_of(spec), spec)
    assert chain is not None
    assert chain.ends == Ends(front=("emb.tok", "emb.pos"), behind=("ln_f", "head"))
    assert chain.tied == ((("emb.tok.weight", "head.weight"),) if tied else ())


@pytest.mark.parametrize(
    ("kind", "front", "behind"),
    [
        ("plain", ("wte", "wpe"), ("ln_f", "head")),
        ("bare", ("wte", "wpe"), ("ln_f", "head", "scale")),
    ],
)
def test_without_a_plan_a_forward_pass_finds_embedding_and_head(kind, front, behind):
    chain = chain_of_module(build_model_of(staged_spec(kind)), staged_spec(kind))
    assert chain is not None
    assert chain.ends == Ends(front=front, behind=behind)
    assert chain.layers == ("h.0", "h.1", "h.2", "h.3")


@pytest.mark.parametrize("kind", models_staged.SOUND)
def test_every_way_to_write_ends_and_layers_gives_the_models_logits(kind):
    spec = staged_spec(kind)
    module = build_model_of(spec).double().eval()
    chain = untraced_facts(module, spec).chain
    assert chain is not None
    stages = stages_of(spec, untraced_facts(module, spec))
    tokens = torch.arange(3, 19).reshape(1, 16)
    parts = [part_of(module, stages, index, chain) for index in range(2)]
    assert torch.equal(parts[1](parts[0](tokens), tokens), module(tokens))


ALONG = {
    "balanced": "the output of the model depends on the input of h.2 directly",
    "skips": "the input of h.1 depends on wpe.weight directly, not only through h.0",
    "ended": "wpe.weight is used before the layers, and again after them next to the output",
    "relative": "h.0 receives a second tensor [4, 16] with its hidden states, and both need",
    "remembers": "layers pass more than hidden states to each other (tensors without gradients)",
    "averages": "the forward pass modifies mean, and stage 1 writes different values",
    "functional": "wte.weight is used before the layers, and again after them next to",
    "headfirst": "head.weight is tied to wte.weight, but is defined before it in the model",
}


@pytest.mark.parametrize("kind", ALONG)
def test_tensors_that_bypass_the_layers_are_rejected_by_name(kind):
    assert ALONG[kind] in rejection_of(staged_spec(kind))[1]


def test_a_step_that_calls_the_model_twice_is_rejected():
    spec = spec_of(
        {"target": "tests.models_staged:staged", "arguments": {"kind": "plain"}},
        step={"target": "tests.models_staged:called_twice"},
    )
    finding = rejection_of(spec, build_model_of(spec))[1]
    assert "the forward pass does not call the layers" in finding


def test_code_after_the_models_call_runs_on_the_last_stage_only():
    module, hidden = nn.Linear(3, 3), torch.ones(2, 3)
    calls: list[str] = []

    def step(model: Any) -> torch.Tensor:
        calls.append("in front")
        output: torch.Tensor = model(hidden)
        calls.append("behind")
        return output.sum()

    handed_on = run_stage(CalledOnce(module, None, is_last=False), step)
    assert torch.equal(handed_on, module(hidden)) and calls == ["in front"]
    assert run_stage(CalledOnce(module, None, is_last=True), step).dim() == 0
    assert calls == ["in front", "in front", "behind"]


def test_a_module_without_blocks_is_rejected_with_the_missing_part():
    place, finding, remedy = rejection_of(
        spec_of(MODELS["pairs"]), nn.Sequential(nn.Embedding(260, 8))
    )
    assert place == "mesh.pp"
    assert "has no list of layers to split into stages" in finding
    assert "an attribute `pp_plan`" in remedy


@pytest.mark.parametrize(("kind", "is_written"), [("plain", False), ("written", True)])
def test_the_substitute_for_an_embedding_has_no_memory_until_written(kind, is_written):
    spec = staged_spec(kind)
    module = build_model_of(spec)
    facts = untraced_facts(module, spec)
    assert facts.chain is not None
    part = part_of(module, stages_of(spec, facts), 1, facts.chain)
    given: list[torch.Tensor] = []
    part.get_submodule("wte").register_forward_hook(lambda *call: given.append(call[-1]))
    tokens, hidden = torch.arange(16).unsqueeze(0), torch.randn(1, 16, 16)
    part(hidden, tokens)
    (embedded,) = given
    assert embedded.shape == hidden.shape
    has_its_own = embedded.untyped_storage()._cdata != hidden.untyped_storage()._cdata
    assert has_its_own is is_written


def test_the_substitute_for_an_embedding_runs_once_per_shape_and_dtype():
    spec = staged_spec("plain")
    module = build_model_of(spec)
    facts = untraced_facts(module, spec)
    assert facts.chain is not None
    part = part_of(module, stages_of(spec, facts), 1, facts.chain)
    (own,) = part.get_submodule("wte")._module
    calls: list[torch.dtype] = []
    own.register_forward_pre_hook(lambda _, given: calls.append(given[0].dtype))
    for samples, dtype in ((1, torch.int64), (1, torch.int64), (2, torch.int64), (1, torch.int32)):
        tokens = torch.arange(16, dtype=dtype).repeat(samples, 1)
        part(torch.randn(samples, 16, 16), tokens)
    assert calls == [torch.int64, torch.int64, torch.int32]


WRONG = {
    "no such module": (
        lambda: planned_model(Pairs(16, 2, 260, tied=False), "tabel", "layers", "head"),
        "has tabel, but the model has no such module",
    ),
    "no list": (
        lambda: planned_model(Pairs(16, 2, 260, tied=False), "table", "head"),
        "must contain one ModuleList, the layers; it contains none",
    ),
    "a module left out": (
        lambda: planned_model(Pairs(16, 2, 260, tied=False), "table", "layers"),
        "head.weight is used after the layers, but the pp_plan of ",
    ),
    "twice through a layer": (
        lambda: planned_model(Repeated(16, 2, 260, tied=False), "table", "layers", "head"),
        "does not call the layers",
    ),
    "one tensor in two layers": (
        model_with_shared_weight,
        "are the same tensor, but belong to two stages",
    ),
    "past the layers": (
        lambda: planned_model(Carriers(10, 3, 259), "table", "layers", "head"),
        "layers.1 receives a second tensor [1, 4, 10] with its hidden states, and both need",
    ),
}


@pytest.mark.parametrize(("module", "finding"), WRONG.values(), ids=WRONG)
def test_a_plan_that_does_not_match_the_model_is_rejected_with_the_mismatch(module, finding):
    assert finding in rejection_of(spec_of(MODELS["pairs"]), module())[1]


def test_more_stages_than_layers_are_rejected():
    spec = spec_of(MODELS["pairs"], pipeline={"stages": 4, "schedule": "interleaved"})
    place, finding, _ = rejection_of(spec)
    assert place == "pipeline.stages"
    assert "4 stages need at least one layer each; the model has 3" in finding


def test_a_model_is_left_as_it_was():
    spec = spec_of(MODELS["pairs"])
    module = planned_model(Necks(10, 2, 259), "table", "layers", "head")
    module.layers[0].eval()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    modes = [each.training for each in module.modules()]
    state = torch.get_rng_state()
    stages_of_module(spec, module, untraced_facts(module, spec))
    assert torch.equal(torch.get_rng_state(), state)
    assert [each.training for each in module.modules()] == modes
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_a_sample_is_no_longer_than_the_specs():
    spec = spec_of(MODELS["pairs"], batch={"accumulate": 2, "micro": 1, "sequence": 2})
    assert sample_tokens(build_model_of(spec), spec).tolist() == [[1, 2]]
