"""Ratios get the names of what they are products of; sums the names of what is not in them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from ptrain.verification.parts import (
    absent_addends,
    are_equal_on_ranks,
    canonical_modules,
    canonical_name,
    canonical_parameters,
    factor_text,
    fit_combination,
    fit_multiple,
    is_even,
    matching_products,
    missing_sum_factor,
)

DEGREES = {"dp": 3, "tp": 2, "K": 5}


def gradients(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(7, 5, generator=generator, dtype=torch.float64) for _ in range(count)]


@pytest.mark.parametrize(
    ("ratio", "text", "axes"),
    [
        (2.0, "× 2", ("tp",)),
        (1 / 3, "÷ 3", ("dp",)),
        (25.0, "× 25", ("K",)),
        (1 / math.sqrt(3), "× 1/√3", ("dp",)),
        (math.sqrt(2), "× √2", ("tp",)),
        (15.0, "× 15", ("dp", "K")),
        (3 / 5, "× 0.6", ("dp", "K")),
    ],
)
def test_a_ratio_is_a_product_of_degrees(ratio: float, text: str, axes: tuple[str, ...]) -> None:
    first = matching_products(ratio, DEGREES)[0]
    assert (str(first), first.axes) == (text, axes)


def test_degrees_of_the_same_size_all_count() -> None:
    found = matching_products(2.0, {"dp": 2, "tp": 2})
    assert [each.axes for each in found[:2]] == [("dp",), ("tp",)]


def test_one_is_no_factor_and_an_odd_ratio_keeps_its_digits() -> None:
    assert matching_products(1.0, {"dp": 2, "tp": 2}) == ()
    assert factor_text(0.7071, {"dp": 3}) == "× 0.7071"


def test_a_multiple_is_found_with_its_remainder() -> None:
    (g, other) = gradients(2)
    assert fit_multiple(3 * g, g).factor == pytest.approx(3)
    assert fit_multiple(3 * g, g).residual < 1e-14
    assert fit_multiple(g + other, g).residual > 0.1
    assert fit_multiple(torch.zeros_like(g), g).residual == math.inf
    assert fit_multiple(g * math.nan, g).residual == math.inf


def test_a_combination_names_the_missing_terms() -> None:
    basis = gradients(4)
    fit = fit_combination(0.25 * (basis[0] + basis[1] + basis[3]), basis)
    assert fit.is_within(1e-12)
    assert absent_addends(fit.coefficients) == (2,)
    assert not is_even(fit.coefficients)
    assert is_even(fit_combination(sum(basis[1:], basis[0]), basis).coefficients)


def test_equal_addends_share_the_coefficient() -> None:
    (g,) = gradients(1)
    assert fit_combination(g, [g, g]).coefficients == pytest.approx((0.5, 0.5))


def test_a_missing_sum_or_mean_is_identified_from_the_ranks_values() -> None:
    parts = torch.stack(gradients(4))
    of_pairs = torch.stack([parts[:2].sum(0)] * 2 + [parts[2:].sum(0)] * 2)
    pairs = (0, 1), (2, 3)
    assert missing_sum_factor(parts, of_pairs, pairs, 1e-9) == pytest.approx(1)
    assert missing_sum_factor(parts, of_pairs / 2, pairs, 1e-9) == pytest.approx(1 / 2)
    assert missing_sum_factor(parts, of_pairs, ((0, 2), (1, 3)), 1e-3) is None
    assert missing_sum_factor(parts, of_pairs, [(0, 1, 2, 3)], 1e-3) is None
    assert missing_sum_factor(of_pairs, of_pairs, pairs, 1e-3) is None
    parts[1, 0] = math.inf
    assert missing_sum_factor(parts, of_pairs, pairs, 1e-3) is None
    assert are_equal_on_ranks(of_pairs[:2], 1e-12)
    assert not are_equal_on_ranks(parts, 1e-12)


def test_tensors_missing_on_a_rank_are_no_terms_and_other_elements_no_sum() -> None:
    parts = torch.stack(gradients(4))
    truths = parts[:2].sum(0).expand_as(parts)
    parts[2:] = math.nan
    assert missing_sum_factor(parts, truths, ((0, 1), (2, 3)), 1e-9) == pytest.approx(1)
    assert missing_sum_factor(parts, truths, ((0, 2), (1, 3)), 1e-3) is None


def test_names_of_wrappers_are_no_part_of_a_name() -> None:
    wrapped = "module._fsdp_wrapped_module.blocks.0._checkpoint_wrapped_module.weight"
    assert canonical_name(wrapped) == "blocks.0.weight"
    assert canonical_name("_orig_mod.module") == ""


class Wrapper(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def test_a_tied_parameter_has_its_first_name() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    wrapped = Wrapper(model)
    assert list(canonical_parameters(wrapped)) == ["0.weight"]
    assert dict(canonical_modules(wrapped))[""] is model
