"""The committed tables of a block over cp, compared with the closed forms of traffic and
operations."""

from __future__ import annotations

from collections import Counter

import pytest

from ptrain.axes.context.attention import ContextPart, computed_scores, context_of, part_at
from ptrain.cost import Collective, Phase
from ptrain.derivation import archive
from ptrain.derivation.archive import TablePart
from ptrain.derivation.estimate import derive
from ptrain.derivation.layers import is_tabulated
from ptrain.derivation.tables import RankCut, setting_of
from ptrain.derivation.work import model_work
from ptrain.facts.model import InnerCollective, Operator
from ptrain.spec.cluster import OperatorKind
from ptrain.spec.load import load
from tests.oracles.context import gathered_bytes, keys_and_values, layer_exchange
from tests.saved_tensors import saved_bytes
from tests.timelines import model_timeline

HYBRID = {"ulysses": 2, "ring": 4}
WAYS = ("ring", "zigzag", "all-gather", "ulysses", HYBRID)


def spec_of(attention, ranks=8, **more):
    mode = "S*" if attention == "all-gather" else "S"
    words = {
        "name": "long",
        "model": {"preset": "llama-tiny", "layers": 2, "heads": 16, "kv_heads": 8, "hidden": 256},
        "mesh": {"cp": ranks},
        "placement": {"cp": f"R,R,R,{mode}"},
        "precision": {"layout": "zero16"},
        "batch": {"global": 1, "micro": 1, "sequence": 2048},
        "context": {"attention": attention},
        **more,
    }
    return load(words).spec


def works(spec):
    derivation = derive(spec)
    return [
        model_work(spec, derivation.plan, derivation.facts, index).layers[0]
        for index in range(spec.world_size)
    ]


@pytest.mark.parametrize("attention", WAYS, ids=str)
def test_a_layers_messages_are_those_of_the_closed_form(attention):
    spec = spec_of(attention)
    assert is_tabulated(spec)
    step = context_of(spec)
    expected = dict(layer_exchange(spec, step))
    for layer in works(spec):
        calls, sizes = Counter(), Counter()
        for phase, work in ((Phase.FORWARD, layer.forward), (Phase.BACKWARD, layer.backward)):
            for item in work:
                if isinstance(item, InnerCollective):
                    is_hop = item.collective is Collective.SEND
                    key = (Collective.ALL_TO_ALL if is_hop else item.collective), phase
                    ranks = item.ranks or spec.world_size
                    sent = item.payload if is_hop else item.payload * (ranks - 1) // ranks
                    calls[key] += item.times
                    sizes[key] += item.times * sent
        assert {key: (calls[key], sizes[key]) for key in calls} == expected


@pytest.mark.parametrize("attention", WAYS, ids=str)
def test_kernels_are_given_the_scores_of_the_blocks_that_meet(attention):
    spec = spec_of(attention)
    of_rank = []
    for layer in works(spec):
        scores = [
            item.times * item.dimensions[1] * item.dimensions[2] * item.dimensions[3]
            for item in layer.forward
            if isinstance(item, Operator) and item.kind is OperatorKind.ATTENTION
        ]
        of_rank.append(sum(scores) // spec.model.heads)
    assert tuple(of_rank) == computed_scores(context_of(spec))


def test_gathered_keys_are_saved_in_addition_to_the_tensors_of_a_ring():
    rings, gathered = spec_of("ring"), spec_of("all-gather")
    step = context_of(gathered)
    kept = [
        saved_bytes(model_timeline(setting_of(spec, RankCut(context=part_at(context_of(spec), 3)))))
        for spec in (rings, gathered)
    ]
    own = keys_and_values(gathered, gathered.model, step)
    more = gathered_bytes(gathered, gathered.model, step) - own
    assert kept[1] - kept[0] == gathered.model.layers * more


def test_a_table_for_many_ranks_extrapolates_few_ranks():
    part = ContextPart(kind="zigzag", before=40, behind=23)
    assert (part.name, part.table_place, part.ring_degree) == ("3-3", "2-2", 64)
    assert part_at(context_of(spec_of("zigzag")), 7).name == "3-0"


@pytest.mark.parametrize(
    "more",
    (
        {"batch": {"global": 2, "micro": 2, "sequence": 2048}},
        {"precision": {"layout": "fp32"}},
        {"recompute": "selective", "activations": "M"},
    ),
    ids=("samples", "fp32", "selective"),
)
def test_models_without_a_table_are_traced(more):
    assert not is_tabulated(spec_of("zigzag", **more))


def test_every_kind_has_a_table():
    names = archive.table_names(TablePart.CONTEXT)
    kinds = {name.rpartition("-")[2] for name in names if name.startswith("llama-gqa-bf16-one")}
    assert kinds == {"ring", "zigzag", "gather", "ulysses", "hybrid"}
