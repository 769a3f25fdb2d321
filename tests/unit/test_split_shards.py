"""Code that splits sharded features: split by another operator, joined, or reshaped to a fixed head
count. A rank would compute another result on its shard."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ptrain.errors import SpecError
from ptrain.models.roles import module_roles
from tests.unit.test_fused import spec_of

HIDDEN, HEADS, WIDTH = 16, 4, 32
Between = Callable[[Tensor], Tensor]


class Mixing(nn.Module):
    """A column, what a test does with what it gives, and a row."""

    def __init__(self, between: Between) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, WIDTH), nn.LazyLinear(HIDDEN)
        self.between = between

    def forward(self, x_BTC: Tensor) -> Tensor:
        y: Tensor = self.down(self.between(self.up(x_BTC)))
        return y


class Model(nn.Module):
    """One block of one sub-block."""

    def __init__(self, between: Between) -> None:
        super().__init__()
        self.emb, self.head = nn.Embedding(260, HIDDEN), nn.Linear(HIDDEN, 260)
        self.h = nn.ModuleList([Mixing(between)])
        self.tp_plan = {"h.*": "whole input", "h.*.up": "column", "h.*.down": "row"}
        self(torch.zeros(1, 2, dtype=torch.long))  # the row knows its width

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTC = self.emb(tokens_BT)
        y: Tensor = self.head(x_BTC + self.h[0](x_BTC))
        return y


def halves(y: Tensor) -> Tensor:
    first, second = y.chunk(2, -1)
    return F.silu(first) * second


def rotate_halves(heads: Tensor) -> Tensor:
    """The two halves of each head, turned."""
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((-second, first[..., : heads.shape[-1]]), dim=-1)


TAKEN_APART: list[Between] = [
    lambda y: F.glu(y, -1),
    lambda y: F.glu(F.relu(y)),
    lambda y: halves(y * 1.0),
    lambda y: halves(F.dropout(y, 0.1)),
    lambda y: halves(y.chunk(2, -1)[0]),
    lambda y: F.relu(y)[..., : WIDTH // 2],
    lambda y: F.relu(y).narrow(-1, 0, WIDTH // 2),
    lambda y: y[..., : WIDTH // 2],  # and what of the others?
    lambda y: F.relu(y.unflatten(-1, (-1, 8)).transpose(1, 2))[:, :2].transpose(1, 2).flatten(2),
    lambda y: F.relu(y.unflatten(-1, (-1, 8)))[:, :, 0],
    lambda y: halves(F.relu(y.unflatten(-1, (-1, 8))).flatten(2)),
]
COUNTED: list[Between] = [
    lambda y: y.reshape(*y.shape[:2], HEADS, -1).flatten(2),
    lambda y: y.view((*y.shape[:2], HEADS, -1)).flatten(2),
    lambda y: y.unflatten(-1, (HEADS, -1)).flatten(2),
    lambda y: F.relu(y).reshape(*y.shape[:2], HEADS, -1).transpose(1, 2).transpose(1, 2).flatten(2),
    lambda y: sum(y.view(*y.shape[:2], 2, HEADS, -1).unbind(2)).flatten(2),  # type: ignore[union-attr]
]
SOUND: list[Between] = [
    halves,
    lambda y: y[..., ::2] * y[..., 1::2],  # each rank has pairs of its own
    lambda y: sum(y.view(*y.shape[:2], 2, -1).unbind(2)),  # type: ignore[arg-type,return-value]
    lambda y: sum(y.view(*y.shape[:2], 2, -1, 8).unbind(2)).flatten(2),  # type: ignore[union-attr]
    lambda y: rotate_halves(y.view(*y.shape[:2], -1, 8).transpose(1, 2)).transpose(1, 2).flatten(2),
    lambda y: rotate_halves(F.relu(y.unflatten(-1, (-1, 8)))).reshape(*y.shape[:2], -1),
    lambda y: F.relu(y)[:, : y.shape[1]].reshape(*y.shape[:2], -1),
]


def finding_of(between: Between) -> tuple[str, str]:
    with pytest.raises(SpecError) as caught:
        module_roles(Model(between), spec_of())
    (fault,) = caught.value.faults
    return fault.finding, fault.remedy


@pytest.mark.parametrize("between", TAKEN_APART)
def test_a_split_of_a_shard_after_its_column_is_rejected(between):
    finding, remedy = finding_of(between)
    assert finding.startswith("in the forward pass of h.0, aten::")
    assert "splits a shard of the features of h.0.up" in finding
    assert "output of h.*.up" in remedy


def test_slices_that_are_put_together_are_rejected():
    finding, _ = finding_of(lambda y: torch.cat((y, y * 2), -1))
    assert "aten::cat concatenates shards of the features" in finding


@pytest.mark.parametrize("between", COUNTED)
def test_heads_of_a_written_number_are_rejected_where_their_width_follows(between):
    finding, remedy = finding_of(between)
    assert f"splits the output of h.0.up into {HEADS} heads" in finding
    assert "-1 for the number of heads" in remedy


def test_a_layer_that_is_cut_and_called_by_keyword_is_rejected():
    model = Model(halves)
    up = model.h[0].up
    model.h[0].forward = lambda x: model.h[0].down(halves(up(input=x)))  # type: ignore[assignment]
    with pytest.raises(
        SpecError, match=r"h\.0\.up has the role column, but receives its input as a keyword"
    ):
        module_roles(model, spec_of())


@pytest.mark.parametrize("between", SOUND)
def test_projections_and_halves_of_each_head_are_not(between):
    assert module_roles(Model(between), spec_of())[0]
