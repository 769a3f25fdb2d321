"""A loss computed in chunks of the logits equals the loss of one device, to fp64 rounding, for
every placement of the head: gathered, replicated, sharded over the vocabulary, on the last
stage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch.distributed as dist

from ptrain.algebra.legality import require_runnable
from ptrain.data.corpus import open_corpus
from ptrain.data.sampler import Split
from ptrain.interpreter.program import interpret
from ptrain.models.objective import can_fuse
from ptrain.runtime.world import World
from ptrain.spec.load import load
from ptrain.spec.spec import LossSpec, Spec
from ptrain.train.loop import local_batch
from tests.gloo.matrix import run_spec
from tests.gloo.test_exact import failed_checks
from tests.ranks import Ranks

pytestmark = pytest.mark.gloo

CHUNK = 7  # does not divide the 32 tokens of a micro-batch
MODELS: Mapping[str, Mapping[str, Any]] = {
    "llama": {"family": "llama", "kv_heads": 2},
    "llama-tied": {"family": "llama", "kv_heads": 2, "tied": True},
    "gpt": {"family": "gpt"},
    "gpt-tied": {"family": "gpt", "tied": True},
}
STAGES, SLICES = "S,S,S,R", "S,S,S,S"
PLACES: Mapping[str, Mapping[str, Any]] = {
    "one": {},
    "zero3": {"dp_shard": "S*,S,S,R"},
    "zero1-flat": {"dp_shard": "R,S,R,R"},
    "gathered-update": {"dp_shard": "S*,S*,S,R"},
    "ddp": {"dp_replicate": "R,R,R,R"},
    "tp": {"tp": STAGES},
    "tp-sp": {"tp": SLICES},
    "tp-gathered": {"tp": SLICES},
    "pp-1f1b": {"pp": STAGES},
    "pp-zbv": {"pp": STAGES},
    "3d": {"pp": STAGES, "dp_shard": "S*,S,S,R", "tp": SLICES},
}
DEFAULT = {("zero3", "gpt-tied"), ("tp-sp", "llama-tied"), ("pp-1f1b", "llama-tied")}


def spec_of(place: str, model: str) -> Spec:
    axes, pieces = PLACES[place], {"pp-zbv": "zbv", "pp-1f1b": "1f1b", "3d": "1f1b"}
    layers = 4 if place in pieces else 2
    shape = {"layers": layers, "hidden": 24, "heads": 4, "ffn": 48, "vocab": 260} | MODELS[model]
    sections: dict[str, Any] = (
        {"tensor": {"loss_parallel": False}} if place == "tp-gathered" else {}
    )
    if place in pieces:
        sections["pipeline"] = {"schedule": pieces[place]}
    mapping = {
        "name": f"{place}-{model}",
        "model": shape,
        "mesh": dict.fromkeys(axes, 2),
        "placement": dict(axes),
        "precision": {"layout": "fp32", "compute": "fp64"},
        "batch": {"accumulate": 2, "micro": 2, "sequence": 16},
        "optimizer": {"name": "adamw", "lr": 3e-3, "clip": 1.0},
        "data": {"corpus": "python-docs", "tokenizer": "bytes"},
        "loss": {"chunk": CHUNK},
    }
    return require_runnable(load(mapping | sections))


def cases() -> Iterator[Any]:
    for case in product(PLACES, MODELS):
        marks = () if case in DEFAULT else (pytest.mark.nightly,)
        yield pytest.param(*case, marks=marks, id="-".join(case))


@pytest.mark.parametrize(("place", "model"), list(cases()))
def test_a_loss_in_chunks_is_that_of_one_device(ranks: Ranks, place: str, model: str) -> None:
    compare_with_one_device(ranks, spec_of(place, model))


@pytest.mark.nightly
@pytest.mark.skipif(not can_fuse(), reason="torch has no linear_cross_entropy")
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("place", [place for place, axes in PLACES.items() if "tp" not in axes])
def test_a_fused_loss_is_that_of_one_device(ranks: Ranks, place: str, model: str) -> None:
    spec = spec_of(place, model)
    compare_with_one_device(ranks, replace(spec, loss=LossSpec(chunk=CHUNK, fused=True)))


def compare_with_one_device(ranks: Ranks, spec: Spec) -> None:
    """Compare every predicted byte with the measurement, and the training with one device."""
    result = run_spec(ranks, spec)
    assert not [*failed_checks(result.checks), *failed_checks(result.against)]


def evaluate_untrained(spec: Spec) -> float:
    """Return the evaluation loss of an untrained program, summed over the ranks."""
    program = interpret(spec, world=World.join(spec.timeout))
    local = local_batch(program, open_corpus(spec.data), 0, Split.HELD_OUT)
    share = program.evaluate(local)
    if dist.is_initialized():
        dist.all_reduce(share)
    return float(share)


@pytest.mark.parametrize(
    "place", ["pp-1f1b", *(pytest.param(p, marks=pytest.mark.nightly) for p in ("zero3", "3d"))]
)
def test_held_out_text_has_the_loss_of_whole_logits(ranks: Ranks, place: str) -> None:
    spec = spec_of(place, "llama-tied")
    whole = replace(spec, loss=LossSpec())
    (cut, *others), (plain, *_) = (
        ranks.run(s.world_size, evaluate_untrained, s) for s in (spec, whole)
    )
    assert cut == pytest.approx(plain, rel=1e-12)
    assert others == [cut] * len(others)
