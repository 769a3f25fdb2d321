"""Small random specs over everything that a prediction depends on: axes, modes, tiers, layouts,
optimizers, options, activations, losses and schedules. A draw depends only on its seed; it raises
AssertionError unless several specs have every choice."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from ptrain.algebra.legality import check, find_unsupported
from ptrain.derivation.estimate import derive
from ptrain.errors import SpecError
from ptrain.spec.load import load
from ptrain.spec.pipeline import ScheduleName
from ptrain.spec.precision import LAYOUTS

Written = Mapping[str, Any]  # a spec as written in a file
LabelsOf = Callable[[Written], Iterator[str]]

SEED, NUMBER = 30, 300
FEWEST = 3  # specs that have a choice
_MORE = 4  # factor of additional draws for rare choices
OFTEN = 0.22  # the share of specs in which a dial is not at its default

REPLICATED, SPREAD, SHARDED, MADE = "R,R,R", "R,S,R", "S*,S,S", "M,S,S"
PARAMETERS = ("R", "S*", "M", "O", "R@host", "S*@host", "S*@file")
OPTIMIZER = ("R", "S", "S*", "O", "S@file", "S*@host", "R@host")
GRADIENTS = ("R", "S", "S*", "M", "O", "S@file", "R@host")
MODES = {"parameters": PARAMETERS, "optimizer": OPTIMIZER, "gradients": GRADIENTS}
DRAWN, LAYOUT_OF_MASTERS = "drawn", ("zero16", "megatron18", "fsdp-mixed", "fp16")
TENSOR = ("S,S,S,R", "S,S,S,S", "S,S,S,S*")
STAGES = "S,S,S,R"

# The axes of the mesh, outermost first, with the tuples that a data axis has.
KINDS: Mapping[str, Mapping[str, str]] = {
    "local": {},
    "replicated": {"dp_replicate": REPLICATED},
    "replicated twice": {"dp_replicate": REPLICATED, "dp_shard": REPLICATED},
    "spread update": {"dp_replicate": SPREAD},
    "fully sharded": {"dp_shard": SHARDED},
    "hybrid": {"dp_replicate": REPLICATED, "dp_shard": SHARDED},
    "of masters": {"dp_shard": MADE},
    "used up in backward": {"dp_shard": "R,S,M"},
    "used up on replicas": {"dp_replicate": "R,R,M"},
    "flat": {"dp_shard": DRAWN},
    "flat over replicas": {"dp_replicate": DRAWN},
    "flat over two axes": {"dp_replicate": DRAWN, "dp_shard": DRAWN},
    "flat over three ranks": {"dp_shard": DRAWN},
    "tensor": {"tp": ""},
    "tensor, sharded": {"dp_shard": SHARDED, "tp": ""},
    "tensor, flat": {"dp_shard": DRAWN, "tp": ""},
    **{f"stages, {schedule}": {"pp": ""} for schedule in ScheduleName},
    **{f"stages, {schedule}, flat": {"pp": "", "dp_shard": DRAWN} for schedule in ScheduleName},
    "stages, replicated": {"pp": "", "dp_replicate": REPLICATED},
    "stages, sharded": {"pp": "", "dp_shard": SHARDED},
    "stages, tensor": {"pp": "", "tp": ""},
    "stages, sharded, tensor": {"pp": "", "dp_shard": SHARDED, "tp": ""},
    "stages, flat, tensor": {"pp": "", "dp_replicate": DRAWN, "tp": ""},
}
DIALS: Mapping[str, Sequence[Any]] = {
    "unit": ("sub-block", "2 blocks", "model"),
    "overlap": ("none", "backward"),
    "prefetch": (0, 1, 2),
    "gather_after_update": ("during-update", "next-forward"),
    "bucket": ("whole", "per-tensor", "32 KiB"),
    "reshard": (False, 2, "non-root", True),
    "reduce_scatter": ("all_to_all",),
    "sync": ({"gradients": "last"}, {"gradients": "every"}, {"reshard_after_backward": False}),
    "offload": ({"update": "device"}, {"tier": "file"}, {"path": "/nvme"}),
    "activations": ("M", "O", "M@host", "R@file", {"0": "M", "1-": "O"}, {"2-": "M@file"}),
    "recompute": ("full", "selective", {"keep": ["matmul"], "every": 2}),
    "loss": ("chunked", {"chunk": 8}, {"chunk": 8, "fused": True}),
    "tensor": ({"plan": "naive"}, {"loss_parallel": False}),
    "device": ("cuda",),
    "cluster": ({"preset": "h100-8"}, {"preset": "laptop"}),
}
# Dials that few kinds obey are drawn there in every second spec.
FAVOURED: Mapping[str, Sequence[str]] = {
    "replicated": ("bucket",),
    "replicated twice": ("bucket",),
    "spread update": ("bucket",),
    "fully sharded": ("reshard", "prefetch"),
    "hybrid": ("reshard", "prefetch"),
    "flat": ("gather_after_update", "prefetch", "overlap", "offload"),
    "flat over replicas": ("gather_after_update", "prefetch", "overlap", "offload"),
    "tensor": ("tensor",),
    "stages, tensor": ("tensor",),
}
OPTIMIZERS = (
    {"name": "adamw"},
    {"name": "adamw"},
    {"name": "sgd"},
    {"name": "sgd", "momentum": 0.9},
    {"name": "muon"},
)
CLIPS = (None, 1.0)
PRECISION: Sequence[Mapping[str, str]] = ({}, {}, {}, {}, {"moments": "bf16"}, {"compute": "fp64"})
SPLITS: Sequence[Any] = ("parameters", "time", "layers")
STEPS_OF_PLANS = ("LocalGradients", "Replicate", "FullyShard", "FlatUnits", "Pipeline", "Keep")


def random_specs(seed: int = SEED, number: int = NUMBER) -> list[dict[str, Any]]:
    """Return `number` legal specs as a user would write them, cycling through the kinds. Rare
    choices are drawn again until enough specs have them; such a spec replaces one of its kind."""
    draw = random.Random(seed)
    kinds = list(KINDS)
    specs = [next(_legal(draw, kinds[index % len(kinds)])) for index in range(number)]
    known = [_all_labels(spec) for spec in specs]
    for index in range(_MORE * number):
        missing = _too_rare(known)
        if not missing:
            return specs
        spec = next(_legal(draw, kinds[index % len(kinds)]))
        if missing & (has := _all_labels(spec)):
            place = _needless(known, range(index % len(kinds), number, len(kinds)))
            specs[place], known[place] = spec, has
    raise AssertionError(
        f"in fewer than {FEWEST} of {number} drawn specs: {', '.join(sorted(_too_rare(known)))}"
    )


def _all_labels(spec: Written) -> set[str]:
    return {*labels(spec), *consequences_of(spec)}


def _too_rare(known: Sequence[set[str]]) -> set[str]:
    counts = Counter(label for has in known for label in has)
    return {label for label in (*choices(), *consequences()) if counts[label] < FEWEST}


def _needless(known: Sequence[set[str]], places: Sequence[int]) -> int:
    """Return the index of the spec whose rarest label most others have."""
    counts = Counter(label for has in known for label in has)
    return max(places, key=lambda place: min(counts[label] for label in known[place]))


def rare(specs: Sequence[Written], wanted: Iterable[str], labels_of: LabelsOf) -> list[str]:
    """Return the `wanted` labels that fewer than `FEWEST` of these specs have."""
    counts = Counter(label for spec in specs for label in set(labels_of(spec)))
    return [label for label in dict.fromkeys(wanted) if counts[label] < FEWEST]


def _legal(draw: random.Random, kind: str) -> Iterator[dict[str, Any]]:
    """Yield legal specs of one kind without end, each with a prediction."""
    while True:
        written = _draw_mapping(draw, kind)
        try:
            spec = load(written).spec
        except SpecError:
            continue
        if not check(spec) and not find_unsupported(spec):
            yield written


def _draw_mapping(draw: random.Random, kind: str) -> dict[str, Any]:
    tuples = {axis: _tuple(draw, axis, modes) for axis, modes in KINDS[kind].items()}
    mesh = {axis: draw.choice((2, 4) if axis != "tp" else (2,)) for axis in tuples}
    if "three" in kind:
        mesh = dict.fromkeys(mesh, 3)
    stages = mesh.get("pp", 0)
    rounds = draw.choice((1, 2)) * 2 * stages if stages else draw.choice((1, 1, 2, 4))
    dials = {
        key: draw.choice(values)
        for key, values in DIALS.items()
        if draw.random() < (0.5 if key in FAVOURED.get(kind, ()) else OFTEN)
    }
    if "recompute" in dials:
        dials["activations"] = "M"
    if stages:
        words = kind.split(", ")[1]
        name = words if words in {*ScheduleName} else draw.choice(list(ScheduleName)).value
        dials["pipeline"] = {"schedule": name, "split": draw.choice(SPLITS)}
    layouts = LAYOUT_OF_MASTERS if MADE in KINDS[kind].values() else list(LAYOUTS)
    return {
        "name": "drawn",
        "model": _model(draw, layers=8 if stages else 3),
        "mesh": mesh,
        "placement": tuples,
        "batch": {"micro": draw.choice((1, 2)), "sequence": 16, "accumulate": rounds},
        "precision": {"layout": draw.choice(layouts), **draw.choice(PRECISION)},
        "optimizer": {**draw.choice(OPTIMIZERS), "clip": draw.choice(CLIPS)},
        **dials,
    }


def _model(draw: random.Random, layers: int) -> dict[str, Any]:
    """Return a model whose sizes no power of two divides, so that rounding is visible."""
    family = draw.choice(("llama", "gpt"))
    return {
        "family": family,
        "layers": layers + draw.choice((0, 1)),
        "hidden": 40,
        "heads": 4,
        "kv_heads": draw.choice((2, 4)) if family == "llama" else 4,
        "ffn": draw.choice((102, 54)),
        "vocab": 262,
        "tied": draw.choice((False, False, True)),
    } | ({"dropout": 0.1} if family == "gpt" and draw.random() < OFTEN else {})


def _tuple(draw: random.Random, axis: str, modes: str) -> str:
    if axis == "tp":
        return draw.choice(TENSOR)
    if axis == "pp":
        return STAGES
    if modes == DRAWN:
        modes = ",".join(draw.choice(values) for values in MODES.values())
    return f"{modes},R"


def labels(written: Written) -> Iterator[str]:
    """Yield the labels of `choices` in a spec."""
    for axis, modes in written["placement"].items():
        if axis in ("dp_replicate", "dp_shard"):
            yield from map(_label, MODES, modes.split(","))
        yield _label(axis, modes) if axis == "tp" else axis
    for key in DIALS:
        if key in written:
            yield _label(key, written[key])
    if "pipeline" in written:
        yield from (_label(key, value) for key, value in written["pipeline"].items())
    optimizer, model = dict(written["optimizer"]), written["model"]
    yield _label("clip", optimizer.pop("clip"))
    yield _label("optimizer", optimizer)
    yield from (_label("precision", {key: it}) for key, it in written["precision"].items())
    yield from (_label(key, model[key]) for key in ("family", "tied"))


def consequences_of(written: Written) -> Iterator[str]:
    """Yield the steps of a spec's plan, and the flags and tiers of its wrapper."""
    plan = derive(load(dict(written)).spec).plan
    yield from (type(step).__name__ for step in plan.steps)
    for field in fields(plan.wrap):
        value = getattr(plan.wrap, field.name)
        if isinstance(value, bool | str):
            yield _label(field.name, str(value))


