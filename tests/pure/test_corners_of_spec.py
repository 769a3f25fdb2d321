"""Corner cases of reading and checking a spec that no other test covers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ptrain.algebra.legality import BYTE_VOCAB, RULES, UNSUPPORTED_RULES, check
from ptrain.cost import State
from ptrain.derivation.paper import compose, factor_product
from ptrain.errors import Fault, SpecError
from ptrain.spec import text
from ptrain.spec.check import schema, validate
from ptrain.spec.job import KeepSpec
from ptrain.spec.load import expand_sweeps, load
from ptrain.spec.model import HuggingFaceModel
from ptrain.spec.pipeline import ScheduleName
from ptrain.spec.placement import Axis, Factor
from ptrain.spec.spec import rank_groups
from ptrain.spec.text import COMMAND_LINE, Tree
from ptrain.spec.write import to_yaml
from tests.pure.build import GATHERED, WHOLE, make_spec, tuple_of
from tests.pure.changes import BASE, faults, load_changed


def test_reading_a_valid_spec_leaves_the_tree_unchanged():
    root = BASE | {"placement": {}, "train": {"steps": 0, "seed": 3}}
    tree = Tree(root=root, source="")
    raw, found = validate(tree)
    assert list(found) == [("train", "steps")] and raw.train.seed == 3
    assert tree.root["train"] == {"steps": 0, "seed": 3}


def test_an_error_without_a_place_points_to_the_first_line(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text(to_yaml(load_changed().resolved))
    located = load(file).locate(Fault(place="", finding="a"))
    assert (located.source, located.line) == (str(file), 1)


def test_a_value_that_is_no_list_is_left_as_it_was_written():
    assert list(expand_sweeps(["name= a ", "b"])) == [("name= a ", "b")]


def test_a_mesh_without_a_tuple_is_the_only_fault():
    batch = {"global": 3, "micro": 2, "sequence": 32}
    assert list(faults(placement=None, batch=batch)) == ["mesh.dp_shard"]


def test_a_tier_that_no_state_is_on_is_rejected_where_there_are_ranks():
    assert list(faults(offload={"tier": "host"})) == ["offload.tier"]
    assert load_changed(mesh={}, placement={}, offload={"tier": "host"}).world_size == 1


def test_where_nothing_is_recomputed_every_block_is_like_the_others():
    assert load_changed(recompute={"policy": "none", "every": 3}).activations.every == 1
    assert load_changed(recompute={"every": 3}, activations="M").activations.every == 3


def test_heads_near_to_those_that_were_written_are_offered():
    shape = {"layers": 1, "hidden": 256, "heads": 100, "ffn": 3, "vocab": 259}
    assert faults(model=shape)["model.heads"].remedy == "Use one of 4, 8, 16, 32, 64, 128."


def test_a_tuple_of_two_modes_is_rejected_at_its_axis():
    assert set(faults(placement={"dp_shard": "S*,S"})) == {"placement.dp_shard"}


def test_an_empty_text_and_one_cut_short_are_at_fault_as_a_whole():
    for content in ("", "a: {"):
        with pytest.raises(SpecError) as caught:
            text.parse(content, "a.yaml")
        (fault,) = caught.value.faults
        assert (fault.place, fault.source) == ("", "a.yaml")


def test_a_folder_in_place_of_a_file_is_named(tmp_path):
    with pytest.raises(SpecError) as caught:
        text.read(Path(tmp_path))
    assert caught.value.faults[0].source == str(tmp_path)


def test_a_spec_is_written_in_the_order_it_has_in_lines_of_a_hundred():
    assert to_yaml({"b": {"z": 1, "a": 2}, "a": [3, 4]}) == "b: {z: 1, a: 2}\na: [3, 4]\n"
    assert to_yaml({"a": {"b": {"z": 1, "c": 2}}}) == "a:\n  b: {z: 1, c: 2}\n"
    words = ["abcdefgh"] * 9
    assert to_yaml({"key": words}) == f"key: [{', '.join(words)}]\n"
    longer = to_yaml({"key": words * 2}).splitlines()
    assert len(longer) == 2 and 90 < len(longer[0]) <= 110
    assert to_yaml({"a": "ä b", "c": None}) == "a: ä b\nc: null\n"


def test_of_two_tiers_the_one_that_is_further_away_holds_the_product():
    for inner, outer in (("file", "host"), ("host", "file"), ("file", "file")):
        modes = (f"R@{inner},R,R", f"R@{outer},R,R")
        axes = (Axis.DP_SHARD, Axis.DP_REPLICATE)
        factors = [
            factor_product(Factor(axis=axis, degree=2, placement=tuple_of(mode)))
            for axis, mode in zip(axes, modes, strict=True)
        ]
        assert compose(*factors)[State.PARAMETERS].tier.value == "file"


def test_without_axes_every_rank_is_a_separate_group():
    spec = make_spec({Axis.DP_REPLICATE: (2, WHOLE), Axis.DP_SHARD: (2, GATHERED)})
    assert list(rank_groups(spec, ())) == [(0,), (1,), (2,), (3,)]
    assert list(rank_groups(spec, (Axis.DP_REPLICATE,))) == [(0, 2), (1, 3)]


def test_a_hidden_file_gives_its_spec_a_name_without_the_dot(tmp_path):
    file = tmp_path / ".mine.yaml"
    file.write_text(
        to_yaml({key: load_changed().resolved[key] for key in ("model", "batch", "mesh")})
    )
    assert load(file, ["mesh.dp_shard=1"]).spec.name == "mine"


def test_an_editor_offers_the_schedules_by_name_a_file_and_its_rows():
    shape = schema()["$defs"]["PipelineSpec"]["properties"]["schedule"]
    names, file, rows = shape["anyOf"]
    assert [entry["const"] for entry in names["oneOf"]] == list(ScheduleName)
    assert re.search(file["pattern"], "mine.CSV") and rows["items"] == {"type": "string"}


@pytest.mark.parametrize("word", ["DualPipe", "dual pipe", "dual_pipe", "dual-pipe"])
def test_dualpipe_is_understood_however_it_is_written(word):
    fault = faults(pipeline={"schedule": word})["pipeline.schedule"]
    assert "two copies of parameters" in fault.remedy


def test_slices_of_activations_that_name_no_axis_are_rejected():
    assert "only be sharded on a named axis" in faults(activations="S")["activations"].finding
    both = faults(activations="M", placement={"dp_shard": "S*,S,S,O"})
    assert "M, but placement.dp_shard.activations is O" in both["activations"].finding


def test_tokens_become_the_nearest_number_of_micro_batches():
    batch = {"global": "200 tokens", "micro": 2, "sequence": 32}  # 6.25 samples; 4 in one step
    assert load_changed(batch=batch).batch.global_samples == 8
    odd = {"global": "400 tokens", "micro": 2, "sequence": 32}  # 12 samples
    assert load_changed(batch=odd).batch.accumulate == 4  # a power of two
    assert load_changed(batch=odd | {"round": "none"}).batch.accumulate == 3


def test_a_strategy_rejects_a_mesh_with_one_axis_more():
    fault = faults(mesh={"dp_shard": 2, "pp": 2}, placement="zero3")["placement"]
    assert fault.finding == "zero3 needs the axis dp_shard; the mesh has dp_shard, pp"


def test_reshard_and_its_long_form_must_agree():
    both = faults(reshard=True, sync={"reshard_after_forward": False})
    assert "which is false" in both["reshard"].finding
    assert (
        load_changed(reshard=False).sync == load_changed(sync={"reshard_after_forward": False}).sync
    )


def test_an_error_in_a_command_line_mapping_points_to_the_command_line():
    fault = faults("placement={dp_shard: [S*, S, Q, R]}")["placement.dp_shard.gradients"]
    assert fault.source.startswith(COMMAND_LINE)


def test_a_list_of_words_is_of_words_that_are_known_and_of_each_once():
    kept = {"activations": "M"}
    assert load_changed(recompute={"keep": ["softmax"]}, **kept) == load_changed(
        recompute={"keep": "softmax"}, **kept
    )
    wrong = faults(recompute={"keep": ["softmax", "soft"]}, **kept)
    assert "soft" in str(wrong)
    twice = faults(recompute={"keep": ["softmax", "softmax"]}, **kept)["recompute.keep"]
    assert twice.finding == "softmax is listed twice"


def test_a_bucket_is_written_as_a_word_or_in_bytes():
    sizes = {"per-tensor": "per-tensor", "whole": "whole", "32 KiB": 2**15}
    for written, resolved in sizes.items():
        assert load_changed(bucket=written).resolved["bucket"] == resolved


def test_a_file_of_dots_alone_gives_its_spec_the_name_spec(tmp_path):
    file = tmp_path / "-.-.yaml"
    file.write_text(to_yaml(load_changed().resolved | {"name": None}).replace("name: null\n", ""))
    dots = file.rename(tmp_path / "....yaml")
    assert load(dots).spec.name == "spec"


def test_errors_that_follow_from_an_invalid_section_are_not_reported():
    """The batch depends on the mesh; of its two errors only the mesh's is reported."""
    batch = {"global": 3, "micro": 2, "sequence": 32}
    assert list(faults(mesh={"dp_shard": "two"}, batch=batch)) == ["mesh.dp_shard"]


