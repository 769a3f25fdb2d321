"""The changes that `predict` and a training's preflight advise when a spec does not fit: each is
pasted, loaded and derived again."""

from __future__ import annotations

import shlex
from itertools import product
from math import inf

from ptrain.algebra.legality import require_runnable
from ptrain.derivation.estimate import derive
from ptrain.selection.fit import fit
from ptrain.selection.preflight import ChangeKind, FitAdvice, Variant, find_changes
from ptrain.spec.load import load
from ptrain.units import format_memory, format_seconds
from tests.pure.test_by_data import EXACT, facts_with_extents
from tests.pure.test_selection import PEAK, REPLICATED, on_devices_of

# 8 GPUs of 80 GiB, zero3: some 0.9 GB too large where nothing is reserved.
LLAMA_8B = (
    "model.preset=llama3-8b",
    "mesh.dp_shard=8",
    "precision.layout=fsdp-mixed",
    "batch.global=64",
    "batch.micro=1",
    "batch.sequence=8192",
    "cluster.preset=h100-8",
)


def advice_for(name: str, *words: str) -> FitAdvice:
    """Return the advice for the arguments of `ptrain predict`."""
    return find_changes(load(name, words).spec, reload=lambda more: load(name, (*words, *more)))


def require_true(variant: Variant, name: str, *words: str) -> None:
    """Load and derive the overrides that a variant prints, and compare its claims."""
    spec = require_runnable(load(name, [*words, *variant.overrides]))
    exact = derive(spec).exact
    assert fit(spec, exact) == variant.fit
    if variant.fit.fits:
        assert variant.seconds == (exact.step.seconds if exact.step else None)


def test_recomputation_is_the_first_advice_for_a_model_that_is_a_little_too_large():
    first, *_ = variants = advice_for("zero3", *LLAMA_8B).variants
    assert first.overrides[0] == "activations=M" and first.kinds == (ChangeKind.RECOMPUTE,)
    assert [*variants[-1].kinds] == [ChangeKind.LAYOUT] and len(variants) == 3
    for variant in variants:
        time = "unknown" if variant.seconds is None else format_seconds(variant.seconds)
        assert variant.fit.fits and (variant.seconds or ChangeKind.OFFLOAD in variant.kinds)
        require_true(variant, "zero3", *LLAMA_8B)
        assert f"step time {time}" in variant.line
        assert f"{format_memory(variant.fit.spare_bytes)} to spare" in variant.line


def test_the_advice_of_predict_is_pasted_as_it_is_printed(ptrain):
    line = next(
        line
        for line in ptrain("predict", "zero3", *LLAMA_8B).splitlines()
        if line.startswith("activations=M")
    )
    overrides = shlex.split(line.partition("  ")[0])
    assert "\nFits: " in ptrain("predict", "zero3", *LLAMA_8B, *overrides)


def test_fitting_variants_are_ranked_by_step_time_with_tight_ones_last():
    for name, words in (
        ("zero3", LLAMA_8B),
        ("ddp", ("model.preset=llama3-8b", "mesh.dp_replicate=8", "cluster.preset=h100-8")),
        ("8b-tp", ("cluster.device_memory=15GiB", "cluster.reserve=0")),
    ):
        variants = advice_for(name, *words).variants
        keys = [(variant.fit.is_tight, variant.seconds or inf) for variant in variants]
        assert keys == sorted(keys) and keys


def test_without_a_step_time_changes_keep_their_stated_order():
    changes = [
        variant.kinds for variant in find_changes(on_devices_of(PEAK - 1, REPLICATED)).variants
    ]
    assert changes == sorted(changes) and all(len(each) == 1 for each in changes)


def test_a_loss_in_chunks_is_advised_where_the_vocabulary_is_large():
    words = (
        "model={family: llama, layers: 1, hidden: 64, heads: 4, ffn: 128, vocab: 200000}",
        "precision.layout=zero16",
        "batch={global: 2, micro: 1, sequence: 8192}",
        "cluster={preset: h100-8, device_memory: 6GiB, reserve: 0, host_memory: 1GiB}",
    )
    variants = advice_for("zero3", *words).variants
    assert variants[0].overrides == ("loss=chunked",)
    assert {change for variant in variants for change in variant.kinds} == {ChangeKind.LOSS}
    require_true(variants[0], "zero3", *words)


def test_states_go_to_the_host_where_only_that_fits():
    cluster = "cluster={preset: h100-8, host_memory: 2TB}"
    words = ("model.preset=llama3.1-70b", "mesh.dp_shard=8", cluster)
    advice = advice_for("zero3", *words)
    on_as_many = [v for v in advice.variants if ChangeKind.RANKS not in v.kinds]
    assert on_as_many and all(v.fit.fits for v in advice.variants)
    for variant in on_as_many:
        assert variant.kinds == (ChangeKind.OFFLOAD,) and variant.fit.host_bytes > 0
        assert variant.seconds is not None, "the update on the host has a rate"
        require_true(variant, "zero3", *words)


