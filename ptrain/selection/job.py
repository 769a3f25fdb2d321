"""The job that a search places: a model, or a spec without placements."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property, partial
from math import gcd, log
from pathlib import Path
from typing import Any

import ptrain
from ptrain.axes.candidates import NOTHING_FIXED, FixedChoices, divisors
from ptrain.cost import State
from ptrain.derivation.layers import is_tabulated, without_programs
from ptrain.errors import input_error
from ptrain.facts.cache import read_or_cache
from ptrain.facts.model import InnerCollective, LayerWork, ModelFacts, ModelWork, Operator
from ptrain.facts.parameters import facts
from ptrain.selection.space import SEARCHED_AXES, ways_to_keep
from ptrain.selection.where import Where
from ptrain.spec.activations import ActivationMode
from ptrain.spec.cluster import OperatorKind
from ptrain.spec.keys import Offload, data_axis_dials
from ptrain.spec.leaf import find_similar
from ptrain.spec.load import load, read_expanded_tree
from ptrain.spec.model import Family, ModelShape
from ptrain.spec.names import list_files, load_names
from ptrain.spec.placement import DATA_AXES, Axis, R, Tier
from ptrain.spec.spec import Spec
from ptrain.spec.text import to_flow_yaml

ReadFacts = Callable[[Spec], ModelFacts]


def read_or_kept(spec: Spec) -> ModelFacts:
    """Return the facts from the user's cache, or read them from the model, which needs torch."""
    return read_or_cache(spec, partial(ptrain.read_facts, spec))


AUTO = "auto"
_BATCH = ("batch.micro", "batch.accumulate")
# Sections that a candidate sets.
OF_CANDIDATES = (
    *("placement", *_BATCH, "activations", "recompute", "offload"),
    *("sync", "reshard", "pipeline", "context", "unit", "overlap", "prefetch"),
    *("gather_after_update", "bucket", "reduce_scatter"),
)
_HOW = ("policy", "keep")  # keys of recompute

Said = Mapping[str, Any]
LoadWith = Callable[[Sequence[str], Sequence[str]], Spec]


def is_open(said: Said) -> bool:
    """Return True if any value is left to the search: an `auto` in the mesh or in a section that a
    candidate sets."""
    return any(True for _ in _autos(said.get("mesh"), ("mesh",))) or any(_open_places(said))


def _open_places(said: Said) -> Iterator[str]:
    for place in OF_CANDIDATES:
        yield from _autos(at(said, place), tuple(place.split(".")))


def _autos(value: object, route: tuple[str, ...]) -> Iterator[str]:
    """Yield the outermost places at which all values are `auto`."""
    if _is_auto(value):
        yield ".".join(route)
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _autos(inner, (*route, key))


def _is_auto(value: object) -> bool:
    if isinstance(value, dict):
        return bool(value) and all(_is_auto(inner) for inner in value.values())
    return value == AUTO


def at(said: Any, place: str) -> Any:
    """Return the value at a place such as `batch.micro`, or None."""
    for key in place.split("."):
        said = said.get(key) if isinstance(said, dict) else None
    return said


def numbers(said: Said) -> Iterator[str]:
    """Yield a constraint for each degree, micro-batch size and accumulation that the spec sets."""
    mesh = said.get("mesh")
    yield from (
        f"mesh.{axis}={degree}"
        for axis, degree in (mesh if isinstance(mesh, dict) else {}).items()
        if isinstance(degree, int)
    )
    yield from (
        f"{place}={at(said, place)}" for place in _BATCH if isinstance(at(said, place), int)
    )


def unnamed(said: Said) -> Iterator[str]:
    """Yield a constraint for each axis that the mesh does not name. It has one rank."""
    mesh = said.get("mesh")
    named = mesh if isinstance(mesh, dict) else {axis.value for axis in SEARCHED_AXES}
    yield from (
        f"mesh.{axis}=1"
        for axis in SEARCHED_AXES
        if axis.value not in named and not ("dp" in named and axis in DATA_AXES)
    )


