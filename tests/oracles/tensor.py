"""The cost of the tensor axis in closed form, independent of the derivation.

Counted from what the axis means, not from the tables, facts or roles that the derivation reads: of
a rank's elements, of its collectives, and of those bytes whose number follows from the loss and
from the slices of the tokens alone. b samples of s tokens a micro-batch, H features, F of the MLP,
V words, L layers, t ranks, e bytes an element of what the model computes in.

Sources: Shoeybi et al. 2019 (two sums of b·s·H forward and two backward a layer), Korthikanti et
al. 2022, section 4.2 (each sum as a reduce-scatter and an all-gather; inputs saved as slices), and
Theorem 6 of the paper. What has no closed form is None: the activations of a block between its
operators depend on its kernels and are traced; so does what a policy makes a recomputation send.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ptrain.cost import Collective, Phase, State
from ptrain.spec.activations import FULL, ActivationMode
from ptrain.spec.block import Bias, Positions
from ptrain.spec.model import ModelShape
from ptrain.spec.placement import Axis
from ptrain.spec.precision import DType
from ptrain.spec.spec import Spec
from ptrain.steps.step import Parallelize
from ptrain.units import ceil_div

CallKey = tuple[Collective, State, Phase]
Sent = tuple[int, int]  # calls, and the bytes of their full tensors
_Call = tuple[Collective, State, Phase, int, int]  # number, and the payload of each


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpan:
    """Consecutive layers of a model, from 0 to `end` (exclusive), with the embedding if it includes
    the first and norm and head if it includes the last one."""

    start: int
    end: int
    layers: int  # of the model

    @property
    def numbers(self) -> range:
        """Return the layer indices."""
        return range(self.start, self.end)

    @property
    def is_first(self) -> bool:
        """Return True if it has the embedding."""
        return self.start == 0

    @property
    def is_last(self) -> bool:
        """Return True if it has the final norm and the head."""
        return self.end == self.layers


def all_layers(shape: ModelShape) -> LayerSpan:
    """Return the span of all layers."""
    return LayerSpan(start=0, end=shape.layers, layers=shape.layers)


def vocab_shard_size(vocab: int, degree: int, index: int) -> int:
    """Return the vocabulary shard of rank `index` of `degree`: equal sizes rounded up; the last
    ranks have the rest."""
    height = ceil_div(vocab, degree)
    return max(0, min(height, vocab - index * height))


def parameters(
    shape: ModelShape,
    span: LayerSpan,
    *,
    sequence: int,
    degree: int = 1,
    index: int = 0,
    has_whole_experts: bool = False,
) -> int:
    """Return the elements of Theta that rank `index` of `degree` has of a span, with
    `has_whole_experts` without experts that only this rank has.

    A matrix is cut into `degree` parts, with its bias where its outputs are cut; norms, positions
    and the biases behind a sum are whole on every rank. A tied head of a span that does not reach
    the embedding is a copy of its rows.
    """
    hidden, ffn = shape.hidden, shape.ffn
    table = vocab_shard_size(shape.vocab, degree, index) * hidden
    has_head = span.is_last and (not shape.tied or not span.is_first)
    tables = table * (span.is_first + has_head)
    norm = len(shape.norm.tensor_names)
    all_biased = shape.bias is Bias.ALL
    inner = 2 + shape.activation.is_gated  # up and down, and perhaps gate
    num_layers = span.end - span.start
    with_experts = _with_experts(shape, span)
    cut = _of_heads(shape)
    dense = inner * hidden * ffn + (inner - 1) * ffn * all_biased
    whole_there = 2 * hidden * all_biased
    whole_there += _norms(shape) * norm * hidden + 2 * shape.qk_norm * norm * shape.head_dim
    whole_there += sum(_latents(shape))
    ends = norm * hidden * span.is_last
    if shape.positions is Positions.LEARNED:
        ends += sequence * hidden * span.is_first
    if shape.head_bias:
        ends += vocab_shard_size(shape.vocab, degree, index) * span.is_last
    mlps = (num_layers - with_experts) * (dense // degree)
    mlps += with_experts * _of_experts(shape, degree, 0 if has_whole_experts else shape.experts)
    return num_layers * (cut // degree + whole_there) + mlps + tables + ends


def _of_heads(shape: ModelShape) -> int:
    """Return the elements of a layer's attention that differ between heads."""
    hidden, width = shape.hidden, shape.head_dim
    if shape.kv_lora_rank is not None:
        own = width * (shape.q_lora_rank or hidden) + shape.v_head_dim * hidden
        return shape.heads * (
            own + (shape.qk_nope_head_dim + shape.v_head_dim) * shape.kv_lora_rank
        )
    # query and output, key and value of perhaps fewer heads
    matrices = 2 * hidden * width * (shape.heads + shape.kv_heads)
    biases = width * (shape.heads + 2 * shape.kv_heads)
    return matrices + biases * (shape.bias is not Bias.NONE)


