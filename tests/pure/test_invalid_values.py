"""Requirements on the values of a section, and the message for each violation: one error, word for
word."""

from __future__ import annotations

import pytest

from ptrain.errors import SpecError
from ptrain.spec.load import load

SHARDS = {"dp_shard": "S*,S,S,R"}


@pytest.mark.parametrize(
    ("changes", "place", "finding", "remedy"),
    [
        ({"mesh": {"dp_shard": 131072, "dp_replicate": 2}, "placement": SHARDS | {
            "dp_replicate": "R,R,R,R"}}, "mesh",
         "mesh dp_shard=131072 x dp_replicate=2 has 262144 ranks; the limit is 131072",
         "Use a smaller mesh."),
        ({"mesh": {"dp_shard": "auto", "dp_replicate": "auto"}}, "mesh.dp_replicate",
         "only one axis size may be auto; got dp_shard and dp_replicate",
         "Set all but one to a number, or let `ptrain select SPEC` find all of them."),
        ({"mesh": {"dp": 2}, "placement": SHARDS | {"dp_replicate": "R,R,R,R"}}, "mesh.dp",
         "`dp` is an alias of dp_replicate or dp_shard, but the placement has dp_replicate and "
         "dp_shard",
         "Set the sizes of `dp_replicate` and `dp_shard`."),
        ({"mesh": {"dp": 2}, "placement": None}, "mesh.dp",
         "`dp` is an alias of dp_replicate or dp_shard, but the placement has neither",
         "Set the sizes of `dp_replicate` and `dp_shard`."),
        ({"mesh": {"dp": 2, "dp_shard": 2}}, "mesh.dp",
         "`dp` is an alias of a data axis, but dp_shard is set too", "Remove `dp` or `dp_shard`."),
        ({"placement": None}, "mesh.dp_shard",
         "the mesh has dp_shard: 2, but the placement has no entry for dp_shard",
         "Add `placement.dp_shard=S*,S,S,R`, four other modes, or a strategy name."),
        ({"mesh": {"dp_shard": 2, "pp": 2}}, "placement",
         "the mesh has pp: 2, but the placement has no entry for pp",
         "Add `placement.pp=S,S,S,R`."),
        ({"placement": SHARDS | {"tp": "S,S,S,R"}}, "placement.tp",
         "the placement has an entry for tp, but the mesh has no such axis",
         "Add `mesh.tp=N` (1 is allowed), or remove the entry."),
        ({"offload": {"tier": "file"}}, "offload.tier",
         "tier file has no effect: no state has mode O", ("Use mode `O` for a state, or "
                                                         "remove `offload.tier`.")),
        ({"batch": {"global": 15, "micro": 2, "sequence": 8}}, "batch.global",
         "global=15 is not a multiple of micro=2 x data degree=2 = 4",
         "Use `batch.global=12` or `batch.global=16`."),
        ({"batch": {"global": 16, "micro": 2, "accumulate": 3, "sequence": 8}}, "batch.global",
         "global=16 is not micro=2 x accumulate=3 x data degree=2 = 12",
         "Use `batch.global=12`, or `batch.accumulate=4`."),
        ({"batch": {"global": 15, "micro": 2, "accumulate": 3, "sequence": 8}}, "batch.global",
         "global=15 is not micro=2 x accumulate=3 x data degree=2 = 12", "Use `batch.global=12`."),
        ({"batch": {"global": 3, "micro": 2, "sequence": 8}}, "batch.global",
         "global=3 is not a multiple of micro=2 x data degree=2 = 4", "Use `batch.global=4`."),
        ({"batch": {"global": "9T tokens", "sequence": 1}}, "batch.global",
         "9T tokens are 9000000000000 samples; a step needs 1..2147483647", "Use fewer tokens."),
        ({"model": {"layers": 2, "heads": 3}}, "model",
         "the model is incomplete: missing hidden, vocab, ffn", None),
        ({"model": {"target": "a:b", "layers": 2}}, "model.layers",
         "layers belongs to built-in models, but `target` builds the model",
         "Put it into `model.arguments`, or remove it."),
        ({"model": {"target": "a:b"}, "attention": "eager"}, "attention",
         "eager has no effect: the function of `model.target` decides its attention",
         "Remove `attention`, or put it into `model.arguments`."),
        ({"model": {"hf": "A", "tied": True}}, "model.tied",
         "tied belongs to built-in models, but `hf` names a Transformers class",
         "Put the class's config fields into `model.config`, or remove it."),
        ({"model": {"preset": "llama-tiny", "experts_per_token": 2}}, "model.experts_per_token",
         "the model has no experts (experts is not set)",
         "Remove `model.experts_per_token`, or set `model.experts`."),
        ({"expert": {"a": 1}}, "expert",
         "not supported yet: expert is reserved", "Remove `expert`."),
        ({"model": None}, "model", "the required key 'model' is missing",
         "Add `model: {preset: llama-tiny}`."),
        ({"context": {}}, "context.attention", ("the required key 'attention' is missing in "
                                               "context"),
         "Add `context.attention=zigzag`."),
        ({"batch": {"micro": 2}}, "batch.sequence", ("the required key 'sequence' is missing "
                                                    "in batch"),
         "Add `batch.sequence=128`."),
        ({"placement": {"dp_shard": "S*,S,S"}}, "placement.dp_shard",
         "a placement has 4 modes (parameters, optimizer, gradients, activations); got 3",
         "Use four modes: `dp_shard: [S*, S, S, R]`."),
        ({"compile": "head"}, "compile",
         "must be none, block, loss or all; got the string 'head'", None),
        ({"model": {"target": 3}, "attention": "eager"}, "model.target",
         "must be package.module:function; got the number 3", ("Put it in quotes to make it a "
                                                              "string.")),
        ({"model": {"preset": "llama-tiny", "config": {}}}, "model.config",
         "config requires `hf`", "Add `model.hf`, or remove this key."),
        ({"model": {"preset": "llama-tiny", "arguments": {}}}, "model.arguments",
         "arguments require `target`", "Add `model.target`, or remove this key."),
        ({"model": {"preset": "llama-tiny", "blocks": "a"}}, "model.blocks",
         "`blocks` has no effect for built-in models",
         "Remove `model.blocks`, or set `model.target` or `model.hf`."),
        ({"cluster": {"devices": 2}}, "cluster",
         "the cluster is incomplete: missing device_memory, intra_node_bandwidth", None),
        ({"data": {"corpus": "synthetic", "path": "a"}}, "data.path",
         "both a corpus and a path are given", "Remove one of the two."),
        ({"data": {"loss_mask": "m.npy"}}, "data.loss_mask",
         "a loss mask needs a token file, and `data.path` is not set",
         "Add `data.path=FILE`, or use `data.ignored=[ID, …]`."),
        ({"data": {"target": "a:b", "ignored": [0]}, "loss": {"target": "a:c"}}, "data.ignored",
         "`data.target` provides samples that are not tokens; this key selects target tokens",
         "Remove `data.ignored`."),
        ({"data": {"path": 3}}, "data.path", "must be a text; got the number 3",
         "Put it in quotes to make it a string."),
        ({"recompute": {"policy": "none"}, "activations": "M"}, "recompute",
         "policy none contradicts activations M: activations would be neither saved nor "
         "recomputed",
         "Use `recompute=full`, `recompute=selective` or `activations=R`."),
        ({"recompute": {"policy": "full", "keep": ["matmul"]}, "activations": "M"},
         "recompute.keep", "`keep` and policy full both select what is saved",
         "Remove one of the two."),
        ({"activations": "M", "placement": {"dp_shard": "S*,S,S,O"}}, "activations",
         "M, but placement.dp_shard.activations is O",
         "Remove `activations`, or use `placement.dp_shard.activations=R`."),
        ({"activations": {"0-7": "S", "8-": "R"}}, "activations",
         ("S of blocks 0-7: activations can only be sharded on a named axis, because its "
         "ranks must hold the same tokens"),
         "Use `R`, `M` or `O`."),
        ({"loss": {"kind": "cross-entropy", "chunk": 64}}, "loss.chunk",
         "cross-entropy computes all logits at once",
         "Remove `chunk`, or use `loss.kind=chunked`."),
        ({"loss": {"kind": "fused", "fused": False}}, "loss.fused",
         "false contradicts kind fused", "Remove one of the two."),
        ({"loss": "vocab-parallel"}, "loss",
         "vocab-parallel needs at least two tp ranks",
         "Use `loss=cross-entropy`, or use `mesh.tp=2` with `placement.tp=S,S,S,R`."),
    ],
)  # fmt: skip
def test_a_spec_from_python_is_rejected_in_the_same_words(changes, place, finding, remedy):
    """With one fault alone: what cannot be known without the section at fault is not looked at."""
    base = {"model": {"preset": "llama-tiny"}, "mesh": {"dp_shard": 2}, "placement": SHARDS}
    spec = base | {"batch": {"global": 16, "micro": 2, "sequence": 8}} | changes
    with pytest.raises(SpecError) as caught:
        load({key: value for key, value in spec.items() if value is not None})
    (fault,) = caught.value.faults
    assert (fault.place, fault.finding) == (place, finding)
    assert remedy is None or fault.remedy == remedy