def written_of(said: Said, load_with: LoadWith) -> FixedChoices:
    """Return the tuples, dials and activations that the spec sets; raise SpecError if no candidate
    can have them. `load_with` loads the spec with overrides and without some places."""
    mesh, open_places = said.get("mesh"), set(_open_places(said))
    placement = said.get("placement")
    placed = [
        axis
        for axis in SEARCHED_AXES
        if at(placement, axis.value) is not None and f"placement.{axis}" not in open_places
    ]
    # A tuple is checked only on an axis of the mesh. One rank keeps the probe independent of
    # degrees that are still open.
    of_one_rank = to_flow_yaml({axis.value: 1 for axis in placed})
    more = ("activations=M",) if _recomputes(said) and not _says_activations(said) else ()
    probe = load_with((f"mesh={of_one_rank}", *more), (*_BATCH, *sorted(open_places)))
    degrees = mesh.items() if isinstance(mesh, dict) else ()
    return FixedChoices(
        degrees=tuple(
            (Axis(axis), degree)
            for axis, degree in degrees
            if axis in set(Axis) and isinstance(degree, int)
        ),
        tuples=tuple((f.axis, f.placement) for f in probe.trivial_factors),
        values=tuple(_values(said, probe)),
        kept=_kept(said, probe),
    )


def _values(said: Said, probe: Spec) -> Iterator[tuple[str, Any]]:
    """Yield dials, the schedule and its settings, and the tier of offloaded state."""
    for section in ("sync", "pipeline"):
        for spot in fields(getattr(probe, section)):
            if _is_said(said, f"{section}.{spot.name}"):
                yield f"{section}.{spot.name}", getattr(getattr(probe, section), spot.name)
    yield from (
        (dial.path[0], dial.read_value(probe))
        for dial in data_axis_dials()
        if len(dial.path) == 1 and _is_said(said, dial.place)
    )
    if probe.context is not None:
        yield "context", probe.context
    if _is_said(said, "offload.tier"):
        yield "offload.tier", _away(said)
    if probe.offload != Offload():
        yield "offload", probe.offload


def _is_said(said: Said, place: str) -> bool:
    return at(said, place) not in (None, AUTO)


def _away(said: Said) -> Tier:
    """Return the tier of offloaded state."""
    return Tier(at(said, "offload.tier")) if _is_said(said, "offload.tier") else Tier.HOST


def _recomputes(said: Said) -> bool:
    how = [at(said, f"recompute.{key}") for key in _HOW]
    return any(value not in (None, AUTO, "none") for value in how)


def _says_activations(said: Said) -> bool:
    """Return True if activations are set at the top of the spec or in the tuple of a data axis."""
    tuples = (at(said, f"placement.{axis}.{State.ACTIVATIONS}") for axis in DATA_AXES)
    return _is_said(said, "activations") or any(mode not in (None, str(R)) for mode in tuples)


def _kept(said: Said, probe: Spec) -> tuple[ActivationMode, ...]:
    """Return the activation modes that the search may try; empty if the spec sets none. For M
    without a policy these are all policies, for the policy `none` alone all modes without
    recomputation."""
    activations = probe.activations
    if activations.budget is not None or activations.by_block or activations.every != 1:
        place = "activations" if activations.by_block else "recompute"
        raise input_error(
            place,
            "not supported yet: a search with per-block activation modes or a recomputation budget",
            f"Use `{place}=auto`, or one policy for all blocks.",
        )
    says_how = any(_is_said(said, f"recompute.{key}") for key in _HOW)
    offered = ways_to_keep(_away(said))
    if not _says_activations(said):
        if not says_how:
            return ()
        if not _recomputes(said):
            return tuple(kept for kept in offered if kept.policy is None)
    default = activations.default
    if default.policy is None or says_how:
        return (default,)
    alike = (k for k in offered if k.policy and k.tier is default.tier)
    return tuple(alike) or (default,)


