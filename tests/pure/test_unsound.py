"""What a section must satisfy to have a value at all, and what is said where it does not: one
fault, word for word."""

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
         "mesh dp_shard=131072 x dp_replicate=2 has 262144 ranks; a mesh has 1..131072",
         "lower a degree"),
        ({"mesh": {"dp_shard": "auto", "dp_replicate": "auto"}}, "mesh.dp_replicate",
         "one degree may be auto; got dp_shard and dp_replicate",
         "write one of them as a number, or have all of them chosen: ptrain select SPEC"),
        ({"mesh": {"dp": 2}, "placement": SHARDS | {"dp_replicate": "R,R,R,R"}}, "mesh.dp",
         "dp stands for dp_replicate or dp_shard, and the placement names dp_replicate and "
         "dp_shard",
         "write the degrees of dp_replicate and dp_shard"),
        ({"mesh": {"dp": 2}, "placement": None}, "mesh.dp",
         "dp stands for dp_replicate or dp_shard, and the placement names neither",
         "write the degrees of dp_replicate and dp_shard"),
        ({"mesh": {"dp": 2, "dp_shard": 2}}, "mesh.dp",
         "dp stands for a data axis, and dp_shard is given too", "remove dp or dp_shard"),
        ({"placement": None}, "mesh.dp_shard",
         "the mesh has dp_shard: 2, and the placement has no tuple for it",
         "write placement.dp_shard=S*,S,S,R, four other modes, or a strategy's name"),
        ({"mesh": {"dp_shard": 2, "pp": 2}}, "placement",
         "the mesh has pp: 2, and the placement has no tuple for it",
         "write placement.pp=S,S,S,R"),
        ({"placement": SHARDS | {"tp": "S,S,S,R"}}, "placement.tp",
         "the placement has a tuple for tp, and the mesh has no such axis",
         "write mesh: {tp: N} (1 is a degree too), or remove the tuple"),
        ({"offload": {"tier": "file"}}, "offload.tier",
         "tier file says where O is, and no state is O", "write O for a state, or remove tier"),
        ({"batch": {"global": 15, "micro": 2, "sequence": 8}}, "batch.global",
         "global=15 is not a multiple of micro=2 x data degree=2 = 4",
         "write batch.global=12 or 16"),
        ({"batch": {"global": 16, "micro": 2, "accumulate": 3, "sequence": 8}}, "batch.global",
         "global=16 is not micro=2 x accumulate=3 x data degree=2 = 12",
         "write batch.global=12, or batch.accumulate=4"),
        ({"batch": {"global": 15, "micro": 2, "accumulate": 3, "sequence": 8}}, "batch.global",
         "global=15 is not micro=2 x accumulate=3 x data degree=2 = 12", "write batch.global=12"),
        ({"batch": {"global": 3, "micro": 2, "sequence": 8}}, "batch.global",
         "global=3 is not a multiple of micro=2 x data degree=2 = 4", "write batch.global=4"),
        ({"batch": {"global": "9T tokens", "sequence": 1}}, "batch.global",
         "9T tokens are 9000000000000 samples; a step takes 1..2147483647", "write fewer tokens"),
        ({"model": {"layers": 2, "heads": 3}}, "model",
         "the model's shape is incomplete: missing hidden, vocab, ffn", None),
        ({"model": {"target": "a:b", "layers": 2}}, "model.layers",
         "target gives the whole model; layers belongs to a built-in one",
         "put it into model.arguments, or remove it"),
        ({"model": {"target": "a:b"}, "attention": "eager"}, "attention",
         "eager, but a target computes attention as its function has it",
         "remove attention, and say it in model.arguments"),
        ({"model": {"hf": "A", "tied": True}}, "model.tied",
         "hf gives the whole model; tied does not belong to it",
         "write model.config with the class's own fields, or remove it"),
        ({"model": {"preset": "llama-tiny", "experts_per_token": 2}}, "model.experts_per_token",
         "a block has no experts", "remove experts_per_token, or write model.experts"),
        ({"expert": {"a": 1}}, "expert",
         "not yet: expert is in the grammar, and nothing executes it", "remove expert"),
        ({"model": None}, "model", "the key 'model' is missing",
         "write model: {preset: llama-tiny}"),
        ({"context": {}}, "context.attention", "the key 'attention' is missing in context",
         "write context.attention=zigzag"),
        ({"batch": {"micro": 2}}, "batch.sequence", "the key 'sequence' is missing in batch",
         "write batch.sequence=128"),
        ({"placement": {"dp_shard": "S*,S,S"}}, "placement.dp_shard",
         "a tuple has 4 modes, for Θ, Ω, G, A; got 3", "write four: dp_shard: [S*, S, S, R]"),
        ({"compile": True}, "compile",
         "not yet: compile true is in the grammar, and nothing executes it",
         "what works today: compile: false"),
        ({"model": {"target": 3}, "attention": "eager"}, "model.target",
         "must be package.module:function; got the number 3", "put it in quotes to make it a text"),
        ({"model": {"preset": "llama-tiny", "config": {}}}, "model.config",
         "config belongs to an hf class", "add model.hf, or remove it"),
        ({"model": {"preset": "llama-tiny", "arguments": {}}}, "model.arguments",
         "arguments belong to a target", "add model.target, or remove it"),
        ({"model": {"preset": "llama-tiny", "blocks": "a"}}, "model.blocks",
         "the blocks of a built-in model are known",
         "remove blocks, or write model.target or model.hf"),
        ({"cluster": {"devices": 2}}, "cluster",
         "the cluster is incomplete: missing device_memory, intra_node_bandwidth", None),
        ({"data": {"corpus": "synthetic", "path": "a"}}, "data.path",
         "both a corpus and a path are given", "remove one of the two"),
        ({"data": {"loss_mask": "m.npy"}}, "data.loss_mask",
         "it stands beside a token file of one's own, and there is no path",
         "add data.path=FILE, or write data.ignored=[ID, …]"),
        ({"data": {"target": "a:b", "ignored": [0]}, "loss": {"target": "a:c"}}, "data.ignored",
         "target gives samples that are no tokens, and it says which of them count",
         "remove ignored"),
        ({"data": {"path": 3}}, "data.path", "must be a text; got the number 3",
         "put it in quotes to make it a text"),
        ({"recompute": {"policy": "none"}, "activations": "M"}, "recompute",
         "none, and activations are M: they would be neither kept nor computed again",
         "write recompute=full or recompute=selective, or activations=R"),
        ({"recompute": {"policy": "full", "keep": ["matmul"]}, "activations": "M"},
         "recompute.keep", "keep says what is kept of a block, and policy full says it too",
         "remove one of the two"),
        ({"activations": "M", "placement": {"dp_shard": "S*,S,S,O"}}, "activations",
         "M here and O in placement.dp_shard.activations: activations belong to the rank, and are "
         "kept in one way", "remove activations, or write placement.dp_shard.activations=R"),
        ({"activations": {"0-7": "S", "8-": "R"}}, "activations",
         "S of blocks 0-7: slices of activations are those of an axis whose ranks hold the same "
         "tokens, and here no axis is named",
         "write R, M or O here"),
        ({"loss": {"kind": "cross-entropy", "chunk": 64}}, "loss.chunk",
         "cross-entropy has all logits at once", "remove chunk, or write loss.kind=chunked"),
        ({"loss": {"kind": "fused", "fused": False}}, "loss.fused",
         "false, and the kind is fused", "remove one of the two"),
        ({"loss": "vocab-parallel"}, "loss",
         "vocab-parallel: no vocabulary is cut, since tp has no two ranks",
         "write loss=cross-entropy, or mesh.tp=2 with placement.tp=S,S,S,R"),
    ],
)  # fmt: skip
def test_a_spec_from_python_is_refused_in_the_same_words(changes, place, finding, remedy):
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
        (3, "mesh dp_replicate=2 x dp_shard=2 needs 4 ranks; 3 were started",
         "start 4 ranks, or give a mesh of 3 ranks"),
        (6, "mesh dp_replicate=2 x dp_shard=2 needs 4 ranks; 6 were started",
         "start 4 ranks, or set mesh.dp_shard=3"),
    ],
)  # fmt: skip
def test_other_ranks_than_were_started_are_refused_with_the_nearest_mesh(
    world_size, finding, remedy
):
    with pytest.raises(SpecError) as caught:
        load("hsdp", ["mesh={dp_replicate: 2, dp_shard: 2}"], world_size=world_size)
    (fault,) = caught.value.faults
    assert (fault.place, fault.finding, fault.remedy) == ("mesh", finding, remedy)


@pytest.mark.parametrize(
    ("name", "finding", "remedy"),
    [
        ("h100-8", "'h100-8' is a cluster, not a spec", "write cluster.preset=h100-8"),
        ("llama-tiny", "'llama-tiny' is a model, not a spec", "write model.preset=llama-tiny"),
        ("zreo3", "there is no spec named 'zreo3'", "did you mean 'zero3'? `ptrain specs`"),
        ("b" * 61, f"there is no spec named {'b' * 57 + '...'!r}", "`ptrain specs`"),
        ("b" * 60, f"there is no spec named {'b' * 60!r}", "`ptrain specs`"),
    ],
)
def test_a_name_that_no_spec_bears_says_what_bears_it(name, finding, remedy):
    with pytest.raises(SpecError) as caught:
        load(name)
    (fault,) = caught.value.faults
    assert (fault.place, fault.finding) == ("", finding)
    assert fault.remedy.startswith(remedy)
