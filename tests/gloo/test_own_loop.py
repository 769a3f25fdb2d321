"""A user's loop with any wrapper: it holds if it is correct; a fault is named with state, axis and
factor."""

from __future__ import annotations

from collections import UserDict

import pytest
import torch
from torch import nn

import ptrain
from ptrain.errors import PtrainError, VerdictFailed
from ptrain.report.finding import MismatchFound
from tests.gloo import own_loops
from tests.gloo.own_faults import FAULTS
from tests.ranks import Ranks

pytestmark = pytest.mark.gloo
nightly = pytest.mark.nightly


@pytest.mark.parametrize(
    ("size", "way"),
    [
        (2, "ddp"),
        pytest.param(2, "fsdp2", marks=nightly),
        pytest.param(2, "fsdp1", marks=nightly),
        pytest.param(2, "fsdp1_flat", marks=nightly),
        pytest.param(2, "tensor_parallel", marks=nightly),
        pytest.param(2, "tensor_and_sequence_parallel", marks=nightly),
        pytest.param(2, "unwrapped", marks=nightly),
        pytest.param(4, "fsdp2", marks=nightly),
        (4, "fsdp2_tp"),
        pytest.param(4, "hsdp", marks=nightly),
    ],
)
def test_a_sound_loop_holds_in_fp64(ranks: Ranks, size: int, way: str) -> None:
    told = ranks.run(size, own_loops.summarize_verdict, way)
    assert told[0]["holds"], told[0]["text"]
    assert all(verdict["text"] == told[0]["text"] for verdict in told)


@nightly
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("size", "way"),
    [(2, "ddp"), (2, "fsdp2"), (2, "tensor_and_sequence_parallel"), (4, "fsdp2_tp"), (4, "hsdp")],
)
def test_a_sound_loop_holds_in_coarser_dtypes(
    ranks: Ranks, size: int, way: str, dtype: torch.dtype
) -> None:
    told = ranks.run(size, own_loops.summarize_verdict, way, "", dtype)
    assert told[0]["holds"], told[0]["text"]


# Expected: state, axis, factor, and the place or a part of it.
NAMED = {
    ("ddp", "divided twice"): ("gradients", "", "changed after backward, × 0.5", ""),
    ("fsdp2", "divided twice"): ("gradients", "", "changed after backward, × 0.5", ""),
    ("ddp", "summed"): ("gradients", "", "changed after backward, × 2", ""),
    ("ddp", "infinite"): ("gradients", "ranks", "changed after backward", "embed.weight"),
    ("fsdp2", "zero"): ("gradients", "", "changed after backward", ""),
    ("fsdp2", "frozen shard"): ("gradients", "dp", "no gradient", "blocks.1.up.weight"),
    ("fsdp2", "local clip"): ("gradient norm", "dp", "clipped by the local norm", ""),
    ("ddp", "stale"): ("gradients", "", "stale by 1 step", ""),
    ("fsdp2", "last micro-batch only"): ("gradients", "", "micro-batch 0 missing", ""),
    ("unwrapped", "never zeroed"): ("gradients", "", "previous step added", ""),
    ("ddp", "not divided by K"): ("loss", "", "× 2 (micro-batches)", ""),
    ("ddp", "two updates"): ("step counter", "", "2 updates, 1 in the reference", ""),
    ("fsdp2", "head left out"): ("parameters", "", "not updated", "head.weight"),
    ("fsdp2", "other rate"): ("learning rate", "", "× 2", ""),
    ("ddp", "unsynchronised"): ("gradients", "ranks", "missing all-reduce over all ranks", ""),
    ("ddp", "drift"): ("parameters", "ranks", "replicas differ", "embed.weight"),
    ("unwrapped", "other weights"): (
        "parameters", "ranks", "other weights at the start", "head.weight",
    ),
    ("ddp", "doubled sample"): ("batch", "ranks", "missing and doubled", "samples"),
    ("ddp", "not copied back"): (
        "parameters", "ranks", "stale on some ranks", "blocks.*.norm.weight",
    ),
    ("fsdp2", "shard skipped"): (
        "step counter", "dp", "0 updates, 1 in the reference", "blocks.*.down.bias",
    ),
    ("fsdp2_tp", "summed"): ("gradients", "", "changed after backward, × 4", ""),
    ("hsdp", "divided twice"): ("gradients", "", "changed after backward, × 0.25", ""),
}  # fmt: skip
BY_DEFAULT = {("fsdp2", "local clip"), ("ddp", "doubled sample")}


