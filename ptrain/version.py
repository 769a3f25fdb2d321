"""The version, and the torch versions for which the tests show that `exact` is exact."""

VERSION = "0.1.0"
TESTED_TORCH = ("2.11", "2.13")


def is_tested(torch: str) -> bool:
    """Whether `exact` is claimed for this version of torch."""
    return ".".join(torch.split(".")[:2]) in TESTED_TORCH
