"""Legality of a spec: RULES, a table collected from the axes' packages and from the spec.

`check` returns the violations of theorems, with the nearest legal spec. `find_unsupported` returns
the parts that are legal but not supported yet. The two are separate, so that legal specs can be
counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Protocol

from ptrain.activations import rules as activations
from ptrain.algebra import products
from ptrain.axes.context.rules import CONTEXT
from ptrain.axes.data.rules import DATA
from ptrain.axes.expert.rules import EXPERT
from ptrain.axes.pipeline.rules import DIALS as PIPELINE_DIALS
from ptrain.axes.pipeline.rules import PIPELINE
from ptrain.axes.rule import AxisRules, SpecRule, TupleRule
from ptrain.axes.tensor.rules import DIALS as TENSOR_DIALS
from ptrain.axes.tensor.rules import TENSOR
from ptrain.errors import Fault, SpecError
from ptrain.spec.batch import token_multiple
from ptrain.spec.job import OptimizerSpec
from ptrain.spec.misfits import find_misfits
from ptrain.spec.model import ExternalModel, ModelShape
from ptrain.spec.placement import Factor
from ptrain.spec.spec import Spec

ROOMS: tuple[AxisRules, ...] = (DATA, CONTEXT, EXPERT, TENSOR, PIPELINE)
BYTE_VOCAB = 259  # 256 bytes and three special tokens
# An optimizer that accepts every tuple. On an axis of one rank nothing is sharded, so that a spec
# may keep a tuple there that its optimizer would not accept on several ranks.
_ANY_TUPLE_OPTIMIZER = OptimizerSpec(name="sgd")
FaultsOf = Callable[[Spec], Iterable[Fault]]


class LocatedSpec(Protocol):
    """A spec that can locate faults in its source (`spec.load.Document`)."""

    @property
    def spec(self) -> Spec: ...

    def locate(self, fault: Fault, /) -> Fault: ...


def check(spec: Spec) -> tuple[Fault, ...]:
    """Return a fault for every violated rule."""
    return tuple(fault for faults in LEGALITY_CHECKS for fault in faults(spec))


def find_unsupported(spec: Spec) -> tuple[Fault, ...]:
    """Return a fault for every part of `spec` that is legal but not supported yet."""
    return tuple(fault for faults in SUPPORT_CHECKS for fault in faults(spec))


def is_sound(spec: Spec) -> bool:
    """Return True if `spec` is legal and supported. Stops at the first fault."""
    return breaks_none(spec, (*LEGALITY_CHECKS, *SUPPORT_CHECKS))


def breaks_none(spec: Spec, rules: Iterable[FaultsOf]) -> bool:
    """Return True if none of these rules yields a fault."""
    for faults in rules:
        for _ in faults(spec):
            return False
    return True


def require_runnable(document: LocatedSpec) -> Spec:
    """Return the spec of a document that is legal and supported.

    Args:
        document: A loaded spec.

    Raises:
        SpecError: Every fault, located in the source.
    """
    faults = (*check(document.spec), *find_unsupported(document.spec))
    if faults:
        raise SpecError(*(document.locate(fault) for fault in faults))
    return document.spec


def _tuple_faults(room: AxisRules, spec: Spec) -> Iterator[Fault]:
    for factor in room.factors(spec):
        yield from _broken_rule_faults(room, factor, spec.optimizer)
    for factor in room.trivial_factors(spec):
        yield from _broken_rule_faults(room, factor, _ANY_TUPLE_OPTIMIZER)


def _broken_rule_faults(
    room: AxisRules, factor: Factor, optimizer: OptimizerSpec
) -> Iterator[Fault]:
    nearest = room.nearest_legal(factor.placement, optimizer)
    for rule in room.broken_rules(factor.placement, optimizer):
        yield Fault(
            place=f"placement.{factor.axis}",
            finding=f"({factor.placement}) on {factor.axis}: {rule.message} [{rule.theorem}]",
            remedy=f"Use `placement.{factor.axis}={nearest}`.",
        )


def _shape_faults(spec: Spec) -> Iterator[Fault]:
    if isinstance(spec.model, ModelShape):
        yield from find_misfits(spec.model)


def _fused_faults(spec: Spec) -> Iterator[Fault]:
    shape = spec.model
    if isinstance(shape, ModelShape) and shape.logit_soft_cap is not None and spec.loss.fused:
        yield Fault(
            place="loss.fused",
            finding=(
                "torch's linear_cross_entropy does not support logit_soft_cap: "
                f"{shape.logit_soft_cap:g}"
            ),
            remedy="Remove `loss.fused`: a chunked loss applies the soft cap.",
        )


def _vocab_padding_faults(spec: Spec) -> Iterator[Fault]:
    shape, function = spec.model, spec.loss.user_function
    if not isinstance(shape, ModelShape) or shape.vocab_rows == shape.vocab:
        return
    if spec.loss.fused:
        yield Fault(
            place="loss.fused",
            finding=(
                "torch's linear_cross_entropy would predict the padding of "
                f"{shape.vocab} tokens to {shape.vocab_rows} rows"
            ),
            remedy="Remove `loss.fused`: a chunked loss leaves the padding out.",
        )
    if function is not None:
        yield Fault(
            place="model.vocab_multiple",
            finding=(
                f"{function.target} would receive {shape.vocab_rows} logits per token, "
                f"of which {shape.vocab} are of tokens"
            ),
            remedy="Use `model.vocab_multiple=1`.",
        )


def _vocabulary_faults(spec: Spec) -> Iterator[Fault]:
    (size, key), data = spec.model.vocabulary, spec.data
    if size is None:
        return
    if of_no_token := [str(token) for token in data.ignored or () if token >= size]:
        yield Fault(
            place="data.ignored",
            finding=(
                f"token ids {' and '.join(of_no_token)} are outside the vocabulary of {size} tokens"
            ),
            remedy=f"Use ids below {size}.",
        )
    if not data.is_of_files and data.tokenizer == "bytes" and size < BYTE_VOCAB:
        yield Fault(
            place=key,
            finding=f"{size} is smaller than the vocabulary of the byte tokenizer",
            remedy=f"Use `{key}={BYTE_VOCAB}` or more.",
        )


def _ignored_faults(spec: Spec) -> Iterator[Fault]:
    """Yield a fault if the loss is a mean per micro-batch, but micro-batches have different numbers
    of counted targets.

    A mean over one micro-batch's targets is then no summand of the global mean.
    """
    function, data = spec.loss.user_function, spec.data
    if function is None or data.function is not None or not spec.ignores_targets:
        return
    given = (key for key in ("ignored", "loss_mask") if getattr(data, key) is not None)
    section, key = "data", next(given, "sources")
    if not data.ignores_targets:
        section, key = "batch", "pad"
    yield Fault(
        place=f"{section}.{key}",
        finding=(
            f"{function.target} returns the mean over a micro-batch, but micro-batches "
            "have different numbers of targets: the mean of these means is not the mean "
            "over the global batch"
        ),
        remedy=(
            f"Remove `{function.section}` to use the built-in cross entropy, or remove `{key}`."
        ),
    )


def _padding_faults(spec: Spec) -> Iterator[Fault]:
    """Yield a fault if padding has no effect or may change the loss.

    Padding after a sample changes nothing before it only if attention is causal.
    """
    if not spec.batch.allows_padding:
        return
    if token_multiple(spec.factors, None) == 1 and spec.world_size > 1:
        yield Fault(
            place="batch.pad",
            finding="has no effect: no axis shards the tokens of a sample",
            remedy="Remove it.",
        )
    elif isinstance(spec.model, ExternalModel):
        yield Fault(
            place="batch.pad",
            finding=(
                "padding needs causal attention, and it is unknown whether "
                f"{spec.model.target} is causal"
            ),
            remedy="Use a `batch.sequence` that the axes divide evenly.",
        )


def _batch_faults(spec: Spec) -> Iterator[Fault]:
    batch = spec.batch
    product = batch.micro * batch.accumulate * spec.data_degree
    if batch.global_samples != product:
        yield Fault(
            place="batch.global",
            finding=(
                f"global={batch.global_samples} is not micro={batch.micro} x "
                f"accumulate={batch.accumulate} x data degree={spec.data_degree} = "
                f"{product}"
            ),
            remedy=f"Use `batch.global={product}`, or remove `batch.accumulate`.",
        )


def _capability_faults(spec: Spec) -> Iterator[Fault]:
    cluster = spec.cluster
    if cluster is not None and cluster.kind == "cpu" and cluster.sm is not None:
        yield Fault(
            place="cluster.sm",
            finding=f"compute capability {cluster.sm} needs GPUs, but the cluster has CPUs",
            remedy="Remove `cluster.sm`, or use `cluster.kind=cuda`.",
        )


def _cluster_faults(spec: Spec) -> Iterator[Fault]:
    cluster = spec.cluster
    if cluster is not None and spec.world_size > cluster.devices:
        yield Fault(
            place="mesh",
            finding=(
                f"the mesh has {spec.world_size} ranks, but the cluster {cluster.name} "
                f"has {cluster.devices} devices"
            ),
            remedy=(
                f"Use a mesh with at most {cluster.devices} ranks, or "
                f"`cluster.devices={spec.world_size}`."
            ),
        )


_PRODUCT_RULES = (
    SpecRule(name="heads divide", theorem="Definition 1", faults=_shape_faults),
    SpecRule(
        name="the loss kernel supports the logits", theorem="Definition 1", faults=_fused_faults
    ),
    SpecRule(
        name="the loss leaves the padding out",
        theorem="Definition 1",
        faults=_vocab_padding_faults,
    ),
    SpecRule(
        name="every token has an embedding row", theorem="Definition 1", faults=_vocabulary_faults
    ),
    SpecRule(
        name="the loss is a mean over all counted targets",
        theorem="Theorem 3, gradient integrity",
        faults=_ignored_faults,
    ),
    SpecRule(
        name="padding has no effect",
        theorem="Theorem 3, gradient integrity",
        faults=_padding_faults,
    ),
    SpecRule(
        name="the batch is the sum of its parts",
        theorem="Theorem 3, gradient integrity",
        faults=_batch_faults,
    ),
    SpecRule(name="the mesh fits the cluster", theorem="Definition 5", faults=_cluster_faults),
    SpecRule(
        name="GPUs have a compute capability",
        theorem="Definition 5",
        faults=_capability_faults,
    ),
)
SPEC_RULES = (
    *_PRODUCT_RULES,
    *(rule for room in ROOMS for rule in room.specs),
    *TENSOR_DIALS,
    *PIPELINE_DIALS,
    *activations.RULES,
    *products.RULES,
)
RULES: tuple[TupleRule | SpecRule, ...] = (
    *dict.fromkeys(rule for room in ROOMS for rule in room.tuples),  # packages share some rules
    *SPEC_RULES,
)
UNSUPPORTED_RULES: tuple[SpecRule, ...] = (
    *(rule for room in ROOMS for rule in room.unsupported),
    *activations.NOT_YET,
    *products.NOT_YET,
)
LEGALITY_CHECKS: tuple[FaultsOf, ...] = (
    *(partial(_tuple_faults, room) for room in ROOMS),
    *(rule.faults for rule in SPEC_RULES),
)
SUPPORT_CHECKS: tuple[FaultsOf, ...] = tuple(rule.faults for rule in UNSUPPORTED_RULES)
