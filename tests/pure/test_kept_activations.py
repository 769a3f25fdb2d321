"""Activations in every mode, predicted: saved, moved, communicated again and recomputed."""

from __future__ import annotations

from collections import Counter

import pytest

from ptrain.cost import Collective, Estimate, Phase, State
from ptrain.derivation.estimate import derive
from ptrain.spec.load import load
from ptrain.spec.spec import Spec

B, T, C, H, F, V, LAYERS = 2, 64, 48, 4, 96, 300, 4
HIDDEN = B * T * C * 4  # bytes of hidden states of one micro-batch in fp32
SCORES = B * H * T * T * 4


def spec_of(family: str = "llama", **more: object) -> Spec:
    model = {
        "family": family,
        "layers": LAYERS,
        "hidden": C,
        "heads": H,
        "kv_heads": H,
        "ffn": F,
        "vocab": V,
    }
    batch = {"sequence": T, "micro": B, "accumulate": 2}
    base = {
        "model": model,
        "mesh": {"dp_shard": 2},
        "batch": batch,
        "precision": {"layout": "fp32"},
    }
    if "mesh" not in more:
        base["placement"] = {"dp_shard": "S*,S,S,R"}
    return load({**base, **more}).spec


def exact(family: str = "llama", **more: object) -> Estimate:
    return derive(spec_of(family, **more)).exact


def activations(family: str = "llama", **more: object) -> int:
    return exact(family, **more).bytes_of(State.ACTIVATIONS)


@pytest.mark.parametrize("family", ["llama", "gpt"])
def test_a_recomputed_block_saves_only_its_input(family):
    nothing = activations(family, activations="M", model=shape(family, layers=1))
    several = activations(family, activations="M")
    assert several - nothing == (LAYERS - 1) * HIDDEN


@pytest.mark.parametrize(("kept", "peak"), [("O", 225_988), ("R@file", 225_988)])
def test_offloaded_activations_of_a_stage_return_with_its_output_gradient(kept, peak):
    """The schedule holds that gradient until the backward pass is over. As simulated."""
    fields = {"layers": 3, "hidden": 32, "ffn": 48, "vocab": 261}
    staged = exact(
        model=shape("llama", **fields),
        mesh={"pp": 3, "dp_shard": 4},
        placement={"pp": "S,S,S,R", "dp_shard": "S*,S,S,R"},
        pipeline={"schedule": "gpipe"},
        batch={"accumulate": 3, "micro": 1, "sequence": 16},
        activations=kept,
    )
    peaks = {row.rank: row.device_bytes for row in staged.peak if row.phase is Phase.BACKWARD}
    assert peaks[0] == peak


def shape(family: str, **fields: object) -> dict[str, object]:
    resolved = spec_of(family).resolved["model"]
    assert isinstance(resolved, dict)
    return {**resolved, **fields}


@pytest.mark.parametrize("family", ["llama", "gpt"])
def test_blocks_of_different_modes_add_up(family):
    plain, full = activations(family), activations(family, activations="M")
    mixed = activations(family, activations={"1-2": "M"})
    assert plain - mixed == mixed - full > 0
    every_second = activations(family, activations="M", recompute={"every": 2})
    assert every_second == mixed


@pytest.mark.parametrize("family", ["llama", "gpt"])
def test_scores_are_there_with_eager_attention_alone_and_go_where_it_is_recomputed(family):
    difference = activations(family, attention="eager") - activations(
        family, attention="eager", activations="M", recompute="attention"
    )
    assert difference >= LAYERS * SCORES


