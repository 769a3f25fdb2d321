"""Make the table of GPU attention kernels: the kernel that torch chooses, and the bytes that it
saves next to its output. Also apply the table when a trace runs on a CPU.

torch's choice is read in a process with a simulated GPU (`runtime.simulated_gpu`), per compute
capability and torch version, for every head_dim that is a multiple of 8. Other head dims are padded
by separate operators before the kernel. For a single token torch may choose another kernel.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from ptrain.derivation import archive
from ptrain.derivation.archive import Table, TablePart
from ptrain.derivation.kernels import HEAD_DIM_MULTIPLE, FusedAttention, capability, row_name
from ptrain.files import temporary_folder
from ptrain.installed import torch_minor
from ptrain.models.kernels import AttentionCall, UnknownKernels, kernels_of
from ptrain.models.ledger import OperatorMode
from ptrain.models.numerics import DTYPE_NAMES, TORCH_DTYPES
from ptrain.runtime import simulated_gpu
from ptrain.runtime.world import fake_tensors
from ptrain.spec.dials import Compiled
from ptrain.spec.precision import DType
from ptrain.spec.spec import Spec
from ptrain.traces.settings import Make


def kernels_for(spec: Spec) -> AbstractContextManager[UnknownKernels]:
    """Return a context in which a CPU allocates as the spec's devices do, if the table has their
    kernels. Compiled blocks keep the CPU's, because the kernels' mode would run them eagerly."""
    is_replaced = spec.is_for_cuda and spec.compile is Compiled.NONE
    return kernels_of(is_for_cuda=is_replaced, keeping=_ArchivedAttention(capability(spec)))


@dataclass(frozen=True, slots=True)
class _ArchivedAttention:
    """The attention facts for GPUs of compute capability `sm`.

    Without one, attention saves the tensors of the CPU kernel, and a warning names the bytes that
    are not counted.
    """

    sm: int | None

    def __call__(self, call: AttentionCall) -> Callable[[int], int] | None:
        attention = _attention(call)
        if attention is None or not attention.has_kernel(self.sm):
            return None
        kept = attention.statistics(self.sm)
        return kept.gpu_bytes if kept else lambda size: size

    def goes_by_operators(self, call: AttentionCall) -> bool:
        attention = _attention(call)
        return attention is not None and attention.goes_by_operators(self.sm)


def _attention(call: AttentionCall) -> FusedAttention | None:
    """Return the key of a call in the table; None for dtypes without kernels."""
    if call.dtype not in DTYPE_NAMES:
        return None
    return FusedAttention(
        dtype=DTYPE_NAMES[call.dtype],
        head_dim=call.head_dim,
        sequence=call.sequence,
        drops=call.drops,
        is_grouped=call.is_grouped,
    )


# A100, H100 and B200. Torch chooses by capability, so that a row holds for other GPUs of one.
CAPABILITIES = (80, 90, 100)
DTYPES = (DType.BF16, DType.FP16, DType.FP32, DType.FP64)
WIDEST = 512  # the largest head_dim of the table
BATCH, HEADS = 3, 5  # odd, so that a padding of either would show
# Lengths below, between and at the multiples to which kernels pad rows, so that a multiple is
# unique.
SEQUENCES = (2, 33, 77, 1000, 1024)
Choice = tuple[str, int, str, str, list[list[int]]]
_OPERATOR = "aten::_scaled_dot_product_"
_MATH = "math"  # torch's name for attention operator by operator, without a kernel


class _KernelWatch(OperatorMode):
    """The mode that records the attention kernel that runs, and the bytes of the other outputs on
    the GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel, self.beside = _MATH, [0]

    def run_operator(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = function(*args, **kwargs)
        name = function._schema.name
        if name.startswith(_OPERATOR) and not name.endswith("backward"):
            self.kernel = name.removeprefix(_OPERATOR).removesuffix("_attention")
            tensors = [tensor for tensor in result[1:] if isinstance(tensor, torch.Tensor)]
            self.beside = [t.untyped_storage().nbytes() for t in tensors if t.is_cuda]
        return result


def _kernel_of(
    dtype: DType, head_dim: int, sequence: int, *, drops: bool, is_grouped: bool = False
) -> tuple[str, list[int]]:
    """Return the kernel that torch chooses for a call, and the bytes of each other output."""
    query, key, value = (
        torch.empty(
            (BATCH, heads, sequence, head_dim),
            dtype=TORCH_DTYPES[dtype],
            device="cuda",
            requires_grad=True,
        )
        for heads in (HEADS, *[1 if is_grouped else HEADS] * 2)
    )
    with _KernelWatch() as watch:
        F.scaled_dot_product_attention(
            query,
            key,
            value,
            is_causal=True,
            dropout_p=0.1 if drops else 0.0,
            enable_gqa=is_grouped,
        )
    return watch.kernel, watch.beside


def kernel_choices() -> Iterator[Choice]:
    """Yield the kernels that torch chooses, in a process that pretends to have a GPU.

    Each entry has the row of the table, head_dim, the kernel, the kernel for fewer key heads, and
    for each sequence length the bytes of the other outputs.
    """
    for dtype, drops in itertools.product(DTYPES, (False, True)):
        for head_dim in range(HEAD_DIM_MULTIPLE, WIDEST + 1, HEAD_DIM_MULTIPLE):
            answers = [_kernel_of(dtype, head_dim, length, drops=drops) for length in SEQUENCES]
            kernel, *others = dict.fromkeys(kernel for kernel, _ in answers)
            assert not others, (
                f"head_dim {head_dim}: the kernel depends on the sequence length for {others}"
            )
            of_groups, _ = _kernel_of(dtype, head_dim, SEQUENCES[-1], drops=drops, is_grouped=True)
            beside = [sizes for _, sizes in answers]
            yield row_name(dtype, drops=drops), head_dim, kernel, of_groups, beside


def kernel_table() -> Table:
    """Return the table for every compute capability: the archived one, updated for this torch
    version."""
    kernels: dict[str, list[int]] = {}
    choice: dict[str, dict[str, list[list[object]]]] = {}
    ungrouped: set[str] = set()
    for sm in CAPABILITIES:
        rows: dict[str, list[list[object]]] = {}
        for row, head_dim, kernel, of_groups, sizes in _of_capability(sm):
            if kernel != _MATH:
                statistics = [*_statistics(sizes)]
                assert kernels.setdefault(kernel, statistics) == statistics, kernel
            if of_groups != kernel:
                assert of_groups == _MATH, f"{kernel} of groups of heads is {of_groups}"
                ungrouped.add(kernel)
            spans = rows.setdefault(row, [])
            if spans and spans[-1][2] == kernel:
                spans[-1][1] = head_dim
            else:
                spans.append([head_dim, head_dim, kernel])
        choice[str(sm)] = {
            row: [span for span in spans if span[2] != _MATH] for row, spans in rows.items()
        }
    return {
        "kernels": kernels,
        "choice": _beside_others("choice", choice, kernels),
        "ungrouped": _beside_others("ungrouped", sorted(ungrouped), kernels),
    }


def _beside_others(key: str, answer: object, kernels: dict[str, list[int]]) -> dict[str, object]:
    """Return this torch version's answer together with the answers of archived versions.

    All versions must save the same bytes per kernel.
    """
    there = archive.read_table(TablePart.KERNEL, "attention")
    assert there["kernels"] == kernels, "kernels save different tensors in this version of torch"
    return {**there[key], torch_minor(): answer}


def _statistics(by_sequence: list[list[int]]) -> tuple[int, int]:
    """Return the row padding and the extra bytes of a kernel's saved statistics.

    A kernel saves one fp32 number per row, head and sample, with rows padded to a multiple, and a
    number of bytes that depends on none of these.
    """
    of_rows = [sizes[0] // (4 * BATCH * HEADS) for sizes in by_sequence]
    multiple = next(
        n for n in (1, 8, 16, 32, 64, 128)
        if of_rows == [-(-length // n) * n for length in SEQUENCES]
    )  # fmt: skip
    (beside,) = {sum(sizes[1:]) for sizes in by_sequence}
    return multiple, beside


def _of_capability(sm: int) -> list[Choice]:
    """Return the entries of `choices` for one compute capability, from a subprocess."""
    with temporary_folder() as folder:
        answer = folder / "answer.json"
        if simulated_gpu.run_python(["-m", __name__, str(answer)], sm):
            raise RuntimeError(f"the attention kernels of sm {sm} could not be queried")
        rows: list[Choice] = json.loads(answer.read_text())
        return rows


def table_makers() -> Iterator[tuple[str, Make]]:
    """Yield the table's name and the function that makes it, if CUDA's operators are available."""
    if simulated_gpu.missing_requirement() is None:
        yield "attention", partial(kernel_table)


if __name__ == "__main__":
    with fake_tensors():
        Path(sys.argv[1]).write_text(json.dumps([*kernel_choices()]))
