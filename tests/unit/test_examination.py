"""A program of one rank compared with one device: the checks and the evidence of a step."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import torch

from ptrain.data.sampler import LocalBatch
from ptrain.interpreter.program import Program, interpret
from ptrain.report.finding import Subject
from ptrain.runtime.world import World
from ptrain.selection.recompute import resolve_auto
from ptrain.spec.load import load
from ptrain.train.exchange import Exchange
from ptrain.verification.capture import model_parts
from ptrain.verification.examine import examine
from ptrain.verification.jobs import evidence, run
from ptrain.verification.jobs.evidence import MOST, JobEvidence, RankGradients
from ptrain.verification.jobs.job import Ranks
from ptrain.verification.jobs.step import StepComparison, run_step
from ptrain.verification.options import VerifyOptions
from ptrain.verification.parts import number_difference
from ptrain.verification.preconditions import observe_run
from ptrain.verification.protocol import STAGES, VerificationContext, interpret_spec
from ptrain.verification.references import NOTE

TINY = (
    "model.layers=1", "model.hidden=16", "model.heads=2", "model.kv_heads=1", "model.ffn=24",
    "batch.global=8", "batch.micro=2", "batch.sequence=8", "mesh={dp_shard: 1}",
    "precision.compute=fp64",
)  # fmt: skip


def program(*more: str) -> Program:
    return interpret(resolve_auto(load("zero2", (*TINY, *more))), world=World())


def test_micro_batches_in_another_order_fail_the_ledger_though_every_sum_is_right() -> None:
    swapped = program()
    run = swapped.forward_backward

    def forward_backward(batch: LocalBatch, lr: float | None = None) -> torch.Tensor:
        first, second, third, last = batch.tokens.split(2)
        return run(replace(batch, tokens=torch.cat([first, third, second, last])), lr)

    swapped.forward_backward = forward_backward  # type: ignore[method-assign]
    found = examine(swapped, Exchange(World()), 1)
    assert found.root_cause is not None
    assert [check.name for check in found.checks if not check.holds] == ["samples"]


@pytest.mark.parametrize("factor", [1.0, 1.0 + 1e-6])
def test_activations_are_compared_in_a_model_with_a_document_mask(factor: float) -> None:
    """The mask is a module's output, and mostly infinite."""
    packed = program("model.document_start=32")

    def scaled(module: torch.nn.Module, given: object, output: torch.Tensor) -> torch.Tensor:
        return output * factor

    packed.model.blocks[0].register_forward_hook(scaled)
    checks = {check.name: check.holds for check in examine(packed, Exchange(World()), 1).checks}
    assert checks["activations"] is (factor == 1.0)


@pytest.mark.parametrize("name", ["window_TT", "cos_TK"])
def test_a_differing_table_is_detected_next_to_an_equal_window_mask(name) -> None:
    windowed = interpret(resolve_auto(load("zero2", (*TINY, "model.window=4"))), world=World())
    assert examine(windowed, Exchange(World()), 1).root_cause is None
    (model,) = model_parts(windowed)
    model.get_buffer(name)[1, 1] += 0.01
    checks = examine(windowed, Exchange(World()), 1).checks
    assert "buffers" in [check.name for check in checks if not check.holds]


def test_a_document_mask_differs_if_it_hides_other_tokens_only() -> None:
    spec = resolve_auto(load("zero2", (*TINY, "model.document_end=32")))
    assert examine(interpret(spec, world=World()), Exchange(World()), 1).root_cause is None
    packed = interpret(spec, world=World())
    (model,) = model_parts(packed)
    model.documents.edge = 101
    checks = examine(packed, Exchange(World()), 1).checks
    assert "activations" in [check.name for check in checks if not check.holds]


def test_a_nan_learning_rate_differs() -> None:
    odd = program()
    update = odd.step
    odd.step = lambda lr: update(math.nan)  # type: ignore[method-assign]
    found = examine(odd, Exchange(World()), 1)
    assert found.root_cause is not None
    assert "learning rate" in [check.name for check in found.checks if not check.holds]


def test_a_step_counter_with_another_start_differs() -> None:
    odd = program()
    counters = [its for name, its in odd.state_dict()["optimizer"].items() if "step" in name]
    counters[0].add_(1)
    checks = examine(odd, Exchange(World()), 1).checks
    assert "parameters after the update" in [check.name for check in checks if not check.holds]