def test_an_override_without_a_value_is_shown_up_to_sixty_letters_and_its_key_may_have_capitals():
    (fault,) = faults("x" * 61).values()
    assert fault.finding == f"an override needs a value; got {'x' * 60!r}"
    assert "Train" in str(faults("Train.Steps=3"))


def test_a_loss_that_has_all_logits_has_no_chunks_and_no_fused_kernel():
    for key, value in (("chunk", 8), ("fused", True)):
        loss = {"kind": "cross-entropy", key: value}
        remedy = f"Remove `{key}`, or use `loss.kind=chunked`."
        assert faults(loss=loss)[f"loss.{key}"].remedy == remedy


def test_a_preset_may_be_a_file_next_to_the_spec_with_either_suffix(tmp_path):
    for ending in (".yaml", ".yml"):
        shape = {"family": "gpt", "layers": 1, "hidden": 8, "heads": 1, "ffn": 8, "vocab": 259}
        (tmp_path / f"small{ending}").write_text(to_yaml(shape))
        file = tmp_path / "spec.yaml"
        file.write_text(to_yaml(BASE | {"model": {"preset": f"small{ending}"}}))
        assert load(file).spec.model.hidden == 8


def test_a_preset_may_be_a_file_in_the_current_folder_after_the_specs_folder(tmp_path, monkeypatch):
    """`ptrain calibrate` writes such a file for a built-in spec."""
    monkeypatch.chdir(tmp_path)
    sizes = {"devices": 2, "intra_node_bandwidth": "1 GB/s"}
    Path("mine.yaml").write_text(to_yaml(sizes | {"device_memory": "8 GB"}))
    assert load("zero3", ["cluster.preset=mine.yaml"]).spec.cluster.device_memory == 8e9
    Path("own").mkdir()
    Path("own/mine.yaml").write_text(to_yaml(sizes | {"device_memory": "4 GB"}))
    Path("own/spec.yaml").write_text(to_yaml(BASE | {"cluster": {"preset": "mine.yaml"}}))
    assert load(Path("own/spec.yaml")).spec.cluster.device_memory == 4e9
    with pytest.raises(SpecError, match=r"no cluster named 'none\.yaml'"):
        load("zero3", ["cluster.preset=none.yaml"])