def choices() -> Iterator[str]:
    """Yield a label for everything that can be drawn."""
    for state, values in MODES.items():
        yield from (_label(state, mode) for mode in values)
    for key, values in DIALS.items():
        yield from (_label(key, value) for value in values)
    yield from (_label("tp", modes) for modes in TENSOR)
    yield from (_label("schedule", schedule.value) for schedule in ScheduleName)
    yield from (_label("split", split) for split in SPLITS)
    yield from (_label("clip", clip) for clip in CLIPS)
    yield from (_label("optimizer", optimizer) for optimizer in OPTIMIZERS)
    yield from (_label("precision", {"layout": layout}) for layout in LAYOUTS)
    yield from (_label("precision", dtypes) for dtypes in PRECISION if dtypes)
    yield from (_label("family", family) for family in ("llama", "gpt"))
    yield from ("pp", "dp_replicate", "dp_shard", _label("tied", True))


def consequences() -> Iterator[str]:
    """Yield a label for each wrapper, and each of its flags and tiers, that follows from
    choices."""
    yield from STEPS_OF_PLANS
    for flag in ("zero_redundancy", "materialized", "consumed", "overlaps"):
        yield from (_label(flag, str(value)) for value in (True, False))
    for state in ("parameters", "optimizer", "gradients"):
        yield from (_label(f"{state}_tier", tier) for tier in ("device", "host", "file"))
    yield from (_label("update_tier", tier) for tier in ("device", "host"))


def _label(key: str, value: Any) -> str:
    return f"{key}: {value}"
