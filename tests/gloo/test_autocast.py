"""Products in torch.autocast: bytes are the predicted ones, gradients are fp32, and gradients and
losses are those of one context around a model and its loss on one device."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ptrain.algebra.legality import require_runnable
from ptrain.data.corpus import open_corpus
from ptrain.derivation.estimate import derive
from ptrain.errors import SpecError
from ptrain.interpreter.program import interpret
from ptrain.runtime.world import World
from ptrain.spec.load import load
from ptrain.spec.spec import Spec
from ptrain.traces.facts import facts_of
from ptrain.train.loop import local_batch
from ptrain.verification.reference import ReferenceTraining
from tests.gloo.compiled_runs import Steps, run_steps
from tests.gloo.test_compile import SMALL, traffic
from tests.gloo.test_float8 import require_measured
from tests.ranks import Ranks

pytestmark = pytest.mark.gloo

AUTOCAST = "precision.matmul=bf16-autocast"
MODEL = SMALL[:-1]
GPT = ("model.preset=gpt-tiny", "model.tied=true")
ROWS = {
    "ddp": ("ddp",),
    "zero1": ("zero1",),
    "zero2": ("zero2",),
    "zero3": ("zero3",),
    "hsdp": ("hsdp", "batch.global=8"),
    "pp": ("pp-1f1b",),
    "pp, tied": ("pp-1f1b", "model.tied=true"),
    "recomputed": ("zero1", "activations=M"),
    "recomputed in part": ("zero3", "activations=M", "recompute=selective"),
    "recomputed, pp": ("pp-1f1b", "activations=M"),
    "off the device": ("fsdp-offload",),
    "gpt": ("ddp", *GPT),
    "gpt, dropout": ("zero3", *GPT, "model.dropout=0.1"),
}
BY_DEFAULT = ("ddp", "zero1", "zero3", "pp", "recomputed", "gpt")
CASES = [pytest.param(r, marks=() if r in BY_DEFAULT else pytest.mark.nightly) for r in ROWS]


def row_spec(row: str, *more: str) -> Spec:
    name, *words = ROWS[row]
    return require_runnable(load(name, [*MODEL, *words, *more]))


@pytest.mark.parametrize("row", CASES)
def test_bytes_are_predicted_and_traffic_is_that_of_fp32(ranks: Ranks, row: str) -> None:
    spec = row_spec(row, AUTOCAST)
    exact, plain = derive(spec, facts_of(spec)).exact, row_spec(row)
    assert traffic(exact) == traffic(derive(plain, facts_of(plain)).exact)
    steps: list[Steps] = ranks.run(spec.world_size, run_steps, spec, timeout=300.0)
    require_measured(exact, steps)
    gradients = [g for own in steps for g in own.gradients[0] if g is not None]
    assert gradients and all(g.dtype is torch.float32 for g in gradients)
    if "dropout" in row:
        return
    device = ReferenceTraining(spec)
    for number, shares in enumerate(zip(*(own.losses for own in steps), strict=True)):
        accumulated = device.accumulate(number)
        assert sum(shares) == pytest.approx(accumulated.loss, rel=2e-5), f"step {number}"
        device.updater.update(accumulated.sums, 1e-3)


class SmallGPT(NamedTuple):
    """A GPT as a function of its weights, in the manner of nanoGPT: with a tied head."""

    weights: dict[str, Tensor]
    heads: int

    def linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def norm(self, x: Tensor, name: str) -> Tensor:
        weight, bias = self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias")
        return F.layer_norm(x, weight.shape, weight, bias, 1e-5)

    def block(self, x: Tensor, name: str) -> Tensor:
        y = self.norm(x, f"{name}.attention_norm")
        parts = (self.linear(y, f"{name}.attention.{n}") for n in ("query", "key", "value"))
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.linear(y, f"{name}.attention.output")
        y = F.gelu(self.linear(self.norm(x, f"{name}.mlp_norm"), f"{name}.mlp.up"))
        return x + self.linear(y, f"{name}.mlp.down")

    def loss(self, inputs: Tensor, targets: Tensor, layers: int) -> Tensor:
        embed = self.weights["embed.weight"]
        x = F.embedding(inputs, embed) + self.weights["positions.weight"][: inputs.shape[1]]
        for layer in range(layers):
            x = self.block(x, f"blocks.{layer}")
        logits = F.linear(self.norm(x, "norm"), embed)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def test_gradients_are_those_of_a_loop_with_one_context(ranks: Ranks) -> None:
    spec = require_runnable(
        load("ddp", [*MODEL, *GPT, AUTOCAST, "mesh={}", "placement={}", "batch.global=1"])
    )
    program = interpret(spec, world=World())
    weights = {n: p.detach().clone().requires_grad_() for n, p in program.model.named_parameters()}
    batch = local_batch(program, open_corpus(spec.data), 0)
    share = program.forward_backward(batch, 1e-3)
    (samples,) = batch.micro_batches(1)
    gpt = SmallGPT(weights, spec.model.heads)
    tokens = samples.inputs, samples.targets, spec.model.layers
    with torch.autocast("cpu", dtype=torch.bfloat16):
        by_hand = gpt.loss(*tokens)
    by_hand.backward()
    assert float(share) == pytest.approx(by_hand.item(), rel=1e-6)
    assert abs(gpt.loss(*tokens).item() / by_hand.item() - 1) > 1e-6, "bf16 rounds"
    for name, parameter in program.model.named_parameters():
        assert torch.equal(parameter.grad, weights[name].grad), name


REJECTED = {
    "tp": ("tp", []),
    "cp": ("cp-ulysses", []),
    "experts": ("zero1", ["model.preset=moe-tiny"]),
    "compiled": ("zero1", ["compile=block"]),
    "in chunks": ("zero1", ["loss.chunk=64"]),
    "halves": ("pp-zbv", []),
    "casts fp32 parameters": ("zero1", ["precision.layout=zero16"]),
}


@pytest.mark.parametrize("finding", REJECTED)
def test_what_autocast_does_not_support_is_rejected_by_name(finding: str) -> None:
    name, words = REJECTED[finding]
    with pytest.raises(SpecError, match=finding):
        require_runnable(load(name, [*words, AUTOCAST]))
