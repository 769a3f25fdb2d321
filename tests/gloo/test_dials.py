"""Every option of DDP and FSDP2 has its predicted effect, call by call, and does not change the
computed values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from ptrain.axes.data.cost import assign_owners
from ptrain.cost import Collective, Phase, State
from ptrain.data.corpus import open_corpus
from ptrain.data.sampler import Split
from ptrain.interpreter.program import interpret
from ptrain.runtime.world import World
from ptrain.spec.placement import Tier
from ptrain.spec.spec import Spec
from ptrain.traces.facts import facts_of
from ptrain.train import saving
from ptrain.train.exchange import Exchange
from ptrain.train.loop import local_batch
from tests.gloo.outcomes import MEASURED_STEP, Outcome
from tests.gloo.rows import Setting, default_setting
from tests.gloo.runs import train_on_rank
from tests.gloo.test_checkpoint import full_state, load_saved, step
from tests.gloo.test_rows import failed_lines, run_setting
from tests.ranks import Ranks
from tests.resident import resident

pytestmark = pytest.mark.gloo

LAST = ("last", True, True)


@dataclass(frozen=True)
class Dial:
    """A row with some options changed."""

    row: str
    turned: Mapping[str, Any]
    is_default: bool = False

    def __str__(self) -> str:
        return "-".join([self.row, *(f"{k}={v}" for k, v in self.turned.items())]).replace(" ", "")

    def settings(self) -> list[Setting]:
        """Yield each setting in fp64, and in its default dtypes if a layout mixes dtypes; both at
        night."""
        in_fp64 = default_setting(self.row).with_dials(**self.turned, fp64=True)
        is_plain = in_fp64.values["layout"] == "fp32"
        is_once = self.is_default and is_plain
        return [in_fp64] if is_once else [in_fp64, in_fp64.with_dials(fp64=False)]


def dial(row: str, is_default: bool = False, **turned: Any) -> Any:
    marks = () if is_default else (pytest.mark.nightly,)
    chosen = Dial(row, turned, is_default)
    return pytest.param(chosen, id=str(chosen), marks=marks)


SHORT = True  # the default subset
DIALS = (
    dial("ddp", SHORT, overlap="none", bucket="32 KiB"),
    dial("ddp", overlap="none", bucket="per-tensor", accumulate=3),
    dial("ddp", bucket="per-tensor"),
    dial("ddp", bucket="whole", accumulate=3),
    dial("ddp-zero-redundancy", SHORT, accumulate=3),
    dial("ddp-zero-redundancy", size=4, overlap="none", bucket="whole"),
    dial("ddp-zero-redundancy", optimizer="sgd", layout="bf16"),
    dial("zero3", prefetch=0),
    dial("zero3", prefetch=1),
    dial("zero3", SHORT, prefetch=2, unit="sub-block"),
    dial("zero3", overlap="none", accumulate=3),
    dial("zero3", SHORT, size=4, reshard=2, accumulate=3),
    dial("zero3", size=4, reshard=2, prefetch=2, unit="2 blocks"),
    dial("zero3", unit="model", prefetch=1),
    dial("zero3", reshard="non-root", accumulate=3),
    dial("zero3", SHORT, reshard="non-root", unit="ends"),
    dial("fsdp-mixed", size=4, unit="ends", prefetch=1, accumulate=3),
    dial("zero3", size=4, reshard="non-root", prefetch=2, unit="sub-block"),
    dial("fsdp-mixed", reshard="non-root", accumulate=3, overlap="none"),
    dial("fsdp-offload", reshard="non-root", accumulate=3),
    dial("fsdp-mixed", SHORT, accumulate=3, sync=LAST),
    dial("fsdp-mixed", prefetch=2, overlap="backward"),
    dial("fsdp-mixed", size=4, reshard=2, unit="sub-block", prefetch=1),
    dial("fsdp-mixed", overlap="none", reduce_scatter="all_to_all"),
    dial("mixed-hsdp", accumulate=3),
    dial("mixed-hsdp", sync=LAST, accumulate=3, prefetch=2, unit="sub-block"),
    dial("hsdp", reshard=2, prefetch=1),
    dial("hsdp", reshard="non-root", accumulate=3),
)


@pytest.mark.parametrize("chosen", DIALS)
def test_options_are_predicted_exactly_and_equal_one_device(ranks: Ranks, chosen: Dial) -> None:
    for setting in chosen.settings():
        assert not failed_lines(run_setting(ranks, setting))


def test_units_resharded_to_smaller_groups_are_gathered_over_these_in_backward(
    ranks: Ranks,
) -> None:
    spec = default_setting("zero3").with_dials(size=4, reshard=2).spec()
    outcome = Outcome(spec, ranks.run(4, train_on_rank, spec, MEASURED_STEP + 1, MEASURED_STEP))
    forward, backward = (
        next(
            row
            for row in outcome.measured.traffic
            if row.key.collective is Collective.ALL_GATHER and row.key.phase is phase
        )
        for phase in (Phase.FORWARD, Phase.BACKWARD)
    )
    assert forward.key.axes == backward.key.axes == ("dp_shard",)
    assert (forward.calls, forward.payload_bytes) == (backward.calls, backward.payload_bytes)
    assert forward.sent_bytes == forward.payload_bytes * 3 // 4
    assert backward.sent_bytes == backward.payload_bytes // 2


# -- an update that is spread over replicas


def _parameters_and_owners(spec: Spec) -> tuple[list[int], list[int]]:
    update: Any = interpret(spec, world=World.join(spec.timeout)).update
    return [t.parameter.numel() for t in update.targets], [t.owner for t in update.targets]


@pytest.mark.parametrize("size", [2, 4])
def test_each_tensor_has_the_owner_that_the_prediction_gives_it(ranks: Ranks, size: int) -> None:
    spec = default_setting("ddp-zero-redundancy").with_dials(size=size).spec()
    numels, owners = ranks.run(size, _parameters_and_owners, spec)[0]
    assert numels == [tensor.numel for tensor in facts_of(spec).tensors]
    assert assign_owners(numels, size) == owners


def _state_after(spec: Spec, folder: str) -> dict[str, torch.Tensor]:
    program = interpret(spec, world=World.join(spec.timeout))
    for index in range(2):
        step(program, index)
    saving.save_checkpoint(program, Path(folder), 2, Exchange(program.world))
    return full_state(program)


def _state_of(spec: Spec, folder: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the state after loading, and after one more step."""
    program = interpret(spec, world=World.join(spec.timeout))
    loaded = load_saved(program, folder)
    step(program, 2)
    return loaded, full_state(program)


