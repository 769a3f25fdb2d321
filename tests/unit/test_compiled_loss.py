"""A compiled loss: its values and gradients, the number of its programs, and its bytes."""

from __future__ import annotations

from collections.abc import Iterator
from shutil import which
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from ptrain.cost import Estimate, Phase
from ptrain.derivation.estimate import derive
from ptrain.errors import SpecError
from ptrain.models import compiled
from ptrain.models.cross_entropy import IGNORED, fusible_loss_sum, token_loss_sum
from ptrain.models.initialize import build_model
from ptrain.models.objective import LossInHead
from ptrain.models.transformer import Transformer
from ptrain.spec.load import load
from ptrain.steps.step import CompiledLoss
from ptrain.traces.facts import facts_of

TINY = "model={layers: 1, hidden: 16, heads: 2, kv_heads: 2, ffn: 32, vocab: 30}"
SHAPES = [[], ["model.tied=true"], ["model.logit_soft_cap=2"], ["model.vocab_multiple=16"]]
FULL, SHORT = (4, 8), (3, 8)  # samples, and tokens of each


@pytest.fixture(autouse=True)
def programs_by_eager_kernels() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    with mock.patch.object(compiled, "BACKEND", "aot_eager"):
        yield
    torch._dynamo.reset()


class Losses:
    """A small model in fp64 that returns logits, and then its loss in one program."""

    def __init__(self, *overrides: str) -> None:
        spec = load("ddp", [TINY, "batch.sequence=8", *overrides]).spec
        self.padding = spec.vocab_padding
        model = build_model(spec.model, sequence=8, seed=0)
        assert isinstance(model, Transformer)
        self.model = model.double()
        self.inside = LossInHead(CompiledLoss(padding=self.padding))

    def compute_eager(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return token_loss_sum(self.model(tokens), targets, self.padding)

    def compute(self, tokens: Tensor, targets: Tensor) -> Tensor:
        with self.inside.provide_targets(targets):
            loss: Tensor = self.model(tokens)
        return loss

    def gradients(self, loss: Tensor) -> list[Tensor]:
        self.model.zero_grad()
        loss.backward()
        gradients = [parameter.grad for parameter in self.model.parameters()]
        return [gradient.clone() for gradient in gradients if gradient is not None]


def samples(shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    tokens = torch.arange(shape[0] * (shape[1] + 1)).view(shape[0], -1) % 30
    targets = tokens[:, 1:].clone()
    targets[0, ::2] = IGNORED
    return tokens[:, :-1], targets


@pytest.mark.parametrize("overrides", SHAPES)
def test_loss_and_gradients_equal_the_eager_ones(overrides: list[str]) -> None:
    losses = Losses(*overrides)
    given = samples(FULL)
    eager = losses.compute_eager(*given)
    expected = losses.gradients(eager)
    losses.inside.attach(losses.model, "")
    loss = losses.compute(*given)
    torch.testing.assert_close(loss, eager, rtol=1e-13, atol=0)
    gradients = losses.gradients(loss)
    assert len(gradients) == len(expected) == len([*losses.model.parameters()])
    torch.testing.assert_close(gradients, expected, rtol=1e-12, atol=1e-15)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    losses.inside.detach(losses.model, "")
    assert losses.compute_eager(*given) == eager


def test_each_shape_has_one_program_and_an_evaluation_has_none() -> None:
    losses = Losses()
    losses.inside.attach(losses.model, "")
    with torch.no_grad():
        losses.compute(*samples(FULL))
    assert not counters["stats"]["unique_graphs"]
    for shape in (FULL, SHORT, FULL, SHORT):
        losses.compute(*samples(shape)).backward()
    assert counters["stats"]["unique_graphs"] == 2


def test_a_loss_that_torch_runs_in_eager_mode_is_an_error() -> None:
    losses = Losses()
    losses.inside.attach(losses.model, "")
    with torch._dynamo.config.patch(disable=True), pytest.raises(SpecError, match="compile=none"):
        losses.compute(*samples(FULL))


def test_losses_of_narrow_logits_are_computed_in_fp32() -> None:
    torch.manual_seed(0)
    logits = torch.randn(2, 3, 50).bfloat16()
    targets = torch.tensor([[1, 2, IGNORED], [4, 39, 0]])
    for padding in (0, 10):
        loss = fusible_loss_sum(logits, targets, padding)
        assert loss.dtype is torch.float32
        torch.testing.assert_close(loss, token_loss_sum(logits, targets, padding))


WIDE = (
    "model={layers: 1, hidden: 16, heads: 2, kv_heads: 2, ffn: 32, vocab: 4096}",
    "batch={global: 4, micro: 2, sequence: 64}",
)  # fmt: skip


def exact_of(*overrides: str) -> Estimate:
    spec = load("ddp", [*WIDE, *overrides]).spec
    return derive(spec, facts_of(spec)).exact


def peak_of(exact: Estimate, phase: Phase) -> int:
    return max(row.device_bytes for row in exact.peak if row.phase is phase)


@pytest.mark.skipif(which("g++") is None, reason="inductor compiles with a C++ compiler")
@pytest.mark.parametrize(
    ("layout", "itemsize", "forward", "backward"),
    # Bytes per logit of the eager step: logits and exponentials in fp32 in forward, exponentials
    # and, unless these become it, a gradient in backward. The peak of a program in bf16 is later,
    # when the weight's gradient exists, which has 2 * 16 features / 128 tokens bytes per logit.
    [("fp32", 4, 8, 4), ("bf16", 2, 6, 6 - 2 * 16 / 128)],
)
def test_a_compiled_loss_has_one_buffer_of_the_logits(
    layout: str, itemsize: int, forward: float, backward: float
) -> None:
    with mock.patch.object(compiled, "BACKEND", "inductor"):
        words = f"precision.layout={layout}", "mesh.dp_replicate=1"
        eager, program = exact_of(*words), exact_of(*words, "compile=loss")
    logits, few = 2 * 64 * 4096, 0.02
    less = {
        phase: (peak_of(eager, phase) - peak_of(program, phase)) / logits
        for phase in (Phase.FORWARD, Phase.BACKWARD)
    }
    assert less[Phase.FORWARD] == pytest.approx(forward - itemsize, abs=few)
    assert less[Phase.BACKWARD] == pytest.approx(backward - itemsize, abs=few)
    assert program.traffic == eager.traffic
