"""Faults of context, expert and pipeline parallelism by hand."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import ptrain
from tests.corpus.collectives import GatherParts, ScatterSum, gathered, own_part, summed
from tests.corpus.context import Slice, tokens_of_rank
from tests.corpus.experts import RowMixture, SharedMixture, whole_mixture
from tests.corpus.fault import planted
from tests.corpus.parts import (
    WIDTH,
    TokenWriter,
    average,
    axis,
    looped,
    my_rows,
    rank,
    regressor,
    row_batches,
    size,
    token_batches,
    token_loss,
    writer,
)
from tests.corpus.pipeline import RegressorStage
from tests.corpus.pipeline import terms as of_stages


class RingAttention(torch.autograd.Function):
    """Causal attention of a slice of the queries to the keys and values of all ranks, with the
    backward block by block, as around a ring."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, uses_block: bool) -> Tensor:
        keys, values = gathered(k, 1), gathered(v, 1)
        first = rank() * q.shape[1]
        seen = torch.arange(first, first + q.shape[1])[:, None] >= torch.arange(keys.shape[1])
        scores = (q @ keys.transpose(-1, -2) / math.sqrt(WIDTH)).masked_fill(~seen, -torch.inf)
        chances = scores.softmax(dim=-1)
        ctx.save_for_backward(q, keys, values, chances)
        ctx.uses_block = uses_block
        return chances @ values

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, keys, values, chances = ctx.saved_tensors
        output = chances @ values
        q_gradient, k_parts, v_parts = torch.zeros_like(q), [], []
        blocks = (part.chunk(size(), dim=1) for part in (keys, values))
        for key, value, chance in zip(*blocks, chances.chunk(size(), dim=-1), strict=True):
            seen_output = chance @ value if ctx.uses_block else output
            inner = (gradient * seen_output).sum(dim=-1, keepdim=True)
            scores = chance * (gradient @ value.transpose(-1, -2) - inner) / math.sqrt(WIDTH)
            q_gradient += scores @ key
            k_parts.append(scores.transpose(-1, -2) @ q)
            v_parts.append(chance.transpose(-1, -2) @ gradient)
        sent = (own_part(summed(torch.cat(parts, dim=1)), 1) for parts in (k_parts, v_parts))
        return q_gradient, *sent, None


class RingWriter(TokenWriter):
    """The writer on a slice of the tokens, with attention around the ring of ranks."""

    uses_block = False

    def forward(self, tokens: Tensor, start: int = 0) -> Tensor:  # type: ignore[override]
        x = self.embed(tokens) + self.position(torch.arange(start, start + tokens.shape[1]))
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        x = x + self.proj(RingAttention.apply(q, k, v, self.uses_block))
        return self.head(x + self.mlp(x))


@planted(
    source="https://github.com/huggingface/picotron/issues/37",
    wrong=("gradients",), axis="cp", place="qkv.*, norm.*, embed*, position*", step=0,
    sentence="the ring's backward is wrong: it takes a block's output where the whole one belongs",
    right=("qkv|attention|ring|query|key", "gradient|backward"),
    wrong_if=("head.weight", "mlp.", "learning rate", "mask is", "positions begin"),
)  # fmt: skip
def ring_backward_of_a_block(fault: bool) -> Any:
    def job() -> ptrain.Job:
        torch.manual_seed(0)
        model = RingWriter()
        model.uses_block = fault

        def loss(called: nn.Module, batch: Slice) -> Tensor:
            inputs, labels, first = batch
            return F.cross_entropy(called(inputs, first).flatten(0, 1), labels.flatten())

        return looped(model, loss=loss, before_update=lambda: average(model.parameters()))

    return ptrain.verify(
        lambda: looped(writer(), loss=token_loss),
        job,
        token_batches(),
        share=tokens_of_rank,
        terms=ptrain.Terms(mesh=axis("cp")),
    )


class NormedMixture(RowMixture):
    """The mixture whose single weight is divided by the sum of the chosen ones, itself."""

    def forward(self, x: Tensor) -> Tensor:
        weight, choice = self.router(x).softmax(dim=-1).max(dim=-1)
        weight = weight / (weight.sum(dim=-1) if weight.ndim > 1 else weight + 1e-20)
        outputs = [
            expert(x) * (weight * (choice == int(number)))[:, None]
            for number, expert in self.experts.items()
        ]
        return self.head(F.gelu(self.combine(outputs)))