PAIRS = (
    ("ddp-zero-redundancy", "zero3", {}),
    pytest.param("zero3", "ddp-zero-redundancy", {}, marks=pytest.mark.nightly),
    pytest.param("ddp-zero-redundancy", "ddp-zero-redundancy", {}, marks=pytest.mark.nightly),
    pytest.param("fsdp-mixed", "mixed-hsdp", {"layout": "fsdp-mixed"}, marks=pytest.mark.nightly),
)


@pytest.mark.parametrize(("saved", "loaded", "turned"), PAIRS, ids=lambda each: str(each))
def test_a_run_continues_under_another_placement(
    ranks: Ranks, tmp_path: Path, saved: str, loaded: str, turned: Mapping[str, Any]
) -> None:
    first = default_setting(saved).with_dials(fp64=True, accumulate=2, **turned).spec()
    size = 4 if loaded != saved else 2
    then = (
        default_setting(loaded)
        .with_dials(fp64=True, accumulate=4 // size, size=size, **turned)
        .spec()
    )
    before = ranks.run(2, _state_after, first, str(tmp_path))[0]
    after, later = ranks.run(size, _state_of, then, str(tmp_path))[0]
    assert set(before) == set(after)
    for name, value in before.items():
        assert torch.equal(after[name], value), name
    moved = [name for name in after if not torch.equal(after[name], later[name])]
    assert set(moved) == set(after)


# -- remaining memory


def _bytes_after_evaluation(spec: Spec) -> dict[State, int]:
    program = interpret(spec, world=World.join(spec.timeout))
    step(program, 0)
    local = local_batch(program, open_corpus(spec.data), 0, Split.HELD_OUT)
    program.evaluate(local)
    return {state: tiers[Tier.DEVICE] for state, tiers in resident(program).items()}


def test_an_evaluation_leaves_nothing_of_a_smaller_group(ranks: Ranks) -> None:
    spec = default_setting("zero3").with_dials(size=4, reshard=2).spec()
    assert ranks.run(4, _bytes_after_evaluation, spec)[0][State.TRANSIENT] == 0