_OF_HEADS = (OperatorKind.ATTENTION, OperatorKind.ATTENTION_BACKWARD)
_HEAD = 64  # head_dim if a model does not show it: the smallest that large models commonly have
_STEP = 64  # multiple of the feed-forward width, which shards of up to 64 ranks divide
_LARGEST_HEAD, _EVEN = 256, 8  # head_dim of attention kernels: the maximum and the multiple


def stand_in(shape: ModelShape) -> ModelShape:
    """Return a shape with tables that replaces a model without tables: a llama if the activation is
    gated, else a gpt. It has the model's layers, hidden size and vocabulary, heads of about its
    head_dim, and about its parameters per block. `with_heads` corrects attention scores."""
    shape = dense(shape)
    is_gated = shape.activation.is_gated
    heads = _heads(shape)
    step = gcd(shape.ffn, _STEP)
    like = ModelShape(
        family=Family.LLAMA if is_gated else Family.GPT,
        layers=shape.layers,
        hidden=shape.hidden,
        heads=heads,
        kv_heads=gcd(heads, shape.kv_heads) if is_gated else heads,
        ffn=step,
        vocab=shape.vocab_rows,
        attention=shape.attention,
        tied=shape.tied,
        dropout=0.0 if is_gated else max(shape.dropouts),
    )
    return with_block(like, block_size(shape), step)


def with_block(like: ModelShape, size: int, step: int) -> ModelShape:
    """Return a shape whose block has about `size` parameters, with a feed-forward width that is a
    multiple of `step`."""
    # Parameters grow linearly with the width, so two widths determine the slope.
    narrow = replace(like, ffn=step)
    least, next_least = block_size(narrow), block_size(replace(like, ffn=2 * step))
    more = round((size - least) / (next_least - least))
    return replace(like, ffn=step * (1 + max(0, more)))


