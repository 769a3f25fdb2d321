"""Kernel workspaces are a separate row: a figure if torch's sources give one, otherwise unknown."""

from __future__ import annotations

import pytest

from ptrain.derivation.kernels import (
    Workspace,
    attention_backward,
    products,
    sum_of_rows,
    workspaces,
)
from ptrain.report.simulation import reserved_lines
from ptrain.spec.load import load
from ptrain.spec.spec import Spec

MIB = 2**20


def of_8b(sm: int | None = 80, *overrides: str) -> Spec:
    cluster = (
        f"cluster={{preset: h100-8, sm: {sm}}}" if sm else "cluster={preset: a100-8, sm: null}"
    )
    batch = "batch={global: 16, micro: 2, sequence: 8192}"
    size = ("model.preset=llama3-8b", "mesh.dp_shard=8", batch)
    return load("fsdp-mixed", (*size, cluster, *overrides)).spec


def sizes(spec: Spec) -> dict[str, int | None]:
    return {space.what.split(",")[0]: space.device_bytes for space in workspaces(spec)}


def test_flash_sums_the_gradient_of_queries_in_fp32_with_a_number_a_row():
    """2 samples of 8192 tokens: 4096 features of each are 256 MiB, 32 heads 2 MiB."""
    assert sizes(of_8b(80)) == {
        "products (cuBLAS)": 2 * 8_519_680,
        "backward pass of attention (flash)": (256 + 2) * MIB,
        "sums over tokens (gradients of norms and biases)": 132 * MIB,
        "collectives (NCCL)": None,
    }


def test_a_rank_of_tp_has_its_heads_alone_and_whole_tiles_of_rows():
    sliced = of_8b(80, "mesh={dp_shard: 4, tp: 2}", "placement.tp=S,S,S,R", "batch.sequence=8100")
    one = 4 * 2 * 16 * 8192 * (128 + 1)
    assert sizes(sliced)["backward pass of attention (flash)"] == one


@pytest.mark.parametrize(
    ("spec", "unknown"),
    [
        (
            of_8b(80, "precision.layout=fp32", "model.hidden=2304"),  # head_dim 72
            "backward pass of attention (efficient)",
        ),
        (of_8b(80, "deterministic=true"), "backward pass of attention (flash)"),
        (of_8b(80, "deterministic=true"), "products (cuBLAS)"),
        (of_8b(100), "products (cuBLAS)"),
        (of_8b(86), "backward pass of attention"),
    ],
)
def test_unknown_workspaces_are_unknown(spec, unknown):
    assert sizes(spec)[unknown] is None


def test_operator_by_operator_attention_has_no_kernel_workspace():
    assert [*sizes(of_8b(90, "attention=eager"))] == [
        "products (cuBLAS)",
        "sums over tokens (gradients of norms and biases)",
        "collectives (NCCL)",
    ]


@pytest.mark.parametrize(
    ("rows", "columns", "size"),
    [
        (2048, 1024, 16 * MIB),
        (2048, 4096, 64 * MIB),
        (1024, 1024, 8 * MIB),
        (2048, 1600, 25 * MIB),
        (2048, 6400, 100 * MIB),
        (512, 1024, 0),
    ],
)
def test_row_sums_leave_the_memory_measured_on_an_h100(rows, columns, size):
    assert sum_of_rows(rows, columns) == size


def test_the_backward_pass_of_attention_has_the_workspace_measured_on_an_h100():
    shape = {"batch": 2, "heads": 8, "sequence": 1024, "head_dim": 128}
    assert sum(attention_backward("cudnn", 2, **shape)) == 8_454_400
    assert sum(attention_backward("efficient", 4, **shape)) == 8_519_680


def test_products_with_a_bias_have_a_workspace_more():
    assert sum(products(of_8b(90))) == 64 * MIB
    with_bias = of_8b(90, "model.preset=gpt2-124m", "batch.sequence=1024")
    assert sum(products(with_bias)) == 65 * MIB
    assert sizes(with_bias)["products with a bias (cuBLASLt)"] == MIB


def test_the_workspace_for_a_bias_on_other_gpus_is_unknown():
    assert (
        sizes(of_8b(80, "model.preset=gpt2-124m", "batch.sequence=1024"))[
            "products with a bias (cuBLASLt)"
        ]
        is None
    )


def test_sums_do_not_depend_on_deterministic_mode():
    row = "sums over tokens (gradients of norms and biases)"
    assert sizes(of_8b(90, "deterministic=true"))[row] == sizes(of_8b(90))[row]


def test_processors_have_none():
    assert workspaces(of_8b(80, "device=cpu")) == ()


def test_the_row_shows_the_share_of_reserved_memory_in_kernels():
    spaces = (Workspace("products, all the time", 2 * MIB), Workspace("collectives", None))
    *_, table = reserved_lines({"default segments": None}, spaces)
    assert "of that within kernels" in table and "2 MiB" in table and "unknown" in table
