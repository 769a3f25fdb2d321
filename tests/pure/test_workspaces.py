"""What kernels take within themselves is a row of its own: a figure where torch's sources give one,
else unknown."""

from __future__ import annotations

import pytest

from ptrain.derivation.workspaces import Workspace, workspaces
from ptrain.report.reserved import reserved_lines
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
        "products (cuBLAS": 2 * 8_519_680,
        "attention's backward pass (flash)": (256 + 2) * MIB,
        "collectives (NCCL)": None,
    }


def test_a_rank_of_tp_has_its_heads_alone_and_whole_tiles_of_rows():
    sliced = of_8b(80, "mesh={dp_shard: 4, tp: 2}", "placement.tp=S,S,S,R", "batch.sequence=8100")
    one = 4 * 2 * 16 * 8192 * (128 + 1)
    assert sizes(sliced)["attention's backward pass (flash)"] == one


@pytest.mark.parametrize(
    ("spec", "unknown"),
    [
        (of_8b(90), "attention's backward pass (cudnn)"),
        (of_8b(80, "precision.layout=fp32"), "attention's backward pass (efficient)"),
        (of_8b(80, "deterministic=true"), "attention's backward pass (flash)"),
        (of_8b(80, "deterministic=true"), "products (cuBLAS"),
        (of_8b(80, "model.heads=16"), "attention's backward pass (flash)"),  # head_dim 256
        (of_8b(100), "products (cuBLAS"),
        (of_8b(86), "attention's backward pass"),
    ],
)
def test_what_is_not_known_is_unknown(spec, unknown):
    assert sizes(spec)[unknown] is None


def test_attention_operator_by_operator_has_no_kernel_of_its_own():
    assert [*sizes(of_8b(90, "attention=eager"))] == ["products (cuBLAS", "collectives (NCCL)"]


def test_processors_have_none():
    assert workspaces(of_8b(80, "device=cpu")) == ()


def test_the_row_stands_beside_what_is_reserved():
    spaces = (Workspace("products, all the time", 2 * MIB), Workspace("collectives", None))
    *_, table = reserved_lines({"default segments": None}, spaces)
    assert "of that within kernels" in table and "2.097 MB" in table and "unknown" in table
