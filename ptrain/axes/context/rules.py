"""Which tuples the context axis takes, and which specs.

A rank of cp has a slice of the tokens of every sample, and addends of all gradients: of Theta,
Omega and G any triple is legal that is legal on a data axis. A is S, or S* where the slices of keys
and values are gathered and kept so; R would be duplicate samples. Of 625 tuples 190 are legal, 95
triples times two, with an optimizer that keeps state 160, with one that needs whole matrices 48.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import gcd

from ptrain.axes.context.attention import attention_of, degrees, factor_of
from ptrain.axes.data.rules import GRADIENT_INTEGRITY, STATE_RULES
from ptrain.axes.rule import AxisRules, SpecRule, TupleRule
from ptrain.errors import Fault
from ptrain.spec.batch import PADDED, token_multiple
from ptrain.spec.block import Positions
from ptrain.spec.context import ContextAttention, Hybrid
from ptrain.spec.job import OptimizerSpec
from ptrain.spec.misfits import divisors
from ptrain.spec.model import Attention, HuggingFaceModel, ModelShape
from ptrain.spec.placement import S_STAR, Axis, Distribution, Placement, R, S
from ptrain.spec.spec import Spec
from ptrain.units import counted


def _whole(placement: Placement, optimizer: OptimizerSpec) -> bool:
    return placement.activations.distribution is Distribution.REPLICATED


def _of_a_rank(placement: Placement, optimizer: OptimizerSpec) -> bool:
    return not _whole(placement, optimizer) and placement.activations not in (S, S_STAR)


_TUPLES = (
    *STATE_RULES,
    TupleRule(
        name="every token counts once",
        theorem=GRADIENT_INTEGRITY,
        broken=_whole,
        message="activations: R leave every rank all tokens of the same samples, so that each "
        "token counts once per rank; a rank has a slice of the tokens: S, or S* where keys and "
        "values are gathered and kept so",
        nearest=lambda placement: replace(placement, activations=S),
    ),
    TupleRule(
        name="activations are slices of the tokens",
        theorem="Definition 2",
        broken=_of_a_rank,
        message="activations on cp are S (a slice of the tokens) or S* (keys and values gathered "
        "and kept); M and O belong to a rank, not to an axis: activations: M at the top of the "
        "spec",
        nearest=lambda placement: replace(placement, activations=S),
    ),
)


def _without_cp(spec: Spec) -> Iterator[Fault]:
    if spec.context is not None and factor_of(spec) is None and spec.world_size > 1:
        yield Fault(
            place="context.attention",
            finding="nothing obeys it: every rank has all tokens of its samples, since cp has no "
            "two ranks",
            remedy="remove context, or write mesh.cp=2 with placement.cp=R,R,R,"
            f"{S_STAR if spec.context.attention is ContextAttention.ALL_GATHER else S}",
        )


def _as_the_tuple_says(spec: Spec) -> Iterator[Fault]:
    factor, attention = factor_of(spec), attention_of(spec)
    if factor is None or factor.placement.activations not in (S, S_STAR):
        return
    is_gathered, activations = (
        attention is ContextAttention.ALL_GATHER,
        factor.placement.activations,
    )
    if is_gathered is (activations == S_STAR):
        return
    does = "keeps gathered keys and values" if is_gathered else "keeps slices alone"
    yield Fault(
        place="context.attention",
        finding=f"{attention} {does}, which is {S_STAR if is_gathered else S}, and activations on "
        f"cp are {activations}",
        remedy="write placement.cp.activations=S*, or context.attention=zigzag"
        if is_gathered
        else "write placement.cp.activations=S, or context.attention=all-gather",
    )


def _product(spec: Spec) -> Iterator[Fault]:
    factor, attention = factor_of(spec), attention_of(spec)
    if factor is None or not isinstance(attention, Hybrid):
        return
    if attention.ulysses * attention.ring != factor.degree:
        yield Fault(
            place="context.attention",
            finding=f"ulysses {attention.ulysses} × ring {attention.ring} are "
            f"{attention.ulysses * attention.ring} ranks, and cp has {factor.degree}",
            remedy=_one_of(factor.degree, divisors(factor.degree)),
        )


def _one_of(ranks: int, degrees_of_ulysses: list[int]) -> str:
    """Return the remedy of a hybrid: those of so many ranks."""
    ways = [str(Hybrid(ulysses=ulysses, ring=ranks // ulysses)) for ulysses in degrees_of_ulysses]
    return f"write {'one of ' * (len(ways) > 1)}{', '.join(ways)}"


def _slices(spec: Spec) -> Iterator[Fault]:
    factor, attention, sequence = factor_of(spec), attention_of(spec), spec.batch.sequence
    if factor is None or any(_product(spec)) or any(_heads(spec)):
        return  # another degree is to be had first
    ulysses, ring = degrees(attention, factor.degree)
    per_rank = _chunks(attention)
    chunks = ulysses * ring * per_rank
    if sequence % chunks == 0:
        return
    near = _nearest(sequence, token_multiple(spec.factors, attention))
    degrees_that_do = _degrees(factor.degree, sequence, attention, _heads_of(spec))
    fewer = f", or cp of {_listed(degrees_that_do)}" if degrees_that_do else ""
    contiguous = (
        ", or context.attention=ring" if per_rank > 1 and sequence % factor.degree == 0 else ""
    )
    yield Fault(
        place="batch.sequence",
        finding=f"{counted(sequence, 'token')} cannot be cut into {chunks} equal "
        + (f"chunks, two for each of {factor.degree} ranks" if per_rank > 1 else "slices")
        + f" of cp ({attention})",
        remedy=f"write batch.sequence={near}{fewer}{contiguous}{PADDED}",
    )


def _nearest(sequence: int, multiple: int) -> str:
    """Return the lengths around a sequence that are such multiples."""
    near = sorted({max(1, sequence // multiple) * multiple, -(-sequence // multiple) * multiple})
    return " or ".join(map(str, near))


def _degrees(
    ranks: int, sequence: int, attention: ContextAttention | Hybrid, heads: int
) -> list[int]:
    """Return the degrees of cp, up to a few times these `ranks`, of which each cuts the tokens, and
    with Ulysses the heads; none of a hybrid, whose own degrees are written."""
    if isinstance(attention, Hybrid):
        return []
    cut = gcd(sequence, heads) if attention is ContextAttention.ULYSSES and heads else sequence
    return [d for d in divisors(cut) if d <= 4 * ranks and sequence % (_chunks(attention) * d) == 0]


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))


def _heads(spec: Spec) -> Iterator[Fault]:
    if _heads_of(spec):
        yield from uncut_heads(spec, _heads_of(spec))


def _heads_of(spec: Spec) -> int:
    """Return how many query heads tp leaves a rank; 0 of a model that is not built in, whose
    modules say it."""
    shape = spec.model
    return shape.heads // spec.degree(Axis.TP) if isinstance(shape, ModelShape) else 0


def uncut_heads(spec: Spec, heads: int, whose: str = "") -> Iterator[Fault]:
    """Yield the fault of `heads` on a rank that Ulysses does not divide. It gives each rank as many
    query heads as the others; those of keys and values it repeats."""
    factor, attention, sequence = factor_of(spec), attention_of(spec), spec.batch.sequence
    if factor is None or any(_product(spec)):
        return
    ranks = factor.degree
    ulysses, _ = degrees(attention, ranks)
    if heads % ulysses == 0:
        return
    place = "mesh.cp"
    remedy = f"choose cp from {_listed(_degrees(ranks, sequence, attention, heads))}"
    if isinstance(attention, Hybrid):
        place, remedy = "context.attention", _one_of(ranks, divisors(gcd(heads, ranks)))
    rings = (ring for ring in _RINGS if sequence % (_chunks(ring) * ranks) == 0)
    yield Fault(
        place=place,
        finding=f"ulysses over {ulysses} ranks does not divide {counted(heads, 'head')}"
        f"{f' of {whose}' if whose else ''}"
        f"{' that tp leaves a rank' if spec.degree(Axis.TP) > 1 else ''}",
        remedy=remedy + next((f", or context.attention={ring}" for ring in rings), ""),
    )


_RINGS = (ContextAttention.ZIGZAG, ContextAttention.RING)  # that which waits least first


def _chunks(attention: ContextAttention | Hybrid) -> int:
    """Return in how many chunks a rank has its tokens."""
    return 2 if attention.is_balanced else 1


def _dropout(spec: Spec) -> Iterator[Fault]:
    shape = spec.model
    if factor_of(spec) is None or not isinstance(shape, ModelShape):
        return
    if shape.dropouts.attention:
        own = shape.attention_dropout is not None
        yield Fault(
            place=f"model.{'attention_dropout' if own else 'dropout'}",
            finding=f"{shape.dropouts.attention:g} within attention, whose scores are spread over "
            "the ranks of cp: a fused kernel draws a mask for each part of them, which no one "
            "device draws",
            remedy="write model.attention_dropout=0",
        )


def _kernels(spec: Spec) -> Iterator[Fault]:
    """Partial results of attention are joined by their log-sum-exp, which torch's
    scaled_dot_product_attention alone gives, of causal scores without more."""
    factor, shape = factor_of(spec), spec.model
    if factor is None or not isinstance(shape, ModelShape):
        return
    attention = attention_of(spec)
    if degrees(attention, factor.degree)[1] == 1:
        return
    other = "or context.attention=ulysses, which has all tokens"
    if shape.attention is not Attention.SDPA:
        yield Fault(
            place="attention",
            finding=f"{shape.attention}: {attention} joins parts of attention by what sdpa alone "
            "gives",
            remedy=f"write attention=sdpa, {other}",
        )
    for name, value in (("window", shape.window), ("attention_soft_cap", shape.attention_soft_cap)):
        if value is not None:
            yield Fault(
                place=f"model.{name}",
                finding=f"{value:g}: {attention} joins parts of plain causal attention",
                remedy=f"write model.{name}=null, {other}",
            )


def _documents(spec: Spec) -> Iterator[Fault]:
    factor, shape, attention = factor_of(spec), spec.model, attention_of(spec)
    if factor is None or not isinstance(shape, ModelShape) or not shape.has_documents:
        return
    if spec.is_for_cuda and degrees(attention, factor.degree)[1] > 1:
        yield Fault(
            place=f"model.{shape.document_key}",
            finding=f"not yet: documents with {attention} on cuda, whose flash takes no mask",
            remedy="what works today: context.attention=ulysses with placement.cp.activations=S",
        )


def _latents(spec: Spec) -> Iterator[Fault]:
    shape = spec.model
    if factor_of(spec) is not None and isinstance(shape, ModelShape) and shape.is_latent:
        yield Fault(
            place="model.kv_lora_rank",
            finding="not yet: latent attention over cp, whose values are narrower than its keys",
            remedy="what works today: remove cp, or keys and values of the stream "
            "(model.kv_lora_rank=null)",
        )


def _own_functions(spec: Spec) -> Iterator[Fault]:
    if factor_of(spec) is None:
        return
    for function in (spec.loss.user_function, spec.data.function):
        if function is not None:
            place = "step.target" if function is spec.loss.step else f"{function.section}.target"
            yield Fault(
                place=place,
                finding=f"{function.target}: nothing says how it is of slices of the tokens; on cp "
                "the loss is a sum over tokens, divided by their global count",
                remedy=f"remove {function.section}, or cp",
            )


def _slices_of_tp(spec: Spec) -> Iterator[Fault]:
    factor, tp, sequence = factor_of(spec), spec.degree(Axis.TP), spec.batch.sequence
    cut = any(f.axis is Axis.TP and f.placement.activations != R for f in spec.factors)
    if (
        factor is None
        or not cut
        or sequence % factor.degree
        or not (sequence // factor.degree) % tp
    ):
        return
    near = _nearest(sequence, token_multiple(spec.factors, attention_of(spec)))
    yield Fault(
        place="batch.sequence",
        finding=f"{counted(sequence // factor.degree, 'token')} of a rank of cp cannot be cut into "
        f"{tp} equal slices of tp",
        remedy=f"write batch.sequence={near}, or placement.tp.activations=R{PADDED}",
    )


def _stretches(spec: Spec) -> Iterator[Fault]:
    """With an odd number of neighbours the middle one has the end of an early chunk and the
    beginning of a late one; the others have one stretch."""
    factor, shape, attention = factor_of(spec), spec.model, attention_of(spec)
    is_cut = any(f.axis is Axis.TP and f.placement.activations != R for f in spec.factors)
    if factor is None or not is_cut or not isinstance(attention, Hybrid):
        return
    is_odd = attention.ulysses > 1 and attention.ulysses % 2 and attention.ring > 1
    if is_odd and isinstance(shape, ModelShape) and shape.positions is Positions.LEARNED:
        yield Fault(
            place="context.attention",
            finding=f"not yet: {attention} with learned positions in slices of the tokens over "
            "tp, whose gradients ranks of one stretch make whole once, and those of two twice",
            remedy="what works today: an even ulysses, context.attention=zigzag, or "
            "placement.tp.activations=R",
        )


def _own_kernels(spec: Spec) -> Iterator[Fault]:
    """What else attention of a model that is not built in must be, the model itself shows."""
    model = spec.model
    if factor_of(spec) is None or not isinstance(model, HuggingFaceModel):
        return
    if model.attention not in (None, Attention.SDPA):
        yield Fault(
            place="attention",
            finding=f"{model.attention}: of {model.hf} attention over cp is what goes through "
            "torch's scaled_dot_product_attention",
            remedy="write attention=sdpa",
        )
    if spec.batch.sequence == spec.degree(Axis.CP):
        yield Fault(
            place="batch.sequence",
            finding="a rank has one token, whose attention transformers takes for that of a last "
            "token to all before",
            remedy=f"write batch.sequence={2 * spec.batch.sequence} or more",
        )


CONTEXT = AxisRules(
    axes=(Axis.CP,),
    tuples=_TUPLES,
    specs=(
        SpecRule(
            name="the dials of cp need it",
            theorem="every key of a spec has an effect",
            faults=_without_cp,
        ),
        SpecRule(
            name="attention is as the tuple says", theorem="Definition 2", faults=_as_the_tuple_says
        ),
        SpecRule(name="a hybrid has all ranks", theorem="Definition 5", faults=_product),
        SpecRule(name="ranks have as many tokens", theorem=GRADIENT_INTEGRITY, faults=_slices),
        SpecRule(name="ranks have as many heads", theorem="Definition 2", faults=_heads),
        SpecRule(name="a slice of a slice", theorem="Definition 2", faults=_slices_of_tp),
        SpecRule(name="one mask for all parts", theorem=GRADIENT_INTEGRITY, faults=_dropout),
        SpecRule(name="parts of attention are joined", theorem="Definition 2", faults=_kernels),
        SpecRule(
            name="attention is one that is reached", theorem="Definition 2", faults=_own_kernels
        ),
        SpecRule(
            name="the loss is a sum over tokens", theorem=GRADIENT_INTEGRITY, faults=_own_functions
        ),
    ),
    not_yet=(
        SpecRule(name="flash knows of no mask", theorem="", faults=_documents),
        SpecRule(name="keys are as wide as values", theorem="", faults=_latents),
        SpecRule(name="ranks have as many stretches", theorem="", faults=_stretches),
    ),
)
