"""An option without effect is rejected with the placements that it applies to; an option with
effect is legal."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ptrain.algebra.legality import check
from ptrain.axes.data.dials import DIALS
from ptrain.axes.data.form import form_of
from ptrain.report.printed import minimal_spec
from ptrain.spec.dials import (
    WHOLE_BUCKET,
    GatherAfterUpdate,
    GradientSync,
    Overlap,
    ReduceScatterVia,
    Reshard,
    SyncPolicy,
    UnitKind,
    UnitSize,
)
from ptrain.spec.keys import Offload
from ptrain.spec.load import load
from ptrain.spec.placement import Axis, Tier
from ptrain.spec.precision import LAYOUTS
from ptrain.spec.spec import Spec
from ptrain.steps.wraps import Form
from tests.pure.build import make_spec, tuple_of

BATCH = {"global": 4, "micro": 1, "sequence": 16}
SUB_BLOCK = UnitSize(kind=UnitKind.SUB_BLOCK)
THREE, FOUR = (UnitSize(kind=UnitKind.BLOCKS, count=count) for count in (3, 4))
EXCHANGE = ReduceScatterVia.ALL_TO_ALL
KEPT_TO_BACKWARD = SyncPolicy(reshard_after_forward=False)
ALL_BUT_THE_ROOT = SyncPolicy(reshard_after_forward=Reshard.NON_ROOT)
KEPT = SyncPolicy(reshard_after_backward=False)
_FORWARD, _BACKWARD = "sync.reshard_after_forward", "sync.reshard_after_backward"
NEXT, DURING = GatherAfterUpdate.NEXT_FORWARD, GatherAfterUpdate.DURING_UPDATE


def one_axis(text: str, axis: Axis = Axis.DP_SHARD, degree: int = 2, **changes: object) -> Spec:
    layout = LAYOUTS["fsdp-mixed" if text.startswith("M") else "fp32"]
    clip = None if text.split(",")[2] == "M" else 1.0
    spec = make_spec({axis: (degree, tuple_of(text))}, clip=clip, layout=layout)
    return replace(spec, **changes)


LEGAL = [
    ("S*,S,S", {"prefetch": 2}),
    ("S*,S,S", {"prefetch": 0, "overlap": Overlap.NONE}),
    ("O,O,S", {"prefetch": 1, "overlap": Overlap.NONE}),
    ("R@host,R,R", {"prefetch": 1}),
    ("M,S,S", {"prefetch": 1}),
    ("R,S,R", {"prefetch": 0}),
    ("R,S,S", {"gather_after_update": NEXT}),
    ("R,O,O", {"gather_after_update": NEXT}),
    ("R@host,O,O", {"gather_after_update": DURING}),
    ("R,S,S", {"overlap": Overlap.BACKWARD}),
    ("R,S,R", {"overlap": Overlap.BACKWARD}),
    ("R,R,O", {"overlap": Overlap.BACKWARD}),
    ("R,R,M", {"overlap": Overlap.NONE}),
    ("R,R,R", {"bucket_bytes": WHOLE_BUCKET, "overlap": Overlap.BACKWARD}),
    ("R,S,S", {"unit": SUB_BLOCK}),
    ("R,S,S", {"unit": THREE}),
    ("R,S,R", {"reduce_scatter": EXCHANGE}),
    ("R,R,O", {"reduce_scatter": EXCHANGE}),
    ("R,S,M", {"reduce_scatter": EXCHANGE}),
    ("S*,S,S", {"unit": SUB_BLOCK}),
    ("S*,S,S", {"sync": KEPT_TO_BACKWARD}),
    ("S*,S,S", {"sync": KEPT}),
    ("O,S,S", {"sync": KEPT_TO_BACKWARD}),
    ("R@host,R,R", {"sync": KEPT}),
    ("R@file,S,S", {"sync": KEPT_TO_BACKWARD}),
    ("M,S,S", {"sync": KEPT_TO_BACKWARD}),
    ("S*,S,S", {"sync": ALL_BUT_THE_ROOT}),
    ("M,S,S", {"sync": ALL_BUT_THE_ROOT}),
    ("O,O,S", {"sync": ALL_BUT_THE_ROOT}),
    ("S*,R,R", {"sync": ALL_BUT_THE_ROOT}),
    ("R@host,R,R", {"sync": ALL_BUT_THE_ROOT}),
    ("R,O,S", {"offload": Offload(update=Tier.DEVICE)}),
    ("R,S@file,S", {"offload": Offload(path="/nvme")}),
]


@pytest.mark.parametrize(("text", "changes"), LEGAL)
def test_a_dial_that_something_obeys_is_legal(text, changes):
    assert not check(one_axis(text, **changes))


REFUSED = [
    ("R,S,S", {"prefetch": 1}, "prefetch", "never all-gathered", "parameters=S*"),
    ("S*,S,S", {"prefetch": 1, "overlap": Overlap.NONE}, "prefetch", "overlap is none", "one of"),
    (
        "S*,S,S",
        {"gather_after_update": DURING},
        "gather_after_update",
        ("nothing is gathered after the update unless"),
        "Remove",
    ),
    (
        "R,S*,S",
        {"gather_after_update": NEXT},
        "gather_after_update",
        ("nothing is gathered after the update unless"),
        "Remove",
    ),
    (
        "M,S,S",
        {"gather_after_update": NEXT},
        "gather_after_update",
        "nothing is gathered after the update unless",
        "Remove",
    ),
    ("R@host,S,S", {"gather_after_update": NEXT}, "gather_after_update", "on the host", "blocking"),
    ("R,R,M", {"overlap": Overlap.BACKWARD}, "overlap", "waits for its reduction", "overlap=none"),
    (
        "R,S,R@host",
        {"overlap": Overlap.BACKWARD},
        "overlap",
        "accumulated on the host",
        "gradients=O",
    ),
    (
        "R,R,R",
        {"reduce_scatter": EXCHANGE},
        "reduce_scatter",
        "full gradients are all-reduced",
        "gradients=S",
    ),
    (
        "R,S*,R",
        {"reduce_scatter": EXCHANGE},
        "reduce_scatter",
        "full gradients are all-reduced",
        "gradients=S",
    ),
    ("R,S,S", {"bucket_bytes": 1}, "bucket", "DistributedDataParallel", "`unit`"),
    ("S*,S,S", {"bucket_bytes": WHOLE_BUCKET}, "bucket", "reduced by unit", "Remove `bucket`"),
    ("R,R,R", {"unit": SUB_BLOCK}, "unit", "reduces by bucket", "Remove `unit`"),
    ("S*,S,S", {"unit": FOUR}, "unit", "the model has only 3", "`unit=model`, or at most 3 blocks"),
    (
        "R,S,R",
        {"sync": KEPT_TO_BACKWARD},
        _FORWARD,
        "false has no effect: parameters are R",
        "parameters=S*",
    ),
    ("R,S,S", {"sync": KEPT}, _BACKWARD, "no gathered parameters can be freed", "Remove it"),
    (
        "R,S,S",
        {"sync": ALL_BUT_THE_ROOT},
        _FORWARD,
        "non-root has no effect: parameters are R",
        "Remove it",
    ),
    (
        "R,R,R",
        {"sync": SyncPolicy(reshard_after_forward=2)},
        _FORWARD,
        ("2 has no effect: parameters"),
        "Remove it",
    ),
    (
        "R,S,S",
        {"offload": Offload(update=Tier.DEVICE)},
        "offload.update",
        ("every state is on the device"),
        "mode `O`",
    ),
    (
        "S*,S,S",
        {"offload": Offload(path="/nvme")},
        "offload.path",
        "every state is on the device",
        "Remove `offload`",
    ),
    ("R,O,S", {"offload": Offload(path="/nvme")}, "offload.path", "in files", "offload.tier=file"),
    (
        "O,S,S",
        {"offload": Offload(update=Tier.DEVICE)},
        "offload.update",
        ("optimizer state is on the device"),
        "Remove",
    ),
]


@pytest.mark.parametrize(("text", "changes", "place", "finding", "remedy"), REFUSED)
def test_a_dial_that_nothing_obeys_is_rejected(text, changes, place, finding, remedy):
    (fault,) = check(one_axis(text, **changes))
    assert fault.place == place
    assert finding in fault.finding and remedy in fault.remedy


def test_zero_redundancy_optimizer_decides_when_it_gathers():
    spec = one_axis("R,S,R", Axis.DP_REPLICATE, gather_after_update=NEXT)
    (fault,) = check(spec)
    assert form_of(spec) is Form.SPREAD_UPDATE
    assert fault.place == "gather_after_update" and "to dp_shard" in fault.remedy
    assert not check(one_axis("R,S,R", Axis.DP_REPLICATE, bucket_bytes=1))


@pytest.mark.parametrize(("degree", "shards"), [(4, 2), (4, 4), (6, 3), (8, 4), (8, 2)])
def test_smaller_shards_divide_the_larger_group(degree, shards):
    sync = SyncPolicy(gradients=GradientSync.EVERY, reshard_after_forward=shards)
    assert not check(one_axis("S*,S,S", degree=degree, sync=sync))
    assert not check(one_axis("M,S,S", degree=degree, sync=sync))


@pytest.mark.parametrize(("degree", "shards"), [(4, 3), (2, 4), (6, 4), (8, 1)])
def test_shards_that_do_not_divide_are_rejected_with_the_divisors(degree, shards):
    sync = SyncPolicy(reshard_after_forward=shards)
    (fault,) = check(one_axis("S*,S,S", degree=degree, sync=sync))
    assert fault.place == "sync.reshard_after_forward"
    divisors = ", ".join(str(n) for n in range(2, degree + 1) if degree % n == 0)
    assert f"Use one of {divisors} (" in fault.remedy


@pytest.mark.parametrize("text", ["S*,S,R", "O,S,S", "S*,O,S"])
def test_only_fully_shard_has_smaller_shards(text):
    (fault,) = check(one_axis(text, sync=SyncPolicy(reshard_after_forward=2)))
    assert fault.place == "sync.reshard_after_forward" and "true, false or non-root" in fault.remedy


def test_one_device_takes_every_dial_for_nothing_moves_there():
    spec = replace(
        make_spec({}),
        prefetch=2,
        gather_after_update=NEXT,
        overlap=Overlap.BACKWARD,
        bucket_bytes=1,
        unit=SUB_BLOCK,
        sync=SyncPolicy(reshard_after_forward=3, reshard_after_backward=False),
        offload=Offload(update=Tier.DEVICE),
    )
    assert not check(spec)


def test_every_rule_about_a_dial_rejects_something():
    for rule in DIALS:
        specs = [one_axis(text, **changes) for text, changes, *_ in REFUSED]
        specs.append(one_axis("S*,S,R", sync=SyncPolicy(reshard_after_forward=2)))
        specs.append(one_axis("S,S,S", Axis.TP, prefetch=1))
        assert any(list(rule.faults(spec)) for spec in specs), rule.name


DATA_DIALS = {
    "sync.gradients": ("last", "every"),
    "reshard": ("false", "2", "non-root"),
    "sync.reshard_after_backward": ("false",),
    "reduce_scatter": ("all_to_all",),
    "bucket": ("whole", "per-tensor"),
    "unit": ("model", "sub-block"),
    "overlap": ("none", "backward"),
    "prefetch": ("0", "3"),
    "gather_after_update": ("next-forward", "during-update"),
    "offload.update": ("device",),
    "offload.path": ("/nvme",),
}
TENSOR_DIALS = {"tensor.plan": ("naive",), "tensor.loss_parallel": ("false",)}
EVEN = "model.vocab=260"


def _assignments(dials: dict[str, tuple[str, ...]]) -> list[str]:
    return [f"{key}={value}" for key, values in dials.items() for value in values]


@pytest.mark.parametrize("dial", _assignments(DATA_DIALS))
def test_a_dial_of_the_data_axes_is_rejected_where_tp_is_alone(dial):
    (fault,) = check(load("tp", [dial]).spec)
    key = dial.split("=")[0]
    assert fault.place == {"reshard": "sync.reshard_after_forward"}.get(key, key)
    assert "no data axis" in fault.finding and fault.remedy.startswith(f"Remove `{fault.place}`")
    assert check(load("tp", [dial, "mesh={dp_shard: 1, tp: 2}"]).spec) == (fault,)


@pytest.mark.parametrize("name", ["tp", "pp-1f1b"])
def test_a_gather_that_is_awaited_is_written_in_resolved_specs_of_runs_and_means_nothing(name):
    assert not check(load(name, ["gather_after_update=blocking"]).spec)


@pytest.mark.parametrize("dial", _assignments(TENSOR_DIALS))
@pytest.mark.parametrize("mesh", ["{dp_shard: 2}", "{dp_shard: 2, tp: 1}"])
def test_a_dial_of_tp_is_rejected_where_there_are_ranks_but_no_tp(dial, mesh):
    (fault,) = check(load("zero3", [dial, f"mesh={mesh}", EVEN]).spec)
    assert fault.place == dial.split("=")[0]
    assert "no tp axis with two or more ranks" in fault.finding and "mesh.tp=2" in fault.remedy


def test_roles_of_a_user_model_are_rejected_without_tp():
    own = {"model": {"target": "a:b"}, "placement": {"dp_shard": "S*,S,S,R"}, "batch": BATCH}
    own |= {"tensor": {"plan": {"up": "column"}}}
    (fault,) = check(load(own | {"mesh": {"dp_shard": 2}}).spec)
    assert fault.place == "tensor.plan"
    assert not check(load(own | {"mesh": {"dp_shard": 1}}).spec)


@pytest.mark.parametrize("dial", _assignments(DATA_DIALS | TENSOR_DIALS))
def test_every_dial_is_free_on_one_rank(dial):
    assert not check(load("tp", [dial, "mesh.tp=1", EVEN]).spec)
    assert not check(load("zero3", [dial, "mesh.dp_shard=1", EVEN]).spec)


@pytest.mark.parametrize("dial", _assignments(TENSOR_DIALS))
def test_the_dials_of_tp_are_obeyed_with_it(dial):
    assert not check(load("tp-zero3", [dial, EVEN]).spec)
    assert not check(load("tp", [dial, EVEN]).spec)


def test_a_spec_with_only_tp_shows_no_option_of_data_axes():
    found = minimal_spec(load("tp").spec)
    assert not {"sync", "reduce_scatter", "bucket", "unit", "overlap"} & set(found.mapping)
    (line,) = (each for each in found.left_out if "no effect with this placement" in each)
    assert all(key in line for key in ("sync.gradients", "overlap", "prefetch", "unit", "bucket"))
