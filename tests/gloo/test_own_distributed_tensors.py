"""Loops whose modules return DTensors get a verdict against a plain reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import ptrain
from tests.ranks import Ranks

pytestmark = pytest.mark.gloo
WORDS, WIDTH = 32, 16


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(WORDS, WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens_BT: Tensor) -> Any:
        x_BTC = self.norm(self.embed(tokens_BT))
        return self.head(self.down(torch.tanh(self.up(x_BTC))))


class DoubleSum(torch.autograd.Function):
    """A sum over the ranks whose backward sums the gradients too."""

    @staticmethod
    def forward(_: Any, term: Tensor) -> Tensor:
        total = term.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return gradient


class SharedTensor(torch.autograd.Function):
    """A replicated tensor of which each rank uses a part: its gradient is summed over the ranks."""

    @staticmethod
    def forward(_: Any, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        total = gradient.clone()
        dist.all_reduce(total)
        return total


def plan(is_sequence: bool) -> dict[str, Any]:
    """Return a plan with DTensor outputs up to the head, as sequence shards if `is_sequence`."""
    if not is_sequence:
        head = ColwiseParallel(output_layouts=Replicate())
        return {"up": ColwiseParallel(), "down": RowwiseParallel(), "head": head}
    kept: dict[str, Any] = {"use_local_output": False}
    rows, replicated = Shard(1), Replicate()
    return {
        "embed": RowwiseParallel(input_layouts=replicated, output_layouts=rows, **kept),
        "norm": SequenceParallel(**kept),
        "up": ColwiseParallel(input_layouts=rows, **kept),
        "down": RowwiseParallel(output_layouts=rows, **kept),
        "head": ColwiseParallel(input_layouts=rows, output_layouts=replicated, **kept),
    }


def verify_loop(fault: str = "", is_sequence: bool = False, is_distilled: bool = False) -> Any:
    """Return the verdict. `fault`: a module whose output is scaled, or a loss term with a wrong
    sum."""
    rank, size = dist.get_rank(), dist.get_world_size()
    teacher = torch.randn(WORDS, WORDS, generator=torch.Generator().manual_seed(1))

    def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
        inputs, labels = rows[:, :-1], rows[:, 1:]
        logits = model(inputs)
        logits = logits.full_tensor() if isinstance(logits, DTensor) else logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        if not is_distilled:
            return loss
        is_cut = isinstance(model.head.weight, DTensor)
        logits = SharedTensor.apply(logits) if is_cut and fault != "part" else logits
        terms = -(teacher[inputs].softmax(-1) * logits.log_softmax(-1))
        if is_cut:  # each rank adds the terms of its part of the vocabulary
            return loss + DoubleSum.apply(terms.chunk(size, -1)[rank].sum(-1).mean())
        return loss + terms.sum(-1).mean()

    def job(is_cut: bool) -> ptrain.Job:
        torch.manual_seed(0)
        model: Any = Net()
        if is_cut:
            mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
            model = parallelize_module(model, mesh, plan(is_sequence))
            if fault in dict(model.named_children()):
                module = model.get_submodule(fault)
                module.register_forward_hook(lambda _, given, output: 1.5 * output)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(rows: Tensor) -> Tensor:
            loss = loss_of(model, rows)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return ptrain.Job(model=model, step=step)

    rows = torch.randint(0, WORDS, (3, 4, 9), generator=torch.Generator().manual_seed(0))
    verdict = ptrain.verify(lambda: job(False), lambda: job(True), rows, share=lambda batch: batch)
    return verdict.holds, str(verdict.root_cause)


@pytest.mark.parametrize("is_sequence", [False, True])
def test_a_loss_of_parts_whose_gradients_are_summed_holds(ranks: Ranks, is_sequence: bool) -> None:
    assert ranks.run(2, verify_loop, "", is_sequence, True)[0][0]


def test_a_loss_of_parts_whose_gradients_are_not_summed_has_a_root_cause(ranks: Ranks) -> None:
    """The forward pass is right: no module is reported to return another output or ruled out."""
    holds, root_cause = ranks.run(2, verify_loop, "part", False, True)[0]
    assert not holds
    assert "returns another output" not in root_cause and "plain module" not in root_cause


@pytest.mark.parametrize(
    ("fault", "is_sequence"),
    [("head", False), ("up", False), ("down", False), ("norm", True), ("up", True)],
)
def test_a_wrong_sharded_module_is_located(ranks: Ranks, fault: str, is_sequence: bool) -> None:
    holds, root_cause = ranks.run(2, verify_loop, fault, is_sequence)[0]
    assert not holds
    assert f"{fault} returns another output than in the reference" in root_cause
    assert "located by trying" in root_cause
