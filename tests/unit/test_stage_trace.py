"""The tables of stages against a fresh trace, and a stage's passes against those of torch."""

from __future__ import annotations

import json

import pytest
import torch

from ptrain.derivation import archive
from ptrain.derivation.archive import TablePart
from ptrain.models.trace import Born, Completion, Died
from ptrain.traces import stage_tables as tables
from ptrain.traces.stage_tables import Case, StageTableBuilder, TableSetting, passes_of
from ptrain.traces.tensor_tables import KINDS

SETTINGS = {name: (alone, cuts) for name, alone, cuts in tables.settings()}
DEFAULT = ("llama-untied-gqa-bf16", "gpt-tied-dropout-bf16-one")


def written(setting: TableSetting, most: int = tables.MOST) -> object:
    return json.loads(json.dumps(StageTableBuilder(setting).build(most)))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == DEFAULT[0] else pytest.mark.nightly)
        for name in SETTINGS
    ],
)
def test_the_committed_tables_are_what_the_command_writes(name):
    stored = archive.table(TablePart.STAGE, name)
    alone, _ = SETTINGS[name]
    found = written(alone)
    assert isinstance(found, dict)
    if stored["torch"] != found["torch"]:
        pytest.skip(f"traced with torch {stored['torch']}, this is {found['torch']}")
    assert found == stored


def test_every_table_that_a_stage_can_ask_for_is_committed():
    assert archive.names(TablePart.STAGE) == archive.names(TablePart.STAGE_SLICES) == set(SETTINGS)
    for name in SETTINGS:
        stored = archive.table(TablePart.STAGE_SLICES, name)
        assert set(stored) == {kind.name for kind in KINDS}


@pytest.mark.nightly
@pytest.mark.parametrize("name", DEFAULT)
def test_begin_block_and_end_make_a_stage_of_any_length(name):
    alone, _ = SETTINGS[name]
    assert written(alone, 4) == written(alone)


@pytest.mark.parametrize("place", tables.PLACES[1:])
def test_both_halves_leave_what_the_whole_backward_pass_leaves(place):
    """All that forward and backward allocated is freed, but for what is handed on, the gradients
    and the loss."""
    alone, _ = SETTINGS[DEFAULT[0]]
    left = []
    for in_halves in (False, True):
        found, _ = passes_of(alone, Case(place, 2, in_halves), torch.bfloat16, None)
        events = [event for events in found.events.values() for event in events]
        gone = {event.id for event in events if isinstance(event, Died | Completion)}
        alive = sorted(
            found.sizes[event.id]
            for event in events
            if isinstance(event, Born) and event.id not in gone
        )
        complete = sorted(event.parameter for event in events if isinstance(event, Completion))
        left.append((complete, alive))
    (names, whole), (again, halves) = left
    assert names == again
    # what is left of the graph goes in the end of the half of the weights, and is not listed
    assert set(whole) <= set(halves)
