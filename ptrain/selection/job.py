"""The job that a search places: a model or a spec without placements, the keys that are written and
so not chosen, and the shape that stands in for one that the tables do not cover.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd, log
from pathlib import Path
from typing import Any

from ptrain.axes.candidates import NOTHING, Written, divisors
from ptrain.derivation.layers import is_tabulated
from ptrain.errors import refused
from ptrain.facts.model import InnerCollective, LayerWork, ModelFacts, ModelWork, Operator
from ptrain.facts.parameters import facts
from ptrain.selection.cuts import ReadFacts, read_or_kept
from ptrain.selection.where import Where
from ptrain.selection.written import (
    OF_CANDIDATES,
    is_open,
    numbers,
    unnamed,
    written_of,
)
from ptrain.spec.extras import require_eager
from ptrain.spec.leaf import nearest
from ptrain.spec.load import load, written
from ptrain.spec.model import Family, ModelShape
from ptrain.spec.names import listing
from ptrain.spec.rates import OperatorKind
from ptrain.spec.spec import Spec

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
        vocab=shape.vocab,
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
    distinct = {id(layer): layer for layer in work.layers}
    changed = {key: _layer_with_heads(layer, shape, like) for key, layer in distinct.items()}
    layers = tuple(changed[id(layer)] for layer in work.layers)
    return ModelWork(front=work.front, layers=layers, behind=work.behind)


def _layer_with_heads(layer: LayerWork, shape: ModelShape, like: ModelShape) -> LayerWork:
    return LayerWork(*(tuple(_with_heads(item, shape, like) for item in work) for work in layer))


def _with_heads(
    item: Operator | InnerCollective, shape: ModelShape, like: ModelShape
) -> Operator | InnerCollective:
    if isinstance(item, InnerCollective) or item.kind not in _OF_HEADS:
        return item
    samples, heads, queries, keys, _ = item.dimensions
    of_rank = max(1, heads * shape.heads // like.heads)
    return item._replace(dimensions=(samples, of_rank, queries, keys, shape.head_dim))


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
    written: Written = NOTHING
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
            f"Add `--cluster` with one of {', '.join(listing('clusters'))}, or a file.",
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
    root = written(source, overrides).root
    assert isinstance(root, dict), "a file of a spec is a mapping"
    return root


def _require_known(source: str) -> None:
    """Raises SpecError for a name that is like a model's and no spec's."""
    specs = [name for folder in ("strategies", "paper", "node") for name in listing(folder)]
    near = nearest(source, tuple(listing("models")))
    if near and source not in specs and not Path(source).exists():
        raise refused(
            "MODEL",
            f"there is no spec named {source!r}, and no such model",
            f"Did you mean `{near}`?",
        )


def is_model(source: str) -> bool:
    """Return whether it names a model: a preset, or a file of a shape's fields and no spec."""
    if source in listing("models"):
        return True
    if not source.endswith((".yaml", ".yml")) or not Path(source).exists():
        return False
    said = said_in(source)
    return "model" not in said and "layers" in said


def _model_mapping(source: str) -> dict[str, object]:
    is_preset = source in listing("models")
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
