"""Losses, steps and datasets named in a spec: each mistake is one message with place, finding and
fix; each sample is read once by its rank."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_iter

from ptrain.data.corpus import open_corpus
from ptrain.data.sampler import Split, read_batch, require_trainable_data
from ptrain.errors import Fault, SpecError
from ptrain.interpreter.program import interpret
from ptrain.models.external import MapDataset
from ptrain.models.objective import sample_batch
from ptrain.runtime.world import World
from ptrain.spec.load import load
from ptrain.spec.spec import Spec
from ptrain.traces import tensor_parts
from ptrain.traces.facts import facts_of
from tests import models_losses
from tests.models_vision import VECTORS

OWN = "tests.models_losses"
SHAPE = {"family": "llama", "layers": 1, "hidden": 16, "heads": 2, "ffn": 16, "vocab": 260}
VISION: dict[str, Any] = {
    "model": {"target": "tests.models_vision:vit"},
    "loss": {"target": "tests.models_vision:label_loss"},
}


def spec_of(**sections: Any) -> Spec:
    written = {
        "model": SHAPE,
        "mesh": {"dp_shard": 2},
        "placement": "zero2",
        "batch": {"global": 8, "micro": 2, "sequence": 8},
    }
    return load(written | sections).spec


def function(name: str, **arguments: Any) -> dict[str, Any]:
    return {"target": f"{OWN}:{name}", "arguments": arguments}


def fault_of(spec: Spec) -> Fault:
    with pytest.raises(SpecError) as caught:
        require_trainable_data(open_corpus(spec.data), spec)
        facts_of(spec, allow_import=True)
    (fault,) = caught.value.faults
    return fault


RETURNED = {
    "nothing": "returned NoneType",
    "a number": "returned float",
    "by token": "returned float32 [2, 8]",
    "whole": "returned int64 []",
    "detached": "returned a loss that depends on no trainable parameter",
}


@pytest.mark.parametrize("how", RETURNED)
def test_an_invalid_loss_is_named_by_its_type_and_shape(how):
    fault = fault_of(spec_of(loss=function("wrong", how=how)))
    assert fault.place == "loss.target" and f"{OWN}:wrong {RETURNED[how]}" in fault.finding
    fault = fault_of(spec_of(step=function("wrong_step", how=how)))
    assert fault.place == "step.target" and f"{OWN}:wrong_step {RETURNED[how]}" in fault.finding


def test_a_loss_that_raises_is_named_with_its_line():
    fault = fault_of(spec_of(loss=function("raises")))
    given = "given output float32 [2, 8, 260] and batch (inputs, targets)"
    assert f"{given}, raised ValueError: no such loss" in fault.finding
    assert f"{models_losses.__file__}:" in fault.finding and "mean loss" in fault.remedy
    fault = fault_of(spec_of(step=function("step_that_raises")))
    assert fault.place == "step.target" and "raised TypeError" in fault.finding


@pytest.mark.parametrize(
    ("name", "arguments", "finding"),
    [
        ("parts_step", {}, "does not call the model"),
        ("regularised_step", {}, "uses head.weight outside of the model call"),
        ("regularised_step", {"every": True}, "uses embed.weight and "),
    ],
)
@pytest.mark.parametrize("placed", [{}, {"mesh": {"dp_shard": 1}}], ids=["zero2", "one device"])
def test_a_step_uses_parameters_within_calls_of_the_model_alone(name, arguments, finding, placed):
    fault = fault_of(spec_of(step=function(name, **arguments), **placed))
    assert fault.place == "step.target" and f"{OWN}:{name} {finding}" in fault.finding
    assert "around calls of the full model" in fault.remedy


@pytest.mark.parametrize("detached", [False, True])
def test_a_step_that_runs_backward_itself_is_rejected(detached):
    fault = fault_of(spec_of(step=function("backward_step", detached=detached)))
    assert fault.place == "step.target" and "backward_step runs backward: " in fault.finding
    assert fault.remedy.startswith("Return the loss")


@pytest.mark.parametrize("how", RETURNED)
def test_an_invalid_loss_is_rejected_at_a_later_call(how):
    spec = spec_of(loss=function("later_wrong", how=how, by=[1]), mesh={"dp_shard": 1})
    program = interpret(spec, world=World(), allow_import=True)
    with pytest.raises(SpecError) as caught:
        program.forward_backward(program.samples(0))  # four micro-batches
    (fault,) = caught.value.faults
    assert fault.place == "loss.target" and RETURNED[how] in fault.finding


def test_a_step_without_the_model_is_rejected_in_a_users_loop():
    """There it is not run before the model is wrapped."""
    spec = spec_of(step=function("parts_step"), mesh={"dp_shard": 1})
    program = interpret(spec, world=World(), allow_import=True)
    with pytest.raises(SpecError, match=r"step\.target: .*parts_step does not call the model"):
        program.forward_backward(program.samples(0))


def test_a_step_may_call_the_model_twice_and_modify_its_output():
    assert facts_of(spec_of(step=function("twice_step")), allow_import=True).numel > 0


def test_a_function_with_other_arguments_is_rejected_by_their_names():
    fault = fault_of(spec_of(loss=function("z_loss", wait=2)))
    assert fault.place == "loss.arguments"
    assert "cannot be called with output, batch, wait" in fault.finding


@pytest.mark.parametrize("section", ["loss", "step", "data"])
def test_nothing_is_imported_without_leave(section):
    loss = {"loss": function("plain")} if section == "data" else {}
    spec = spec_of(**{section: function("items")}, **loss)
    with pytest.raises(SpecError, match=rf"{section}.target: the code of {OWN}.* is not imported"):
        facts_of(spec, allow_import=False)


@pytest.mark.parametrize(
    ("name", "arguments", "finding"),
    [
        ("no_dataset", {}, "returned int, not a map-style dataset"),
        ("no_data", {}, "raised KeyError: 'no such split'"),
        ("items", {"count": 0}, "has no samples: its length is 0"),
        ("items", {"how": "lengthless"}, "raised RuntimeError: nobody knows"),
        (
            "items",
            {"how": "raising"},
            "sample 39 of tests.models_losses:items raised OSError: ",
        ),
        (
            "items",
            {"how": "uneven"},
            "has int64 [9] and int64 [9], but sample 0 has int64 [8] and int",
        ),
        ("items", {"how": "texts"}, "is not made of tensors only: it contains a str"),
        ("items", {"how": "drifting"}, "sample 0 has different values when it is read again"),
    ],
)
def test_an_unreadable_dataset_is_rejected(name, arguments, finding):
    fault = fault_of(spec_of(data=function(name, **arguments), loss=function("plain")))
    assert fault.place == "data.target" and finding in fault.finding and fault.remedy


def test_a_dictionary_sample_must_name_the_models_input():
    fault = fault_of(spec_of(data=function("items", how="unnamed"), loss=function("plain")))
    assert fault.place == "data.target"
    assert "the keys image, label" in fault.finding and "step.target=" in fault.remedy


@pytest.mark.parametrize("how", ["augmented", "drawn"])
def test_draws_of_a_sample_are_equal_in_every_process(how):
    """Another process has generators in another state."""
    spec = spec_of(data=function("items", how=how), loss=function("plain"))
    named = spec.data.function
    assert named is not None

    def of_process(seed: int) -> list[Tensor]:
        random.seed(seed)
        np.random.seed(seed)
        return [*tree_iter(MapDataset(named).read([3, 5]))]

    once, again = map(of_process, (1, 2))
    pairs = zip(once, again, strict=True)
    assert all(torch.equal(tensor, other) for tensor, other in pairs)
    states = random.Random(2).getstate(), np.random.RandomState(2).randint(99)
    assert (random.getstate(), np.random.randint(99)) == states, "they are as they were"


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_an_epoch_gives_every_sample_once_on_any_mesh(degree):
    spec = spec_of(data=function("items"), loss=function("plain"), mesh={"dp_shard": degree})
    source = open_corpus(spec.data)
    size = source.num_samples(8, Split.TRAIN)
    assert size == 38
    firsts = [
        int(row.inputs[0, 0])
        for step in range(19)  # four epochs of 38 samples are 19 batches of 8
        for index in range(degree)
        for row in read_batch(
            source, spec=spec, step=step, data_index=index, data_degree=degree
        ).micro_batches(1)
    ]
    assert sorted(firsts) == sorted(4 * list(range(38)))


def test_the_last_twentieth_is_held_out():
    spec = spec_of(data=function("items"), loss=function("plain"), eval={"every": 1})
    source = open_corpus(spec.data)
    held_out = read_batch(source, spec=spec, step=0, split=Split.HELD_OUT)
    assert {int(row.inputs[0, 0]) for row in held_out.micro_batches(1)} == {38, 39}
    few = spec_of(data=function("items", count=19), loss=function("plain"), eval={"every": 1})
    assert "too few to hold out one in 20" in fault_of(few).finding


def test_real_numbers_come_in_the_dtype_that_the_model_computes_in():
    layout = {"layout": "fp32", "compute": "fp64"}
    data = {"target": "tests.models_vision:images"}
    spec = spec_of(**VISION, data=data, precision=layout)
    image, label = sample_batch(spec).data
    assert (image.dtype, label.dtype) == (torch.float64, torch.int64)
    assert image.shape == (2, 3, 12, 12) and label.shape == (2,)
    assert torch.equal(image[0], image[1])


def test_over_tp_the_vectors_between_blocks_are_counted():
    placed = {"mesh": {"tp": 2}, "placement": {"tp": "S,S,S,R"}}
    fault = fault_of(spec_of(**VISION, **placed, data={"target": "tests.models_vision:images"}))
    assert fault.place == "batch.sequence" and fault.remedy == "Use `batch.sequence=10`."
    assert fault.finding.startswith("8, but ") and "10 vectors per sample" in fault.finding


def test_over_pp_a_forward_pass_shows_the_vectors_between_blocks():
    pp = {"mesh": {"pp": 2}, "placement": {"pp": "S,S,S,R"}}
    spec = spec_of(**VISION, **pp, data={"target": "tests.models_vision:images"})
    facts = facts_of(spec, allow_import=True)
    assert facts.chain is not None and facts.chain.sample_shape(0) == (VECTORS, 32)
    assert facts.chain.ends.front == ("patches", "class_token", "positions")
    assert facts.stage_passes[0][0].output == 2 * VECTORS * 32 * 4


def test_the_last_stage_gives_the_loss_whatever_the_model_does():
    pair = {"model": {"target": "tests.models_invalid:changed", "arguments": {"how": "tuple"}}}
    pp = {"mesh": {"pp": 2}, "placement": {"pp": "S,S,S,R"}, "loss": function("of_pair")}
    facts = facts_of(spec_of(**pair, **pp), allow_import=True)
    assert facts.stage_passes[-1][0].output == 4


def test_bytes_of_a_batch_are_those_of_its_samples():
    spec = spec_of(**VISION, data={"target": "tests.models_vision:images"})
    assert facts_of(spec, allow_import=True).sample_bytes == 3 * 12 * 12 * 4 + 8


@pytest.mark.parametrize("by", ["loss", "step"])
def test_a_model_too_large_to_run_is_traced_with_its_loss_on_fakes(by, monkeypatch):
    named = {"target": "tests.models_vision:images", "arguments": {"named": by == "step"}}
    own = VISION if by == "loss" else {"step": {"target": "tests.models_vision:step"}}
    spec = spec_of(model=VISION["model"], data=named, **{by: own[by]})
    real = facts_of(spec, allow_import=True)
    monkeypatch.setattr(tensor_parts, "REAL_BYTES", 0)
    assert facts_of(spec, allow_import=True) == real and real.timeline


def test_a_model_with_more_outputs_than_logits_is_answered_with_the_key():
    pair = {"model": {"target": "tests.models_invalid:changed", "arguments": {"how": "tuple"}}}
    fault = fault_of(spec_of(**pair))
    assert "returned tuple (float32" in fault.finding and "loss.target=" in fault.remedy
    assert facts_of(spec_of(**pair, loss=function("of_pair")), allow_import=True).timeline


def test_cut_logits_are_gathered_for_a_loss_of_the_users():
    tp = {"mesh": {"tp": 2}, "placement": "tp", "loss": function("plain")}
    assert not spec_of(**tp).tensor.loss_parallel
    with pytest.raises(SpecError, match=r"tensor.loss_parallel: true: tests.models_losses:plain"):
        spec_of(**tp, tensor={"loss_parallel": True})


@pytest.mark.parametrize(
    ("sections", "place"),
    [
        ({"loss": {"target": f"{OWN}:plain", "chunk": 8}}, "loss.chunk"),
        ({"loss": {"arguments": {"by": 1}}}, "loss.arguments"),
        ({"loss": function("plain"), "step": function("plain")}, "step"),
        ({"loss": "chunked", "step": function("plain")}, "step"),
        ({"data": function("items")}, "data.target"),
        ({"data": function("items") | {"path": "x.npy"}, "loss": function("plain")}, "data.path"),
        ({"data": {"folder": "x"}}, "data.folder"),
    ],
)
def test_keys_that_contradict_a_function_are_rejected(sections, place):
    with pytest.raises(SpecError) as caught:
        spec_of(**sections)
    (fault,) = caught.value.faults
    assert fault.place == place and fault.remedy


def test_a_resolved_spec_finds_its_functions_from_anywhere(tmp_path):
    lines = (
        "model: {target: mine:build}",
        "data: {target: mine:samples}",
        "loss: {target: mine:loss, folder: losses}",
        "mesh: {dp_shard: 2}",
        "placement: zero2",
        "batch: {global: 8, micro: 2}",
    )
    file = tmp_path / "spec.yaml"
    file.write_text("\n".join(lines))
    spec = load(str(file)).spec
    again = load(spec.resolved).spec
    assert again == spec and again.resolved == spec.resolved
    folders = [function.folder for function in again.user_functions]
    assert folders == [str(tmp_path), str(tmp_path), str(tmp_path / "losses")]
    assert spec.batch.sequence == 1


def test_a_loss_equal_to_ptrains_is_ptrains():
    ours = facts_of(spec_of(model={"target": "tests.models_external:necks"}), allow_import=True)
    theirs = facts_of(
        spec_of(model={"target": "tests.models_external:necks"}, loss=function("plain")),
        allow_import=True,
    )
    assert theirs.vocabulary is None and ours.vocabulary == 259
    assert theirs.gradient_order == ours.gradient_order
