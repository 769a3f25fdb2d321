"""A rehearsed rank with real tensors leaves no state in the process."""

import gc

import pytest
import torch

from ptrain.selection.recompute import resolve_auto
from ptrain.simulation.execute import simulate
from ptrain.spec.load import load

BRIEF = ("batch={global: 4, micro: 1, sequence: 16}", "device=cpu")


def num_parameters() -> int:
    gc.collect()
    return sum(issubclass(type(thing), torch.nn.Parameter) for thing in gc.get_objects())


@pytest.mark.parametrize("strategy", ["zero1", "ep"])
def test_no_parameter_of_a_flat_unit_is_kept_alive_by_its_hook(strategy: str) -> None:
    before = num_parameters()
    simulate(resolve_auto(load(strategy, BRIEF)), rehearse=True)
    assert num_parameters() == before
