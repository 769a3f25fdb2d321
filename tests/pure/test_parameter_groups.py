"""Parameter groups of the optimizer: kinds by name and shape, rules, and rejected values."""

from __future__ import annotations

from typing import Any

import pytest

from ptrain.algebra.legality import require_runnable
from ptrain.axes.data.form import form_of
from ptrain.cost import State
from ptrain.derivation.estimate import derive
from ptrain.errors import SpecError
from ptrain.facts.parameters import facts
from ptrain.optimizers.groups import Rule, rule_of, rules_of_unit, split_by_rule
from ptrain.spec.groups import KINDS, selects
from ptrain.spec.load import load
from ptrain.spec.spec import Spec
from ptrain.spec.write import section_mapping
from ptrain.steps.wraps import Form

NAMES = {
    "transformer.wte.weight": ("embeddings", 2),
    "transformer.wpe.weight": ("embeddings", 2),
    "transformer.h.0.ln_1.weight": ("norms", 1),
    "transformer.ln_f.bias": ("norms", 1),
    "transformer.value_embeds.3.weight": ("embeddings", 2),
    "lm_head.weight": ("head", 2),
    "model.embed_tokens.weight": ("embeddings", 2),
    "model.layers.3.input_layernorm.weight": ("norms", 1),
    "model.layers.3.self_attn.q_norm.weight": ("norms", 1),
    "bert.embeddings.LayerNorm.weight": ("norms", 1),
    "bert.embeddings.position_embeddings.weight": ("embeddings", 2),
    "output.weight": ("head", 2),
    "embed_out.weight": ("head", 2),
    "unembed.weight": ("head", 2),
    "blocks.3.attention.output.weight": ("", 2),
    "blocks.3.mlp.up.weight": ("", 2),
    "blocks.3.norm_scale_free.alpha": ("norms", 1),
    "model.layers.0.mlp.down_proj.bias": ("biases", 1),
    "layers.0.A_log": ("", 1),
}


@pytest.mark.parametrize("name", NAMES)
def test_the_kind_of_a_parameter_follows_from_its_name(name: str) -> None:
    kind, dims = NAMES[name]
    found = {word for word in ("embeddings", "head", "norms") if selects(word, name, dims)}
    assert found == ({kind} - {"", "biases"})
    assert selects("biases", name, dims) is name.endswith("bias")
    assert selects("matrices", name, dims) is (dims == 2) is not selects("vectors", name, dims)


@pytest.mark.parametrize(
    ("word", "is_selected"),
    [
        ("blocks.*.mlp", True), ("blocks.3", True), ("blocks.*.mlp.up.weight", True),
        ("blocks.*.ml", False), ("mlp", False), ("blocks.1", False),
    ],
)  # fmt: skip
def test_a_name_selects_a_parameter_or_a_module(word: str, is_selected: bool) -> None:
    assert selects(word, "blocks.3.mlp.up.weight", 2) is is_selected


def spec_with(optimizer: str, name: str = "zero2", *more: str) -> Spec:
    return load(name, [f"optimizer={optimizer}", *more]).spec


def rules_by_name(spec: Spec) -> dict[str, Rule]:
    units = facts(spec.model, spec.batch.sequence).units  # type: ignore[arg-type]
    pairs = ((u, zip(u.trained, rules_of_unit(spec.optimizer, u), strict=True)) for u in units)
    return {tensor.name: rule for _, rules in pairs for tensor, rule in rules}


DECAYED = {
    "all": {"embed.weight", "norm.bias", "norm.weight", "blocks.0.mlp.up.bias"},
    "matrices": {"embed.weight"},
    "no-norms-biases": {"embed.weight"},
}


@pytest.mark.parametrize("decay", DECAYED)
def test_weight_decay_applies_to_these_parameters(decay: str) -> None:
    spec = spec_with(f"{{weight_decay: 0.2, decay: {decay}}}", "zero2", "model.preset=gpt-tiny")
    rules = rules_by_name(spec)
    assert {n for n in DECAYED["all"] if rules[n].hyper.weight_decay == 0.2} == DECAYED[decay]
    assert rules["blocks.0.mlp.up.weight"].hyper.weight_decay == 0.2


def test_the_first_matching_group_applies_and_others_keep_the_optimizers_values() -> None:
    ends = "{match: [head, embeddings], lr: 6e-4, betas: [0.8, 0.9]}"
    groups = f"[{ends}, {{match: matrices, lr_factor: 3}}]"
    spec = spec_with(f"{{lr: 3e-4, decay: matrices, groups: {groups}}}")
    rules = rules_by_name(spec)
    embedding, inner, norm = (
        rules[name] for name in ("embed.weight", "blocks.1.mlp.up.weight", "norm.weight")
    )
    assert (embedding.lr_factor, embedding.hyper.betas) == (2.0, (0.8, 0.9))
    assert (inner.lr_factor, inner.hyper.betas) == (3.0, (0.9, 0.95))
    assert (norm.lr_factor, norm.hyper.weight_decay) == (1.0, 0.0)


