"""The section `precision`: the dtypes of parameters, gradients and optimizer state (Remark 1: 2 + 2
+ 12 bytes is one of several layouts)."""

from dataclasses import dataclass, replace
from typing import Annotated

from ptrain.spec.leaf import Choice, grammar_dataclass
from ptrain.word import MeantWord, words_of

_DTYPE_SLIPS = {
    "float64": "fp64",
    "double": "fp64",
    "float32": "fp32",
    "float": "fp32",
    "float16": "fp16",
    "half": "fp16",
    "bfloat16": "bf16",
}
_NO_MASTER = {"none": "no master copy: the optimizer updates the parameters"}


class DType(MeantWord):
    """A floating-point dtype, independent of torch."""

    FP64 = "fp64", "8 bytes"
    FP32 = "fp32", "4 bytes"
    BF16 = "bf16", "2 bytes"
    FP16 = "fp16", "2 bytes, with loss scaling"
    FP8 = "fp8", "1 byte, for factors of matrix products only"

    @property
    def itemsize(self) -> int:
        """The bytes per element."""
        return _ITEMSIZES[self]


_DTYPES = words_of((DType.FP32, DType.BF16, DType.FP16, DType.FP64))
_ITEMSIZES = {DType.FP64: 8, DType.FP32: 4, DType.BF16: 2, DType.FP16: 2, DType.FP8: 1}


FP8_CAPABILITY = 89  # Ada, the first with matrix units for fp8; Hopper has 90


class Matmul(MeantWord):
    """The factors of the matrix products, for fp8 with torchao's names of recipes."""

    NONE = "none", "the dtype of the parameters"
    AUTOCAST = (
        "bf16-autocast",
        "bf16 by torch.autocast, with parameters, gradients and residual stream in fp32",
    )
    TENSORWISE = (
        "fp8-tensorwise",
        "fp8 with one scale per tensor: inputs and weights e4m3, gradients e5m2",
    )
    ROWWISE = (
        "fp8-rowwise",
        "fp8 with a scale per row and per column, rounded down to a power of two: all e4m3",
    )

    @property
    def is_fp8(self) -> bool:
        """True if linear layers take fp8 factors."""
        return self in (Matmul.TENSORWISE, Matmul.ROWWISE)


NF4_BLOCK = 64  # elements of a row with one scale, as in bitsandbytes and torchao
_SCALE_BYTES = 4  # fp32


