"""`residual_scale` multiplies what sub-blocks add to the stream, as Granite does."""

from __future__ import annotations

from dataclasses import replace

import torch

from ptrain.models.initialize import build_model, cast_module, initialize
from ptrain.spec.model import ModelShape
from tests.pure.build import ODD_SHAPE

SEQUENCE = 12


def logits_of(shape: ModelShape, scaled_by: float = 1.0) -> torch.Tensor:
    module = build_model(shape, sequence=SEQUENCE)
    cast_module(module, torch.float64)
    initialize(module, 0)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith(("attention.output.weight", "mlp.down.weight")):
                parameter.mul_(scaled_by)
    return module(torch.arange(SEQUENCE).unsqueeze(0)).detach()


def test_a_residual_scale_multiplies_the_output_of_sub_blocks():
    scaled = logits_of(replace(ODD_SHAPE, residual_scale=0.25))
    torch.testing.assert_close(scaled, logits_of(ODD_SHAPE, scaled_by=0.25))
    assert not torch.allclose(scaled, logits_of(ODD_SHAPE))


def test_no_table_covers_a_residual_scale():
    assert replace(ODD_SHAPE, residual_scale=0.25).tabulated is None