def _latents(shape: ModelShape) -> Iterator[int]:
    """Yield the elements of each tensor that computes or normalizes latent features."""
    if shape.kv_lora_rank is None:
        return
    norm = len(shape.norm.tensor_names)
    if shape.q_lora_rank is not None:
        yield from (shape.q_lora_rank * shape.hidden, *[shape.q_lora_rank] * norm)
    yield (shape.kv_lora_rank + shape.qk_rope_head_dim) * shape.hidden
    yield from [shape.kv_lora_rank] * norm


def _with_experts(shape: ModelShape, span: LayerSpan) -> int:
    """Return the number of layers with experts in a span."""
    return sum(map(shape.has_experts, span.numbers))


def _of_experts(shape: ModelShape, degree: int, cut: int | None) -> int:
    """Return the elements of a layer's replicated router, and of a rank's shards of the given
    number of experts and of the shared experts."""
    if shape.experts is None:
        return 0
    matrices = (2 + shape.activation.is_gated) * shape.width_of_expert
    of_experts = ((cut or 0) + shape.shared_experts) * matrices // degree
    return shape.hidden * (shape.experts + of_experts)


def _norms(shape: ModelShape) -> int:
    """Return the norms of a layer between its sub-blocks."""
    return 2 - shape.parallel + 2 * shape.post_norm


def traffic(spec: Spec, step: Parallelize, span: LayerSpan) -> Mapping[CallKey, Sent] | None:
    """Return calls and payload bytes of a step by collective, state and phase: what the operators
    of `span` send over `step.axis`.

    None for a model that is not built in, and where a policy keeps some results of a block that is
    computed again: which of its collectives then run twice is known from its trace. None too for a
    loss in chunks whose backward passes are in halves, of which a schedule tells how many are.
    """
    shape = spec.model
    if not isinstance(shape, ModelShape):
        return None
    in_halves = spec.degree(Axis.PP) > 1 and spec.pipeline.is_in_halves
    if span.is_last and spec.loss.chunk is not None and in_halves:
        return None
    kept = spec.activations.block_modes(shape.layers)[span.start : span.end]
    if any(mode.policy not in (None, FULL) for mode in kept):
        return None
    totals: dict[CallKey, Sent] = {}
    for collective, state, phase, number, payload in _calls(spec, step, shape, span, kept):
        calls, size = totals.get((collective, state, phase), (0, 0))
        more = number * spec.batch.accumulate
        totals[collective, state, phase] = (calls + more, size + more * payload)
    return {key: sent for key, sent in totals.items() if sent[0]}


def collectives(spec: Spec, step: Parallelize, span: LayerSpan) -> int | None:
    """Return the number of collectives of the operators of `span` in a step; None if `traffic` is
    None."""
    sent = traffic(spec, step, span)
    return None if sent is None else sum(calls for calls, _ in sent.values())


