"""The first module that differs is named: hand-written tensor parallelism with a missing sum."""

from __future__ import annotations

import copy
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import ptrain
from ptrain.codec import encode
from tests.gloo import field_stories, sequence_parallel
from tests.gloo.own_loops import square_loss_job
from tests.ranks import Ranks

pytestmark = [pytest.mark.gloo, pytest.mark.nightly]


class FullNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Linear(8, 6, bias=False, dtype=torch.float64)
        self.head = nn.Linear(6, 3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.gelu(self.rows(x)))


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Rows(nn.Module):
    """A row-parallel linear: each rank has some columns of the weight and the matching inputs."""

    def __init__(self, whole: nn.Linear, is_summed: bool) -> None:
        super().__init__()
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.weight = nn.Parameter(whole.weight.detach().chunk(self.size, 1)[self.rank].clone())
        self.is_summed = is_summed

    def forward(self, x: Tensor) -> Tensor:
        partial = F.linear(x.chunk(self.size, -1)[self.rank], self.weight)
        return _Sum.apply(partial) if self.is_summed else partial


def verify_row_parallel(is_summed: bool) -> dict[str, Any] | None:
    torch.manual_seed(0)
    plain = FullNet()
    model = copy.deepcopy(plain)
    model.rows = Rows(plain.rows, is_summed)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    batches = torch.randn(2, 4, 8, dtype=torch.float64)
    terms = ptrain.Terms(mesh=mesh, steps=4)
    verdict = ptrain.verify(square_loss_job(plain), square_loss_job(model), batches, terms=terms)
    assert verdict.holds or verdict.root_cause, verdict
    return encode(verdict.root_cause)


def verify_without_sum(name: str) -> dict[str, Any]:
    """Verify a loop that returns partial sums, or local gradients of column-parallel layers,
    without a reduction."""
    unsummed = {
        "scatter_row_sums": sequence_parallel.split_sequence,
        "gather_for_columns": sequence_parallel.gather_sequence,
    }
    with patch.object(sequence_parallel, name, unsummed[name]):
        root_cause = field_stories.sequence_parallelism(fault=False).root_cause
    assert root_cause is not None
    return encode(root_cause)


def test_a_row_parallel_linear_by_hand_holds(ranks: Ranks) -> None:
    assert ranks.run(2, verify_row_parallel, True) == [None, None]


def test_an_output_that_is_not_summed_is_named_with_axis_and_module(ranks: Ranks) -> None:
    root_cause = ranks.run(2, verify_row_parallel, False)[0]
    assert (root_cause["state"], root_cause["place"]) == ("activations", "rows")
    assert (root_cause["axis"], root_cause["factor"]) == ("tp", "missing all-reduce over tp")
    assert "with the reference's output of rows in its place" in root_cause["tried"]


@pytest.mark.parametrize(
    ("name", "state", "place", "does"),
    [
        ("scatter_row_sums", "activations", "blocks.*.down", "returns another output"),
        ("gather_for_columns", "gradients", "blocks.*.norm", "the gradient of that output differs"),
    ],
)
def test_the_innermost_module_is_named_whose_values_make_the_step_right(
    ranks: Ranks, name: str, state: str, place: str, does: str
) -> None:
    root_cause = ranks.run(2, verify_without_sum, name)[0]
    assert (root_cause["state"], root_cause["place"]) == (state, place)
    how = "proven" if state == "activations" else "located"
    assert root_cause["certainty"] == f"{how} by trying"
    assert does in root_cause["sentence"]
