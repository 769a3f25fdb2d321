"""The version of ptrain, and the torch versions that it runs with and is tested with."""

VERSION = "0.1.0"
TORCH_RANGE = ">=2.11,<2.16"  # in pip's syntax; a test compares it with pyproject.toml
# Versions for which benchmarks/torch_versions.py shows that `exact` is exact.
TESTED_TORCH = ("2.11", "2.12", "2.13", "2.14", "2.15")
# The version of the tables and pages, and of predictions without torch.
REFERENCE_TORCH = "2.13"


def is_tested(torch: str) -> bool:
    """Return True if `exact` is claimed for this version of torch."""
    return ".".join(torch.split(".")[:2]) in TESTED_TORCH
