"""A training loop that is somebody else's, and on what terms it is judged. Nothing of how it works
is asked for: its optimizers are found when they step, its shards by what its tensors say."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ptrain.errors import PtrainError

Known: TypeAlias = Literal["mean", "sum", "same"]
Average: TypeAlias = nn.Module | Mapping[str, Tensor]
Losses: TypeAlias = Known | Callable[[Sequence[float]], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A model as the loop has it (wrapped, or plain for the reference), and one step of the loop:
    forward, backward and update on a batch. It returns the loss, as a number or a tensor, or None
    where nobody computes it. `average`: a moving average of the parameters, if the loop keeps one:
    a module (torch.optim.swa_utils.AveragedModel) or tensors by the parameters' names, the same
    object in every step; None on ranks that keep none."""

    model: nn.Module
    step: Callable[[Any], Any]
    average: Average | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """Relative, by the 2-norm. `gradients` of each parameter, `outputs` of each module, `updates`
    of the way that a parameter has gone since the start, `losses` of the global loss."""

    gradients: float
    outputs: float
    updates: float
    losses: float

    def length_of(self, rounding: float) -> float:
        """Return beside which length a rounding is just what an update may be off; none, where
        nothing may be."""
        return rounding / self.updates if self.updates else 0.0


# fp64 and fp32: sums over the same addends in another order, with room for three steps of Adam,
# which turns an element's rounding into a step of its own. 16 bits: a rounding is 2^-8 or 2^-11,
# and a layer's sum holds some; a fault is a factor.
TOLERANCES = {
    torch.float64: Tolerance(gradients=1e-11, outputs=1e-11, updates=1e-9, losses=1e-12),
    torch.float32: Tolerance(gradients=1e-5, outputs=1e-5, updates=1e-3, losses=1e-4),
    torch.float16: Tolerance(gradients=2e-2, outputs=1e-2, updates=0.2, losses=5e-3),
    torch.bfloat16: Tolerance(gradients=8e-2, outputs=4e-2, updates=0.5, losses=2e-2),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """How a loop is compared with one device. Raises PtrainError for terms that are none.

    steps: updates (None: one for each batch); beyond the batches these begin again.
    examined: of these the first so many are compared tensor by tensor, the rest by their losses
        alone (None: all are).
    dtype: the coarsest that the loop computes in (None: the reference's); it sets the tolerance.
    loss: what the ranks' losses make up the global one: their mean, their sum, each has it (same),
        or a function of all ranks' losses.
    mesh: the ranks' axes, where no DTensor tells them.
    document_end: the token that ends a document, where samples have several: nothing is asked of it
        then, as the next one is another document's.
    part: (name, whole tensor) -> this rank's piece of it, for tensors that are cut in a way that
        neither a DTensor nor their shape tells.
    """

    steps: int | None = None
    examined: int | None = None
    dtype: torch.dtype | None = None
    tolerance: Tolerance | None = None
    loss: Losses = "mean"
    mesh: DeviceMesh | None = None
    part: Callable[[str, Tensor], Tensor] | None = None
    document_end: int | None = None

    def __post_init__(self) -> None:
        if self.steps is not None and self.steps < 1:
            remedy = "leave it out for one step a batch, or give 1 or more"
            raise _refused("steps", f"{self.steps} steps show nothing", remedy)
        if self.examined is not None and self.examined < 0:
            raise _refused("examined", f"{self.examined} is no number of steps", "give 0 or more")
        if self.tolerance is None and self.dtype not in (None, *TOLERANCES):
            known = ", ".join(map(str, TOLERANCES))
            remedy = f"give one of {known}, or a tolerance"
            raise _refused("dtype", f"no rounding is known of {self.dtype}", remedy)
        if not callable(self.loss) and self.loss not in get_args(Known):
            known = ", ".join(map(repr, get_args(Known)))
            remedy = f"give one of {known}, or a function of all ranks' losses"
            raise _refused("loss", f"{self.loss!r} is no way to add losses up", remedy)


def _refused(term: str, finding: str, remedy: str) -> PtrainError:
    return PtrainError(f"verify: Terms.{term}: {finding}\n  remedy: {remedy}")


def tolerance_of(dtype: torch.dtype | None, parameters: Iterable[Tensor]) -> Tolerance:
    """Return the tolerance of `dtype`, or without one that of the coarsest dtype of the reference's
    parameters. Raises PtrainError for one of which no rounding is known."""
    dtypes = {dtype} if dtype else {parameter.dtype for parameter in parameters}
    known = [TOLERANCES[known_dtype] for known_dtype in dtypes if known_dtype in TOLERANCES]
    if not known:
        names = ", ".join(sorted(map(str, dtypes)))
        raise PtrainError(
            f"verify: the reference's parameters are in {names}, of which no rounding is known\n"
            "  remedy: give Terms(tolerance=...), or Terms(dtype=...) of what it computes in"
        )
    return max(known, key=lambda tolerance: tolerance.gradients)