@pytest.mark.parametrize(
    ("way", "fault"),
    [pytest.param(*case, marks=() if case in BY_DEFAULT else (nightly,)) for case in NAMED],
)
def test_a_fault_in_the_loop_is_named(ranks: Ranks, way: str, fault: str) -> None:
    size = 4 if way in ("fsdp2_tp", "hsdp") else 2
    told = ranks.run(size, own_loops.summarize_verdict, way, fault)
    assert all(verdict["text"] == told[0]["text"] for verdict in told)
    root_cause = told[0]["culprit"]
    state, axis, factor, place = NAMED[way, fault]
    assert (root_cause["state"], root_cause["axis"], root_cause["factor"]) == (state, axis, factor)
    assert place in root_cause["place"]
    assert root_cause["factor"] in told[0]["text"]
    assert root_cause["sentence"].partition(". ")[0] in told[0]["text"]


def test_every_fault_has_a_test() -> None:
    assert set(FAULTS) - {"autocast"} == {fault for _, fault in NAMED}


@nightly
def test_a_loop_in_another_dtype_is_named(ranks: Ranks) -> None:
    told = ranks.run(2, own_loops.summarize_verdict, "ddp", "autocast", torch.float32)
    assert told[0]["culprit"]["factor"].startswith("bfloat16 for")


class Line(nn.Module):
    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.dropout = nn.Dropout(p)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.linear(x))


def _line(*, rate: float = 1e-2, factor: float = 1.0, p: float = 0.0) -> ptrain.Job:
    torch.manual_seed(0)
    model = Line(p).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        (loss * factor).backward()
        optimizer.step()
        return loss

    return ptrain.Job(model=model, step=step)


ROWS = [torch.arange(8.0, dtype=torch.float64).reshape(2, 4) / 8]


def test_one_process_without_a_group_gets_a_verdict() -> None:
    verdict = ptrain.verify(_line, _line, ROWS, terms=ptrain.Terms(steps=3))
    assert verdict.holds, verdict
    assert "the same twice" in str(verdict)
    verdict.raise_for_verdict()


def test_a_factor_in_one_process_is_named() -> None:
    verdict = ptrain.verify(_line(), _line(factor=3.0), ROWS)
    assert not verdict.holds
    with pytest.raises(MismatchFound, match="× 3"):
        verdict.raise_for_verdict()


def test_two_runs_without_learning_do_not_hold() -> None:
    """Their values agree exactly."""
    verdict = ptrain.verify(_line(rate=0.0), _line(rate=0.0), ROWS)
    assert verdict.root_cause is None
    failing = [check.name for check in verdict.checks if not check.holds]
    assert "reference: parameters move" in failing
    assert "reference: learns" in failing
    with pytest.raises(VerdictFailed, match="did not change"):
        verdict.raise_for_verdict()


def test_zero_gradients_on_both_sides_do_not_hold() -> None:
    verdict = ptrain.verify(_line(factor=0.0), _line(factor=0.0), ROWS)
    assert not verdict.holds
    assert "every gradient is zero" in str(verdict)


def test_a_non_finite_reference_is_reported() -> None:
    verdict = ptrain.verify(_line(factor=1e400), _line(factor=1e400), ROWS)
    assert verdict.root_cause is not None
    assert verdict.root_cause.factor == "the reference is not finite"


def test_a_nondeterministic_loop_is_reported() -> None:
    made: list[ptrain.Job] = []

    def drawn() -> ptrain.Job:
        made.append(_line(rate=1e-2 if not made else 2e-2))
        return made[-1]

    verdict = ptrain.verify(_line(), drawn, ROWS)
    assert verdict.root_cause is not None
    assert verdict.root_cause.factor == "not reproducible"


def test_dropout_on_one_side_alone_is_named() -> None:
    root_cause = ptrain.verify(_line(), _line(p=0.5), ROWS).root_cause
    assert root_cause is not None
    assert root_cause.factor == "dropout in the loop only"
    assert root_cause.certainty == "proven by trying"


def test_an_invalid_job_is_rejected() -> None:
    with pytest.raises(PtrainError, match=r"ptrain.Job is needed"):
        ptrain.verify(_line(), lambda: None, ROWS)


