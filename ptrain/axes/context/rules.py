"""Legal tuples and specs of the context axis.

A rank of cp has a shard of the tokens of every sample, and a partial sum of all gradients. Any (Θ,
Ω, G) that is legal on a data axis is legal. A is S, or S* if keys and values are all-gathered and
saved so; R would duplicate samples. Of 625 tuples 190 are legal: 95 triples times two. For an
optimizer that keeps state there are 160, for one that needs full matrices 48.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import gcd

from ptrain.axes.context.attention import attention_of, factor_of, split_degree
from ptrain.axes.data.rules import GRADIENT_INTEGRITY, STATE_RULES
from ptrain.axes.rule import AxisRules, SpecRule, TupleRule
from ptrain.errors import Fault
from ptrain.spec.batch import PADDED, ContextAttention, Hybrid, token_multiple
from ptrain.spec.block import Positions
from ptrain.spec.misfits import divisors
from ptrain.spec.model import Attention, HuggingFaceModel, ModelShape
from ptrain.spec.placement import S_STAR, Axis, Distribution, S
from ptrain.spec.spec import Spec
from ptrain.units import with_noun

_TUPLES = (
    *STATE_RULES,
    TupleRule(
        name="every token is counted once",
        theorem=GRADIENT_INTEGRITY,
        is_broken=lambda placement, _: (
            placement.activations.distribution is Distribution.REPLICATED
        ),
        message=(
            "activations cannot be R on cp: every rank would hold all tokens of the same "
            "samples and count each token once per rank. Ranks of cp shard the tokens: "
            "S, or S* if keys and values are all-gathered and saved"
        ),
        repair=lambda placement: replace(placement, activations=S),
    ),
    TupleRule(
        name="activations are sharded by tokens",
        theorem="Definition 2",
        is_broken=lambda placement, _: (
            placement.activations.distribution is not Distribution.REPLICATED
            and placement.activations not in (S, S_STAR)
        ),
        message=(
            "activations on cp must be S (sharded by tokens) or S* (keys and values "
            "all-gathered and saved); M and O are set for all axes at the top level, "
            "`activations=M`"
        ),
        repair=lambda placement: replace(placement, activations=S),
    ),
)


def _without_cp(spec: Spec) -> Iterator[Fault]:
    if spec.context is not None and factor_of(spec) is None and spec.world_size > 1:
        mode = S_STAR if spec.context.attention is ContextAttention.ALL_GATHER else S
        yield Fault(
            place="context.attention",
            finding="has no effect: the mesh has no cp axis with two or more ranks",
            remedy=(f"Remove `context`, or use `mesh.cp=2` with `placement.cp=R,R,R,{mode}`."),
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
    does = "saves all-gathered keys and values" if is_gathered else "saves shards only"
    yield Fault(
        place="context.attention",
        finding=(
            f"{attention} {does} ({S_STAR if is_gathered else S}), but activations on cp "
            f"are {activations}"
        ),
        remedy="Use `placement.cp.activations=S*`, or `context.attention=zigzag`."
        if is_gathered
        else "Use `placement.cp.activations=S`, or `context.attention=all-gather`.",
    )


def _hybrid_faults(spec: Spec) -> Iterator[Fault]:
    factor, attention = factor_of(spec), attention_of(spec)
    if (
        factor is not None
        and isinstance(attention, Hybrid)
        and attention.ulysses * attention.ring != factor.degree
    ):
        yield Fault(
            place="context.attention",
            finding=(
                f"ulysses {attention.ulysses} × ring {attention.ring} = "
                f"{attention.ulysses * attention.ring} ranks, but cp has {factor.degree}"
            ),
            remedy=_one_of(factor.degree, divisors(factor.degree)),
        )


def _one_of(ranks: int, degrees_of_ulysses: list[int]) -> str:
    """Return the remedy that lists the hybrids of this number of ranks."""
    ways = [str(Hybrid(ulysses=ulysses, ring=ranks // ulysses)) for ulysses in degrees_of_ulysses]
    return f"Use {'one of ' * (len(ways) > 1)}{', '.join(ways)}"


def _token_faults(spec: Spec) -> Iterator[Fault]:
    factor, attention, sequence = factor_of(spec), attention_of(spec), spec.batch.sequence
    # These faults need another degree, on which the number of chunks depends.
    if factor is None or any(_hybrid_faults(spec)) or any(_head_faults(spec)):
        return
    ulysses, ring = split_degree(attention, factor.degree)
    per_rank = _chunks_per_rank(attention)
    chunks = ulysses * ring * per_rank
    if sequence % chunks == 0:
        return
    near = _nearest_lengths(sequence, token_multiple(spec.factors, attention))
    degrees_that_do = _legal_degrees(factor.degree, sequence, attention, _heads_of(spec))
    fewer = f", or one of {_numbers_text(degrees_that_do)} for `mesh.cp`" if degrees_that_do else ""
    contiguous = (
        ", or `context.attention=ring`" if per_rank > 1 and sequence % factor.degree == 0 else ""
    )
    yield Fault(
        place="batch.sequence",
        finding=f"{with_noun(sequence, 'token')} cannot be split into {chunks} equal "
        + ("chunks, two per rank," if per_rank > 1 else "shards")
        + f" over cp={factor.degree} ({attention})",
        remedy=f"Use {near}{fewer}{contiguous}{PADDED}.",
    )


def _nearest_lengths(sequence: int, multiple: int) -> str:
    """Return the multiples below and above a sequence length, as remedies."""
    near = sorted({max(1, sequence // multiple) * multiple, -(-sequence // multiple) * multiple})
    return " or ".join(f"`batch.sequence={length}`" for length in near)


def _legal_degrees(
    ranks: int, sequence: int, attention: ContextAttention | Hybrid, heads: int
) -> list[int]:
    """Return the degrees of cp that divide the tokens and, with Ulysses, the heads.

    They are at most a few times `ranks`. A hybrid has none, because its degrees are in the spec.
    """
    if isinstance(attention, Hybrid):
        return []
    cut = gcd(sequence, heads) if attention is ContextAttention.ULYSSES and heads else sequence
    return [
        d
        for d in divisors(cut)
        # More than a few times the requested ranks is no useful suggestion.
        if d <= 4 * ranks and sequence % (_chunks_per_rank(attention) * d) == 0
    ]


def _numbers_text(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))


def _head_faults(spec: Spec) -> Iterator[Fault]:
    if _heads_of(spec):
        yield from uncut_heads(spec, _heads_of(spec))


def _heads_of(spec: Spec) -> int:
    """Return the number of query heads on a rank of tp; 0 for a model that is not built in, whose
    modules determine it."""
    shape = spec.model
    return shape.heads // spec.degree(Axis.TP) if isinstance(shape, ModelShape) else 0


def uncut_heads(spec: Spec, heads: int, whose: str = "") -> Iterator[Fault]:
    """Yield a fault if the degree of Ulysses does not divide a rank's query heads.

    Key-value heads are repeated, so the degree need not divide them.

    Args:
        spec: The spec.
        heads: Number of query heads on a rank of tp.
        whose: Name of the attention module, for the message.
    """
    factor, attention, sequence = factor_of(spec), attention_of(spec), spec.batch.sequence
    if factor is None or any(_hybrid_faults(spec)):
        return
    ranks = factor.degree
    ulysses, _ = split_degree(attention, ranks)
    if heads % ulysses == 0:
        return
    place = "mesh.cp"
    remedy = (
        f"Use one of {_numbers_text(_legal_degrees(ranks, sequence, attention, heads))} "
        "for `mesh.cp`"
    )
    if isinstance(attention, Hybrid):
        place, remedy = "context.attention", _one_of(ranks, divisors(gcd(heads, ranks)))
    rings = (ring for ring in _RINGS if sequence % (_chunks_per_rank(ring) * ranks) == 0)
    other = next((f", or `context.attention={ring}`" for ring in rings), "")
    yield Fault(
        place=place,
        finding=(
            f"ulysses over {ulysses} ranks does not divide "
            f"{with_noun(heads, 'head')}{f' of {whose}' if whose else ''}"
            f"{' per tp rank' if spec.degree(Axis.TP) > 1 else ''}"
        ),
        remedy=f"{remedy}{other}.",
    )


_RINGS = (ContextAttention.ZIGZAG, ContextAttention.RING)  # by balance of work, best first


def _chunks_per_rank(attention: ContextAttention | Hybrid) -> int:
    """Return the number of chunks in which a rank has its tokens."""
    return 2 if attention.is_balanced else 1


def _dropout_faults(spec: Spec) -> Iterator[Fault]:
    shape = spec.model
    if factor_of(spec) is not None and isinstance(shape, ModelShape) and shape.dropouts.attention:
        # The remedy must name the key that sets the rate: `dropout` covers attention if no other
        # key does.
        own = shape.attention_dropout is not None
        yield Fault(
            place=f"model.{'attention_dropout' if own else 'dropout'}",
            finding=(
                f"attention dropout {shape.dropouts.attention:g} is not reproducible "
                "over cp: the fused kernel draws one mask per shard of the scores, "
                "unlike a single device"
            ),
            remedy="Use `model.attention_dropout=0`.",
        )


def _kernel_faults(spec: Spec) -> Iterator[Fault]:
    """Reject attention whose partial results cannot be merged.

    They are merged by their log-sum-exp, which only the kernels of torch's
    scaled_dot_product_attention return, for plain causal scores.
    """
    factor, shape = factor_of(spec), spec.model
    if factor is None or not isinstance(shape, ModelShape):
        return
    attention = attention_of(spec)
    # Ulysses alone has all tokens of its heads, so no partial results are merged and any kernel
    # works.
    if split_degree(attention, factor.degree)[1] == 1:
        return
    other = "or `context.attention=ulysses`, which computes all tokens of a head."
    if shape.attention is not Attention.SDPA:
        yield Fault(
            place="attention",
            finding=(
                f"{attention} needs attention=sdpa to combine partial results; got "
                f"{shape.attention}"
            ),
            remedy=f"Use `attention=sdpa`, {other}",
        )
    for name, value in (("window", shape.window), ("attention_soft_cap", shape.attention_soft_cap)):
        if value is not None:
            yield Fault(
                place=f"model.{name}",
                finding=f"{attention} supports plain causal attention only; got {value:g}",
                remedy=f"Use `model.{name}=null`, {other}",
            )


def _document_faults(spec: Spec) -> Iterator[Fault]:
    factor, shape, attention = factor_of(spec), spec.model, attention_of(spec)
    if (
        factor is not None
        and isinstance(shape, ModelShape)
        and shape.has_documents
        and spec.is_for_cuda
        and split_degree(attention, factor.degree)[1] > 1
    ):
        yield Fault(
            place=f"model.{shape.document_key}",
            finding=(
                f"not supported yet: document masks with {attention} on CUDA (flash "
                "attention accepts no mask)"
            ),
            remedy="Use `context.attention=ulysses` with `placement.cp.activations=S`.",
        )


def _latent_faults(spec: Spec) -> Iterator[Fault]:
    shape = spec.model
    if factor_of(spec) is not None and isinstance(shape, ModelShape) and shape.is_latent:
        yield Fault(
            place="model.kv_lora_rank",
            finding=(
                "not supported yet: latent attention over cp, whose values are narrower "
                "than its keys"
            ),
            remedy="Remove `mesh.cp`, or use `model.kv_lora_rank=null`.",
        )


def _own_functions(spec: Spec) -> Iterator[Fault]:
    if factor_of(spec) is None:
        return
    # A function returns a mean over its samples, which cannot be divided by the global count of
    # tokens afterwards.
    for function in (spec.loss.user_function, spec.data.function):
        if function is not None:
            place = "step.target" if function is spec.loss.step else f"{function.section}.target"
            yield Fault(
                place=place,
                finding=(
                    f"{function.target} cannot compute the loss over cp: there the loss "
                    "is a sum over the local tokens, divided by the global token count"
                ),
                remedy=f"Remove `{function.section}`, or remove `mesh.cp`.",
            )


def _slices_of_tp(spec: Spec) -> Iterator[Fault]:
    factor, tp, sequence = factor_of(spec), spec.degree(Axis.TP), spec.batch.sequence
    if (
        factor is None
        or not spec.is_sequence_parallel
        or sequence % factor.degree
        or not (sequence // factor.degree) % tp
    ):
        return
    near = _nearest_lengths(sequence, token_multiple(spec.factors, attention_of(spec)))
    yield Fault(
        place="batch.sequence",
        finding=(
            f"{with_noun(sequence // factor.degree, 'token')} per rank of cp cannot be "
            f"split evenly over {tp} ranks of tp"
        ),
        remedy=f"Use {near}, or `placement.tp.activations=R`{PADDED}.",
    )


def _position_faults(spec: Spec) -> Iterator[Fault]:
    """Yield a fault for learned positions with sequence parallelism, if a rank's tokens are two
    ranges.

    With an odd number of neighbours, the middle one has the end of an early chunk and the beginning
    of a late one. All others have one range.
    """
    factor, shape, attention = factor_of(spec), spec.model, attention_of(spec)
    if factor is None or not spec.is_sequence_parallel or not isinstance(attention, Hybrid):
        return
    is_odd = attention.ulysses > 1 and attention.ulysses % 2 and attention.ring > 1
    if is_odd and isinstance(shape, ModelShape) and shape.positions is Positions.LEARNED:
        yield Fault(
            place="context.attention",
            finding=(
                f"not supported yet: {attention} with learned positions and sequence parallelism"
            ),
            remedy=(
                "Use an even ulysses degree, `context.attention=zigzag`, or "
                "`placement.tp.activations=R`."
            ),
        )


def _own_kernels(spec: Spec) -> Iterator[Fault]:
    """Reject other kernels than SDPA for models of transformers.

    Further requirements are checked on the module.
    """
    model = spec.model
    if factor_of(spec) is None or not isinstance(model, HuggingFaceModel):
        return
    if model.attention not in (None, Attention.SDPA):
        yield Fault(
            place="attention",
            finding=(
                "attention over cp needs torch's scaled_dot_product_attention in "
                f"{model.hf}; got {model.attention}"
            ),
            remedy="Use `attention=sdpa`.",
        )
    if spec.batch.sequence == spec.degree(Axis.CP):
        yield Fault(
            place="batch.sequence",
            finding="a rank has only one token; Transformers then assumes decoding with a cache",
            remedy=f"Use `batch.sequence={2 * spec.batch.sequence}` or more.",
        )


CONTEXT = AxisRules(
    axes=(Axis.CP,),
    tuples=_TUPLES,
    specs=(
        SpecRule(
            name="options of cp need cp",
            theorem="every key has an effect",
            faults=_without_cp,
        ),
        SpecRule(
            name="attention matches the placement",
            theorem="Definition 2",
            faults=_as_the_tuple_says,
        ),
        SpecRule(name="a hybrid uses all ranks", theorem="Definition 5", faults=_hybrid_faults),
        SpecRule(
            name="ranks have equal numbers of tokens",
            theorem=GRADIENT_INTEGRITY,
            faults=_token_faults,
        ),
        SpecRule(
            name="ranks have equal numbers of heads", theorem="Definition 2", faults=_head_faults
        ),
        SpecRule(name="shards split evenly over tp", theorem="Definition 2", faults=_slices_of_tp),
        SpecRule(
            name="one dropout mask for all shards",
            theorem=GRADIENT_INTEGRITY,
            faults=_dropout_faults,
        ),
        SpecRule(
            name="partial attention results are combined",
            theorem="Definition 2",
            faults=_kernel_faults,
        ),
        SpecRule(
            name="the attention call is intercepted", theorem="Definition 2", faults=_own_kernels
        ),
        SpecRule(
            name="the loss is a sum over tokens", theorem=GRADIENT_INTEGRITY, faults=_own_functions
        ),
    ),
    unsupported=(
        SpecRule(name="flash attention accepts no mask", theorem="", faults=_document_faults),
        SpecRule(name="keys and values have equal dimensions", theorem="", faults=_latent_faults),
        SpecRule(name="ranks have equal numbers of chunks", theorem="", faults=_position_faults),
    ),
)