@pytest.mark.parametrize("mode", ["M", "O", "M@host"])
def test_a_slice_of_the_tokens_is_kept_moved_and_recomputed_where_tp_cuts_them(mode):
    cut = {"mesh": {"tp": 2}, "placement": {"tp": "S,S,S,S"}}
    one = exact(**cut, activations=mode, model=shape("llama", layers=1))
    several = exact(**cut, activations=mode)
    kept = several.bytes_of(State.ACTIVATIONS) - one.bytes_of(State.ACTIVATIONS)
    moved = host_bytes(several) - host_bytes(one)
    if mode == "M":
        assert (kept, moved) == ((LAYERS - 1) * HIDDEN // 2, 0)
    elif mode == "M@host":
        assert (kept, moved) == (0, (LAYERS - 1) * HIDDEN // 2)
    else:
        assert kept == 0 < moved


def host_bytes(estimate: Estimate) -> int:
    return max(row.host_bytes for row in estimate.memory if row.state is State.ACTIVATIONS)


def test_offloaded_activations_return_once_per_micro_batch():
    estimate = exact(activations="O")
    rows = {row.key.collective: row for row in estimate.traffic if row.key.collective.is_copy}
    out, back = rows[Collective.DEVICE_TO_HOST], rows[Collective.HOST_TO_DEVICE]
    assert (out.key.phase, back.key.phase) == (Phase.FORWARD, Phase.BACKWARD)
    assert out.payload_bytes == back.payload_bytes == 2 * host_bytes(estimate)
    on_file = exact(activations="O", offload={"tier": "file"})
    assert {row.key.collective for row in on_file.traffic if row.key.collective.is_copy} == {
        Collective.FILE_WRITE,
        Collective.FILE_READ,
    }
    assert host_bytes(on_file) == 0


def test_recomputation_repeats_the_traffic_of_operators_but_not_of_units():
    for mode in ("M", "O"):
        assert calls_by_kind(exact(activations=mode)) == calls_by_kind(exact())
    cut = {"mesh": {"tp": 2}, "placement": {"tp": "S,S,S,S"}}
    plain, full = calls_by_kind(exact(**cut)), calls_by_kind(exact(**cut, activations="M"))
    more = {key: full[key] - plain.get(key, 0) for key in full}
    again = {key[1]: number for key, number in more.items() if number}
    # of two gathers and two sums the last sum is not needed: nobody saves what it gives
    assert again == {
        Collective.ALL_GATHER: 2 * 2 * LAYERS,
        Collective.REDUCE_SCATTER: 2 * LAYERS,
    }


def calls_by_kind(estimate: Estimate) -> dict[tuple[object, ...], int]:
    """Calls between ranks by kind."""
    return {
        (row.key.axes, row.key.collective, row.key.phase): row.calls
        for row in estimate.traffic
        if not row.key.collective.is_copy and row.key.state is not State.OTHER
    }


def test_a_recomputation_is_the_forward_pass_but_for_its_last_product():
    plain = exact().operations[0]
    full = exact(activations="M").operations[0]
    head, down = 2 * B * T * C * V, 2 * B * T * F * C
    assert (full.forward, full.backward) == (plain.forward, plain.backward)
    assert full.again == plain.forward - 2 * (head + LAYERS * down)
    assert exact(activations="M", recompute="selective").operations[0].again == 0
    assert exact(activations="O").operations[0].again == 0


def test_a_step_takes_six_operations_a_parameter_and_token_and_twelve_a_pair_of_tokens():
    """Kaplan et al. 2020, and 12·L·h·s² for whole attention; fused attention computes its scores
    twice: 14."""
    found = exact(attention="eager").operations[0]
    matrices = LAYERS * (4 * C * C + 3 * C * F) + C * V
    tokens = 2 * B * T
    assert found.forward + found.backward == tokens * (6 * matrices + 12 * LAYERS * C * T)
    fused = exact().operations[0]
    assert fused.forward + fused.backward == tokens * (6 * matrices + 14 * LAYERS * C * T)


@pytest.mark.parametrize("mode", ["M", "O", "M@host"])
@pytest.mark.parametrize("axis", ["dp_shard", "tp", "pp"])
def test_moved_and_repeated_traffic_does_not_depend_on_the_loss(axis, mode):
    place = {"mesh": {axis: 2}, "placement": {axis: "S*,S,S,R" if axis == "dp_shard" else STAGES}}

    def added(**loss: object) -> dict[object, int]:
        """Calls and payloads beyond those of blocks that keep all."""
        plain, kept = exact(**place, **loss), exact(**place, **loss, activations=mode)
        assert "traffic" not in kept.undefined
        found = Counter[object]()
        for sign, estimate in ((1, kept), (-1, plain)):
            for row in estimate.traffic:
                found[row.key, "calls"] += sign * row.calls
                found[row.key, "payload"] += sign * row.payload_bytes
        return {key: size for key, size in found.items() if size}

    assert added(loss={"chunk": 24}) == added()


STAGES = "S,S,S,R"


def test_traffic_is_unknown_without_a_table_of_repeated_communication():
    flex = {"attention": "flex", "mesh": {"tp": 2}, "placement": {"tp": STAGES}}
    untold = {"activations", "peak", "step_seconds"}
    assert exact(**flex).undefined.keys() == untold
    assert exact(**flex, activations="M").undefined.keys() == {*untold, "traffic"}
    stages = {"attention": "flex", "mesh": {"pp": 2}, "placement": {"pp": STAGES}}
    assert exact(**stages).undefined.keys() == untold
    assert "traffic" in exact(**stages, activations="O").undefined


def test_the_logits_of_a_large_model_are_never_whole_with_a_loss_in_chunks():
    """In bf16 with losses in fp32: the logits stand beside the loss's buffer, of all tokens or of a
    chunk (6 bytes each). The buffer is saved (4), and of each token the sum of its row (4). Chunks
    run within the root unit, whose embedding and head are gathered then (2 bytes each)."""
    tokens, chunk, vocab, hidden = 8192, 1024, 128256, 4096
    whole, chunked = (
        exact(
            model={"preset": "llama3-8b"},
            precision={"layout": "megatron18"},
            batch={"sequence": tokens, "micro": 1},
            loss=loss,
        )
        for loss in ({}, {"chunk": chunk})
    )
    saved = whole.bytes_of(State.ACTIVATIONS) - chunked.bytes_of(State.ACTIVATIONS)
    assert saved == 4 * tokens * vocab + 4 * tokens
    peaks = [
        max(row.device_bytes for row in each.peak if row.phase is Phase.FORWARD)
        for each in (whole, chunked)
    ]
    less = 6 * tokens * vocab - 6 * chunk * vocab - 2 * 2 * vocab * hidden
    assert peaks[0] - peaks[1] == pytest.approx(less, rel=1e-3)  # targets, scalars