def test_a_single_rank_has_no_check_of_replicated_state() -> None:
    assert observe_run(program(), Exchange(World()), every_collective=True).checks() == ()


@pytest.mark.parametrize(
    ("pair", "off"),
    [
        ((0.0, 0.0), 0.0),
        ((1e-30, 0.0), math.inf),
        ((math.nan, 1.0), math.inf),
        ((math.nan, math.nan), math.inf),
        ((math.inf, 1.0), math.inf),
        ((1.0, math.inf), math.inf),
        ((3.0, -2.0), 2.5),
    ],
)
def test_two_numbers_differ_relative_to_the_expected_one(
    pair: tuple[float, float], off: float
) -> None:
    measured, right = pair
    assert number_difference(right, measured) == off


@pytest.mark.parametrize(("since", "cause"), [(3, None), (1, (Subject.ACTIVATIONS, 1))])
def test_masks_of_a_program_are_compared_in_every_step(
    since: int, cause: tuple[Subject, int] | None
) -> None:
    words = [word for word in TINY if not word.startswith("model.")]
    model = "model={family: gpt, layers: 1, hidden: 16, heads: 2, vocab: 260, dropout: 0.1}"
    odd = interpret(resolve_auto(load("zero2", (*words, model))), world=World())
    run, steps = odd.forward_backward, count()

    def seeded(batch: LocalBatch, lr: float | None = None) -> torch.Tensor:
        if next(steps) >= since:
            torch.manual_seed(999)
        return run(batch, lr)

    odd.forward_backward = seeded  # type: ignore[method-assign]
    verdict = examine(odd, Exchange(World()), 3)
    said = verdict.root_cause
    assert verdict.holds is (cause is None)
    assert (said and (said.state, said.step)) == cause
    assert not any("replayed" in note for note in verdict.notes)


def test_gradients_of_a_program_are_not_explained_by_clipping(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are compared without it, and no backward pass leaves those of all micro-batches."""
    steps = []

    def kept(*args: Any) -> StepComparison:
        steps.append(run_step(*args))
        return steps[-1]

    monkeypatch.setattr(run, "run_step", kept)
    monkeypatch.setattr(run, "explain_clipping", None)
    odd = program("optimizer.clip=1e-3")
    odd.model.get_parameter("head.weight").register_hook(lambda its: its.flip(0))
    verdict = examine(odd, Exchange(World()), 1)
    assert verdict.root_cause is not None
    assert [step.unclipped for step in steps] == [{}]


@pytest.mark.parametrize("rate", [0.1, 0.0])
def test_dropout_of_a_user_model_is_off_with_a_note(rate) -> None:
    config = {
        "num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 24,
        "num_attention_heads": 2, "vocab_size": 260, "attention_dropout": rate,
    }  # fmt: skip
    words = [word for word in TINY if not word.startswith("model")]
    spec = load("zero2", [f"model={{hf: LlamaForCausalLM, config: {config}}}", *words]).spec
    world = World()
    outcome = STAGES["examination"](
        VerificationContext(
            spec=spec,
            world=world,
            exchange=Exchange(world),
            request=VerifyOptions(),
            make=interpret_spec,
        )
    )
    failing = {check.name: check.why for check in outcome.checks if not check.holds}
    assert (outcome.notes, failing) == ((NOTE,) if rate else (), {})


def test_the_first_of_many_micro_batches_are_compared_separately_with_a_note() -> None:
    many = program("batch.global=40", "batch.micro=2")

    def unlike(gradient: torch.Tensor) -> torch.Tensor:
        return gradient + 0.01 * gradient.abs().mean() * torch.ones_like(gradient).cumsum(-1)

    for parameter in many.model.parameters():
        parameter.register_hook(unlike)
    root_cause = examine(many, Exchange(World()), 1).root_cause
    assert root_cause is not None
    assert root_cause.certainty == "not explained"
    assert f"only the first {MOST} of 20 micro-batches of a rank were" in root_cause.tried


def test_the_results_of_many_micro_batches_are_not_gathered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[int] = []
    run = evidence.sample_gradients

    def sampled(ranks: Ranks, own: RankGradients) -> JobEvidence:
        seen.append(own.micro_batches)
        return run(ranks, own)

    monkeypatch.setattr(evidence, "sample_gradients", sampled)
    test_the_first_of_many_micro_batches_are_compared_separately_with_a_note()
    assert seen == [MOST]