def scalars(spec: Spec) -> Sent:
    """Return calls and payload bytes of the sums of one number over an axis that cuts Theta, at the
    end of a step: the square of the norm that gradients are clipped to, in at least fp32, and of a
    scaled loss whether some gradient overflowed."""
    layout = spec.precision.effective_layout
    sizes = []
    if spec.optimizer.clip is not None:
        sizes.append(max(layout.gradients.itemsize, DType.FP32.itemsize))
    if layout.scales_loss:
        sizes.append(DType.FP32.itemsize)
    return len(sizes), sum(sizes)


def _calls(
    spec: Spec,
    step: Parallelize,
    shape: ModelShape,
    span: LayerSpan,
    kept: tuple[ActivationMode, ...],
) -> Iterator[_Call]:
    """Return the calls of one micro-batch."""
    layers, itemsize = span.end - span.start, spec.precision.effective_layout.parameters.itemsize
    features = shape.hidden * itemsize
    stream = spec.batch.micro * spec.batch.sequence * features
    # Of experts that are whole on a rank nothing is a sum.
    with_experts = _with_experts(shape, span)
    apart = with_experts if spec.tensor.is_folded else 0
    # Attention and MLP each end in a sum; the embedding sums the ranks' vocabulary shards.
    sums = 2 * layers - apart + span.is_first
    # A gradient is a sum where all of a rank's column operators begin; naively, where each does.
    dense = 1 + shape.activation.is_gated if step.is_naive else 1
    openings = (3 if step.is_naive else 1) * layers + span.is_last  # of attention
    openings += dense * (layers - with_experts) + with_experts - apart
    again = [layer for layer, mode in zip(span.numbers, kept, strict=True) if mode.policy]
    apart_again = sum(map(shape.has_experts, again)) if apart else 0
    for phase, ends, starts in (
        (Phase.FORWARD, sums, openings),
        (Phase.BACKWARD, openings, sums),
        # Computed again up to the last result that backward needs: the MLP's sum is none.
        (Phase.BACKWARD, len(again), 2 * len(again) - apart_again),
    ):
        if step.is_sequence:
            yield Collective.REDUCE_SCATTER, State.ACTIVATIONS, phase, ends, stream
            yield Collective.ALL_GATHER, State.ACTIVATIONS, phase, starts, stream
        else:
            yield Collective.ALL_REDUCE, State.ACTIVATIONS, phase, ends, stream
    yield from _around_experts(step, shape, apart, apart_again, stream)
    gathered = Collective.ALL_GATHER, State.ACTIVATIONS, Phase.BACKWARD
    if step.is_saved_cut:
        yield *gathered, 2 * layers - apart * (not shape.shared_experts), stream
    vectors = len(shape.norm.tensor_names)
    summed = Collective.ALL_REDUCE, State.GRADIENTS, Phase.BACKWARD
    if step.is_sequence:
        # of positions all samples take the same: their gradient comes in slices of the tokens
        is_learned = shape.positions is Positions.LEARNED
        yield *gathered, int(is_learned and span.is_first), spec.batch.sequence * features
        norms = _norms(shape) * layers + span.is_last
        yield *summed, norms * vectors, features
    if shape.qk_norm:  # of its own heads a rank has a part of their gradients
        yield *summed, 2 * layers * vectors, shape.head_dim * itemsize
    for elements in _latents(shape):  # a rank's heads give their gradients a part
        yield *summed, layers, elements * itemsize
    if shape.experts is not None:  # of a router a part, whose choices weigh a rank's addends
        yield *summed, with_experts, shape.experts * features
    if span.is_last:
        yield from _of_loss(spec, step, shape)


def _around_experts(
    step: Parallelize, shape: ModelShape, layers: int, again: int, stream: int
) -> Iterator[_Call]:
    """Of so many layers whose experts are whole on a rank, so many of them computed again. Shared
    ones are cut, and take slices of the tokens as they give them; where a rank has all tokens
    between the sub-blocks the slices are gathered behind a layer, and in backward before it."""
    gathered = Collective.ALL_GATHER, State.ACTIVATIONS
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        if not step.is_sequence:
            yield *gathered, phase, layers, stream
        if shape.shared_experts:
            yield Collective.REDUCE_SCATTER, State.ACTIVATIONS, phase, layers, stream
            yield *gathered, phase, layers, stream
    if shape.shared_experts:
        yield *gathered, Phase.BACKWARD, again, stream