def stand_in_of(base: Spec, facts: ModelFacts) -> ModelShape:
    """Return a llama shape that replaces a custom or transformers model, with its blocks, hidden
    size and vocabulary; raise SpecError if the model does not show them."""
    blocks = [unit for unit in facts.units if {*unit.modules} & {*facts.blocks}]
    tables = [
        t.shape for u in facts.units if u not in blocks for t in u.tensors if len(t.shape) == 2
    ]
    if not blocks or not tables:
        raise input_error(
            "model",
            "a search needs repeated blocks and an embedding, and this model shows none",
            "Set `model.blocks` to a pattern of the names of its blocks, such as `layers.*`.",
        )
    # The largest matrix outside of the blocks is the embedding or the head.
    vocab, hidden = max(tables, key=math.prod)
    heads = max(1, hidden // _HEAD)
    like = ModelShape(
        family=Family.LLAMA,
        layers=len(facts.blocks),
        hidden=hidden,
        heads=heads if hidden % heads == 0 else 1,
        kv_heads=heads if hidden % heads == 0 else 1,
        ffn=_STEP,
        vocab=vocab,
    )
    return with_block(like, max(unit.numel for unit in blocks) // len(blocks[0].modules), _STEP)


def dense(shape: ModelShape) -> ModelShape:
    """Return the shape with a dense feed-forward part, as wide as all experts that a token visits,
    including their empty places if they have a capacity. It computes and keeps as much."""
    if shape.experts is None:
        return shape
    rows = shape.experts_per_token * (shape.capacity_factor or 1.0)
    width = shape.width_of_expert
    return replace(
        shape,
        ffn=round(min(rows, shape.experts) * width) + shape.shared_experts * width,
        experts=None,
        shared_experts=0,
        dense_layers=0,
        capacity_factor=None,
    )


def block_size(shape: ModelShape) -> int:
    """Return the number of parameters of a block."""
    return facts(replace(shape, layers=1), 1).units[0].numel


def _heads(shape: ModelShape) -> int:
    """Return a number of heads with about the model's head_dim. Numbers with attention kernels are
    preferred, and multiples of the model's key heads, which tp shards in the same way."""
    pool = [heads for heads in divisors(shape.hidden) if shape.hidden // heads % 2 == 0] or [1]
    alike = [heads for heads in pool if heads % shape.kv_heads == 0]

    def distance(heads: int) -> tuple[bool, float]:
        width = shape.hidden // heads
        is_odd = width % _EVEN != 0 or width > _LARGEST_HEAD
        return is_odd, abs(log(width / shape.head_dim))

    return min(alike or pool, key=distance)


def with_heads(work: ModelWork, shape: ModelShape, like: ModelShape) -> ModelWork:
    """Return the work of a stand-in with the shape's number of heads and head_dim. Scores grow with
    the square of the sequence, so a feed-forward width cannot compensate them."""

    def changed(item: Operator | InnerCollective) -> Operator | InnerCollective:
        if isinstance(item, InnerCollective) or item.kind not in _OF_HEADS:
            return item
        samples, heads, queries, keys, _ = item.dimensions
        of_rank = max(1, heads * shape.heads // like.heads)
        return item._replace(dimensions=(samples, of_rank, queries, keys, shape.head_dim))

    alike = {  # equal layers are one object
        id(layer): LayerWork(*(tuple(map(changed, passes)) for passes in layer))
        for layer in {id(layer): layer for layer in work.layers}.values()
    }
    return work._replace(layers=tuple(alike[id(layer)] for layer in work.layers))


# Tokens per step and per sample by default, as in published pre-training runs of dense models.
_TOKENS, _SEQUENCE = 4e6, 4096
_CPU_LAYOUT, _GPU_LAYOUT, _OLD_GPU_LAYOUT = "fp32", "zero16", "fp16"
_BF16 = 80  # the first compute capability with matrix units for bf16


@dataclass(frozen=True, kw_only=True)
class SearchedJob:
    """A job to be placed by a search.

    Attributes:
        base: The spec of the job on one rank.
        devices: The number of devices.
        where: Constraints, including degrees and numbers that the spec sets.
        source: The model or spec from which the base is loaded.
        overrides: The overrides with which it is loaded.
        written: The other choices that the spec sets.
        stand_in: The shape that estimates use, without programs. None if tables cover the job.
        margin: The fraction of a device's memory that stays free.
    """

    base: Spec
    devices: int
    where: Where
    source: str
    overrides: tuple[str, ...] = ()
    written: FixedChoices = NOTHING_FIXED
    stand_in: ModelShape | None = None
    margin: float = 0.0

    @property
    def margin_bytes(self) -> int:
        """The bytes of a device that stay free."""
        return round(self.margin * self.base.cluster.device_memory) if self.base.cluster else 0

    @property
    def room(self) -> float:
        """The bytes of a device that a peak may fill. Infinite without a cluster."""
        cluster = self.base.cluster
        return float(cluster.usable_memory - self.margin_bytes) if cluster else math.inf

    @cached_property
    def scored(self) -> Spec:
        """The base as estimates see it."""
        like = self.stand_in
        return replace(without_programs(self.base), model=like) if like else self.base

    @cached_property
    def sized(self) -> Spec:
        """The base as estimates see it, with its own shape if the model has one."""
        own: dict[str, Any] = {"model": m} if isinstance(m := self.base.model, ModelShape) else {}
        return replace(self.scored, frozen=self.base.frozen, **own)

    @property
    def name(self) -> str:
        """The name of the best placement's spec."""
        return f"{self.base.name}-{self.devices}"


def searched_job(
    source: str,
    overrides: Sequence[str] = (),
    *,
    cluster: str | None = None,
    devices: int | None = None,
    where: Sequence[str] = (),
    read: ReadFacts = read_or_kept,
) -> SearchedJob:
    """Return the job of a model (a preset, or a file with a shape) or of a spec.

    Args:
        source: The model or spec.
        overrides: Overrides as on the command line.
        cluster: The name or file of a cluster. By default the cluster of the spec.
        devices: The number of devices. By default all devices of the cluster.
        where: Constraints.
        read: Reads the facts of a model that is not built in.

    Raises:
        SpecError: The source, cluster or number of devices is invalid, or no table covers the
            model.
    """
    of_cluster = [] if cluster is None else [f"cluster.preset={cluster}"]
    words = [*of_cluster, *overrides]
    if is_model(source):
        job = _of_model(source, said_in(_model_mapping(source), words), where)
    else:
        job = _of_spec(source, words, where)
    base = job.base
    if base.cluster is None:
        raise input_error(
            "--cluster",
            "the cluster is missing, so device memory and links are unknown",
            f"Add `--cluster` with one of {', '.join(list_files('clusters'))}, or a file.",
        )
    own = base.model
    like = _stand_in(job, own) if isinstance(own, ModelShape) else stand_in_of(base, read(base))
    number = base.cluster.devices if devices is None else devices
    if number > base.cluster.devices:
        raise input_error(
            "--devices",
            f"{number} devices requested, but {base.cluster.name} has {base.cluster.devices}",
            f"Use `--devices {base.cluster.devices}` or fewer, or `cluster.devices={number}`.",
        )
    return replace(job, devices=number, overrides=tuple(words), stand_in=like)


def _stand_in(job: SearchedJob, shape: ModelShape) -> ModelShape | None:
    """Return the shape that estimates use; None if tables cover the model. May raise SpecError."""
    base = job.base  # without a data axis, so that only candidates have the unit that the spec sets
    if is_tabulated(replace(base, unit=job.written.value("unit", base.unit))):
        return None
    attention = shape.attention_by(None) if shape.is_grouped else shape.attention
    shape, plain = replace(shape, lora_rank=None, attention=attention), without_programs(base)
    for like in (shape, stand_in(shape)):
        if is_tabulated(replace(plain, model=like)):
            return like
    raise input_error(
        "model",
        f"not supported yet: searching {base.name}, because every split needs a trace: no "
        "memory table covers it or a similar llama or gpt",
        "Use a preset with llama or gpt blocks, for example `llama3-8b` or `gpt3-13b`.",
    )


def said_in(
    source: str | dict[str, object] | None, overrides: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the keys and values that a source and overrides set, before they are resolved."""
    root = read_expanded_tree(source, overrides).root
    assert isinstance(root, dict), "a file of a spec is a mapping"
    return root


def _require_known(source: str) -> None:
    """Raise SpecError for a name that is similar to a model's name and is no spec's name."""
    specs = [name for folder in ("strategies", "paper", "node") for name in list_files(folder)]
    near = find_similar(source, tuple(list_files("models")))
    if near and source not in specs and not Path(source).exists():
        raise input_error(
            "MODEL",
            f"there is no spec named {source!r}, and no such model",
            f"Did you mean `{near}`?",
        )


def is_model(source: str) -> bool:
    """Return True if a source names a model: a preset, or a file with the fields of a shape instead
    of a spec."""
    if source in list_files("models"):
        return True
    if not source.endswith((".yaml", ".yml")) or not Path(source).exists():
        return False
    said = said_in(source)
    return "model" not in said and "layers" in said


def _model_mapping(source: str) -> dict[str, object]:
    is_preset = source in list_files("models")
    preset = source if is_preset else str(Path(source).resolve())
    return {
        "name": source if is_preset else Path(source).stem,
        "model": {"preset": preset},
        "mesh": {},
    }


def _of_model(source: str, said: dict[str, Any], where: Sequence[str]) -> SearchedJob:
    """Return the job of a model. All axes are searched, except degrees that overrides set."""
    said = _with_defaults(said)

    def load_with(overrides: Sequence[str], without: Sequence[str]) -> Spec:
        return load({**said, "mesh": {}}, overrides, without=without).spec

    return SearchedJob(
        base=load_with((), OF_CANDIDATES),
        devices=0,
        where=Where.of([*numbers(said), *where]),
        written=written_of(said, load_with),
        source=source,
    )


def _of_spec(source: str, words: Sequence[str], where: Sequence[str]) -> SearchedJob:
    """Return the job of a spec. Its values stay, and an axis that its mesh does not name has one
    rank."""
    _require_known(source)
    said = said_in(source, words)
    if isinstance(batch := said.get("batch", {}), dict) and "global" not in batch:
        raise input_error(
            "batch.global",
            "the number of samples per step is missing",
            "Use `batch.global=64`, or a number of tokens such as `4M tokens`.",
        )
    if not is_open(said):
        raise input_error(
            "mesh",
            "this spec leaves nothing to search",
            "Use `auto` for mesh degrees (`mesh.tp=auto`), the full mesh (`mesh=auto`), "
            "`placement`, `batch.micro` or an option. Or name a model.",
        )

    def load_with(overrides: Sequence[str], without: Sequence[str]) -> Spec:
        return load(source, [*words, *overrides], without=without).spec

    own = Where.of([*numbers(said), *unnamed(said)]).constraints
    return SearchedJob(
        base=load_with(("mesh={}",), OF_CANDIDATES),
        devices=0,
        where=Where((*(replace(r, is_of_spec=True) for r in own), *Where.of(where).constraints)),
        written=written_of(said, load_with),
        source=source,
    )


def _with_defaults(said: dict[str, Any]) -> dict[str, Any]:
    """Return a model's mapping with defaults: about 4M tokens per step, and a layout for the
    devices."""
    if not isinstance(said.get("batch", {}), dict):
        load({**said, "mesh": {}})  # raises the usual error for an invalid batch
    batch = dict(said.get("batch", {}))
    batch.setdefault("sequence", _SEQUENCE)
    if isinstance(batch["sequence"], int) and batch["sequence"] > 0:
        batch.setdefault("global", 2 ** max(0, round(math.log2(_TOKENS / batch["sequence"]))))
    probe = load({**said, "mesh": {}, "batch": {"sequence": 1}, "precision": {}}).spec
    layout = _GPU_LAYOUT
    if probe.cluster is not None and probe.cluster.kind == "cpu":
        layout = _CPU_LAYOUT
    elif (probe.sm or _BF16) < _BF16:
        layout = _OLD_GPU_LAYOUT
    precision = said.get("precision", {})
    if isinstance(precision, dict) and not precision.keys() - {"matmul"}:
        precision = {"layout": layout, **precision}
    return {**said, "batch": batch, "precision": precision}


def words_of(job: SearchedJob, spec: Spec) -> tuple[str, ...]:
    """Return the name or file of a spec (for a model the default spec), and the overrides that turn
    it into the candidate with this resolved spec."""
    if is_model(job.source):
        before, said = _default_spec()
        return (load_names().default, *_changes(before, spec.resolved, said))
    said = said_in(job.source, job.overrides)
    return (job.source, *job.overrides, *_changes(job.base.resolved, spec.resolved, said))


@cache
def _default_spec() -> tuple[dict[str, object], dict[str, Any]]:
    """Return the default spec, resolved and as written."""
    return load(None).spec.resolved, said_in(None)


def _changes(
    before: dict[str, object], after: dict[str, object], said: dict[str, object]
) -> Iterator[str]:
    """Yield overrides for sections that differ, or that the source sets to another value."""
    of_candidates = {place.partition(".")[0] for place in OF_CANDIDATES}
    for key, value in after.items():
        is_said = key in of_candidates and said.get(key) not in (None, value)
        if before.get(key) != value or is_said:
            yield f"{key}={to_flow_yaml(value)}"
    yield from (
        f"{key}={_UNSAID.get(key, '{}')}"
        for key in of_candidates
        if key in said and key not in after
    )


_UNSAID = {
    "activations": "R",
    "recompute": "none",
    # null: the wrapper's default
    **dict.fromkeys(("unit", "overlap", "prefetch", "gather_after_update"), "null"),
}
