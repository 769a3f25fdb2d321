"""The supported optimizers, one row each.

Code that stores, places, predicts or times an update reads these rows. `ptrain.optimizers.build`
maps their names to torch classes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerRow:
    """The properties of an optimizer, except its arithmetic.

    Attributes:
        about: The meaning, for the schema and the help.
        keys: The keys that it reads in addition to `lr` and `weight_decay`, with their defaults.
        moments: The state tensors per parameter, in its shape, by torch's names.
        needs_momentum: True if there are no moments with momentum 0.
        numbers: The fp32 scalars per parameter, with their initial values.
        remainder: For an optimizer of full matrices, the optimizer of all parameters other than the
            matrices in blocks; "" for an elementwise one.
        is_fused: True if one torch kernel updates in place, divides by the loss scale, and skips
            the update if a flag on the device is set. `ptrain calibrate` measures it.
        temporaries: The number of parameter-sized temporaries that exist at once in an update.
        operators: For each operator of an update that is not fused, in order, the number of
            parameter-sized tensors that it reads and writes.
        numbers_in_16_bits: On CPU, where torch's fused kernel is wrong for 16-bit dtypes, the fp32
            numbers that ptrain's update has at once: without and with momentum.
        enlarges_rounding: True if the update amplifies differences in summation order beyond the
            rounding error of the updated tensor's dtype.
    """

    description: str
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
        """True if the update of a shard is the shard of the update."""
        return not self.remainder


OPTIMIZERS: Mapping[str, OptimizerRow] = {
    "adamw": OptimizerRow(
        description="Adam with decoupled weight decay: two moments",
        keys={"betas": (0.9, 0.95), "eps": 1e-8},
        moments=("exp_avg", "exp_avg_sq"),
        numbers={"step": 0.0},
        is_fused=True,
    ),
    "sgd": OptimizerRow(
        description="stochastic gradient descent, with momentum if set",
        keys={"momentum": 0.0},
        moments=("momentum_buffer",),
        needs_momentum=True,
        is_fused=True,
        numbers_in_16_bits=(1, 3),
    ),
    "nadam": OptimizerRow(
        description="AdamW with Nesterov momentum: two moments",
        keys={"betas": (0.9, 0.999), "eps": 1e-8},
        moments=("exp_avg", "exp_avg_sq"),
        numbers={"step": 0.0, "mu_product": 1.0},
        temporaries=2,  # the bias-corrected second moment, and its root
        operators=(2, 3, 2, 3, 2, 2, 2, 4, 4),
    ),
    "lion": OptimizerRow(
        description="sign of the momentum, with decoupled weight decay: one moment",
        keys={"betas": (0.9, 0.99)},  # of its authors
        moments=("exp_avg",),
        temporaries=1,  # the direction
        operators=(3, 2, 2, 3, 3),
        enlarges_rounding=True,  # a flipped sign changes the update by twice the learning rate
    ),
    "muon": OptimizerRow(
        description="orthogonalized momentum for matrices in blocks, AdamW for all other "
        "parameters; needs full matrices",
        keys={"momentum": 0.95},  # of its authors
        moments=("momentum_buffer",),
        remainder="adamw",
        enlarges_rounding=True,  # it iterates in bf16
    ),
}
FUSED = tuple(name for name, row in OPTIMIZERS.items() if row.is_fused)


def list_defaults(key: str) -> str:
    """List the optimizers that read a key, with their defaults: `0.0 (sgd), 0.95 (muon)`."""
    rows = OPTIMIZERS.items()
    return ", ".join(f"{row.keys[key]} ({name})" for name, row in rows if key in row.keys)
