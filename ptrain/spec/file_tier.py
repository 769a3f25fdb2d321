"""The folder of the file tier: whether states can be put there. Pure: no torch."""

from __future__ import annotations

import os
import tempfile

from ptrain.cost import PLACED
from ptrain.errors import SpecError, refused
from ptrain.spec.placement import Tier
from ptrain.spec.spec import Spec


def require_file_tier(spec: Spec) -> None:
    """Raises SpecError where a state goes to files and no file can be made in their folder."""
    tiers = {factor.placement[state].tier for factor in spec.factors for state in PLACED}
    if Tier.FILE not in tiers | spec.activations.tiers:
        return
    try:
        tempfile.TemporaryFile(prefix="ptrain-", dir=spec.offload.path).close()
    except OSError as error:
        raise unusable(spec.offload.path, error) from error


def unusable(path: str | None, error: OSError | RuntimeError) -> SpecError:
    """Return the SpecError for what `error` says of the folder (None: the system's temporary one).
    Where a folder exists but takes no files, as /proc, the kernel's answer is that there is
    none."""
    folder = path or tempfile.gettempdir()
    reason = getattr(error, "strerror", None) or str(error)
    if not os.path.lexists(folder):
        finding = "no such folder"
    elif not os.path.isdir(folder):
        finding = "is not a folder"
    elif isinstance(error, FileNotFoundError):
        finding = "is not writable"
    else:
        finding = f"is not writable: {reason}"
    return refused(
        "offload.path",
        f"{folder}: {finding}",
        "Use an existing, writable folder with enough space for the file tier.",
    )
