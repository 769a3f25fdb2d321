"""The version, the torch versions that it runs with, and those of which the tests show that `exact`
is exact."""

from __future__ import annotations

import re

VERSION = "0.1.0"
TORCH_RANGE = ">=2.11,<2.14"  # as pip reads it; a test holds pyproject.toml to it
TESTED_TORCH = ("2.11", "2.13")


def is_tested(torch: str) -> bool:
    """Whether `exact` is claimed for this version of torch."""
    return ".".join(torch.split(".")[:2]) in TESTED_TORCH


def runs_with(torch: str) -> bool:
    """Whether this version of torch is within TORCH_RANGE, as pip reads it: `+cpu` does not count,
    and a pre-release of either bound is outside. A text that is no version is outside."""
    first, refused = (_minor(bound) for bound in re.findall(r"[\d.]+", TORCH_RANGE))
    minor = _minor(torch)
    is_early = minor == first and re.match(r"\d+\.\d+(\.0)*\.?(a|b|rc|dev)\d", torch)
    return first <= minor < refused and not is_early


def _minor(version: str) -> tuple[int, int]:
    """(2, 13) of 2.13.0+cpu, (0, 0) of what does not begin so."""
    number = re.match(r"(\d+)\.(\d+)", version)
    return (int(number[1]), int(number[2])) if number else (0, 0)
