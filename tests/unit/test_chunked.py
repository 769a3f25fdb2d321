"""The loss computed in chunks of tokens equals the loss, and the full logits never exist at
once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ptrain.cost import Phase
from ptrain.data.sampler import LocalBatch
from ptrain.errors import SpecError
from ptrain.interpreter.program import interpret
from ptrain.meters.measure import measure
from ptrain.models.cross_entropy import IGNORED, token_loss_sum
from ptrain.models.facts import head_of
from ptrain.models.initialize import build_model
from ptrain.models.objective import LossInHead, can_fuse
from ptrain.runtime.world import World
from ptrain.spec.model import HuggingFaceModel
from ptrain.spec.spec import LossSpec, Spec
from ptrain.steps.step import ChunkedLoss
from tests.models_external import Necks, necks
from tests.pure.build import ODD_SHAPE, make_spec
from tests.unit.shapes import SHAPES
from tests.unit.test_attention import LLAMA
from tests.unit.test_models import real, tokens_of

FUSED = pytest.param(
    True, marks=pytest.mark.skipif(not can_fuse(), reason="torch has no linear_cross_entropy")
)
ROUNDS = {torch.float64: 1e-12, torch.bfloat16: 2e-2}  # bf16: to 8 bits, other sums in between


def gradients(model: nn.Module, run: Callable[[], Tensor]) -> list[Tensor]:
    """The loss and every parameter's gradient, which are left empty."""
    loss = run()
    loss.backward()
    found = [loss.detach(), *(parameter.grad for parameter in model.parameters())]
    model.zero_grad(set_to_none=True)
    return [each for each in found if each is not None]


@pytest.mark.parametrize("fused", [False, FUSED])
@pytest.mark.parametrize("tokens", [1, 5, 24, 1000])
@pytest.mark.parametrize("shape", SHAPES[:2] + SHAPES[3:5])
def test_chunks_of_any_size_have_the_loss_and_the_gradients_of_all_tokens(shape, tokens, fused):
    compare(real(shape), tokens_of(shape), ChunkedLoss(tokens=tokens, fused=fused))


@pytest.mark.parametrize("fused", [False, FUSED])
def test_a_loss_of_bf16_is_summed_in_fp32(fused):
    model, rows = real(SHAPES[1], torch.bfloat16), tokens_of(SHAPES[1])
    assert compare(model, rows, ChunkedLoss(tokens=5, fused=fused)).dtype is torch.float32


def compare(model: nn.Module, rows: Tensor, step: ChunkedLoss, head: str = "") -> Tensor:
    """Of a model's loss inside and outside, with targets that count for nothing."""
    targets = rows.roll(-1, 1)
    targets[:, -1] = targets[0, 3] = IGNORED
    whole = gradients(model, lambda: token_loss_sum(model(rows), targets))
    inside = LossInHead(step)
    inside.attach(model, head)

    def run() -> Tensor:
        with inside.provide_targets(targets):
            loss: Tensor = model(rows)
        return loss

    found = gradients(model, run)
    tolerance = ROUNDS[next(model.parameters()).dtype]
    for one, other in zip(whole, found, strict=True):
        size = max(1.0, one.abs().max().item())
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance * size)
    with torch.no_grad():
        torch.testing.assert_close(run(), found[0], rtol=tolerance, atol=tolerance)
    assert model(rows).shape[:-1] == rows.shape, "without targets they are logits"
    return found[0]


@pytest.mark.parametrize("fused", [False, FUSED])
@pytest.mark.parametrize("tied", [False, True])
def test_a_model_of_transformers_has_the_loss_in_place_of_its_head(tied, fused):
    pytest.importorskip("transformers")
    model = HuggingFaceModel(hf="llama", config=LLAMA | {"tie_word_embeddings": tied})
    module = build_model(model, sequence=12).double()
    spec = with_chunks(5)
    assert head_of(module, spec) == "lm_head"
    compare(module, torch.arange(24).view(2, 12), ChunkedLoss(tokens=5, fused=fused), "lm_head")


@pytest.mark.parametrize("fused", [False, FUSED])
def test_a_users_model_has_the_loss_in_place_of_its_head_and_its_bias(fused):
    model = necks().double()
    names = [type(module) for module in model.modules()]
    assert head_of(model, with_chunks(5)) == "head"
    compare(model, torch.arange(24).view(2, 12), ChunkedLoss(tokens=5, fused=fused), "head")
    assert [kind.__name__ for kind in map(type, model.modules())] == [k.__name__ for k in names]


class Scaled(Necks):
    def forward(self, tokens_BT: Tensor) -> Tensor:
        return 0.5 * super().forward(tokens_BT)


class ScaledInPlace(Necks):
    def forward(self, tokens_BT: Tensor) -> Tensor:
        return super().forward(tokens_BT).mul_(0.5)


class OfOneToken(Necks):
    """A head that is given tokens in another order."""

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return self.head(self.table(tokens_BT).transpose(0, 1)).transpose(0, 1)


class Widened(Necks):
    def forward(self, tokens_BT: Tensor) -> Tensor:
        return super().forward(tokens_BT).double()


@pytest.mark.parametrize("kind", [Scaled, ScaledInPlace, OfOneToken])
def test_a_model_that_changes_its_heads_output_is_rejected(kind):
    with pytest.raises(SpecError, match=r"other operators follow it.*\n.*Remove `loss`"):
        head_of(kind(10, 2, 40), with_chunks(5))


def test_logits_in_a_wider_dtype_are_the_heads():
    assert head_of(Widened(10, 2, 40), with_chunks(5)) == "head"


def test_a_fused_loss_is_rejected_where_torch_has_none(monkeypatch):
    monkeypatch.setattr("ptrain.models.facts.can_fuse", lambda: False)
    with pytest.raises(SpecError, match=r"no linear_cross_entropy.*\n.*Remove `loss.fused`"):
        head_of(necks(), with_chunks(5, fused=True))
    head_of(necks(), with_chunks(5))


@pytest.mark.parametrize("fused", [False, FUSED])
def test_all_logits_are_never_there_at_once(fused):
    """At 32000 words the peak is the gradient of all logits, 4 bytes each, and that of the head; or
    three of the head: while autograd adds that of a chunk to those before, and their sum is new."""
    shape = replace(ODD_SHAPE, vocab=32000, layers=1)
    plain = make_spec({}, model=shape, sequence=64)
    cut = replace(plain, loss=LossSpec(chunk=16, fused=fused))
    tokens, words = plain.batch.micro * plain.batch.sequence, shape.vocab
    saved = peak(plain) - peak(cut)
    of_head = 4 * words * shape.hidden
    assert saved >= 4 * tokens * words - 2 * of_head


def peak(spec: Spec) -> int:
    """Bytes of a second step's backward pass."""
    program = interpret(spec, world=World())
    tokens = torch.zeros(spec.batch.micro, spec.batch.sequence + 1, dtype=torch.int64)
    batch = LocalBatch(tokens=tokens, global_tokens=tokens.numel(), sample_ids=())
    program.forward_backward(batch)
    program.step(1e-3)
    with measure(program) as measurement:
        program.forward_backward(batch)
        program.step(1e-3)
    rows = measurement.estimate().peak
    return max(row.device_bytes for row in rows if row.phase is Phase.BACKWARD)


def with_chunks(tokens: int, *, fused: bool = False, **changes: Any) -> Spec:
    return replace(make_spec({}, **changes), loss=LossSpec(chunk=tokens, fused=fused))