class Quantization(MeantWord):
    """The storage of frozen weights of linear layers: one row of bytes per output, with the scales
    of the row before its codes."""

    NF4 = (
        "nf4",
        "4 bits per element (NormalFloat, QLoRA), with an fp32 scale for 64 elements of a row",
    )
    INT8 = "int8", "8 bits per element, with an fp32 scale per row"

    def scale_bytes(self, columns: int) -> int:
        """Return the bytes of the scales of a row with this number of elements."""
        return _SCALE_BYTES * (-(-columns // NF4_BLOCK) if self is Quantization.NF4 else 1)

    def row_bytes(self, columns: int) -> int:
        """Return the bytes of a row, whose NF4 codes are padded to full blocks."""
        scales = self.scale_bytes(columns)
        if self is Quantization.INT8:
            return scales + columns
        return scales + scales // _SCALE_BYTES * NF4_BLOCK // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The dtypes of one training step.

    Attributes:
        parameters: The dtype of parameters and computation.
        gradients: The dtype in which reduced gradients are stored and accumulated until the update.
        master: The dtype of the copy that the optimizer updates, which counts as optimizer state;
            None if the optimizer updates the parameters themselves.
        moments: The dtype of the optimizer's moments. The update computes in the dtype of the
            updated tensor. Each `step` counter is one fp32 scalar (4 bytes) in every layout.
        reduced: The dtype in which the gradients of a micro-batch are collected and communicated.
        keeps_both: True if a micro-batch's gradients stay until the update, next to their sum.
        scales_loss: True if the loss is scaled before backward and the update is skipped if a
            gradient overflows.
    """

    name: str
    parameters: DType
    gradients: DType
    master: DType | None
    moments: DType
    reduced: DType
    keeps_both: bool = False
    scales_loss: bool = False

    @property
    def update_dtype(self) -> DType:
        """The dtype of the tensor that the optimizer updates."""
        return self.master or self.parameters

    @property
    def is_plain(self) -> bool:
        """True if gradients are stored and reduced in the dtype in which autograd computes them."""
        return self.keeps_own_dtype and self.reduced is self.parameters

    @property
    def keeps_own_dtype(self) -> bool:
        """True if gradients are stored in the dtype in which autograd computes them, whatever the
        dtype of the reduction."""
        return self.gradients is self.parameters and not self.keeps_both


def _make_layout(
    name: str,
    parameters: DType,
    gradients: DType,
    master: DType | None,
    moments: DType,
    reduced: DType | None = None,
    *,
    keeps_both: bool = False,
    scales_loss: bool = False,
) -> Layout:
    return Layout(
        name=name,
        parameters=parameters,
        gradients=gradients,
        master=master,
        moments=moments,
        reduced=reduced or gradients,
        keeps_both=keeps_both,
        scales_loss=scales_loss,
    )


FP32 = _make_layout("fp32", DType.FP32, DType.FP32, None, DType.FP32)
ZERO16 = _make_layout("zero16", DType.BF16, DType.BF16, DType.FP32, DType.FP32)
LAYOUTS = {
    layout.name: layout
    for layout in (
        FP32,
        _make_layout("bf16", DType.BF16, DType.BF16, None, DType.BF16),
        _make_layout("fp16", DType.FP16, DType.FP16, DType.FP32, DType.FP32, scales_loss=True),
        ZERO16,
        _make_layout("megatron18", DType.BF16, DType.FP32, DType.FP32, DType.FP32),
        _make_layout(
            "zero20", DType.BF16, DType.FP32, DType.FP32, DType.FP32, DType.BF16, keeps_both=True
        ),
        _make_layout("fsdp-mixed", DType.BF16, DType.FP32, DType.FP32, DType.FP32, DType.BF16),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """A layout, optionally with every dtype replaced by float64 for equality tests. `compute_fp64`
    keeps the layout's structure: its master copies and casts. `matmul` keeps fp8 factors, whose
    products are then summed in float64.

    A key of `PrecisionRaw` whose field here has the same name is resolved and written unchanged.
    """

    layout: Layout = FP32
    compute_fp64: bool = False
    matmul: Matmul = Matmul.NONE

    @property
    def effective_layout(self) -> Layout:
        """The layout that runs: all float64 with `compute_fp64`."""
        if not self.compute_fp64:
            return self.layout
        return replace(
            self.layout,
            parameters=DType.FP64,
            gradients=DType.FP64,
            master=DType.FP64 if self.layout.master else None,
            moments=DType.FP64,
            reduced=DType.FP64,
        )


CUSTOM = "custom"  # the name of a layout that is none of LAYOUTS


def custom_layout(
    base: Layout,
    *,
    parameters: DType | None = None,
    gradients: DType | None = None,
    reduced: DType | None = None,
    master: DType | None = None,
    has_master: bool = True,
    moments: DType | None = None,
) -> Layout:
    """Return `base` with other dtypes, named after the built-in layout that has them, or `custom`.

    The loss is scaled if parameters or gradients are fp16, whose smallest number is 6e-8.

    Args:
        base: The layout that provides all dtypes that are None here.
        parameters: The dtype of parameters and computation.
        gradients: The dtype of stored gradients, and of the reduction if `reduced` is None.
        reduced: The dtype of the reduction of gradients.
        master: The dtype of the master copy.
        has_master: False for a layout without master copy, whatever the base has.
        moments: The dtype of the optimizer's moments.
    """
    written = replace(
        base,
        name=CUSTOM,
        parameters=parameters or base.parameters,
        gradients=gradients or base.gradients,
        reduced=reduced or gradients or base.reduced,
        master=(master or base.master) if has_master else None,
        moments=moments or base.moments,
    )
    # Gradients underflow where they are computed, sent or stored in fp16. A master copy does not
    # help.
    passed = (written.parameters, written.reduced, written.gradients)
    written = replace(written, scales_loss=DType.FP16 in passed)
    # A layout has the name of a built-in one if it is equal to it, so that equal specs are written
    # equally.
    named = (known for known in LAYOUTS.values() if replace(known, name=CUSTOM) == written)
    return next(named, written)


# The initial loss scale and its changes: the defaults of torch.amp.GradScaler
# (torch/amp/grad_scaler.py).
INITIAL_SCALE = 2.0**16
SCALE_GROWTH = 2.0
SCALE_BACKOFF = 0.5
SCALE_INTERVAL = 2000  # steps without overflow before it grows


def _dtype_choice(about: str) -> Choice:
    return Choice(about, _DTYPES, slips=_DTYPE_SLIPS, read=DType)


@grammar_dataclass
class PrecisionRaw:
    """A layout: bytes per element of parameters, gradients and optimizer state. Dtypes override
    those of the named layout."""

    layout: Annotated[
        str | None,
        Choice(
            "Named precision layout. Default: fp32.",
            {
                "fp32": "4 + 4 + 8 bytes: everything in fp32",
                "bf16": "2 + 2 + 4 bytes: everything in bf16, no master copy",
                "fp16": "2 + 2 + 12 bytes: fp16 with an fp32 master copy and loss scaling",
                "zero16": "2 + 2 + 12 bytes: bf16, with an fp32 master copy",
                "megatron18": "2 + 4 + 12 bytes: zero16 with gradients stored and reduced in fp32",
                "zero20": "2 + 6 + 12 bytes: gradients of a micro-batch in bf16, accumulated in"
                " fp32",
                "fsdp-mixed": "2 + 4 + 12 bytes: gradients reduced in bf16 and stored in fp32; "
                "0 + 4 + 12 with parameters M, which are cast from the master "
                "copy",
            },
            slips={**_DTYPE_SLIPS, "mixed": "fsdp-mixed"},
        ),
    ] = None
    compute: Annotated[
        str | None,
        Choice(
            "One dtype that replaces every dtype of the layout.",
            {"fp64": "float64, for equality tests"},
            slips=_DTYPE_SLIPS,
        ),
    ] = None
    parameters: Annotated[
        DType | None, _dtype_choice("Dtype of the parameters and of the computation.")
    ] = None
    gradients: Annotated[
        DType | None,
        _dtype_choice(
            "Dtype in which reduced gradients are stored and accumulated until the update."
        ),
    ] = None
    reduced: Annotated[
        DType | None,
        _dtype_choice(
            "Dtype in which a micro-batch's gradients are collected and communicated. Default: "
            "`gradients` if set."
        ),
    ] = None
    master: Annotated[
        DType | str | None,
        Choice(
            "Dtype of the master copy of the parameters, which the optimizer updates.",
            _DTYPES | _NO_MASTER,
            slips=_DTYPE_SLIPS,
            read=lambda word: word if word in _NO_MASTER else DType(word),
        ),
    ] = None
    moments: Annotated[DType | None, _dtype_choice("Dtype of the optimizer moments.")] = None
    matmul: Annotated[
        Matmul,
        Choice(
            "Dtype of the factors in matrix products: bf16 for all, by torch.autocast, or fp8 for "
            "linear layers within blocks, with dynamic scales.",
            words_of(Matmul),
            slips={
                "autocast": "bf16-autocast",
                "amp": "bf16-autocast",
                "bf16": "bf16-autocast",
                "fp8": "fp8-tensorwise",
                "float8": "fp8-tensorwise",
                "tensorwise": "fp8-tensorwise",
                "rowwise": "fp8-rowwise",
            },
            read=Matmul,
            allows_auto_micro=False,
        ),
    ] = Matmul.NONE