def test_no_batch_and_a_wrong_number_of_shares_are_rejected() -> None:
    with pytest.raises(PtrainError, match="no batch"):
        ptrain.verify(_line(), _line(), [])
    with pytest.raises(PtrainError, match="1 global batches, but 2 shares"):
        ptrain.verify(_line(), _line(), ROWS, share=ROWS * 2)


def test_a_share_is_an_equal_part_of_every_tensor_and_keeps_the_mapping_type() -> None:
    batch = {"rows": torch.arange(6), "pair": [torch.arange(3), "name"]}
    share = ptrain.share_of(UserDict(batch), 2, 3)
    assert type(share) is UserDict
    assert share["rows"].tolist() == [4, 5]
    assert [share["pair"][0].tolist(), share["pair"][1]] == [[2], "name"]


def test_samples_that_do_not_divide_evenly_are_rejected_with_a_fix() -> None:
    with pytest.raises(PtrainError, match=r"7 samples .* over 3 ranks\n  remedy: .* multiple of 3"):
        ptrain.share_of(torch.arange(7), 0, 3)


@pytest.mark.parametrize(
    ("terms", "message"),
    [
        ({"steps": 0}, "Terms.steps: 0 steps compare nothing"),
        ({"examined": -1}, "Terms.examined: -1 is not a number"),
        ({"dtype": torch.int8}, "Terms.dtype: the rounding of torch.int8 is unknown"),
        ({"loss": "average"}, "Terms.loss: 'average' is not a way to combine losses"),
    ],
)
def test_invalid_terms_are_rejected_with_a_fix(terms: dict, message: str) -> None:
    with pytest.raises(PtrainError, match=f"{message}.*\n  remedy: "):
        ptrain.Terms(**terms)


@pytest.mark.parametrize("odd", [{"loss": 1.0}, (1.0, 2.0), "0.5", torch.ones(3)])
def test_an_invalid_loss_is_noted_and_other_values_are_compared(odd: object) -> None:
    own = _line()

    def step(rows: torch.Tensor) -> object:
        own.step(rows)
        return odd

    verdict = ptrain.verify(_line(), ptrain.Job(model=own.model, step=step), ROWS)
    assert verdict.holds, verdict
    assert [note for note in verdict.notes if note.startswith("losses: not compared, the step of")]
    assert "gradients" in [check.name for check in verdict.checks]


def test_a_function_of_losses_that_returns_none_is_rejected_with_a_fix() -> None:
    terms = ptrain.Terms(loss=lambda losses: list(losses))  # type: ignore[arg-type,return-value]
    with pytest.raises(PtrainError, match=r"Terms.loss returned \[.*\n  remedy: "):
        ptrain.verify(_line(), _line(), ROWS, terms=terms)


def test_a_reference_without_trained_or_known_parameters_is_rejected_with_a_fix() -> None:
    frozen = _line()
    frozen.model.requires_grad_(False)
    with pytest.raises(PtrainError, match="requires a gradient\n  remedy: "):
        ptrain.verify(frozen, _line(), ROWS)
    odd = _line()
    odd.model.to(torch.float8_e5m2)
    with pytest.raises(PtrainError, match="with unknown rounding\n  remedy: "):
        ptrain.verify(odd, odd, ROWS)


# In 16 bits a factor is far above the band, and so is an update that does not happen.
@nightly
@pytest.mark.parametrize(
    ("way", "fault", "factor"),
    [
        ("ddp", "divided twice", "changed after backward, × 0.5"),
        ("ddp", "unsynchronised", "missing all-reduce over all ranks"),
        ("fsdp2", "last micro-batch only", "micro-batch 0 missing"),
        ("ddp", "stale", "stale by 1 step"),
        ("ddp", "not divided by K", "× 2 (micro-batches)"),
        ("fsdp2", "head left out", "not updated"),
        ("ddp", "not copied back", "stale on some ranks"),
        ("fsdp2", "local clip", "clipped by the local norm"),
        ("ddp", "doubled sample", "missing and doubled"),
    ],
)
def test_faults_are_named_in_bf16_too(ranks: Ranks, way: str, fault: str, factor: str) -> None:
    told = ranks.run(2, own_loops.summarize_verdict, way, fault, torch.bfloat16)
    assert told[0]["culprit"]["factor"] == factor, told[0]["text"]
