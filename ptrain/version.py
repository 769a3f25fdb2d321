"""The version, the torch versions that it runs with, and those of which the tests show that `exact`
is exact."""

VERSION = "0.1.0"
TORCH_RANGE = ">=2.11,<2.14"  # as pip reads it; a test holds pyproject.toml to it
TESTED_TORCH = ("2.11", "2.13")


def is_tested(torch: str) -> bool:
    """Return whether `exact` is claimed for this version of torch."""
    return ".".join(torch.split(".")[:2]) in TESTED_TORCH
