"""Replays of a unit's gradients, and of a step of units, have unchanged levels, peaks, traffic and
residents in every setting. `python -m tests.pure.replay_digests` locates a digest that
differs."""

from __future__ import annotations

from dataclasses import fields

import pytest

from tests.pure.replay_digests import Group, committed_digests, digest, groups, settings
from tests.pure.unit_replays import Life

GROUPS = groups()
GRADIENTS = [group for group in GROUPS if group.gather is None]
STEPS = [group for group in GROUPS if group.gather is not None]
BY_DEFAULT = [*GRADIENTS[::7], *STEPS[::47]]  # in strides that share no factor with any dial
OTHERS = [group for group in GROUPS if group not in BY_DEFAULT]
SETTINGS = 15_168  # of tuples, layouts, ways to reduce, overlap and micro-batches


@pytest.mark.parametrize("group", BY_DEFAULT, ids=lambda group: group.name)
def test_units_live_as_they_did(group: Group):
    assert digest(group) == committed_digests()[group.name]


@pytest.mark.nightly
@pytest.mark.parametrize("group", OTHERS, ids=lambda group: group.name)
def test_units_live_as_they_did_in_all_other_settings(group: Group):
    assert digest(group) == committed_digests()[group.name]


def test_there_is_a_digest_of_each_group_and_they_are_of_15_168_settings():
    assert list(committed_digests()) == [group.name for group in GROUPS]
    assert (
        len(set(committed_digests().values())) > len(GROUPS) / 2
    )  # overlap changes nothing in some
    numbers = (len(settings(group.layout, group.via, group.micro_batches)) for group in GRADIENTS)
    assert sum(numbers) == SETTINGS


def test_the_default_settings_cover_each_value_of_each_option():
    for field in fields(Group):
        everywhere, played = (
            {getattr(group, field.name) for group in some} for some in (STEPS, STEPS[::47])
        )
        assert played == everywhere, field.name


@pytest.mark.parametrize(
    "group",
    [GRADIENTS[7], pytest.param(STEPS[7], marks=pytest.mark.nightly)],
    ids=["gradients", "step"],
)
def test_a_byte_more_for_one_moment_changes_the_digest(group: Group, monkeypatch):
    before, begin = digest(group), Life.begin

    def wasteful(life: Life, phase: object) -> None:
        begin(life, phase)
        life.allocate(1)
        life.allocate(-1)

    monkeypatch.setattr(Life, "begin", wasteful)
    assert digest(group) != before
