"""Legal specs at random, drawn from the declared grammar: any key, any value (`key_values`).

A draw begins with a small model on a mesh of up to 4096 ranks, whose tuples are modes at random
that break no rule of their axis, or a strategy by its name. Then keys are given values, one
after the other, and the product's own reader and law (`resolve_auto`) say which stay. A draw is a
function of its seed.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from ptrain.algebra.legality import ROOMS
from ptrain.cost import PLACED
from ptrain.errors import SpecError
from ptrain.selection.recompute import resolve_auto
from ptrain.spec.job import OptimizerSpec
from ptrain.spec.load import load
from ptrain.spec.model import ModelShape
from ptrain.spec.names import load_strategy
from ptrain.spec.placement import EXPERT_AXES, OF_EXPERTS, Axis, Mode, Placement
from ptrain.spec.shorthand import EXPERTS, REST, route_of
from ptrain.spec.spec import Spec
from tests.adversary.key_values import LIMITS, values

Written = dict[str, Any]  # a spec as written in a file

MOST_RANKS, MOST_PASSES = 4096, 12  # passes: micro-batches x blocks of a rank
SMALL: Mapping[str, int] = {"layers": 2, "hidden": 24, "heads": 4, "ffn": 40, "vocab": 262}
NAMED = 0.25  # the share of draws whose placement is a strategy's name
PLAIN = 0.7  # the share of tuples whose A is R: on an axis hardly any other is legal
CAPPED = 0.5  # the share of draws with ep whose experts have a capacity
MOST_TRIES = 40
BUDGET = "recompute.budget"  # comes last: each spec that has one is predicted until one fits
KEYS = (4, 10, 20, 40)  # how many keys a draw tries to set
# Sections that no prediction reads, as far as is known: half of the draws leave them out.
_BESIDE = ("cluster", "checkpoint", "eval", "log", "timeout", "train", "data", "profile", "backend")


class TooLarge(Exception):
    """A legal spec that takes too long to simulate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomSpec:
    """A legal spec as a user would write it, the ranks to simulate, and the number of rejected
    changes by the place of the first error."""

    seed: int
    written: Written
    ranks: tuple[int, ...]
    refused: Counter[str]


def random_spec(seed: int, most_ranks: int = MOST_RANKS) -> RandomSpec:
    """Return the draw of a seed, starting from a mesh of at most the given number of ranks."""
    draw = Random(seed)
    refused = Counter[str]()
    written = next(_bases(draw, refused, most_ranks))
    for value_of in _settings(draw):
        written = _with_key(written, *value_of, refused) or written
    return RandomSpec(
        seed=seed, written=written, ranks=ranks(load_accepted(written), draw), refused=refused
    )


