"""Flat units to the byte: what a step keeps, sends and copies between tiers, and its peaks within a
few scalars (2 % is what is claimed; nothing that grows with the model may hide in it)."""

from __future__ import annotations

import pytest

from ptrain.derivation.estimate import derive
from ptrain.meters.measure import join_estimates
from ptrain.models.facts import facts_of
from ptrain.plan.lower import lower
from ptrain.plan.step import FlatUnits
from ptrain.report.record import compare
from tests.gloo.rows import ROWS, Setting, default, pairwise
from tests.gloo.runs import train
from tests.gloo.test_exact import failing
from tests.ranks import Ranks

pytestmark = pytest.mark.gloo

STEPS, MEASURED = 4, 3
SCALARS = 64  # bytes: the copy of a loss, the operators' scalars of a norm

# One of each tier and mode, and each dial once; the others at night.
CHOSEN = (
    default("nvme").with_dials(accumulate=3, prefetch=1, layout="megatron18"),
    default("zero-offload").with_dials(layout="fp16", unit="sub-block", update="device"),
    default("muon").with_dials(layout="zero20", accumulate=3),
    default("materialized-from-the-host").with_dials(prefetch=2, clip=None),
    default("backward-update-sharded").with_dials(layout="fsdp-mixed"),
    default("zero1").with_dials(
        layout="fsdp-mixed", overlap="backward", gather_after_update="next-forward"
    ),
)


def is_flat(setting: Setting) -> bool:
    """Whether no part of torch executes it."""
    spec = setting.spec()
    return isinstance(lower(spec, facts_of(spec).unit_modules).wrap, FlatUnits)


def differences(ranks: Ranks, setting: Setting) -> list[str]:
    """Rows that are not exact, and peaks that are off by more than scalars."""
    spec = setting.spec()
    try:
        reports = ranks.run(setting.size, train, spec, STEPS, MEASURED)
    except AssertionError as error:
        return [f"{setting}: {str(error)[-1500:]}"]
    measured = join_estimates([each.measured for each in reports if each.measured])
    exact = derive(spec, facts_of(spec)).exact
    found = failing(compare(exact, measured))
    peaks = {(row.phase, row.rank): row.device_bytes for row in measured.peak}
    for row in exact.peak:
        if abs(row.device_bytes - peaks[row.phase, row.rank]) > SCALARS:
            found.append(
                f"peak {row.phase} rank {row.rank}: predicted {row.device_bytes}, "
                f"measured {peaks[row.phase, row.rank]}"
            )
    return [f"{setting}: {line}" for line in found]


@pytest.mark.parametrize("setting", CHOSEN, ids=str)
def test_a_step_of_flat_units_is_predicted_to_the_byte(ranks: Ranks, setting: Setting) -> None:
    assert is_flat(setting)
    assert not differences(ranks, setting)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("row", ROWS)
def test_every_pair_of_layouts_and_dials_is_predicted_to_the_byte(ranks: Ranks, row: str) -> None:
    settings = [setting for setting in pairwise(row) if is_flat(setting)]
    found = [line for setting in settings for line in differences(ranks, setting)]
    assert not found, "\n".join(found)