def test_muon_of_a_group_updates_matrices_with_its_defaults() -> None:
    text = "{groups: [{match: [embeddings, head], lr_factor: 2}, {match: matrices, name: muon}]}"
    rules = rules_by_name(spec_with(text, "ddp"))
    names = {name: rule.name for name, rule in rules.items()}
    assert names["embed.weight"] == names["head.weight"] == names["norm.weight"] == "adamw"
    assert names["blocks.0.mlp.up.weight"] == "muon"
    assert rules["blocks.0.mlp.up.weight"].hyper.momentum == 0.95


def test_state_is_predicted_by_the_optimizer_of_each_parameter() -> None:
    spec = spec_with("{groups: [{match: matrices, name: sgd, momentum: 0.9}]}", "ddp")
    tensors = facts(spec.model, spec.batch.sequence).tensors  # type: ignore[arg-type]
    state = sum(4 * t.numel if len(t.shape) > 1 else 8 * t.numel + 4 for t in tensors)
    rows = derive(spec).exact.memory
    assert {row.device_bytes for row in rows if row.state is State.OPTIMIZER} == {state}


def test_segments_are_the_runs_of_tensors_with_one_rule() -> None:
    spec = spec_with("{decay: matrices}").optimizer
    matrix, norm = rule_of(spec, "a.weight", 2, False), rule_of(spec, "norm.weight", 1, False)
    found = split_by_rule([norm, matrix, matrix, norm], [0, 3, 4, 2])
    assert [(s.start, s.numel) for s in found] == [(0, 0), (0, 7), (7, 2)]


def test_torchs_zero_redundancy_optimizer_has_one_group() -> None:
    assert form_of(spec_with("{}", "ddp-zero-redundancy")) is Form.SPREAD_UPDATE
    assert form_of(spec_with("{decay: matrices}", "ddp-zero-redundancy")) is Form.FLAT


def test_groups_are_written_as_they_are_read() -> None:
    groups = [{"match": "norms", "weight_decay": 0.0}, {"match": ["head", "a.*.b"], "lr": 0.1}]
    spec = load("zero2", [f"optimizer.groups={groups}"]).spec
    assert section_mapping(spec.optimizer)["groups"] == groups


REJECTED: dict[str, tuple[Any, str]] = {
    "a number": (3, "must be a list of"),
    "no mapping": ([3], "group 1 must be a mapping"),
    "unknown key": ([{"match": "head", "wd": 0}], "group 1 has no key 'wd'"),
    "no match": ([{"lr": 1.0}], "group 1 has no match"),
    "nothing set": ([{"match": "head"}], "group 1 has no hyperparameter"),
    "two rates": ([{"match": "head", "lr": 1.0, "lr_factor": 2.0}], "group 1 has lr and lr_factor"),
    "near": ([{"match": "norm", "lr": 1.0}], "norm is no kind"),
    "empty match": ([{"match": [], "lr": 1.0}], "match is an empty list"),
    "bad match": ([{"match": "a b", "lr": 1.0}], "match must be a kind or a name"),
    "bad value": ([{"match": "head", "eps": 2}], "group 1, eps: must be a finite number"),
}


@pytest.mark.parametrize("case", REJECTED)
def test_a_wrong_list_of_groups_is_rejected(case: str) -> None:
    groups, finding = REJECTED[case]
    with pytest.raises(SpecError) as caught:
        load("zero2", [f"optimizer.groups={groups!r}"])
    (fault,) = caught.value.faults
    assert fault.place == "optimizer.groups" and finding in fault.finding and fault.remedy


@pytest.mark.parametrize(
    ("groups", "finding"),
    [
        ("[{match: biases, lr: 1}]", "the model has no biases that are trained"),
        ("[{match: blocks.9.mlp, lr: 1}]", "no trained parameter is named blocks.9.mlp"),
    ],
)
def test_a_group_that_matches_nothing_is_rejected(groups: str, finding: str) -> None:
    with pytest.raises(SpecError) as caught:
        derive(spec_with(f"{{groups: {groups}}}"))
    (fault,) = caught.value.faults
    assert finding in fault.finding and all(kind in fault.remedy for kind in KINDS)


@pytest.mark.parametrize(
    ("optimizer", "finding"),
    [
        ("{groups: [{match: head, name: sgd}]}", "adamw and sgd, which keep different state"),
        ("{name: lion, decay: matrices}", "lion, whose temporaries"),
        ("{name: sgd, groups: [{match: head, momentum: 0.9}]}", "with and without momentum"),
    ],
)
def test_groups_with_different_state_are_rejected_in_flat_units(
    optimizer: str, finding: str
) -> None:
    with pytest.raises(SpecError, match=finding):
        require_runnable(load("zero2", [f"optimizer={optimizer}"]))
    require_runnable(load("ddp", [f"optimizer={optimizer}"]))


def test_a_tied_weight_on_two_stages_needs_one_rule() -> None:
    def estimate_of(*overrides: str) -> object:
        spec = require_runnable(load("pp-1f1b", ["model.preset=gpt-tiny", *overrides]))
        return derive(spec, facts(spec.model, spec.batch.sequence)).exact

    with pytest.raises(SpecError) as caught:
        estimate_of("optimizer.groups=[{match: embeddings, lr_factor: 2}]")
    (fault,) = caught.value.faults
    assert "are one tied weight with different rules" in fault.finding
    assert estimate_of("optimizer.groups=[{match: matrices, lr_factor: 2}]")
