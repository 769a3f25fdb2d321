"""The random numbers of a step are those of torch.manual_seed with the step's seed."""

from __future__ import annotations

import torch

from ptrain.models.modes import seed_device, seed_of_step


def test_a_step_draws_what_it_draws_after_torch_manual_seed():
    seed_device(seed_of_step(3, 7, 1), torch.device("cpu"))
    drawn = torch.rand(5)
    torch.manual_seed(seed_of_step(3, 7, 1))
    assert torch.equal(drawn, torch.rand(5))


def test_steps_and_places_draw_unlike_numbers():
    def drawn(step: int, index: int) -> float:
        seed_device(seed_of_step(0, step, index), torch.device("cpu"))
        return float(torch.rand(()))

    assert len({drawn(step, index) for step in range(3) for index in range(3)}) == 9
