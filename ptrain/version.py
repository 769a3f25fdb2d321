"""The version, the torch versions that it runs with, and those of which the tests show that `exact`
is exact."""

VERSION = "0.1.0"
TORCH_RANGE = ">=2.11,<2.16"  # as pip reads it; a test holds pyproject.toml to it
TESTED_TORCH = ("2.11", "2.12", "2.13", "2.14", "2.15")  # benchmarks/torch_versions.py
REFERENCE_TORCH = "2.13"  # what tables and pages are of, and is counted where no torch is installed


def is_tested(torch: str) -> bool:
    """Return whether `exact` is claimed for this version of torch."""
    return ".".join(torch.split(".")[:2]) in TESTED_TORCH