def test_a_mesh_that_lacks_an_axis_of_its_strategy_is_offered_one_of_two_ranks():
    fault = faults(mesh={"dp_shard": 4}, placement="hsdp")["placement"]
    assert "Use `mesh: {dp_replicate: 2, dp_shard: 4}`" in fault.remedy


def test_a_checkpoint_at_the_end_is_a_word():
    assert load_changed(checkpoint="at_end").checkpoint.at_end
    assert "checkpoint" in faults(checkpoint="AT_END")


def test_a_number_of_checkpoints_to_keep_is_short_for_the_newest_ones():
    assert load("zero3", ["checkpoint.keep=3"]).spec.checkpoint.keep == KeepSpec(last=3)
    assert load("zero3").spec.checkpoint.keep is None
    resolved = load_changed(checkpoint={"keep": 3}).resolved["checkpoint"]
    assert resolved["keep"] == {"last": 3, "every": 0}
    missing = faults(checkpoint={"keep": {"every": 1000}})["checkpoint.keep.last"]
    assert missing.remedy == "Add `checkpoint.keep.last=3`."


def test_a_missing_schedule_file_names_the_expected_file():
    fault = faults(mesh={"pp": 2}, pipeline={"schedule": "none.csv"})["pipeline.schedule"]
    assert fault.remedy == (
        "Use a file in torch's CSV format of compute actions, or a schedule name."
    )


