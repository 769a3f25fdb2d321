"""The job that a search places: a model or a spec without placements, the keys that are written and
so not chosen, the shape that stands in for one that the tables do not cover, and the overrides that
make exactly a candidate of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from math import gcd, log
from pathlib import Path
from typing import Any

import ptrain
from ptrain.axes.candidates import NOTHING_FIXED, FixedChoices, divisors
from ptrain.cost import State
from ptrain.derivation.layers import is_tabulated
from ptrain.errors import refused
from ptrain.facts.cache import read_or_cache
from ptrain.facts.model import InnerCollective, LayerWork, ModelFacts, ModelWork, Operator
from ptrain.facts.parameters import facts
from ptrain.selection.space import SEARCHED_AXES, ways_to_keep
from ptrain.selection.where import Where
from ptrain.spec.activations import ActivationMode
from ptrain.spec.extras import require_eager
from ptrain.spec.keys import Offload, data_axis_dials
from ptrain.spec.leaf import find_similar
from ptrain.spec.load import load, read_expanded_tree
from ptrain.spec.model import Family, ModelShape
from ptrain.spec.names import list_files, load_names
from ptrain.spec.placement import DATA_AXES, Axis, R, Tier
from ptrain.spec.rates import OperatorKind
from ptrain.spec.spec import Spec
from ptrain.spec.text import to_flow_yaml

ReadFacts = Callable[[Spec], ModelFacts]


def read_or_kept(spec: Spec) -> ModelFacts:
    """Return the facts that the user's cache has, else those read off the model, which needs
    torch."""
    return read_or_cache(spec, partial(ptrain.read_facts, spec))


AUTO = "auto"
_BATCH = ("batch.micro", "batch.accumulate")
# Sections that say something of a candidate.
OF_CANDIDATES = (
    *("placement", *_BATCH, "activations", "recompute", "offload"),
    *("sync", "reshard", "pipeline", "context", "unit", "overlap", "prefetch"),
    *("gather_after_update", "bucket", "reduce_scatter"),
)
_HOW = ("policy", "keep")  # of recompute, what is computed again

Said = Mapping[str, Any]
LoadWith = Callable[[Sequence[str], Sequence[str]], Spec]


def is_open(said: Said) -> bool:
    """Return whether something is left to be chosen: an `auto` of the mesh, of the micro-batch or
    of what else a candidate says."""
    return any(True for _ in _autos(said.get("mesh"), ("mesh",))) or any(_open_places(said))


def _open_places(said: Said) -> Iterator[str]:
    for place in OF_CANDIDATES:
        yield from _autos(at(said, place), tuple(place.split(".")))


def _autos(value: object, route: tuple[str, ...]) -> Iterator[str]:
    """The places at which nothing but `auto` stands, the outermost ones."""
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
    """Return what stands at a place; None where nothing does."""
    for key in place.split("."):
        said = said.get(key) if isinstance(said, dict) else None
    return said


def numbers(said: Said) -> Iterator[str]:
    """Yield a constraint for each number that is written: degrees of the mesh, samples of a
    micro-batch, micro-batches of a step."""
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
    """Yield a constraint for each axis that a mesh does not name: it has one rank."""
    mesh = said.get("mesh")
    named = mesh if isinstance(mesh, dict) else {axis.value for axis in SEARCHED_AXES}
    yield from (
        f"mesh.{axis}=1"
        for axis in SEARCHED_AXES
        if axis.value not in named and not ("dp" in named and axis in DATA_AXES)
    )


def written_of(said: Said, load_with: LoadWith) -> FixedChoices:
    """Return what is written of tuples, dials and activations. `load_with` gives the spec with
    overrides and without some places. Raises SpecError for what is wrong with it, and for what no
    candidate can say."""
    mesh, open_places = said.get("mesh"), set(_open_places(said))
    placement = said.get("placement")
    placed = [
        axis
        for axis in SEARCHED_AXES
        if at(placement, axis.value) is not None and f"placement.{axis}" not in open_places
    ]
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
    """Dials, the schedule and what is said of it, and where offloaded state is updated."""
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
    """Where O is."""
    return Tier(at(said, "offload.tier")) if _is_said(said, "offload.tier") else Tier.HOST


def _recomputes(said: Said) -> bool:
    how = [at(said, f"recompute.{key}") for key in _HOW]
    return any(value not in (None, AUTO, "none") for value in how)


def _says_activations(said: Said) -> bool:
    """At the top of the spec, or by a tuple of a data axis."""
    tuples = (at(said, f"placement.{axis}.{State.ACTIVATIONS}") for axis in DATA_AXES)
    return _is_said(said, "activations") or any(mode not in (None, str(R)) for mode in tuples)


def _kept(said: Said, probe: Spec) -> tuple[ActivationMode, ...]:
    """How blocks may keep activations: as it is written; where M says no policy, or `none` is the
    policy of whatever mode, as the search tries it. None where nothing is written."""
    activations = probe.activations
    if activations.budget is not None or activations.by_block or activations.every != 1:
        place = "activations" if activations.by_block else "recompute"
        raise refused(
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
_HEAD = 64  # the width of a head where a model does not show it
_STEP = 64  # of the feed-forward part's width, so that it divides as the model's own does
_LARGEST_HEAD, _EVEN = 256, 8  # of which attention has kernels


def stand_in(shape: ModelShape) -> ModelShape:
    """Return a llama's shape where the activation is gated, else a gpt's: as many layers, as wide a
    stream and vocabulary, heads about as wide that fill the stream, and a feed-forward part with
    which a block has about as many parameters (of one with experts, as `dense` has), so that what
    its projections have more or less is computed and kept there. What its heads compute with each
    other has no parameters: `with_heads`."""
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
    """Return a shape with a feed-forward part, a multiple of a step, with which a block has about
    as many parameters as `size`."""
    narrow = replace(like, ffn=step)
    least, next_least = block_size(narrow), block_size(replace(like, ffn=2 * step))
    more = round((size - least) / (next_least - least))
    return replace(like, ffn=step * (1 + max(0, more)))


def stand_in_of(base: Spec, facts: ModelFacts) -> ModelShape:
    """Return the shape of a llama with as many blocks as a model of the user's or of transformers,
    as wide a stream and vocabulary, and blocks with about as many parameters. Raises SpecError if
    these cannot be read off the model."""
    blocks = [unit for unit in facts.units if {*unit.modules} & {*facts.blocks}]
    tables = [
        t.shape for u in facts.units if u not in blocks for t in u.tensors if len(t.shape) == 2
    ]
    if not blocks or not tables:
        raise refused(
            "model",
            "a search needs repeated blocks and an embedding, and this model shows none",
            "Set `model.blocks` to a pattern of the names of its blocks, such as `layers.*`.",
        )
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
    """Return the shape with a feed-forward part in place of experts, as wide as those that a
    token's rows go through, places that stay empty included: it computes and keeps as much."""
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
    """Return the parameters of a block."""
    return facts(replace(shape, layers=1), 1).units[0].numel


