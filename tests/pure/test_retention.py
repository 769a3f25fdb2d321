"""Which checkpoints stay after a save, and how the others are removed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ptrain.spec.job import KeepSpec
from ptrain.train import manifest
from tests.pure.run_folders import write_run

steps_of_runs = st.sets(st.integers(0, 60), min_size=1, max_size=12)
keeps = st.builds(KeepSpec, last=st.integers(1, 5), every=st.integers(0, 20))


@given(steps_of_runs, keeps)
def test_of_sound_checkpoints_the_newest_and_the_multiples_stay(steps, keep):
    stay = set(sorted(steps)[-keep.last :])
    stay |= {step for step in steps if keep.every and step % keep.every == 0}
    assert steps - manifest.surplus_steps(steps, steps, keep) == stay


@given(steps_of_runs, keeps, st.data())
def test_a_damaged_checkpoint_takes_the_place_of_no_sound_one(steps, keep, data):
    sound = data.draw(st.sets(st.sampled_from(sorted(steps))))
    left = steps - manifest.surplus_steps(steps, sound, keep)
    assert left >= set(sorted(sound)[-keep.last :])
    assert max(steps) in left
    assert not manifest.surplus_steps(left, sound & left, keep)


@given(st.lists(st.integers(1, 400), min_size=1, max_size=30, unique=True).map(sorted), keeps)
def test_removal_after_each_save_leaves_what_one_removal_at_the_end_leaves(steps, keep):
    left: set[int] = set()
    for step in steps:
        left |= {step}
        left -= manifest.surplus_steps(left, left, keep)
    assert left == set(steps) - manifest.surplus_steps(steps, steps, keep)


def names(parent):
    return [manifest.step_in_name(path) for path in manifest.complete_checkpoints(parent)]


def test_folders_are_removed_except_those_that_stay(tmp_path):
    first, *_, newest = write_run(tmp_path, 5, 10, 15, 20, 25, 30)
    parent = first.parent
    assert list(manifest.remove_surplus(parent, None)) == []
    (newest / "__0_0.distcp").write_bytes(b"short")
    aside = first.rename(parent / f"{first.name}.aside-1234")
    removed = list(manifest.remove_surplus(parent, KeepSpec(last=2, every=10)))
    assert [manifest.step_in_name(path) for path in removed] == [15]
    assert names(parent) == [30, 25, 20, 10]
    assert aside.is_dir() and not manifest.incomplete_checkpoints(parent)


def test_a_removal_that_is_killed_leaves_nothing_that_counts_as_a_checkpoint(tmp_path, monkeypatch):
    parent = write_run(tmp_path, 1, 2, 3)[0].parent

    def kill(folder):
        (folder / manifest.NAME).unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(manifest.shutil, "rmtree", kill)
        list(manifest.remove_surplus(parent, KeepSpec(last=1)))
    assert names(parent) == [3, 2]
    assert len(manifest.incomplete_checkpoints(parent)) == 1
    list(manifest.remove_surplus(parent, KeepSpec(last=1)))
    assert names(parent) == [3]