def _of_loss(spec: Spec, step: Parallelize, shape: ModelShape) -> Iterator[_Call]:
    """Of the logits: each chunk's maximum, its sum of exponentials and the targets' logits; or all
    of them, from slices of equal height. A loss in chunks sends it again in backward."""
    tokens, itemsize = spec.batch.micro * spec.batch.sequence, _itemsize(spec)
    chunk = min(spec.loss.chunk or tokens, tokens)
    full, left = divmod(tokens, chunk)
    degree = spec.degree(step.axis)
    phases = (Phase.FORWARD,) if spec.loss.chunk is None else (Phase.FORWARD, Phase.BACKWARD)
    for phase in phases:
        for number, size in ((full, chunk), (1, left)):
            if not size:
                continue
            if step.loss_parallel:
                numbers = size * max(itemsize, DType.FP32.itemsize)
                yield Collective.ALL_REDUCE, State.ACTIVATIONS, phase, 3 * number, numbers
            else:
                rows = degree * vocab_shard_size(shape.vocab, degree, 0)
                payload = size * rows * itemsize
                yield Collective.ALL_GATHER, State.ACTIVATIONS, phase, number, payload


def whole_input_bytes(spec: Spec, shape: ModelShape) -> int:
    """Return the bytes of what a sub-block gathers for its column operators under sequence
    parallelism: b·s·H·e, made in forward and, where it is saved as a slice, once more in
    backward."""
    return spec.batch.micro * spec.batch.sequence * shape.hidden * _itemsize(spec)


def saved_slices_spare(spec: Spec, shape: ModelShape, degree: int) -> int:
    """Return how many fewer bytes of activations a micro-batch has if column operators save a shard
    of their input (S*) instead of all of it (S): (t-1)/t of two inputs per layer."""
    return 2 * shape.layers * (whole_input_bytes(spec, shape) * (degree - 1) // degree)


def loss_saved_bytes(spec: Spec, step: Parallelize, shape: ModelShape, index: int) -> int:
    """Return the bytes that the loss saves for backward on rank `index`: the exponentials of its
    logits, in at least fp32, of the rank's words, or of all where logits are gathered, and each
    token's sum of them. A loss in chunks saves none."""
    if spec.loss.chunk is not None:
        return 0
    width = (
        vocab_shard_size(shape.vocab, spec.degree(step.axis), index)
        if step.loss_parallel
        else shape.vocab
    )
    tokens = spec.batch.micro * spec.batch.sequence
    return tokens * (width + 1) * max(_itemsize(spec), DType.FP32.itemsize)


def loss_peak_bytes(spec: Spec, step: Parallelize, shape: ModelShape, index: int) -> int | None:
    """Return how many bytes of logits there are at once in the forward pass of rank `index`.

    The logits, of which a slice may be all that a rank has, and one buffer in at least fp32.
    Gathered logits are there as a slice, as what arrived, and in the order of the words; or, if
    that is more, as they are with the buffer. None for a loss in chunks: of those before, the saved
    inputs are there too, as checkpoint keeps them.
    """
    if spec.loss.chunk is not None:
        return None
    tokens, itemsize = spec.batch.micro * spec.batch.sequence, _itemsize(spec)
    beside = itemsize + max(itemsize, DType.FP32.itemsize)
    mine = vocab_shard_size(shape.vocab, spec.degree(step.axis), index)
    if step.loss_parallel:
        return tokens * mine * beside
    gathering = (mine + 2 * shape.vocab) * itemsize
    return tokens * max(gathering, shape.vocab * beside)


def _itemsize(spec: Spec) -> int:
    return spec.precision.effective_layout.parameters.itemsize
