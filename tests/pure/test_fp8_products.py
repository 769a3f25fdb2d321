"""Products with fp8 factors: the step of the plan, rejections with a fix, time on GPUs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ptrain.algebra.legality import check, find_unsupported
from ptrain.errors import SpecError
from ptrain.facts.float8 import products_of
from ptrain.plan.lower import lower
from ptrain.plan.show import format_plan
from ptrain.rates.pace import with_fp8
from ptrain.selection.job import searched_job
from ptrain.selection.recompute import resolve_auto
from ptrain.spec.load import load
from ptrain.spec.precision import DType, Matmul

TENSORWISE, ROWWISE = "precision.matmul=fp8-tensorwise", "precision.matmul=fp8-rowwise"
H100 = (
    "cluster={kind: cuda, sm: 90, devices: 8, device_memory: 80 GiB, intra_node_bandwidth: 1 GB/s}"
)


@pytest.mark.parametrize(
    ("name", "overrides", "finding"),
    [
        ("tp", (), "tp, whose ranks would scale shards of a matrix differently"),
        ("cp-ulysses", (), "cp, whose ranks would scale slices of the tokens differently"),
        ("pp-zero-bubble", (), "zero-bubble, which computes the halves"),
        ("zero1", ("model={hf: GPT2LMHeadModel}",), "a model that is not built in"),
    ],
)
def test_where_a_scale_would_not_be_of_a_full_matrix_fp8_is_rejected_by_name(
    name, overrides, finding
):
    (fault,) = find_unsupported(load(name, [*overrides, TENSORWISE]).spec)
    assert fault.place == "precision.matmul" and finding in fault.finding
    assert fault.remedy == "Use `precision.matmul=none`."
    assert not find_unsupported(load(name, [*overrides, "precision.matmul=none"]).spec)


@pytest.mark.parametrize(
    ("overrides", "finding", "remedy"),
    [
        (["batch.micro=1", "batch.sequence=100"], "a multiple of 16 tokens", "batch.sequence=112"),
        (["model.hidden=24", "model.ffn=56", "model.heads=2"], "no linear layer", "=none"),
        ([H100.replace("90", "80"), "device=cuda"], "a compute capability of 89", "=none"),
        ([H100, "device=cuda", ROWWISE], "return bf16", "precision.parameters=bf16"),
    ],
)
def test_illegal_fp8_products_are_rejected_with_a_fix(overrides, finding, remedy):
    (fault,) = check(load("zero1", [TENSORWISE, *overrides]).spec)
    assert finding in fault.finding and remedy in fault.remedy


def test_a_plan_lists_the_layers_that_are_left_out():
    spec = load("ep", [TENSORWISE]).spec
    text = format_plan(spec, lower(spec))
    assert "attention.output, mlp.shared.gate" in text and "left out, the head: head" in text
    assert "left out, experts: mlp.experts" in text and "left out, routers: mlp.router" in text
    assert set(lower(spec).quantize.modules) == set(products_of(spec.model).scaled)
    assert lower(load("ep").spec).quantize is None


def test_a_search_scores_fp8_products_as_those_of_the_default_layout():
    job = searched_job("llama3-8b", [TENSORWISE, "cluster.preset=h100-8"])
    assert job.base.precision == replace(job.scored.precision, matmul=Matmul.TENSORWISE)
    plain = searched_job("llama3-8b", ["cluster.preset=h100-8"]).base
    assert job.scored.precision == plain.precision and job.stand_in == plain.model
    with pytest.raises(SpecError, match=r"batch\.micro=auto"):
        resolve_auto(load("zero1", [TENSORWISE, "batch.micro=auto"]))


def test_fp8_products_take_half_the_time_of_bf16_unless_they_are_measured():
    cluster = load("zero1", [H100]).spec.cluster
    measured = [((DType.BF16, 1, 64, 64, 64), 4.0), ((DType.FP32, 1, 64, 64, 64), 8.0)]
    derived = ((DType.FP8, 1, 64, 64, 64), 2.0)
    assert with_fp8(measured, cluster) == [*measured, derived]
    own = [*measured, ((DType.FP8, 1, 8, 8, 8), 1.0)]
    assert with_fp8(own, cluster) == own
    older = load("zero1", [H100.replace("90", "80")]).spec.cluster
    assert with_fp8(measured, older) == measured