def _heads(shape: ModelShape) -> int:
    """The number whose width is nearest the model's own, of those that attention has kernels for
    and that its heads of keys divide, where there are any: then tp cuts both alike."""
    pool = [heads for heads in divisors(shape.hidden) if shape.hidden // heads % 2 == 0] or [1]
    alike = [heads for heads in pool if heads % shape.kv_heads == 0]

    def distance(heads: int) -> tuple[bool, float]:
        width = shape.hidden // heads
        is_odd = width % _EVEN != 0 or width > _LARGEST_HEAD
        return is_odd, abs(log(width / shape.head_dim))

    return min(alike or pool, key=distance)


def with_heads(work: ModelWork, shape: ModelShape, like: ModelShape) -> ModelWork:
    """Return the work of a shape's stand-in with attention over as many heads as the shape has, and
    as wide ones: their scores grow with the square of the sequence, and no part of the feed-forward
    width makes up for them."""

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


_TOKENS, _SEQUENCE = 4e6, 4096  # of a step and of a sample, where nothing is written
_CPU_LAYOUT, _GPU_LAYOUT, _OLD_GPU_LAYOUT = "fp32", "zero16", "fp16"
_BF16 = 80  # the first compute capability with matrix units for bf16


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchedJob:
    """`base` is the job on one rank, `devices` are how many it is searched on, `where` the
    constraints, degrees and numbers that are written among them, `written` what else is written of
    what is chosen. `source` and `overrides` load the base, but for what is chosen.
    `stand_in`: the shape that estimates score, where no table tells of the base's own. `margin`:
    the part of a device's memory that stays free."""

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
        """Return the bytes of a device that stay free."""
        return round(self.margin * self.base.cluster.device_memory) if self.base.cluster else 0

    @property
    def room(self) -> float:
        """Return the bytes of a device that a peak may fill."""
        cluster = self.base.cluster
        return float(cluster.usable_memory - self.margin_bytes) if cluster else math.inf

    @property
    def scored(self) -> Spec:
        """Return the base as it is estimated."""
        return self.base if self.stand_in is None else replace(self.base, model=self.stand_in)

    @property
    def sized(self) -> Spec:
        """Return the base if its shape gives its sizes, else that of the stand-in."""
        return self.base if isinstance(self.base.model, ModelShape) else self.scored

    @property
    def name(self) -> str:
        """What the winner's spec is called."""
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
    """Return the job of a model (a preset, a file of a shape) or of a spec, with the facts of a
    model that is not built in from `read`. Raises SpecError for what is none of these, and where
    the cluster has fewer devices."""
    of_cluster = [] if cluster is None else [f"cluster.preset={cluster}"]
    words = [*of_cluster, *overrides]
    if is_model(source):
        job = _of_model(source, said_in(_model_mapping(source), words), where)
    else:
        job = _of_spec(source, words, where)
    base = job.base
    require_eager(base, "select")
    if base.cluster is None:
        raise refused(
            "--cluster",
            "the cluster is missing, so device memory and links are unknown",
            f"Add `--cluster` with one of {', '.join(list_files('clusters'))}, or a file.",
        )
    if isinstance(base.model, ModelShape):
        like = _stand_in(base, base.model)
    else:
        like = stand_in_of(base, read(base))
    number = base.cluster.devices if devices is None else devices
    if number > base.cluster.devices:
        raise refused(
            "--devices",
            f"{number} devices requested, but the cluster {base.cluster.name} has "
            f"{base.cluster.devices}",
            f"Use `--devices {base.cluster.devices}` or fewer, or `cluster.devices={number}`.",
        )
    return replace(job, devices=number, overrides=tuple(words), stand_in=like)


def _stand_in(base: Spec, shape: ModelShape) -> ModelShape | None:
    """The shape that a model is scored as; None where tables tell of its own. Raises SpecError
    where they tell of neither."""
    if is_tabulated(base):
        return None
    like = stand_in(shape)
    if is_tabulated(replace(base, model=like)):
        return like
    raise refused(
        "model",
        f"not supported yet: searching {base.name}, because every split needs a trace: no "
        "memory table covers it or a similar llama or gpt",
        "Use a preset with llama or gpt blocks, for example `llama3-8b` or `gpt3-13b`.",
    )


def said_in(
    source: str | dict[str, object] | None, overrides: Sequence[str] = ()
) -> dict[str, Any]:
    """Return what a source and overrides write, before anything is resolved."""
    root = read_expanded_tree(source, overrides).root
    assert isinstance(root, dict), "a file of a spec is a mapping"
    return root


def _require_known(source: str) -> None:
    """Raises SpecError for a name that is like a model's and no spec's."""
    specs = [name for folder in ("strategies", "paper", "node") for name in list_files(folder)]
    near = find_similar(source, tuple(list_files("models")))
    if near and source not in specs and not Path(source).exists():
        raise refused(
            "MODEL",
            f"there is no spec named {source!r}, and no such model",
            f"Did you mean `{near}`?",
        )


def is_model(source: str) -> bool:
    """Return whether it names a model: a preset, or a file of a shape's fields and no spec."""
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
    """All axes are searched, but for degrees that are written."""
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
    """What is written stays, and an axis that its mesh does not name has one rank."""
    _require_known(source)
    said = said_in(source, words)
    if isinstance(batch := said.get("batch", {}), dict) and "global" not in batch:
        raise refused(
            "batch.global",
            "the number of samples per step is missing",
            "Use `batch.global=64`, or a number of tokens such as `4M tokens`.",
        )
    if not is_open(said):
        raise refused(
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
    """A batch of about 4M tokens where none is written, and a layout that the devices are for."""
    if not isinstance(said.get("batch", {}), dict):
        load({**said, "mesh": {}})  # says what a batch is
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
    precision = said.get("precision", {"layout": layout})
    return {**said, "batch": batch, "precision": precision}


def words_of(job: SearchedJob, spec: Spec) -> tuple[str, ...]:
    """Return the name or file of a spec, and the overrides that make a candidate of it; of a model
    the default spec's. `spec` has the mapping that loads to it."""
    if is_model(job.source):
        before, said = _default_spec()
        return (load_names().default, *_changes(before, spec.resolved, said))
    said = said_in(job.source, job.overrides)
    return (job.source, *job.overrides, *_changes(job.base.resolved, spec.resolved, said))


@cache
def _default_spec() -> tuple[dict[str, object], dict[str, Any]]:
    """Return the default spec, resolved and as it is written."""
    return load(None).spec.resolved, said_in(None)


def _changes(
    before: dict[str, object], after: dict[str, object], said: dict[str, object]
) -> Iterator[str]:
    """Sections that differ, and those that candidates say and the file says otherwise."""
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
    # as the wrapper does by itself
    **dict.fromkeys(("unit", "overlap", "prefetch", "gather_after_update"), "null"),
}
