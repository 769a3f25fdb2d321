"""The activations of attention on GPUs equal the measurements of torch's GPU kernels."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ptrain.cost import State
from ptrain.derivation import archive
from ptrain.derivation.estimate import derive, facts_from_shape
from ptrain.derivation.kernels import FusedAttention, Statistics, statistics_of
from ptrain.derivation.tables import monomials
from ptrain.spec.load import load
from ptrain.spec.precision import DType
from ptrain.spec.spec import Spec

SHAPE = {"family": "llama", "layers": 3, "hidden": 64, "heads": 4, "kv_heads": 2, "ffn": 32}
KINDS = ("activations", "peak")
ROWS = 2 * 4 * 40  # samples, heads and tokens


def spec(sm: int | None = 90, **sections: object) -> Spec:
    cluster = {"devices": 8, "device_memory": "80 GiB", "intra_node_bandwidth": "1 GB/s"}
    written = {
        "model": {**SHAPE, "vocab": 300},
        "mesh": {},
        "placement": {},
        "batch": {"micro": 2, "sequence": 40},
        "precision": {"layout": "bf16"},
        "cluster": {**cluster, "kind": "cuda", **({"sm": sm} if sm else {})},
    }
    return load(written | sections).spec


def activations(of: Spec) -> int:
    facts = facts_from_shape(of)
    assert facts is not None
    (row,) = [r for r in derive(of, facts).exact.memory if r.state is State.ACTIVATIONS]
    return row.device_bytes


@pytest.mark.parametrize(
    ("sm", "dtype", "head_dim", "drops", "kept"),
    [
        (80, DType.BF16, 128, False, Statistics(40, 1, 24)),  # flash: uint64 [2] and []
        (90, DType.BF16, 128, False, Statistics(40, 1, 16)),  # cudnn: two int64
        (90, DType.BF16, 256, False, Statistics(40, 1, 16)),
        (100, DType.BF16, 256, False, Statistics(40, 1, 24)),  # too wide for cudnn's there
        (90, DType.FP16, 64, True, Statistics(40, 1, 24)),
        (
            90,
            DType.FP32,
            64,
            False,
            Statistics(40, 32, 0),
        ),  # efficient: rows by 32, seed and offset on the host
        (90, DType.FP64, 64, False, None),  # operator by operator
        (90, DType.BF16, 12, False, None),  # padded first
        (75, DType.BF16, 64, False, None),  # not asked
        (None, DType.BF16, 64, False, None),
    ],
)
def test_a_kernel_is_chosen_by_capability_dtype_width_and_dropout(sm, dtype, head_dim, drops, kept):
    attention = FusedAttention(dtype=dtype, head_dim=head_dim, sequence=40, drops=drops)
    assert attention.statistics(sm) == kept


@pytest.mark.parametrize("sm", [90, 86, None])
@pytest.mark.parametrize(
    ("dtype", "head_dim", "sequence", "has_kernel"),
    [
        (DType.BF16, 64, 40, True),
        (DType.BF16, 12, 40, False),
        (DType.FP64, 64, 40, False),
        (DType.BF16, 64, 1, False),  # of one token torch may take another one
    ],
)
def test_a_kernel_that_no_gpu_has_is_unavailable_for_an_unknown_capability(
    sm, dtype, head_dim, sequence, has_kernel
):
    attention = FusedAttention(dtype=dtype, head_dim=head_dim, sequence=sequence, drops=False)
    assert attention.has_kernel(sm) is has_kernel


def test_gradients_of_attention_are_no_statistics():
    """They have a head's width, and statistics one number a row."""
    for (part, name), table in archive.read_tables().items():
        for size in monomials(table) if "sizes" in table else ():
            symbols = {symbol for symbol, _ in size.exponents}
            assert not (size.is_statistics and symbols & {"head_dim", "pairs"}), (part, name)


def test_rows_are_rounded_up_with_seed_and_offset_stored_separately():
    assert Statistics(40, 32, 16).gpu_bytes(4 * ROWS) == 4 * ROWS // 40 * 64 + 16
    assert Statistics(64, 32, 16).gpu_bytes(4 * 64) == 4 * 64 + 16


@pytest.mark.parametrize(("sm", "more"), [(80, 24), (90, 16), (86, 0), (None, 0)])
def test_a_block_keeps_seed_and_offset(sm, more):
    on_cpu = activations(replace(spec(sm), device="cpu"))
    assert activations(spec(sm)) - on_cpu == 3 * more


def test_in_32_bits_it_keeps_padded_rows_too():
    fp32 = spec(precision={"layout": "fp32"})
    padding = 4 * (ROWS // 40) * (64 - 40)
    assert activations(fp32) - activations(replace(fp32, device="cpu")) == 3 * padding


@pytest.mark.parametrize(
    ("sections", "is_claimed"),
    [
        ({}, True),
        ({"model": {**SHAPE, "vocab": 300, "hidden": 48}}, False),
        ({"precision": {"compute": "fp64"}}, False),
        ({"attention": "eager", "model": {**SHAPE, "vocab": 300, "hidden": 48}}, True),
    ],
)
def test_no_peak_is_claimed_of_an_attention_that_is_no_kernel(sections, is_claimed):
    of = spec(**sections)
    exact = derive(of, facts_from_shape(of)).exact
    assert ("peak" not in exact.unclaimed) is is_claimed


@pytest.mark.parametrize(
    ("sm", "why"),
    [(None, "`cluster.sm` is not set"), (86, "known for sm 80, 90, 100, not for sm 86")],
)
def test_without_a_known_capability_a_note_says_that_seeds_are_not_counted(sm, why):
    of = spec(sm)
    assert statistics_of(of, of.batch.sequence) is None
    exact = derive(of, facts_from_shape(of)).exact
    (warning,) = [line for line in exact.warnings if why in line]
    assert "16 or 24 bytes" in warning and "peak" not in exact.unclaimed


@pytest.mark.parametrize(
    ("layout", "changes", "figures"),
    [
        ("bf16", {}, {"activations", "peak"}),
        ("fp32", {}, {"activations", "peak", "traffic"}),  # 40 rows in 64
        ("fp32", {"batch": {"micro": 2, "sequence": 64}}, {"activations", "peak"}),
        ("bf16", {"model": {**SHAPE, "vocab": 300, "hidden": 48}}, {*KINDS, "traffic"}),
    ],
)
def test_of_activations_that_leave_gpus_nothing_is_claimed_that_differs(layout, changes, figures):
    of = spec(activations="O", precision={"layout": layout}, **changes)
    exact = derive(of, facts_from_shape(of)).exact
    assert set(exact.unclaimed) == figures
    on_cpu = replace(of, device="cpu")
    assert activations(of) == activations(on_cpu)