def load_accepted(written: Written) -> Spec:
    """Return the spec as ptrain reads it. Raises SpecError if it is rejected, and TooLarge."""
    spec = resolve_auto(load(copy.deepcopy(written)))
    assert isinstance(spec.model, ModelShape), "others are left out"
    passes = spec.batch.accumulate * -(-spec.model.layers // spec.degree(Axis.PP))
    sizes = {f"model.{key}": getattr(spec.model, key) for key in (*SMALL, "kv_heads")}
    sizes["model.head_dim"] = spec.model.head_dim
    sizes |= {"batch.micro": spec.batch.micro, "batch.sequence": spec.batch.sequence}
    is_small = all(size <= LIMITS[key][1] for key, size in sizes.items())
    if spec.world_size > MOST_RANKS or passes > MOST_PASSES or not is_small:
        raise TooLarge
    return spec


def ranks(spec: Spec, draw: Random) -> tuple[int, ...]:
    """Return the first rank, one in between and the last."""
    last = spec.world_size - 1
    return tuple(dict.fromkeys((0, draw.randint(0, last), last)))


# ---- where a draw begins


def _bases(draw: Random, refused: Counter[str], most_ranks: int) -> Iterator[Written]:
    """Yield legal specs of a model, a mesh and its tuples."""
    while True:
        axes = _named_axes(draw) if draw.random() < NAMED else _axes(draw)
        if isinstance(axes, str):
            named = load_strategy(axes)
            assert named is not None, "a strategy has a file"
            mesh = _degrees(draw, list(named["placement"]), most_ranks)
            placement: Any = axes
        else:
            mesh = _degrees(draw, axes, most_ranks)
            placement = {axis: _tuple(draw, axis) for axis in axes}
        written: Written = {
            "model": dict(SMALL) | _model_for(draw, mesh),
            "mesh": mesh,
            "placement": placement,
            "batch": {"sequence": 16, "accumulate": draw.choice((1, 2, 2 * mesh.get("pp", 1)))},
        }
        for section, key in (("precision", "layout"), ("optimizer", "name")):  # tuples need them
            if draw.random() < 0.6:
                written[section] = {key: _value(draw, f"{section}.{key}")}
        if _is_accepted(written, refused):
            yield _with_attention(draw, written, refused) or written


def _model_for(draw: Random, mesh: Mapping[str, int]) -> Written:
    """Return the model keys that a mesh requires: layers for its stages and experts for ep, of
    which one or two serve a token, with a capacity in every second draw."""
    layers = {"layers": 2 * mesh["pp"]} if "pp" in mesh else {}
    if "ep" not in mesh:
        return layers
    experts = mesh["ep"] * draw.choice((1, 2))
    routed = {"experts": experts, "experts_per_token": draw.randint(1, min(2, experts))}
    if draw.random() < CAPPED:
        routed["capacity_factor"] = draw.choice((0.75, 1.0, 1.5, 4.0))
    return layers | routed | {"shared_experts": draw.choice((0, 0, 1))}


def _with_attention(draw: Random, written: Written, refused: Counter[str]) -> Written | None:
    """Return the spec, in most draws over cp with a random attention; a hybrid gets its number of
    ranks. None if it is illegal."""
    if "cp" not in written["mesh"] or draw.random() > 0.6:
        return None
    attention = _value(draw, "context.attention")
    changed = copy.deepcopy(written) | {"context": {"attention": attention}}
    if isinstance(attention, dict):
        changed["mesh"]["cp"] = math.prod(attention.values())
    return changed if _is_accepted(changed, refused) else None


def _named_axes(draw: Random) -> str:
    name: str = draw.choice(values()["placement"]).label
    return name


def _axes(draw: Random) -> list[str]:
    """Return random axes of the grammar, each with probability one half."""
    places = [place for place in values() if place.startswith("mesh.")]
    return [place.partition(".")[2] for place in places if draw.random() < 0.4]


def _degrees(draw: Random, axes: Sequence[str], most_ranks: int) -> dict[str, int]:
    """Return a degree for each axis, powers of two in every second draw, with a limited product."""
    mesh, left, powers = {}, most_ranks, draw.random() < 0.5
    for axis in draw.sample(axes, len(axes)):
        most = min(LIMITS.get(f"mesh.{axis}", (1, 8))[1], left)
        degree = round(2 ** draw.uniform(0.6, max(most.bit_length() - 1, 0.6)))
        degree = 2 ** (degree.bit_length() - 1) if powers else degree
        mesh[axis] = max(1, min(degree, most))
        left //= mesh[axis]
    return {axis: mesh[axis] for axis in axes}


def _tuple(draw: Random, axis: str) -> object:
    """Return random modes, repaired by the rules of the axis, in one of the forms of a file. On ep
    they are the modes of the dense parameters; the experts' tuple is written or omitted."""
    rest = _form(draw, next(_legal_modes(draw, axis)))
    if axis not in EXPERT_AXES or draw.random() < 0.5:
        return rest
    experts = {EXPERTS: _form(draw, str(OF_EXPERTS).split(","))} if draw.random() < 0.5 else {}
    return {**experts, REST: rest}


def _form(draw: Random, modes: list[str]) -> object:
    forms: tuple[object, ...] = (
        ",".join(modes), modes, dict(zip(map(str, PLACED), modes, strict=True))
    )  # fmt: skip
    return draw.choice(forms)


def _legal_modes(draw: Random, axis: str) -> Iterator[list[str]]:
    """Yield modes that satisfy the rules of the axis; after many tries, repaired ones."""
    data = Axis.DP_SHARD if axis == "dp" else Axis(axis)
    place = ".".join(route_of(data)) if data in EXPERT_AXES else f"placement.{axis}"
    (room,) = (room for room in ROOMS if data in room.axes)
    optimizer = OptimizerSpec(name=draw.choice(("adamw", "sgd")))
    tries = itertools.count()
    while True:
        kinds = [values()[f"{place}.{state}"] for state in PLACED]
        words = [str(draw.choice(of).draw(draw)) for of in kinds]
        if draw.random() < PLAIN:
            words[-1] = "R"
        placement = Placement(
            **{state.value: Mode.parse(word) for state, word in zip(PLACED, words, strict=True)}
        )
        if next(tries) > MOST_TRIES:
            placement = room.nearest_legal(placement, optimizer)
        if not [*room.broken_rules(placement, optimizer)]:
            yield str(placement).split(",")


# ---- one key after the other


def _settings(draw: Random) -> list[tuple[str, object]]:
    """Return keys with values in random order; keys that may depend on another occur twice."""
    has_all = draw.random() < 0.5
    places = [place for place in values() if has_all or not place.startswith(_BESIDE)]
    chosen = draw.sample(places, draw.choice(KEYS))
    settings = [(place, _value(draw, place)) for place in chosen if place != "placement"]
    twice = [*settings, *draw.sample(settings, len(settings))]
    return sorted(twice, key=lambda setting: setting[0] == BUDGET)


def _value(draw: Random, place: str) -> object:
    if place == "pipeline.split" and draw.random() < 0.5:
        return _parts(draw)
    return draw.choice(values()[place]).draw(draw)


def _parts(draw: Random) -> list[int]:
    """Return parts that add up to the number of layers, which free numbers hardly do."""
    stages = draw.choice((2, 3, 4))
    return [draw.choice((1, 1, 2, 3)) for _ in range(stages)]


def _with_key(written: Written, place: str, value: object, refused: Counter[str]) -> Written | None:
    """Return the spec with one more key, or None if it is illegal."""
    changed = copy.deepcopy(written)
    *above, key = place.split(".")
    node = changed
    for name in above:
        node = node.setdefault(name, {})
        if not isinstance(node, dict):
            return None  # a word abbreviates the section
    if node.get(key, "") == value:
        return None
    node[key] = value
    if place == "pipeline.split" and isinstance(value, list):
        changed["model"]["layers"] = sum(value)
    return changed if _is_accepted(changed, refused) else None


def _is_accepted(written: Written, refused: Counter[str]) -> bool:
    try:
        load_accepted(written)
    except SpecError as error:
        refused[error.faults[0].place] += 1
        return False
    except TooLarge:
        refused["too large"] += 1
        return False
    return True
