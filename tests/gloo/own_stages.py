"""A hand-written pipeline of two stages: each rank has half of the blocks, sends its output, and
sends the gradient of its input back."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import ptrain
from ptrain.codec import encode
from ptrain.verification.jobs.job import LoopVerdict
from tests.gloo.own_loops import WIDTH, Net, batches, build_model, mean_loss, single_pass_loop

MICRO = 2


class Stage(nn.Module):
    """A stage: the first has the embedding and a block; the last a block, the norm and the head."""

    def __init__(self, net: Net, place: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({str(place): net.blocks[place]})
        if place == 0:
            self.embed = net.embed
        else:
            self.norm, self.head = net.norm, net.head
        self.place = place

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) if self.place == 0 else x
        x = self.blocks[str(self.place)](x)
        return x if self.place == 0 else self.head(self.norm(x))


def build_pipeline_job(fault: str = "") -> ptrain.Job:
    """Return the pipeline's job. `fault`: "unscaled" sums the means of micro-batches, "gradient"
    sends half of the gradient back."""
    place = dist.get_rank()
    model = Stage(build_model(), place)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def first(tokens: Tensor) -> None:
        hidden = model(tokens[:, :-1])
        dist.send(hidden.detach().contiguous(), 1)
        gradient = torch.empty_like(hidden)
        dist.recv(gradient, 1)
        hidden.backward(gradient)

    def last(tokens: Tensor) -> Tensor:
        rows, length = tokens[:, :-1].shape
        hidden = torch.empty(rows, length, WIDTH, dtype=torch.float64)
        dist.recv(hidden, 0)
        hidden.requires_grad_()
        loss = F.cross_entropy(model(hidden).flatten(0, 1), tokens[:, 1:].flatten())
        loss = loss if fault == "unscaled" else loss / MICRO
        loss.backward()
        assert hidden.grad is not None
        dist.send(hidden.grad / 2 if fault == "gradient" else hidden.grad, 0)
        return loss.detach()

    def step(tokens: Tensor) -> Any:
        losses = [(last if place else first)(micro) for micro in tokens.chunk(MICRO)]
        optimizer.step()
        optimizer.zero_grad()
        return sum(losses) if place else None

    return ptrain.Job(model=model, step=step)


def verify_pipeline(fault: str = "") -> LoopVerdict:
    def reference() -> ptrain.Job:
        net = build_model()
        return single_pass_loop(net, lambda tokens: mean_loss(net, tokens))

    return ptrain.verify(reference, lambda: build_pipeline_job(fault), batches(4))


def verify_on_rank(fault: str = "") -> dict[str, Any]:
    verdict = verify_pipeline(fault)
    return {"holds": verdict.holds, "text": str(verdict), "culprit": encode(verdict.root_cause)}