def test_changes_are_combined_where_no_single_one_fits():
    cluster = ("cluster.kind=cuda", "cluster.reserve=0", "cluster.host_memory=1MiB")
    words = ("batch={global: 32, micro: 8, sequence: 2048}", *cluster)
    room = "cluster.device_memory=30MB"
    least = advice_for("zero3", *words, room).variants
    assert least
    for variant in least:
        assert variant.fit.fits and len(variant.kinds) > 1
        require_true(variant, "zero3", *words, room)


def test_changes_that_need_a_trace_are_named_and_not_claimed():
    words = ("model.dropout=0.1", "cluster.device_memory=1MiB", "cluster.reserve=0")
    advice = find_changes(load("zero3", words).spec, facts_with_extents(), EXACT)
    assert "activations=M" in advice.untraced, "the change of its kind that needs least"
    traced = {ChangeKind.RECOMPUTE, ChangeKind.LOSS, ChangeKind.LAYOUT, ChangeKind.MICRO}
    assert all(not traced & {*variant.kinds} for variant in advice.variants)
    assert advice.lines[-1].startswith("  not tried, because each needs a trace: activations=M")


def test_without_a_fitting_variant_the_closest_is_named_with_its_missing_memory():
    words = ("model.preset=llama3-8b", "mesh.dp_shard=1", "batch.micro=8", "cluster.preset=h100-8")
    (closest,) = advice_for("zero3", *words).variants
    assert closest.overrides == ("activations=M", "batch.micro=1")
    assert closest.fit.fits is False
    missing = format_memory(closest.fit.short_bytes)
    assert closest.line.startswith("  closest: activations=M batch.micro=1 → peak ")
    assert closest.line.endswith(f"still {missing} too large")
    require_true(closest, "zero3", *words)


def test_slices_of_the_tokens_are_offered_where_tp_has_them_whole():
    first, *_ = advice_for("8b-tp", "cluster.device_memory=15GiB", "cluster.reserve=0").variants
    assert first.overrides == ("placement.tp.activations=S",) and first.fit.fits
    assert require_runnable(load("8b-tp", ["placement.tp=tp-sp"])).factors == first.spec.factors
    sliced = require_runnable(
        load("8b-tp-sp", ["cluster.device_memory=12GiB", "cluster.reserve=0"])
    )
    offers = find_changes(sliced).variants
    assert offers and all(
        each.spec.factors != sliced.factors for each in offers if ChangeKind.SLICES in each.kinds
    )


def test_an_offer_never_changes_which_sums_tp_takes():
    for name in ("8b-tp", "8b-tp-dp", "8b-tp-zero3"):
        spec = require_runnable(load(name, ["cluster.device_memory=8GiB", "cluster.reserve=0"]))
        for variant in advice_for(name, "cluster.device_memory=8GiB", "cluster.reserve=0").variants:
            after = require_runnable(load(name, list(variant.overrides)))
            assert (after.factors, after.tensor) == (variant.spec.factors, spec.tensor)


def test_the_largest_micro_batch_that_fits_is_printed():
    words = ("batch.micro=48", "batch.global=96", "cluster.kind=cuda", "cluster.reserve=0")
    variants = advice_for("zero3", *words, "cluster.device_memory=270MB").variants
    sizes = [v.spec.batch.micro for v in variants if v.kinds == (ChangeKind.MICRO,)]
    assert sizes == [24]


def test_no_change_adds_an_override_that_is_not_needed():
    words = ("model.preset=llama3-70b", *LLAMA_8B[1:])
    offered = advice_for("zero3", *words).variants
    assert offered
    for less, more in product(offered, offered):
        if {*less.overrides} < {*more.overrides}:
            assert less.seconds and more.seconds and more.seconds < less.seconds


def test_no_change_is_advised_if_the_reserve_is_all_the_memory(ptrain):
    said = ptrain("predict", "8b-zero3", "cluster.reserve=90GiB")
    assert "Does not fit" in said and "closest" not in said


def test_a_vocabulary_that_is_not_aligned_is_advised_to_be_padded(ptrain):
    job = ["--cluster", "h100-8", "--devices", "8", "batch.micro=32", "batch.sequence=1024"]
    words = ["gpt2-124m", *job, "batch.global=512"]
    advised = "model.vocab_multiple=64"
    assert f"{advised} would be " in ptrain("predict", *words)
    assert f"{advised} would be " not in ptrain("predict", *words, advised)
