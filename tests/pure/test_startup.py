"""Predicted host memory at start-up counts in whether a spec fits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ptrain.derivation.estimate import derive
from ptrain.derivation.ghosts.wrapping import ranks_per_node, startup_bytes
from ptrain.errors import DoesNotFit
from ptrain.plan.lower import built_in_facts
from ptrain.report.predict import prediction_of, prediction_screen
from ptrain.selection.fit import fit
from ptrain.selection.preflight import require_fit
from ptrain.spec.load import load
from ptrain.spec.model import ExternalModel
from ptrain.spec.spec import Spec

BATCH = "batch={global: 64, micro: 1, sequence: 1024}"
WHOLE = "its constructor draws random numbers"
PARAMETERS, VOCABULARY, WIDTH = 8_030_261_248, 128_256, 4096  # of Llama-3-8B


def spec_of(*words: str) -> Spec:
    base = ("model.preset=llama3-8b", BATCH, "cluster.preset=h100-8", "mesh.dp_shard=8")
    return load("zero3", (*base, "activations=M", *words)).spec


@pytest.mark.parametrize(("ranks", "on_node"), [(8, 8), (16, 8), (4, 4)])
def test_ranks_of_a_node_build_the_full_model_each(ranks: int, on_node: int) -> None:
    spec = spec_of(f"mesh.dp_shard={ranks}", f"cluster.devices={max(ranks, 8)}")
    facts = replace(built_in_facts(spec), built_whole=WHOLE)
    assert ranks_per_node(spec) == on_node
    assert startup_bytes(spec, facts) == 4 * PARAMETERS
    assert fit(spec, derive(spec, facts).exact).startup_host_bytes == on_node * 4 * PARAMETERS


def test_ranks_that_draw_their_parts_have_one_tensor_at_a_time() -> None:
    spec = spec_of()
    assert startup_bytes(spec, built_in_facts(spec)) == 4 * VOCABULARY * WIDTH
    model = ExternalModel(target="own:build", pretrained="folder")
    assert startup_bytes(replace(spec, model=model), built_in_facts(spec)) == 0


def test_a_misfit_at_start_up_is_a_misfit() -> None:
    """Eight full copies of 32 GB are more than 64 GiB, and one tensor of 2 GB each is less."""
    spec = spec_of("cluster.host_memory=64 GiB")
    facts = built_in_facts(spec)
    assert fit(spec, derive(spec, facts).exact).fits is True
    whole = replace(facts, built_whole=WHOLE)
    derivation = derive(spec, whole)
    assert fit(spec, derivation.exact).fits is False
    text = prediction_screen(prediction_of(derivation, offer=False))
    line = "host memory at start-up: 239.3 GiB of 64 GiB per node; 8 ranks build the full model"
    assert f"{line}: {WHOLE}" in text and "Does not fit by 175.3 GiB" in text
    with pytest.raises(DoesNotFit, match=r"ranks need 239\.3 GiB"):
        require_fit(spec, derivation.exact, whole)


def test_full_models_on_a_host_of_unknown_memory_may_not_fit() -> None:
    spec = spec_of()
    assert spec.cluster is not None
    spec = replace(spec, cluster=replace(spec.cluster, host_memory=None))
    facts = built_in_facts(spec)
    assert fit(spec, derive(spec, facts).exact).fits is True
    found = fit(spec, derive(spec, replace(facts, built_whole=WHOLE)).exact)
    assert found.fits is None and "cluster.host_memory` is missing" in found.unknown


def test_offloaded_parameters_are_on_the_host_at_start_up_too() -> None:
    spec = spec_of("placement.dp_shard=[O,O,S,R]")
    exact = derive(spec).exact
    hosted = max(row.host_bytes for row in exact.memory if str(row.state) == "parameters")
    assert hosted > 0
    assert fit(spec, exact).startup_host_bytes == 8 * (hosted + 4 * VOCABULARY * WIDTH)