@pytest.mark.parametrize(
    ("world_size", "finding", "remedy"),
    [
        (3, "mesh dp_replicate=2 x dp_shard=2 needs 4 ranks, but 3 were started",
         "Start 4 ranks, or use a mesh with 3 ranks."),
        (6, "mesh dp_replicate=2 x dp_shard=2 needs 4 ranks, but 6 were started",
         "Start 4 ranks, or use `mesh.dp_shard=3`."),
    ],
)  # fmt: skip
def test_other_ranks_than_were_started_are_rejected_with_the_nearest_mesh(
    world_size, finding, remedy
):
    with pytest.raises(SpecError) as caught:
        load("hsdp", ["mesh={dp_replicate: 2, dp_shard: 2}"], world_size=world_size)
    (fault,) = caught.value.faults
    assert (fault.place, fault.finding, fault.remedy) == ("mesh", finding, remedy)


@pytest.mark.parametrize(
    ("name", "finding", "remedy"),
    [
        ("h100-8", "'h100-8' is a cluster, not a spec", "Use `cluster.preset=h100-8`"),
        ("llama-tiny", "'llama-tiny' is a model, not a spec", "Use `model.preset=llama-tiny`"),
        ("zreo3", "there is no spec named 'zreo3'", "Did you mean 'zero3'? Run `ptrain specs`"),
        ("b" * 61, f"there is no spec named {'b' * 57 + '...'!r}", "Run `ptrain specs`"),
        ("b" * 60, f"there is no spec named {'b' * 60!r}", "Run `ptrain specs`"),
    ],
)
def test_an_unknown_spec_name_lists_the_known_ones(name, finding, remedy):
    with pytest.raises(SpecError) as caught:
        load(name)
    (fault,) = caught.value.faults
    assert (fault.place, fault.finding) == ("", finding)
    assert fault.remedy.startswith(remedy)