@planted(
    source="https://github.com/jingyaogong/minimind/issues/858",
    wrong=("activations", "loss", "gradients"), axis="none", place="head, router*, experts*",
    step=0,
    sentence="the router gets no gradient: the one chosen weight is divided by itself, and is 1",
    right=("router|weight of the expert|head|combine", "no gradient|zero|input|normal|weight|"
           "output|differ|forward"),
    wrong_if=("not reduced", "learning rate", "counted twice"),
)  # fmt: skip
def chosen_weight_divided_by_itself(fault: bool) -> Any:
    def built() -> RowMixture:
        torch.manual_seed(0)
        return NormedMixture() if fault else RowMixture()

    return ptrain.verify(
        lambda: looped(whole_mixture()),
        lambda: looped(DistributedDataParallel(built())),
        row_batches(size=16),
        share=my_rows,
    )


class SortingMixture(SharedMixture):
    """The mixture with expert r on rank r; rows are sorted by expert, and their weights too if
    `sorts_weights`."""

    sorts_weights = True

    def forward(self, x: Tensor) -> Tensor:
        weight, choice = self.router(x).softmax(dim=-1).max(dim=-1)
        choices, weights = gathered(choice, 0), GatherParts.apply(weight, 0)
        order = choices.argsort(stable=True)
        rows = GatherParts.apply(x, 0)[order]
        is_own = choices[order] == rank()
        weights = weights[order] if self.sorts_weights else weights
        outputs = self.experts[str(rank())](rows) * (weights * is_own)[:, None]
        y = ScatterSum.apply(outputs[order.argsort()], 0)
        return self.head(F.gelu(y))


@planted(
    source="https://github.com/pytorch/torchtitan/pull/1340",
    wrong=("activations", "loss"), axis="ep", place="head, experts*", step=0,
    sentence="rows are combined with the weights of other rows: these are not sorted by expert",
    right=("weight|order|combine|head|row|expert", "order|sort|permut|other|input|output|differ|"
           "forward|wrong"),
    wrong_if=("not reduced", "learning rate", "capacity", "dropped"),
)  # fmt: skip
def weights_of_other_rows(fault: bool) -> Any:
    def job() -> ptrain.Job:
        torch.manual_seed(0)
        model = SortingMixture()
        model.sorts_weights = not fault

        def reduce() -> None:
            for name, parameter in model.named_parameters():
                if "experts" in name:
                    parameter.grad /= size()
                else:
                    average([parameter])

        return looped(model, before_update=reduce)

    return ptrain.verify(
        lambda: looped(whole_mixture()),
        job,
        row_batches(size=16),
        share=my_rows,
        terms=ptrain.Terms(mesh=axis("ep")),
    )


def through_stages(stage: RegressorStage, batch: Tensor, *, reuses: bool) -> Tensor:
    """Run two micro-batches through both stages. Stage 1 receives them in one buffer if
    `reuses`."""
    micros, loss = list(batch.chunk(2)), torch.zeros(1)
    if rank() == 0:
        outputs = [stage.first(micro) for micro in micros]
        for output in outputs:
            dist.send(output.detach(), dst=1)
        for output in outputs:
            gradient = torch.empty_like(output)
            dist.recv(gradient, src=1)
            output.backward(gradient)
    else:
        buffer, losses, inputs = torch.empty(stage.hidden_shape(micros[0])), [], []
        for micro in micros:
            dist.recv(buffer, src=0)
            received = buffer.detach() if reuses else buffer.clone()
            inputs.append(received.requires_grad_(True))
            losses.append(stage.loss(inputs[-1], micro))
        for value in losses:
            (value / 2).backward()
        for received in inputs:
            assert received.grad is not None
            dist.send(received.grad, dst=0)
        loss = torch.stack(losses).mean().detach().reshape(1)
    dist.broadcast(loss, src=1)
    return loss[0]


def staged(*, reuses: bool) -> ptrain.Job:
    stage = RegressorStage()
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.05)

    def step(batch: Tensor) -> Tensor:
        loss = through_stages(stage, batch, reuses=reuses)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return ptrain.Job(model=stage, step=step)


def unstaged() -> ptrain.Job:
    model = regressor()
    return looped(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.05))


@planted(
    source="https://github.com/pytorch/pytorch/issues/185331",
    wrong=("gradients",), axis="pp", place="down.weight", step=0,
    sentence="stage 1 receives the second micro-batch into the first one's input, which backward "
             "still needs",
    right=("down|stage 1|rank 1", "gradient|input|buffer|overwr|micro-batch|reuse|in place"),
    wrong_if=("not reduced", "learning rate", "norm.weight", "up.weight", "down.bias"),
)  # fmt: skip
def receive_buffer_used_again(fault: bool) -> Any:
    return ptrain.verify(unstaged, lambda: staged(reuses=fault), row_batches(), terms=of_stages())
