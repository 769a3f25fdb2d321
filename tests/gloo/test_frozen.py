"""Frozen parameters have neither gradients nor optimizer state: memory and traffic are exact in
prediction, simulation and measurement, and training equals one device."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import ptrain
from ptrain.convert.export import Adapters, export_checkpoint
from ptrain.convert.saved import SavedModel
from ptrain.errors import SpecError
from ptrain.facts.model import ModelFacts
from ptrain.runtime.world import World
from ptrain.simulation.execute import simulate
from ptrain.spec.spec import Spec
from ptrain.verification.reference import ReferenceTraining
from tests import jobs
from tests.gloo import sessions
from tests.ranks import Ranks

pytestmark = pytest.mark.gloo
nightly = pytest.mark.nightly

STEPS = 3
STRATEGIES = ["ddp", "zero3", "zero1", "pp-1f1b", "pp-zero-bubble", "tp"]
OTHERS = [
    "zero2",
    "zero-offload",
    "hsdp",
    "fsdp-mixed",
    "ddp-zero-redundancy",
    "pp-zero3",
    "tp-zero3",
    "checkpoint-full",
]


BATCH = "batch={accumulate: 2, micro: 1, sequence: 16}"
OF_STAGES = "batch.accumulate=4"
ADAPTED = {"up": "column", "widen": "column", "down": "row"}
QUERIES_AND_VALUES = {
    f"self_attn.{operator}.{part}": "column"
    for operator in ("q_proj", "v_proj")
    for part in ("base_layer", "lora_B.default")
}
REST_OF_LLAMA = {
    **dict.fromkeys(("self_attn.k_proj", "mlp.gate_proj", "mlp.up_proj"), "column"),
    **dict.fromkeys(("self_attn.o_proj", "mlp.down_proj"), "row"),
}
OVER_TP = ("mesh.tp=2", "placement.tp=tp")
PLANS = {  # over tp, by model: where its layers are, and their operators
    "adapted": ("layers.*", ADAPTED),
    "lora": ("model.model.layers.*", QUERIES_AND_VALUES | REST_OF_LLAMA),
}


def frozen_spec(strategy: str, model: str, *more: str) -> Spec:
    own = model if model.startswith("{") else f"{{target: tests.models_frozen:{model}}}"
    words = [f"model={own}", BATCH]
    words += [*([OF_STAGES] if strategy.startswith("pp") else []), *more]
    if strategy.startswith("tp") or "mesh.tp=2" in more:
        layers, roles = PLANS[model]
        plan = {f"{layers}.{name}": role for name, role in roles.items()}
        words.append(f"tensor.plan={json.dumps(plan)}")
    return ptrain.load(strategy, words).spec


def _train_on_rank(spec: Spec, facts: ModelFacts) -> dict[str, Any]:
    program = ptrain.interpret(spec, world=World.join(spec.timeout), allow_import=True)
    for step in range(STEPS):
        is_measured = step == STEPS - 1
        with ptrain.measure(program) if is_measured else nullcontext() as measurement:
            lr = spec.optimizer.lr
            program.forward_backward(
                program.samples(step), lr if program.updates_in_backward else None
            )
            program.step(lr)
    comparison = ptrain.compare(spec, measurement, facts)
    state = program.state_dict()
    whole = {name: _full_tensor(tensor) for name, tensor in state["model"].items()}
    return {
        "failing": [str(check) for check in comparison if not check.holds],
        "checks": len(comparison),
        "off": [str(check) for check in comparison if check.predicted != check.measured],
        "model": whole,
        "with state": {name.rpartition(".")[0] for name in state["optimizer"]},
    }


def _full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    return getattr(tensor, "full_tensor", lambda: tensor)().detach().clone()


@pytest.mark.parametrize("model", ["adapted", pytest.param("lora", marks=nightly)])
@pytest.mark.parametrize(
    "strategy", [*STRATEGIES, *(pytest.param(name, marks=nightly) for name in OTHERS)]
)
def test_frozen_parameters_cost_only_their_storage(ranks: Ranks, strategy: str, model: str) -> None:
    if model == "lora":
        pytest.importorskip("peft")
    require_the_same_training(ranks, strategy, model)


def require_the_same_training(ranks: Ranks, strategy: str, model: str, *more: str) -> None:
    """Require exact bytes on all ranks and the training of one device."""
    spec = frozen_spec(strategy, model, *more)
    facts = ptrain.read_facts(spec, allow_import=True)
    device = ReferenceTraining(spec)
    initial = {name: tensor.clone() for name, tensor in device.parameters.items()}
    trained = {name for name, tensor in device.module.named_parameters() if tensor.requires_grad}
    for step in range(STEPS):
        device.updater.update(device.accumulate(step).sums, spec.optimizer.lr)
    for report in ranks.run(spec.world_size, _train_on_rank, spec, facts):
        assert not report["failing"] and report["checks"] >= 9
        assert not report["off"]
        assert report["with state"] == {name for name in report["model"] if name in trained}
        for name, tensor in report["model"].items():
            if tensor.dtype is torch.float32:  # coarser ones round what two ranks sum otherwise
                torch.testing.assert_close(tensor, device.parameters[name])
            assert torch.equal(tensor, initial[name].to(tensor.dtype)) is (name not in trained)


USED_UP = ("batch.accumulate=1", "batch.micro=4", "optimizer.clip=null")
FLAT = {  # gradients reach one flat buffer of a unit and not the other
    "gathered alone": ("zero3", "placement.dp_shard=S*,R,R,R"),
    "ahead": ("zero3", "placement.dp_shard=S*,R,S,R", "prefetch=1", "overlap=backward"),
    "kept": ("zero3", "placement.dp_shard=S*,R,S,R", "sync.reshard_after_backward=false"),
    "made of masters": ("zero3", "placement.dp_shard=M,S,R,R", "precision.layout=zero16"),
    "in files": ("zero3", "placement.dp_shard=S*@file,O,O,R"),
    "in front": ("zero3", "placement.dp_shard=S*,R,S,R", "model.arguments.without=1"),
    "used up": ("optimizer-in-backward", *USED_UP),
    "matrices": ("zero3", "placement.dp_shard=S*,S*,S*,R", "optimizer.name=muon"),
    "gathered late": ("zero1", "gather_after_update=next-forward"),
    "recomputed": ("zero3", "placement.dp_shard=S*,R,S,R", "activations=M"),
    "model": ("zero1", "unit=model"),
    "stages": ("pp-zero2",),
    "operators": ("tp-zero3", "placement.dp_shard=S*,R,S,R"),
}


DAILY = ["ahead", "in front"]


@pytest.mark.parametrize(
    "how", [*DAILY, *(pytest.param(how, marks=nightly) for how in FLAT if how not in DAILY)]
)
def test_frozen_parameters_of_a_flat_unit_have_a_separate_buffer(ranks: Ranks, how: str) -> None:
    strategy, *words = FLAT[how]
    require_the_same_training(ranks, strategy, "adapted", *words)


PLACED = {  # frozen parameters in a place of their own
    "whole": ("zero3", "frozen=R"),
    "gathered": ("ddp", "frozen=S*"),
    "gathered ahead": ("ddp", "frozen=S*", "prefetch=1", "overlap=backward"),
    "gathered once": ("ddp", "frozen=S*", "sync.reshard_after_forward=false"),
    "gathered in front": ("ddp", "frozen=S*", "model.arguments.without=1"),
    "gathered again": ("ddp", "frozen=S*", "activations=M"),
    "gathered in part": ("hsdp", "frozen.dp_shard=R", "frozen.dp_replicate=S*"),
    "gathered as tp cuts": ("tp-dp", "frozen=S*"),
    "gathered of stages": ("pp-dp", "frozen=S*"),
    "gathered for halves": ("pp-dp", "frozen=S*", "pipeline.schedule=zero-bubble"),
    "on the host": ("ddp", "frozen=R@host"),
    "in slices on the host": ("ddp", "frozen=O"),
    "in slices in files": ("zero1", "frozen=S*@file", "prefetch=1"),
    "beside masters": ("fsdp-mixed", "frozen=R"),
    "beside shards of matrices": ("ddp", "frozen=S*", "optimizer.name=muon"),
    "beside what is used up": (
        "optimizer-in-backward",
        "frozen=S*",
        *USED_UP,
    ),
}
PLACED_DAILY = ["whole", "gathered ahead", "in slices on the host"]


@pytest.mark.parametrize(
    "how",
    [
        *PLACED_DAILY,
        *(pytest.param(how, marks=nightly) for how in PLACED if how not in PLACED_DAILY),
    ],
)
def test_frozen_parameters_have_a_separate_placement(ranks: Ranks, how: str) -> None:
    strategy, *words = PLACED[how]
    require_the_same_training(ranks, strategy, "adapted", *words)


@pytest.mark.parametrize(
    "more",
    [
        (),
        *(
            pytest.param((words,), marks=nightly)
            for words in ("prefetch=0", "prefetch=2", "sync.reshard_after_backward=false")
        ),
    ],
)
def test_fully_shard_may_gather_units_that_backward_does_not_use(
    ranks: Ranks, more: tuple[str, ...]
) -> None:
    require_the_same_training(ranks, "zero3", "adapted", "model.arguments.without=2", *more)


@pytest.mark.parametrize("strategy", ["pp-dp", pytest.param("pp-zero2", marks=nightly)])
def test_a_head_tied_to_a_frozen_embedding_is_not_reduced(ranks: Ranks, strategy: str) -> None:
    require_the_same_training(ranks, strategy, "adapted", "model.arguments.is_tied=true")


def test_a_fully_frozen_stage_takes_part_in_the_norm(ranks: Ranks) -> None:
    words = ["optimizer.clip=0.1", "model.arguments.without=2"]
    require_the_same_training(ranks, "pp-1f1b", "adapted", *words)


@pytest.mark.parametrize("without", [0, pytest.param(1, marks=nightly)])
def test_token_slices_with_frozen_parameters_equal_one_device(ranks: Ranks, without: int) -> None:
    in_front = f"model.arguments.without={without}"
    require_the_same_training(ranks, "tp-sp", "adapted", in_front)


@pytest.mark.nightly
@pytest.mark.parametrize("model", ["adapted", "lora"])
def test_sharded_operators_of_stages_with_frozen_parameters_equal_one_device(
    ranks: Ranks, model: str
) -> None:
    if model == "lora":
        pytest.importorskip("peft")
    require_the_same_training(ranks, "pp-1f1b", model, *OVER_TP)


REFUSED = {
    "with sequence-parallel activations that tp saves as shards": ("tp-saved",),
    "in a pipeline stage without trained parameters": ("pp-zero3", "model.arguments.without=2"),
    "in a unit before the first trained parameter, .* with freeing after each pass of a stage": (
        "pp-zero3",
        "model.arguments={without: 1, layers: 4}",
        "sync={reshard_after_forward: true, reshard_after_backward: true}",
    ),
}


@pytest.mark.parametrize("where", REFUSED)
def test_unsupported_frozen_parameters_are_rejected(where: str) -> None:
    strategy, *words = REFUSED[where]
    spec = frozen_spec(strategy, "adapted", *words)
    with pytest.raises(SpecError, match=rf"not supported yet: frozen parameters {where}.*: [a-z]"):
        ptrain.derive(spec, ptrain.read_facts(spec, allow_import=True))


@pytest.mark.parametrize(
    "words",
    [
        ["zero3"],
        ["ddp", "frozen=S*"],
        ["pp-1f1b", *OVER_TP],
        *(pytest.param(words, marks=nightly) for words in (["tp"], ["zero1", "frozen=O"])),
    ],
)
def test_fake_ranks_have_the_predicted_memory_and_traffic(words: list[str]) -> None:
    strategy, *more = words
    spec = frozen_spec(strategy, "adapted", *more)
    exact = ptrain.derive(spec, ptrain.read_facts(spec, allow_import=True)).exact.of_rank(0)
    simulated = simulate(spec, allow_import=True).estimate
    for kind in ("memory", "peak", "traffic"):
        assert not {*getattr(exact, kind)} ^ {*getattr(simulated, kind)}, kind


def test_units_without_gradients_are_exact_under_ddp(ranks: Ranks) -> None:
    spec = frozen_spec("ddp", "adapted", "model.arguments.without=2")
    for report in ranks.run(2, _train_on_rank, spec, ptrain.read_facts(spec, allow_import=True)):
        assert not report["failing"]


@pytest.mark.parametrize(
    ("first", "second", "layout"),
    [
        ("zero3", "ddp", "fp32"),
        pytest.param("fsdp-mixed", "fsdp-mixed", "fsdp-mixed", marks=nightly),
        pytest.param("zero3 frozen=R", "ddp frozen=O", "fp32", marks=nightly),
    ],
)
def test_a_checkpoint_has_frozen_parameters_and_another_placement_continues_it(
    ranks: Ranks, tmp_path: Path, first: str, second: str, layout: str
) -> None:
    target = "model={target: tests.models_frozen:adapted}"
    words = [target, BATCH, f"precision.layout={layout}", "--allow-import", "eval.every=0"]

    def trained(strategy: str, name: str, *more: str) -> dict[int, float]:
        given = (*strategy.split(), *words, *more, "log.every=1")
        for end in sessions.train_on_ranks(ranks, 2, *given, folder=tmp_path / name):
            assert end.code == 0, end.error
        return jobs.losses(tmp_path / name)

    trained(first, "begun", "train.steps=2", "checkpoint.at_end=true")
    goes_on = trained(second, "goes-on", "train.steps=4", "--resume", str(tmp_path / "begun"))
    at_once = trained(second, "at-once", "train.steps=4")
    tolerance = 1e-5 if layout == "fp32" else 1e-2
    assert {*goes_on} == {3, 4}
    assert all(abs(goes_on[step] - at_once[step]) < tolerance for step in goes_on)


def test_adapters_are_exported_to_transformers_or_peft(ranks: Ranks, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    words = ["model={target: tests.models_frozen:lora}", BATCH, "train.steps=3", "eval.every=0"]
    words += ["optimizer.lr=0.1", "optimizer.schedule.warmup=0", "--allow-import"]
    words += ["checkpoint.at_end=true"]
    for end in sessions.train_on_ranks(ranks, 2, "zero3", *words, folder=tmp_path / "run"):
        assert end.code == 0, end.error
    saved = SavedModel(tmp_path / "run")
    (module, _), (plain, _) = (saved.build(allow_import=True) for _ in range(2))
    tokens = torch.arange(12).view(1, 12)
    before = module(tokens)
    module.load_state_dict(saved.load(saved.parameters))
    expected = module(tokens)
    assert not torch.allclose(expected, before, atol=1e-3), "it has learned"
    for how in Adapters:
        export_checkpoint(tmp_path / "run", tmp_path / how, adapters=how, allow_import=True)
    merged = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(merged(input_ids=tokens).logits, expected, atol=1e-5, rtol=1e-5)
    for layer in plain.model.model.layers:
        for name in ("q_proj", "v_proj"):
            setattr(layer.self_attn, name, getattr(layer.self_attn, name).base_layer)
    adapted = peft.PeftModel.from_pretrained(plain.model, tmp_path / "alone")
    torch.testing.assert_close(adapted(input_ids=tokens).logits, expected)


def test_a_model_without_adapters_is_not_exported_as_one(ranks: Ranks, tmp_path: Path) -> None:
    words = ["model.layers=1", "train.steps=1", "eval.every=0", "checkpoint.at_end=true"]
    one = ("ddp", "mesh.dp_replicate=1", *words)
    (end,) = sessions.train_on_ranks(ranks, 1, *one, folder=tmp_path / "run")
    assert end.code == 0, end.error
    with pytest.raises(SpecError, match="Transformer has no PEFT adapters"):
        export_checkpoint(tmp_path / "run", tmp_path / "out", adapters=Adapters.MERGED)
    assert not (tmp_path / "out").exists()
