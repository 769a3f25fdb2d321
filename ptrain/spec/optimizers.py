"""The optimizers that a spec may name, a row for each. What keeps, places, predicts or times an
update asks the row; torch's classes stand beside the rows' names in `ptrain.optimizers.build`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerRow:
    """What is known of an optimizer, but for its arithmetic.

    Attributes:
        about: its meaning, for the schema and the help.
        keys: what it reads of its section beside `lr` and `weight_decay`, each key with the value
            that stands for it where none is written.
        moments: the tensors that it keeps for a parameter, of its shape, by torch's names.
        needs_momentum: without a momentum it keeps none of them.
        numbers: what it keeps beside them for a parameter, in fp32, with the values of the start.
        remainder: the optimizer of all tensors but the matrices within a model, of one that takes
            whole matrices; "" of one whose update of any slice is the slice of the update.
        is_fused: one kernel of torch's updates in place, divides by the loss's scale, and leaves
            the update out where a flag on the device says so. `ptrain calibrate` measures it.
        temporaries: how many tensors like a parameter the update has at once beside it.
        operators: of each operator of an update that is not fused, in order, how many tensors like
            the parameter it reads and writes.
        numbers_in_16_bits: on a processor, whose fused kernel is wrong in 16 bits, the fp32 numbers
            that ours has at once: without a momentum, and with one.
        enlarges_rounding: two orders of summation come to lie further apart by its update than
            the dtype of what is updated says.
    """

    about: str
    keys: Mapping[str, Any]
    moments: tuple[str, ...]
    needs_momentum: bool = False
    numbers: Mapping[str, float] = field(default_factory=dict)
    remainder: str = ""
    is_fused: bool = False
    temporaries: int = 0
    operators: tuple[int, ...] = ()
    numbers_in_16_bits: tuple[int, int] | None = None
    enlarges_rounding: bool = False

    @property
    def is_elementwise(self) -> bool:
        """Whether the update of any slice of a tensor is that slice of the update."""
        return not self.remainder


OPTIMIZERS: Mapping[str, OptimizerRow] = {
    "adamw": OptimizerRow(
        about="Adam with decoupled weight decay: two moments",
        keys={"betas": (0.9, 0.95), "eps": 1e-8},
        moments=("exp_avg", "exp_avg_sq"),
        numbers={"step": 0.0},
        is_fused=True,
    ),
    "sgd": OptimizerRow(
        about="stochastic gradient descent, with momentum if set",
        keys={"momentum": 0.0},
        moments=("momentum_buffer",),
        needs_momentum=True,
        is_fused=True,
        numbers_in_16_bits=(1, 3),
    ),
    "nadam": OptimizerRow(
        about="AdamW with Nesterov momentum: two moments",
        keys={"betas": (0.9, 0.999), "eps": 1e-8},
        moments=("exp_avg", "exp_avg_sq"),
        numbers={"step": 0.0, "mu_product": 1.0},
        temporaries=2,  # the second moment without its bias, and its root
        operators=(2, 3, 2, 3, 2, 2, 2, 4, 4),
    ),
    "lion": OptimizerRow(
        about="sign of the momentum, with decoupled weight decay: one moment",
        keys={"betas": (0.9, 0.99)},  # of its authors
        moments=("exp_avg",),
        temporaries=1,  # the direction
        operators=(3, 2, 2, 3, 3),
        enlarges_rounding=True,  # where a sign is another, twice the learning rate
    ),
    "muon": OptimizerRow(
        about="orthogonalized momentum for matrices in blocks, AdamW for all other parameters; "
        "needs full matrices",
        keys={"momentum": 0.95},  # of its authors
        moments=("momentum_buffer",),
        remainder="adamw",
        enlarges_rounding=True,  # it iterates in bf16
    ),
}
FUSED = tuple(name for name, row in OPTIMIZERS.items() if row.is_fused)


def defaults(key: str) -> str:
    """List the optimizers that read a key, with their defaults: `0.0 (sgd), 0.95 (muon)`."""
    rows = OPTIMIZERS.items()
    return ", ".join(f"{row.keys[key]} ({name})" for name, row in rows if key in row.keys)