def test_a_missing_spec_names_the_folder_of_built_in_specs():
    with pytest.raises(SpecError) as caught:
        text.read(Path("none.yaml"))
    assert caught.value.faults[0].remedy == "Run `ptrain specs` to list the built-in specs."


def test_a_list_with_a_tag_in_it_is_at_fault_for_both():
    with pytest.raises(SpecError) as caught:
        text.parse("- !!str a\n", "a.yaml")
    findings = [fault.finding for fault in caught.value.faults]
    assert findings == [
        "tags (!!str) are not allowed in specs",
        ("a spec must be a mapping; got a list"),
    ]


def test_tp_and_pp_keys_are_written_for_two_ranks_or_more():
    stages = {"mesh": {"pp": 2}, "placement": {"pp": "S,S,S,R"}}
    slices = {"mesh": {"tp": 2}, "placement": {"tp": "S,S,S,R"}}
    plain = load_changed(mesh={}, placement={}).resolved
    assert "pipeline" not in plain and "tensor" not in plain
    assert "pipeline" in load_changed(**stages).resolved
    assert "tensor" in load_changed(**slices).resolved


def test_torchs_names_of_dtypes_are_understood():
    names = {"float64": "fp64", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
    for name, dtype in names.items():
        assert dtype in faults(precision={"parameters": name})["precision.parameters"].remedy


def test_a_vocabulary_too_small_for_a_class_is_named_by_its_field():
    model = HuggingFaceModel(hf="LlamaForCausalLM", config={"vocab_size": 258})
    (fault,) = check(make_spec({}, model=model))
    assert (fault.place, fault.remedy) == (
        "model.config.vocab_size",
        "Use `model.config.vocab_size=259` or more.",
    )
    enough = HuggingFaceModel(hf="LlamaForCausalLM", config={"vocab_size": 259})
    assert check(make_spec({}, model=enough)) == () and BYTE_VOCAB == 259


INTEGRITY, CONSISTENCY = "Theorem 3, gradient integrity", "Theorem 4, state consistency"
EFFECT = "every key has an effect"
BY_TP = "Theorem 6.3, gradients are reduced across tp groups, not within"
BY_STAGE = "Theorem 7.2, gradients are reduced among replicas of a stage"
BETWEEN_STAGES = "Theorem 7.3, activations are sent from stage to stage of one pipeline"
NAMED = {
    "parameters are full when used": INTEGRITY,
    "parameter values are stored": CONSISTENCY,
    "moments are stored between steps": CONSISTENCY,
    "tensors are updated in full": CONSISTENCY,
    "activations are local to their rank": INTEGRITY,
    "every token is counted once": INTEGRITY,
    "activations are sharded by tokens": "Definition 2",
    "activations are those of the local samples": INTEGRITY,
    "states are sharded like operators": CONSISTENCY,
    "gradients are reduced across tp groups, not within": BY_TP,
    "activations are full or sharded by tokens": "Definition 2",
    "states are sharded by stage": CONSISTENCY,
    "gradients are reduced per stage": BY_STAGE,
    "activations are those of the local layers": "Definition 2",
    "heads divide": "Definition 1",
    "the loss kernel supports the logits": "Definition 1",
    "the loss leaves the padding out": "Definition 1",
    "every token has an embedding row": "Definition 1",
    "the loss is a mean over all counted targets": INTEGRITY,
    "padding has no effect": INTEGRITY,
    "the batch is the sum of its parts": INTEGRITY,
    "the mesh fits the cluster": "Definition 5",
    "GPUs have a compute capability": "Definition 5",
    "reduced gradients are not reduced again": INTEGRITY,
    "consumed gradients are not accumulated, clipped or skipped": INTEGRITY,
    "master weights are stored between steps": CONSISTENCY,
    "sums are stored like their terms": INTEGRITY,
    "full updates have units of blocks": "Definition 1",
    "frozen parameters are placed on existing axes": "Definition 1",
    "activations have one mode": "Definition 2",
    "options of data axes need a data axis": EFFECT,
    "prefetched units are gathered": EFFECT,
    "parameters gathered after the update were updated in shards": EFFECT,
    "overlapped reductions run in backward": EFFECT,
    "reduce-scattered gradients are sharded": EFFECT,
    "buckets need a wrapper that reduces by bucket": EFFECT,
    "units need gathers or reductions": EFFECT,
    "freed units were gathered": EFFECT,
    "smaller shards divide the group": EFFECT,
    "a state is offloaded": EFFECT,
    "options of cp need cp": EFFECT,
    "attention matches the placement": "Definition 2",
    "a hybrid uses all ranks": "Definition 5",
    "ranks have equal numbers of tokens": INTEGRITY,
    "ranks have equal numbers of heads": "Definition 2",
    "shards split evenly over tp": "Definition 2",
    "one dropout mask for all shards": INTEGRITY,
    "partial attention results are combined": "Definition 2",
    "the attention call is intercepted": "Definition 2",
    "the loss is a sum over tokens": INTEGRITY,
    "ranks have equal numbers of experts": "Definition 2",
    "tp joins ep": "Definition 2",
    "routed shards are equal": "Definition 2",
    "counts match the layers": "Definition 2",
    "experts use grouped products": "Definition 2",
    "shared experts overlap communication": EFFECT,
    "the degree divides the operators": "Definition 2",
    "every rank has vocabulary rows": "Definition 2",
    "roles are those of the family": "Definition 2",
    "token shards are equal": "Definition 2",
    "the loss kernel has full weights": "Definition 2",
    "the optimizer has full matrices": CONSISTENCY,
    "ranks have equal numbers of stages": BETWEEN_STAGES,
    "every stage has layers": BETWEEN_STAGES,
    "the schedule has enough micro-batches": INTEGRITY,
    "options of tp need tp": EFFECT,
    "options of pp need pp": EFFECT,
    "blocks exist in the model": "Definition 1",
    "a block is recomputed once": INTEGRITY,
    "attention supports the model's dropout": "Definition 1",
    "attention has a backward pass": INTEGRITY,
    "attention has a kernel for grouped heads": "Definition 1",
    "fp8 products are aligned": "Definition 1",
    "GPUs multiply fp8": "Definition 5",
    "autocast casts fp32": "Definition 1",
}
WAITING = """replicas are outside shards; quantized weights are executed;
    ends are units of fully_shard; full updates exclude experts;
    groups have equal state in flat units; flash attention accepts no mask;
    keys and values have equal dimensions; ranks have equal numbers of chunks;
    experts are sharded over tp too; the naive plan shards experts;
    all tokens between blocks; the naive plan uses all tokens;
    the naive plan has no latent attention; shared heads are not compiled;
    gathered shards are equal; shards of shards are equal;
    tp shards have one kind of data shards;
    units are within a stage; one policy for both passes; units exist until their weight gradients;
    saved shards are gathered once; shared gradients are reduced before the update;
    full updates exclude stages; offloaded activations are used once;
    attention is a separate module; a budget's peaks are predicted;
    recomputed units are gathered; the naive plan keeps saved activations;
    a block, or the loss, is one program; an fp8 scale is of a full matrix;
    autocast is around full operators"""


def test_every_rule_has_its_name_and_the_theorem_that_it_guards():
    assert [(rule.name, rule.theorem) for rule in RULES] == list(NAMED.items())


def test_every_rule_of_unsupported_features_has_a_name_and_no_theorem():
    assert [rule.name for rule in UNSUPPORTED_RULES] == " ".join(WAITING.split()).split("; ")
    assert {rule.theorem for rule in UNSUPPORTED_RULES} == {""}
