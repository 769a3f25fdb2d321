"""The embedding and head of a language model: tied under either name, and with a padded
vocabulary."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ptrain
from ptrain.errors import PtrainError
from tests.ranks import Ranks

pytestmark = pytest.mark.gloo
WORDS, PADDED, WIDTH = 10, 13, 8


class Writer(nn.Module):
    """A model of embedding and head; the loop may register them in the other order, or with more
    rows."""

    def __init__(self, rows: int = WORDS, *, is_tied: bool = False, head_first: bool = False):
        super().__init__()
        torch.manual_seed(0)
        embed, head = nn.Embedding(rows, WIDTH), nn.Linear(WIDTH, rows)
        with torch.no_grad():
            torch.manual_seed(1)
            for tensor in (embed.weight, head.weight, head.bias):
                tensor[:WORDS] = torch.randn(WORDS, *tensor.shape[1:])
        if head_first:
            self.head = head
        self.embed, self.mix = embed, nn.Linear(WIDTH, WIDTH)
        with torch.no_grad():
            torch.manual_seed(2)
            self.mix.weight.copy_(torch.randn(WIDTH, WIDTH) / 3)
            self.mix.bias.zero_()
        self.head = head
        if is_tied:
            head.weight = embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(self.embed(tokens))))[..., :WORDS]


def loop_job(model: nn.Module, is_wrong: bool = False) -> ptrain.Job:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(tokens: Tensor) -> Tensor:
        logits = model(tokens)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        if is_wrong:
            model.head.weight.grad *= 2
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return ptrain.Job(model=model, step=step)


def tokens() -> list[Tensor]:
    return list(torch.randint(0, WORDS, (3, 8, 6), generator=torch.Generator().manual_seed(3)))


@pytest.mark.parametrize("is_wrong", [False, True])
def test_tied_embeddings_are_found_under_either_name(is_wrong: bool) -> None:
    loop = loop_job(Writer(is_tied=True, head_first=True), is_wrong)
    verdict = ptrain.verify(loop_job(Writer(is_tied=True)), loop, tokens())
    assert verdict.holds == (not is_wrong), verdict
    assert not is_wrong or (verdict.root_cause and verdict.root_cause.place == "embed.weight")


def test_embeddings_that_are_not_tied_in_the_loop_are_named() -> None:
    verdict = ptrain.verify(loop_job(Writer(is_tied=True)), loop_job(Writer()), tokens())
    assert verdict.root_cause is not None
    assert (
        "head.weight: in the loop's model, but not in the reference" in verdict.root_cause.sentence
    )


def verify_padded_loop(is_wrong: bool) -> tuple[bool, str, str]:
    """Verify an FSDP2 loop with a padded vocabulary; return whether it holds, the place and the
    text."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model = Writer(PADDED)
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("dp",))
    fully_shard(model, mesh=mesh)
    names = ("embed.weight", "head.weight", "head.bias")
    verdict = ptrain.verify(
        loop_job(Writer()), loop_job(model, is_wrong), tokens(),
        share=lambda batch: batch.chunk(size)[rank],
        terms=ptrain.Terms(padded=dict.fromkeys(names, PADDED)),
    )  # fmt: skip
    place = verdict.root_cause.place if verdict.root_cause else ""
    return verdict.holds, place, str(verdict)


@pytest.mark.parametrize("is_wrong", [False, True])
def test_rows_that_pad_a_vocabulary_are_not_compared(ranks: Ranks, is_wrong: bool) -> None:
    holds, place, text = ranks.run(2, verify_padded_loop, is_wrong)[0]
    assert holds == (not is_wrong), text
    assert place == ("head.weight" if is_wrong else ""), text


def test_a_padded_parameter_that_the_reference_lacks_is_rejected() -> None:
    terms = ptrain.Terms(padded={"embedding.weight": PADDED})
    with pytest.raises(PtrainError, match=r"Terms.padded: .* no parameter embedding.weight"):
        ptrain.verify(loop_job(Writer()), loop_job(Writer()), tokens(), terms=terms)
