"""How many samples a step takes, and how they are split over micro-batches and data ranks."""

from dataclasses import dataclass
from typing import Annotated

from ptrain.spec.leaf import Either, Text, Whole, declared

MAX_SAMPLES = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Resolved: `global_samples == micro * accumulate * data_degree`. `sequence` in tokens."""

    global_samples: int
    micro: int
    sequence: int
    accumulate: int

    @property
    def tokens(self) -> int:
        """Tokens of one step over the whole mesh."""
        return self.global_samples * self.sequence


@declared
class BatchRaw:
    """global = micro x accumulate x data degree, in samples of `sequence` tokens."""

    samples: Annotated[
        int | str | None,
        Either(
            "samples per step over all ranks, or `4M tokens` (to the nearest multiple); "
            "without: micro x accumulate x data degree",
            f"an integer in 1..{MAX_SAMPLES} (samples), or tokens like 4M tokens",
            (Whole("", 1, MAX_SAMPLES), Text("", r"[0-9]{1,15}(\.[0-9]{1,6})? *[kKMBT]? tokens")),
            key="global",
            aka=("global_batch_size", "train_batch_size"),
        ),
    ] = None
    micro: Annotated[
        int,
        Whole(
            "samples that a rank computes at once",
            1,
            10**6,
            aka=(
                "micro_batch_size",
                "batch_size",
                "per_device_train_batch_size",
                "train_micro_batch_size_per_gpu",
            ),
        ),
    ] = 1
    sequence: Annotated[
        int,
        Whole(
            "tokens of a sample; without: 1, of data that are not tokens",
            1,
            10**8,
            follows=True,
            aka=(
                "seq_len",
                "seq_length",
                "sequence_length",
                "max_seq_len",
                "context_length",
                "block_size",
            ),
        ),
    ]
    accumulate: Annotated[
        int | None,
        Whole(
            "micro-batches per step; follows from the others",
            1,
            10**6,
            aka=("gradient_accumulation_steps", "accumulation_steps", "grad_accum"),
        ),
    ] = None
