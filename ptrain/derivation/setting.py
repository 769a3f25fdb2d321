"""What the traces of a built-in model depend on: by it a table is written, named and evaluated."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ptrain.axes.tensor.costs import Cut
from ptrain.derivation.archive import TablePart
from ptrain.derivation.attention import Statistics, statistics_of
from ptrain.derivation.monomials import dimensions
from ptrain.spec.model import Family, ModelShape
from ptrain.spec.precision import DType
from ptrain.spec.spec import LossSpec, Spec

# Ways of a table beside the kinds of cut (`Cut.kind`).
PLAIN, FUSED = "plain", "fused"
_GATHERED = "-gathered"
_CUT, _SAVED, _NAIVE, _WHOLE = "cut", "saved", "naive", "whole"

_WHOLE_LOSS = LossSpec()


class Place(StrEnum):
    """What the layers of a table are: all of a model's, or those of a stage."""

    ALONE = "alone"
    FIRST = "first"
    MIDDLE = "middle"
    LAST = "last"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A built-in model and how it runs; `sequence`: all tokens of a sample. Where operators are
    `cut` it is one rank's part. `is_for_cuda`: a GPU drops out; `statistics`: what its attention
    keeps beside its output."""

    shape: ModelShape
    batch: int
    sequence: int
    compute: DType
    cut: Cut | None = None
    loss: LossSpec = _WHOLE_LOSS
    is_for_cuda: bool = False
    statistics: Statistics | None = None

    @property
    def is_full(self) -> bool:
        """Whether fp32 and fp64 do the same as its dtype."""
        return self.compute in (DType.FP32, DType.FP64)

    @property
    def operators(self) -> str:
        """Which operators a block has; what dropout keeps is another thing on a GPU."""
        shape = self.shape
        if shape.family is Family.LLAMA:
            return "mha" if shape.heads == shape.kv_heads else "gqa"
        if not shape.dropout:
            return PLAIN
        return "dropout-cuda" if self.is_for_cuda and self.cut is None else "dropout"

    @property
    def values(self) -> dict[str, int]:
        """The value of every dimension that sizes are products of."""
        dimensions_of = self.cut.dimensions if self.cut else dimensions
        return dimensions_of(self.shape, batch=self.batch, sequence=self.sequence)

    def name(self, part: TablePart) -> str:
        """Return the name of its table. To a block it is nothing whether embedding and head are
        tied, to a loss what the blocks do; one sample's targets need no copy."""
        words = [
            self.shape.family.value,
            *(() if part is TablePart.BLOCK else ("tied" if self.shape.tied else "untied",)),
            *(() if part is TablePart.LOSS else (self.operators,)),
            "full" if self.is_full else "bf16",
            *(("one",) if self.batch == 1 else ()),
        ]
        return "-".join(words)

    def way(self, part: TablePart) -> str:
        """Return which way of its table's it is: how operators are cut, as far as the part sees it.
        A block does not see how logits are, and computes the same where a cut is naive; what it
        saves is nothing to the loss."""
        if self.cut is None:
            return FUSED if part is TablePart.LOSS and self.loss.fused else PLAIN
        kind = self.cut.kind
        match part:
            case TablePart.BLOCK:
                return kind.removesuffix(_GATHERED).replace(_NAIVE, _WHOLE)
            case TablePart.LOSS:
                return kind.replace(_SAVED, _CUT)
            case _:
                return kind


def setting_of(spec: Spec, cut: Cut | None) -> Setting:
    """Return the setting of a spec's built-in model, on a rank whose operators are cut so."""
    assert isinstance(spec.model, ModelShape), "a built-in model"
    return Setting(
        shape=spec.model,
        batch=spec.batch.micro,
        sequence=spec.batch.sequence,
        compute=spec.precision.effective.parameters,
        cut=cut,
        loss=spec.loss,
        is_for_cuda=spec.is_for_cuda,
        statistics=statistics_of(spec),
    )
