"""Flat units to the byte: memory, traffic and copies between tiers are exact, and peaks are within
a few scalars (2 % is claimed; nothing that grows with the model may hide in it)."""

from __future__ import annotations

import pytest

from ptrain.algebra.legality import require_runnable
from ptrain.derivation.estimate import derive
from ptrain.meters.measure import join_estimates
from ptrain.plan.lower import lower
from ptrain.report.record import compare_estimates
from ptrain.spec.load import load
from ptrain.spec.spec import Spec
from ptrain.steps.step import LONG_NORM
from ptrain.steps.wraps import FlatUnits
from ptrain.traces.facts import facts_of
from ptrain.train.loop_inputs import FIRST_STEADY
from tests.gloo.rows import ROWS, Setting, default_setting, pairwise_settings
from tests.gloo.runs import train_on_rank
from tests.gloo.test_exact import failed_checks
from tests.ranks import Ranks

pytestmark = pytest.mark.gloo

STEPS, MEASURED = FIRST_STEADY + 1, FIRST_STEADY
SCALARS = 64  # bytes: the copy of a loss, the operators' scalars of a norm

# One of each tier and mode, and each dial once; the others at night.
CHOSEN = (
    default_setting("nvme").with_dials(accumulate=3, prefetch=1, layout="megatron18"),
    default_setting("zero-offload").with_dials(layout="fp16", unit="sub-block", update="device"),
    default_setting("muon").with_dials(layout="zero20", accumulate=3),
    default_setting("materialized-from-the-host").with_dials(prefetch=2, clip=None),
    default_setting("backward-update-sharded").with_dials(layout="fsdp-mixed"),
    default_setting("zero1").with_dials(
        layout="fsdp-mixed", overlap="backward", gather_after_update="next-forward"
    ),
)


def is_flat(setting: Setting) -> bool:
    """Return True if no torch wrapper executes the plan."""
    spec = setting.spec()
    return isinstance(lower(spec, facts_of(spec)).wrap, FlatUnits)


def differences(ranks: Ranks, setting: Setting) -> list[str]:
    """Return the checks that differ, with the setting's name."""
    try:
        found = inexact_checks(ranks, setting.spec())
    except AssertionError as error:
        found = [str(error)[-1500:]]
    return [f"{setting}: {line}" for line in found]


def inexact_checks(ranks: Ranks, spec: Spec) -> list[str]:
    """Return rows that are not exact, and peaks that differ by more than scalars."""
    reports = ranks.run(spec.world_size, train_on_rank, spec, STEPS, MEASURED)
    measured = join_estimates([each.measured for each in reports if each.measured])
    exact = derive(spec, facts_of(spec)).exact
    found = failed_checks(compare_estimates(exact, measured))
    peaks = {(row.phase, row.rank): row.device_bytes for row in measured.peak}
    for row in exact.peak:
        if abs(row.device_bytes - peaks[row.phase, row.rank]) > SCALARS:
            found.append(
                f"peak {row.phase} rank {row.rank}: predicted {row.device_bytes}, "
                f"measured {peaks[row.phase, row.rank]}"
            )
    return found


@pytest.mark.parametrize("name", ["zero1", "zero3", "fsdp-offload"])
def test_row_by_row_norms_of_long_tensors_are_predicted(ranks: Ranks, name: str) -> None:
    """The strategies' model has such a long tensor; the rows' model does not."""
    small = ["model.layers=2", "batch={global: 4, micro: 1, sequence: 32}"]
    spec = require_runnable(load(name, small))
    assert max(tensor.numel for tensor in facts_of(spec).tensors) > 2 * LONG_NORM
    assert not inexact_checks(ranks, spec)


@pytest.mark.parametrize("setting", CHOSEN, ids=str)
def test_a_step_of_flat_units_is_predicted_to_the_byte(ranks: Ranks, setting: Setting) -> None:
    assert is_flat(setting)
    assert not differences(ranks, setting)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("row", ROWS)
def test_every_pair_of_layouts_and_dials_is_predicted_to_the_byte(ranks: Ranks, row: str) -> None:
    settings = [setting for setting in pairwise_settings(row) if is_flat(setting)]
    found = [line for setting in settings for line in differences(ranks, setting)]
    assert not found, "\n".join(found)
