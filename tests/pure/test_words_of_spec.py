"""Messages for words of other tools, unsupported features and overridden keys, compared with
independent lists. A test is a full table."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, get_type_hints

import pytest

from ptrain.errors import Fault, SpecError
from ptrain.spec import check, foreign, load, shorthand, slips
from ptrain.spec.activations import (
    KEPT_MEANINGS,
    ActivationModeText,
    LossRaw,
    ModesByBlock,
    RecomputeRaw,
)
from ptrain.spec.batch import MAX_SAMPLES
from ptrain.spec.grammar import SpecRaw
from ptrain.spec.keys import Offload
from ptrain.spec.leaf import MODE_MEANINGS, Leaf, ModeText, RejectedValue, section_keys
from ptrain.spec.pipeline import MAX_LAYERS, PipelineSpec
from ptrain.spec.placement import M
from ptrain.spec.resolve_sections import CHUNK
from ptrain.spec.spec import Spec
from ptrain.spec.write import UNWRITTEN, to_yaml
from tests.pure.changes import BASE, faults, load_changed


def remedies(**changes: object) -> dict[str, str]:
    return {place: fault.remedy for place, fault in faults(**changes).items()}


def leaf(kind: type, name: str) -> Any:
    hint = get_type_hints(kind, include_extras=True)[name]
    return next(each for each in hint.__metadata__ if isinstance(each, Leaf))


def answer_to(kind: Leaf, value: object) -> str:
    with pytest.raises(RejectedValue) as caught:
        kind.check(value)
    return caught.value.remedy


def meanings(text: str) -> dict[str, str]:
    """`a b: c; d: e` is what is meant by a, b and d."""
    groups = (group.split(": ") for group in " ".join(text.split()).split("; "))
    return {word: meant for words, meant in groups for word in words.split()}


KEYS = meanings(
    """
    gradient_checkpointing activation_checkpointing activation_checkpoint checkpointing
    checkpoint_activations recompute_activations: activations=M;
    recompute_granularity recomputation rematerialization remat: recompute=full;
    selective_checkpointing selective_ac: recompute=selective;
    activation_offload activation_offloading offload_activations: activations=O;
    attn_implementation attn: attention=sdpa;
    linear_cross_entropy fused_cross_entropy: loss=fused;
    chunked_cross_entropy: loss=chunked;
    loss_chunk: loss={chunk=1};
    loss_parallel: tensor={loss_parallel=true}
    """
)


def test_every_key_of_other_tools_is_answered_with_its_name_in_ptrain():
    asked = {word: f"Use `{key.replace('=', ': ')}`." for word, key in KEYS.items()}
    found = remedies(**dict.fromkeys(KEYS, 1))
    assert {word: said[: len(asked[word])] for word, said in found.items()} == asked
    assert "Use `activations: M`." in remedies(**{"Gradient-Checkpointing": True}).values()
    assert "gradient" not in foreign.foreign_keys()


def test_every_word_for_a_tier_is_answered_with_the_tier():
    tiers = meanings("nvme disk ssd: file; cpu ram: host; gpu cuda: device")
    assert tiers == slips.TIER_SLIPS
    modes = {word: slips.normalize_mode(f"R@{word}") for word in tiers}
    assert modes == meanings("nvme disk ssd: R@file; cpu ram: R@host; gpu cuda: R")
    assert leaf(Offload, "tier").slips == leaf(Offload, "update").slips == tiers
    tier = {word: answer_to(leaf(Offload, "tier"), word) for word in ("nvme", "disk", "cpu", "ram")}
    assert tier == {word: f"Did you mean {tiers[word]!r}?" for word in tier}
    update = {word: answer_to(leaf(Offload, "update"), word) for word in ("gpu", "cuda", "cpu")}
    assert update == {word: f"Did you mean {tiers[word]!r}?" for word in update}


def test_other_names_of_checkpointing_are_answered_with_recompute():
    words = ("full", "selective", "attention", "block", "activations", "gradient", "true", True)
    policies = {word: slips.suggest_recompute(word).partition("`recompute=")[2] for word in words}
    assert {word: said.partition("`")[0] for word, said in policies.items()} == {
        "full": "full", "selective": "selective", "attention": "attention", "block": "full",
        "activations": "full", "gradient": "full", "true": "full", True: "full",
    }  # fmt: skip
    assert slips.suggest_recompute("often") == "" == slips.suggest_recompute(3)
    assert "recompute=full" in remedies(checkpoint="full")["checkpoint"]


def test_words_are_near_from_seven_tenths_on():
    assert slips.NEAR == 0.7
    assert slips.suggest_word("abcdefgxyz", ["abcdefgijk"]) == "Did you mean 'abcdefgijk'?"
    assert slips.suggest_word("abcxyz", ["abcijk"]) == ""


SLIPS = {
    (RecomputeRaw, "policy"): """true on all block: full; false off: none;
        core-attention core_attn: attention; selective_op op: selective""",
    (RecomputeRaw, "keep"): """mm linear matmuls gemm: matmul; sdpa flash: attention;
        layernorm rmsnorm: norm; all-gather all_gather communication: collective""",
    (LossRaw, "kind"): """ce cross_entropy: cross-entropy; chunk: chunked;
        linear_cross_entropy linear-cross-entropy liger: fused;
        loss-parallel loss_parallel: vocab-parallel""",
    (PipelineSpec, "schedule"): """afab schedulegpipe fill-drain: gpipe;
        pipedream-flush schedule1f1b one-f-one-b: 1f1b;
        looped-bfs loopedbfs schedulelooped-bfs scheduleloopedbfs: bfs;
        interleaved1f1b interleaved-1f1b scheduleinterleaved1f1b: interleaved;
        interleavedzerobubble scheduleinterleavedzerobubble zb-h1 zb1p zero_bubble: zero-bubble;
        zb-v zbvzerobubble schedulezbvzerobubble: zbv; scheduledualpipev: dualpipev""",
    (SpecRaw, "attention"): """flash_attention_2 flash-attention: sdpa; flex_attention: flex;
        naive manual: eager""",
    (SpecRaw, "overlap"): "true on yes: backward; false off no: none",
}


def test_every_synonym_of_a_value_is_answered_with_the_accepted_word():
    known = {place: leaf(*place) for place in SLIPS}
    assert {place: each.slips for place, each in known.items()} == {
        place: meanings(words) for place, words in SLIPS.items()
    }
    for place, words in SLIPS.items():
        for word, meant in meanings(words).items():
            assert answer_to(known[place], word) == f"Did you mean {meant!r}?", word
            assert meant in known[place].words


def test_a_synonym_of_split_is_answered_with_the_accepted_word():
    words = meanings("balanced auto: parameters; even uniform: layers")
    split = leaf(PipelineSpec, "split")
    assert split.options[0].slips == words
    assert {word: answer_to(split, word) for word in words} == {
        word: f"Did you mean {meant!r}?" for word, meant in words.items()
    }


def test_asynchronous_schedules_and_moving_layers_are_answered_with_a_reason():
    schedule, split = leaf(PipelineSpec, "schedule"), leaf(PipelineSpec, "split")
    for word in [
        "pipedream",
        "pipedream-2bw",
        "pipedream_2BW",
        "async",
        "asynchronous",
        "pipemare",
        "wpipe",
    ]:
        assert "Theorem 3" in answer_to(schedule, word), word
    for word in ["dynamic", "adaptive", "rebalance", "elastic", "runtime", "Elastic"]:
        assert "--resume" in answer_to(split, word), word
    assert answer_to(split, [0]) == "Use numbers of layers from 1 to 10000, for example `[3, 5]`."
    assert MAX_LAYERS == 10_000 and MAX_SAMPLES == 2_147_483_647


def test_words_for_activation_modes_are_answered_with_the_mode():
    words = meanings(
        """recompute recomputed checkpoint checkpointing full: M;
        offload offloaded host cpu: O; keep none: R"""
    )
    assert {word: ActivationModeText("").suggest(word) for word in words} == {
        word: f"Did you mean `{mode}`?" for word, mode in words.items()
    }
    assert {ModeText("").suggest(word) for word in words} == {""}
    said = {word: remedies(activations=word)["activations"] for word in ("Checkpoint", "cpu")}
    assert said == {"Checkpoint": "Did you mean `M`?", "cpu": "Did you mean `O`?"}


def test_every_mode_is_accepted_and_activations_have_two_more():
    modes = ["R", "S", "S*", "M", "O", "R@host", "S*@host", "R@file", "S@file", "S*@file", "S@host"]
    assert list(MODE_MEANINGS) == modes == list(ModeText.modes)
    assert list(KEPT_MEANINGS) == [*modes, "M@host", "M@file"]
    assert [str(ActivationModeText("").check(mode)) for mode in modes[:-1]] == modes[:-1]
    assert str(ModeText("").check("S@host")) == "O"
    assert all(" " in about for about in KEPT_MEANINGS.values())


def test_blocks_are_ranges_of_up_to_five_digits():
    checked = ModesByBlock("").check({"0-7": "M", "8": "R", "12345-": "O"})
    assert {blocks: str(mode) for blocks, mode in checked.items()} == {
        "0-7": "M", "8": "R", "12345-": "O",
    }  # fmt: skip
    for wrong in ("123456", "-3", "a", "1--2", "1-2-3", ""):
        assert "first-last" in answer_to(ModesByBlock(""), {wrong: "M"})


def test_all_unsupported_values_are_rejected_at_their_place_with_an_alternative():
    found = faults(
        tensor={"asynchronous": True},
        expert={"a": 1},
        attention="flash",
    )
    assert {place: fault.remedy for place, fault in found.items()} == {
        "tensor.asynchronous": "Supported: asynchronous=false.",
        "expert": "Remove `expert`.",
        "attention": "Supported: attention=sdpa or sdpa-gqa or eager or flex or math.",
    }
    plain = {place: fault.finding.partition(" is reserved")
             for place, fault in found.items()}  # fmt: skip
    assert {place: begin for place, (begin, _, _) in plain.items()} == {
        "tensor.asynchronous": "not supported yet: asynchronous true",
        "expert": "not supported yet: expert",
        "attention": "not supported yet: attention flash",
    }
    why = {place: reason for place, (_, _, reason) in plain.items() if reason}
    assert list(why) == ["tensor.asynchronous", "attention"]
    assert "CUDA" in why["tensor.asynchronous"] and "sdpa selects it" in why["attention"]


def test_the_alternatives_of_unsupported_values_are_accepted():
    for word in ("sdpa", "eager", "flex", "math"):
        assert load_changed(attention=word, compile=False, tensor={"asynchronous": False})
    assert load_changed(mesh={"dp_shard": 2, "cp": 1, "ep": 1}).world_size == 2


def test_flash_is_rejected_only_as_unsupported():
    assert list(faults(attention="flash")) == ["attention"]


def test_words_for_attention_loss_and_buckets_have_their_values():
    attention = {
        word: load_changed(attention=word).model.attention.value for word in ("sdpa", "math")
    }
    assert attention | {"": load_changed().model.attention.value} == {
        "sdpa": "sdpa", "math": "eager", "": "sdpa",
    }  # fmt: skip
    assert load_changed(bucket="per-tensor").bucket_bytes == 1
    assert load_changed(bucket="whole").bucket_bytes == 2**40
    assert load_changed(bucket="size").bucket_bytes == load_changed().bucket_bytes == 25 * 2**20
    losses = {word: load_changed(loss=word).loss for word in ("cross-entropy", "chunked", "fused")}
    assert {word: (loss.chunk, loss.fused) for word, loss in losses.items()} == {
        "cross-entropy": (None, False), "chunked": (1024, False), "fused": (1024, True),
    }  # fmt: skip
    assert CHUNK == 1024 and load_changed(loss={"chunk": 7}).loss.chunk == 7


def test_words_for_recomputation_have_their_policies_and_are_written_again():
    modes = {
        word: load_changed(activations="M", recompute=word)
        for word in ("full", "selective", "attention")
    }
    policies = {word: asdict(spec.activations.default.policy) for word, spec in modes.items()}
    assert policies == {
        "full": {"scope": "block", "keep": ()},
        "selective": {"scope": "block", "keep": ("matmul", "attention")},
        "attention": {"scope": "attention", "keep": ()},
    }
    assert {word: spec.resolved["recompute"] for word, spec in modes.items()} == {
        word: word for word in modes
    }
    assert load_changed(recompute="none").activations.default.policy is None
    assert (
        modes["full"].resolved["activations"] == "M"
        and "activations" not in load_changed().resolved
    )
    assert UNWRITTEN == {
        "activations": "R", "recompute": "none", "attention": "sdpa", "loss": "cross-entropy",
    }  # fmt: skip
    assert not set(UNWRITTEN) & set(load_changed().resolved)


def test_activations_of_all_blocks_are_those_from_block_0_on():
    assert load_changed(activations={"0-": "M"}) == load_changed(activations="M")
    assert load_changed(activations={"0-": "M"}).activations.by_block == ()
    assert load_changed(activations={"1-": "M"}).activations.by_block[0][:2] == (1, None)


def test_optimizers_and_models_have_the_figures_of_their_papers():
    momenta = {
        name: load_changed(optimizer={"name": name}).optimizer.momentum for name in ("muon", "sgd")
    }
    assert momenta == {"muon": 0.95, "sgd": 0.0}
    shape = {"layers": 2, "hidden": 8, "heads": 2, "ffn": 3, "vocab": 259}
    assert load_changed(model=shape).model.rope_base == 10_000.0
    assert load_changed(model=shape | {"family": "gpt"}).model.rope_base == 10_000.0


def test_a_key_on_the_command_line_displaces_the_one_that_excludes_it():
    def on_top(override: str, **changes: object) -> Spec:
        return load.load(BASE | changes, [override]).spec

    data = on_top("data.path=a.bin", data={"corpus": "synthetic"}).data
    assert (data.path, data.corpus) == ("a.bin", None)
    data = on_top("data.corpus=synthetic", data={"path": "a.bin"}).data
    assert (data.path, data.corpus) == (None, "synthetic")
    key = "reshard_after_forward"
    assert on_top("reshard=2", sync={key: False}).sync.reshard_after_forward == 2
    assert on_top(f"sync.{key}=false", reshard=2).sync.reshard_after_forward is False


def test_overrides_begin_with_a_dotted_key_and_name_the_command_line():
    given = ["a=1", "a.b-c_d=2", "--a=3", "a/b=c.yaml", "zero3", "a..b=1", ".a=1", "a."]
    sources, written = load.split_arguments(given)
    assert written == ["a=1", "a.b-c_d=2", "--a=3"]
    assert sources == ["a/b=c.yaml", "zero3", "a..b=1", ".a=1", "a."]
    assert load.source_of("a=1") == "command line: a=1"
    with pytest.raises(SpecError, match="Use `key=value`"):
        load.parse_override("a")
    assert load.parse_override("--optimizer.lr=1").route == ("optimizer", "lr")
    assert load.parse_override("a=b--").text == "b--"


def test_a_file_and_an_override_are_distinguished_by_the_keys_they_set():
    swept = {
        "placement.dp_shard=S*,S,S,R": 1, "placement=S*,S,S,R": 1, "placement=zero1,zero2": 2,
        "placement.dp_shard.gradients=R,S": 2, "mesh.dp_shard=1,2,4": 3, "zero3": 1, "a,b": 1,
    }  # fmt: skip
    assert {each: len(list(load.expand_sweeps([each]))) for each in swept} == swept


def test_a_fault_in_these_sections_silences_findings_about_those():
    silences = {
        "mesh": "mesh placement",
        "placement": "mesh placement",
        "batch": "batch mesh placement",
        "activations": "activations placement",
        "recompute": "recompute activations placement",
        "attention": "attention model",
        "loss": "loss mesh placement tensor",
    }
    sections = list(section_keys(SpecRaw))
    found = {}
    for about in sections:
        finding = Fault(place=f"{about}.a", finding="a")
        known = {(each,): Fault(place=f"{each}.b", finding="b") for each in sections}
        alone = ({route: fault} for route, fault in known.items())
        heard = [bool(load._drop_dependent_faults([finding], each)) for each in alone]
        found[about] = {
            each for each, is_heard in zip(sections, heard, strict=True) if not is_heard
        }
    assert found == {each: set(silences.get(each, each).split()) for each in sections}


def test_short_forms_have_their_keys():
    assert shorthand.POLICIES == ("sync", "tensor", "pipeline", "context", "recompute")
    wrong = faults(recompute="fulll", loss="fussed", reshard=1)
    assert set(wrong) == {"recompute.policy", "loss.kind", "sync.reshard_after_forward"}
    assert load_changed(placement={"dp": "S*,S,S,R"}, mesh={"dp": 2}) == load_changed()
    ddp = load_changed(placement={"dp": "R,R,R,R"}, mesh={"dp": 2})
    assert [factor.axis.value for factor in ddp.factors] == ["dp_replicate"]


def test_a_section_that_is_missing_or_no_mapping_is_the_only_fault():
    for section in ("model", "mesh", "batch"):
        assert list(faults(**{section: 3})) == [section]
        rest = {key: value for key, value in BASE.items() if key != section}
        with pytest.raises(SpecError) as caught:
            load.load(rest)
        assert [fault.place for fault in caught.value.faults] == [section]
    assert check.validate(load._from_mapping(BASE | {"batch": 3}))[0].batch.sequence == 1


def test_sizes_name_an_example_of_their_kind():
    budget, bucket = leaf(RecomputeRaw, "budget"), leaf(SpecRaw, "bucket_bytes")
    assert (budget.example, bucket.example) == ("2 GiB", "25 MiB")
    found = faults(cluster={"device_memory": "x", "intra_node_bandwidth": "x", "devices": [2]})
    assert "80 GiB" in found["cluster.device_memory"].finding
    assert "450 GB/s" in found["cluster.intra_node_bandwidth"].finding
    assert "slowest or smallest" in found["cluster.devices"].remedy


def test_texts_that_yaml_takes_for_numbers_are_quoted_and_others_are_not():
    numbers = ["1e-5", "1E5", ".5", "-.5", "+1.", "0o7", "0x1f", "0xAB", "12", "3.5", "on", "1:30"]
    texts = ["a", "0b1x", "0o8x", "0xg", "e5", "S*,S", "1-2"]
    assert to_yaml({"a": numbers}) == "a: [" + ", ".join(f"'{each}'" for each in numbers) + "]\n"
    plain = to_yaml({"a": [each for each in texts if "," not in each]})
    assert plain == "a: [a, 0b1x, 0o8x, 0xg, e5, 1-2]\n"
    same = {"x": 1}
    assert to_yaml({"a": {"b": same, "c": same}}) == "a:\n  b: {x: 1}\n  c: {x: 1}\n"
    assert to_yaml({"b": 1, "a": "ä"}) == "b: 1\na: ä\n"
    assert to_yaml({"a": M.distribution.value}) == "a: M\n"
