"""A rank's shard of a batch's tokens, and the state that reaches beyond it: documents, random
numbers and router choices.

Documents: a rank has a shard of a sample's tokens, so the edges of documents are all-gathered.

Dropout outside attention: the mask of a token follows from its place in the full sequence. Ranks of
cp draw the same mask for all tokens, like a single device, and each keeps its part. No generator
can be set to the middle of a mask. This needs the memory of the full mask while it is drawn (on a
CPU in the dtype of the input), and nothing afterwards.

Routers: each rank has a shard of the tokens, so their choices are counted over all ranks.

Legend of shape suffixes: B samples, H heads, G key-value heads, T tokens of a rank (of a ring's
place, in its hops), D elements per head, N ranks, S tokens of all of them, L contiguous ranges of a
rank's tokens, K choices of a token, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ptrain.axes.context.attention import Span, all_spans, spans_at
from ptrain.cost import State
from ptrain.errors import input_error
from ptrain.internals.functional_collectives import all_gather_tensor, all_reduce_sum
from ptrain.models.attention import DocumentMasks, added_mask, additive_mask, are_apart
from ptrain.models.modes import DropoutCall, dropout_by
from ptrain.models.moe import Balance, ExpertPlaces, SampleTokens, weight_router_losses
from ptrain.models.objective import SampleBatch, StepBatch, TokenPair
from ptrain.runtime.comm import TagRegistry, all_gather
from ptrain.steps.step import ContextParallel


def route_slices(model: nn.Module, tokens: SampleSlices, parts: int) -> None:
    """Let the routers of a model choose for shards of the tokens as they would for all tokens.

    Capacities and mean losses then refer to the full sample. A shard is one of `parts` equal parts
    of the tokens, so the weight of its mean loss is 1 / `parts`.

    Args:
        model: The model or stage, changed in place.
        tokens: The shards of a sample's tokens.
        parts: Number of equal shards.
    """
    weight_router_losses(model, 1.0 / parts)
    for module in model.modules():
        if isinstance(module, (Balance, ExpertPlaces)):
            module.tokens = tokens


class SampleSlices(SampleTokens):
    """The tokens of samples, sharded over the ranks of `group` by spans.

    Counts are integers and have no gradient.
    """

    def __init__(
        self, group: dist.ProcessGroup, registry: TagRegistry, spans: Sequence[Sequence[Span]]
    ) -> None:
        """Prepare the order of all ranks' spans.

        `spans` has the spans of every rank, in order. Ranks with fewer spans than others are padded
        with empty ones.
        """
        self.group, self.registry, self.slices = group, registry, len(spans)
        # An all-gather needs equal shapes on all ranks, hence the padding with empty ranges.
        most = max(map(len, spans))
        padded = [[*own, *[(0, 0)] * (most - len(own))] for own in spans]
        starts = [span for own in padded for span in own]
        # Gathered counts arrive by rank. Tokens before a range are those of ranges with a lower
        # start, on whatever rank.
        self._order = sorted(range(len(starts)), key=starts.__getitem__)
        own = group.rank() * most
        self._own = [self._order.index(own + stretch) for stretch in range(most)]
        self._lengths = [behind - first for first, behind in padded[group.rank()]]

    def sum_counts(self, counts_BE: Tensor) -> Tensor:
        """Return the counts [B, E], summed over all ranks."""
        self.registry.tag(counts_BE, State.ACTIVATIONS)
        return all_reduce_sum(counts_BE, self.group)

    def count_earlier(self, before_BKT: Tensor, chosen_BKT: Tensor, *, num_experts: int) -> Tensor:
        """Return for each choice how many earlier choices its expert has, over all ranks.

        Args:
            before_BKT: The number of earlier choices on this rank, for each choice.
            chosen_BKT: The index of the chosen expert, from 0, in the rank's order of tokens.
            num_experts: The number of experts.

        Returns:
            The counts, [B, K, T].
        """
        parts = chosen_BKT.split(self._lengths, dim=-1)
        counts_LBKE = torch.stack([_count_choices(part, num_experts) for part in parts])
        self.registry.tag(counts_LBKE, State.ACTIVATIONS)
        all_ = all_gather_tensor(counts_LBKE, self.group)  # [N * L, B, K, E], by rank
        in_order = torch.stack([all_[place] for place in self._order], dim=2)  # [B, K, N * L, E]
        # `before_BKT` counts this rank's ranges already, so their part is subtracted.
        elsewhere_BKLE = _count_before(in_order)[:, :, self._own] - _count_before(
            counts_LBKE.movedim(0, 2)
        )
        ahead = [
            elsewhere_BKLE[:, :, stretch].gather(-1, part) for stretch, part in enumerate(parts)
        ]
        return before_BKT + torch.cat(ahead, dim=-1)


def _count_choices(chosen_BKT: Tensor, num_experts: int) -> Tensor:
    """Return the number of tokens that chose each expert first, second and so on [B, K, E]."""
    zeros_BKE = chosen_BKT.new_zeros(*chosen_BKT.shape[:-1], num_experts)
    return zeros_BKE.scatter_add(-1, chosen_BKT, torch.ones_like(chosen_BKT))


def _count_before(counts_BKLE: Tensor) -> Tensor:
    """Return the number of choices before each count: all with a lower K, and with equal K those of
    earlier ranges."""
    flat = counts_BKLE.flatten(1, 2)
    return (flat.cumsum(1) - flat).unflatten(1, counts_BKLE.shape[1:3])


@dataclass(frozen=True, slots=True, kw_only=True)
class SlicedTokens:
    """One rank's tokens of every sample of a data rank's share of a step.

    `inputs` and `targets` are int64 [K · micro, sequence / ranks]. Losses are divided by the
    targets of the full global batch that are not ignored, over all ranks.
    """

    inputs: Tensor
    targets: Tensor
    global_samples: int
    global_tokens: int
    sample_ids: tuple[int, ...]

    @property
    def tensors(self) -> list[Tensor]:
        return [self.inputs, self.targets]

    def micro_batches(self, micro: int) -> Iterator[SampleBatch]:
        """Yield views of `micro` samples each."""
        pairs = zip(self.inputs.split(micro), self.targets.split(micro), strict=True)
        yield from (SampleBatch(TokenPair(*pair)) for pair in pairs)

    def shape_for(self, rows: int, sequence: int) -> list[int]:
        """Return the expected shape of inputs for a rank's tokens of a sample."""
        return [rows, sequence]

    def to(self, device: torch.device) -> SlicedTokens:
        return replace(self, inputs=self.inputs.to(device), targets=self.targets.to(device))


def slice_batch(batch: StepBatch, spans: Sequence[Span]) -> SlicedTokens:
    """Return a copy of the tokens in these spans of a data rank's share of a step."""
    (whole,) = batch.micro_batches(len(batch.tensors[0]))
    pair = token_slices(whole, spans).data
    return SlicedTokens(
        inputs=pair.inputs,
        targets=pair.targets,
        global_samples=batch.global_samples,
        global_tokens=batch.global_tokens,
        sample_ids=batch.sample_ids,
    )


def token_slices(whole: SampleBatch, spans: Sequence[Span]) -> SampleBatch:
    """Return copies of inputs and targets in these spans of full samples of tokens."""
    return SampleBatch(TokenPair(take_spans(whole.inputs, spans), take_spans(whole.targets, spans)))


def take_spans(whole: Tensor, spans: Sequence[Span]) -> Tensor:
    """Return a copy of token ranges of a tensor.

    Args:
        whole: The tensor [samples, tokens, ...].
        spans: The ranges (first, end), end exclusive, in the order of the result.
    """
    return torch.cat([whole[:, first:behind] for first, behind in spans], dim=1)


# Attention kernels that return the log-sum-exp, by which blocks of keys are merged, and accept
# fewer key-value heads than query heads.


_ATEN = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Kernel:
    """An attention kernel. `forward` and `backward` have the signatures that torch's ring calls,
    and `arguments` are further arguments of both."""

    forward: Callable[..., tuple[Tensor, ...]]
    backward: Callable[..., tuple[Tensor, ...]]
    arguments: dict[str, Any]


def kernel_of(query: Tensor, scale: float | None, *, is_masked: bool = False) -> Kernel:
    """Return the attention kernel for queries like these.

    Args:
        query: The queries, for their device and dtype.
        scale: The scale of scores. None is the default of torch.
        is_masked: True if each call also receives an `attn_mask`.

    Raises:
        SpecError: There is no such kernel.
    """
    given: dict[str, Any] = {"dropout_p": 0.0, "scale": scale}
    if not query.is_cuda:
        return Kernel(
            _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
            _ATEN._scaled_dot_product_flash_attention_for_cpu_backward.default,
            given,
        )
    if is_masked:
        raise input_error(
            "model",
            "not supported yet: document masks over keys of other ranks on CUDA (flash "
            "attention accepts no mask)",
            "Use `context.attention=ulysses`.",
        )
    if query.dtype in (torch.float16, torch.bfloat16):
        return Kernel(
            _ATEN._scaled_dot_product_flash_attention.default,
            _ATEN._scaled_dot_product_flash_attention_backward.default,
            given,
        )
    raise input_error(
        "precision",
        f"not supported yet: attention over cp in {query.dtype} on CUDA (flash "
        "attention does not support it)",
        "Compute in bf16 or fp16, or use `context.attention=ulysses`.",
    )


class SlicedDocuments(DocumentMasks):
    """The documents of samples whose tokens are sharded over `group` as in `step`."""

    def __init__(
        self,
        whole: DocumentMasks,
        step: ContextParallel,
        group: dist.ProcessGroup,
        registry: TagRegistry,
    ) -> None:
        super().__init__(whole.edge, ends=whole.ends)
        self.step, self.group, self.registry = step, group, registry
        self._stretches = [span for spans in all_spans(step) for span in spans]  # rank by rank

    def forward(self, tokens_BT: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the mask of documents for this rank's attention.

        Returns:
            With all-gathered keys, the mask of the rank's queries and all keys [B, 1, T, S]. With
            Ulysses, that of all tokens [B, 1, S, S]. With a ring, the document number of every
            token [B, S], ordered by rank, from which each hop makes a mask. A mask of all keys
            would need the memory of all hops.
        """
        documents_BS = self.number_documents(self._gather_edges(tokens_BT))
        if self.step.gathers:
            num_tokens = tokens_BT.shape[1]
            first = self.group.rank() * num_tokens
            own_BT = documents_BS[:, first : first + num_tokens]
            return added_mask(own_BT, documents_BS, dtype, first=first)
        if self.step.ring == 1:
            return added_mask(documents_BS, documents_BS, dtype)
        return take_spans(documents_BS, self._stretches)

    def _gather_edges(self, tokens_BT: Tensor) -> Tensor:
        """Return the document edges of full samples, in the order of tokens."""
        own_BT = (tokens_BT == self.edge).to(torch.uint8)
        whole = own_BT.new_empty(self.group.size() * own_BT.numel())
        self.registry.tag(whole, State.ACTIVATIONS)
        all_gather(whole, own_BT.view(-1), self.group, self.registry)
        # The all-gather puts ranks first; samples must be the first dimension.
        by_rank_BS = whole.view(-1, *own_BT.shape).transpose(0, 1).flatten(1)
        if not self.step.is_balanced:
            return by_rank_BS
        lengths = [behind - first for first, behind in self._stretches]
        parts = zip(self._stretches, by_rank_BS.split(lengths, dim=1), strict=True)
        return torch.cat([part for _, part in sorted(parts, key=_span_start)], dim=1)


def _span_start(part: tuple[tuple[int, int], Tensor]) -> int:
    (first, _), _ = part
    return first


class HopKernel:
    """A kernel for torch's ring that masks documents in each hop: tokens attend only to their
    document. torch's ring decides if a hop is causal.

    After h hops a place has the keys of the h-th place before it. Hops whose keys are all later are
    skipped. With contiguous shards these are the last hops, and with zigzag there are none, so the
    h-th call always belongs to the h-th hop.
    """

    def __init__(self, kernel: Kernel, documents_BS: Tensor, group: dist.ProcessGroup) -> None:
        self._kernel, self._place = kernel, group.rank()
        self._places = documents_BS.chunk(group.size(), dim=1)
        self._hop = 0

    def forward(
        self, q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, **given: Any
    ) -> tuple[Tensor, ...]:
        """Return the outputs of the kernel for one hop.

        If all keys of a query belong to other documents, the log-sum-exp must be -inf. The kernel
        returns 0, which would count when hops are merged, so it is replaced.

        Args:
            q_BHTD: The queries of this rank's tokens.
            k_BGTD: The keys that arrived with this hop.
            v_BGTD: The values that arrived with this hop.
            given: Further arguments of the kernel.

        Returns:
            The outputs [B, H, T, D], the log-sum-exp [B, H, T], and the kernel's other results.
        """
        apart_BTT = self._are_apart(q_BHTD, k_BGTD)
        has_none_B1T = apart_BTT.all(-1).unsqueeze(1)
        mask_B1TT = additive_mask(apart_BTT, q_BHTD.dtype)
        del apart_BTT
        y_BHTD, sums_BHT, *others = self._kernel.forward(
            q_BHTD, k_BGTD, v_BGTD, attn_mask=mask_B1TT, **given
        )
        return y_BHTD, sums_BHT.masked_fill_(has_none_B1T, float("-inf")), *others

    def backward(self, *, query: Tensor, key: Tensor, **given: Any) -> tuple[Tensor, ...]:
        """Return the gradients of queries, keys and values."""
        mask_B1TT = additive_mask(self._are_apart(query, key), query.dtype)
        return self._kernel.backward(query=query, key=key, attn_mask=mask_B1TT, **given)

    def _are_apart(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Return True for each query and key of the next hop in different documents.

        torch passes either all queries of the place or its late chunk, and either all keys of the
        source or its early chunk.
        """
        source_BT = self._places[(self._place - self._hop) % len(self._places)]
        # The template calls the kernel once per hop in order and does not tell the hop, so calls
        # are counted.
        self._hop += 1
        # The late chunk is the second half of the place's tokens, hence the slice from the end. The
        # early chunk of the keys is the first half.
        own_BT = self._places[self._place][:, -queries.shape[-2] :]
        return are_apart(own_BT, source_BT[:, : keys.shape[-2]])


_TOKENS = 1  # the token dimension follows the sample dimension


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchCut:
    """The `samples` of a micro-batch, and the number of `slices` into which their tokens are
    sharded between blocks, over all axes."""

    samples: int
    slices: int


@dataclass(frozen=True, slots=True)
class SlicedMasks:
    """The dropout masks of one rank's tokens.

    Attributes:
        spans: The rank's tokens.
        index: The rank's place along cp.
        ranks: Ranks of cp.
        samples: Samples of a micro-batch.
        between: The rank's tokens of a sample between blocks. Fewer than all if tp shards them too.
    """

    spans: tuple[Span, ...]
    index: int
    ranks: int
    samples: int
    between: int

    @property
    def tokens(self) -> int:
        """The number of tokens of a sample on the rank."""
        return sum(behind - first for first, behind in self.spans)

    def are_of(self, shape: Sequence[int]) -> bool:
        """Return True if a tensor of this shape has the rank's tokens.

        Its shape is then [samples, tokens, ...] or [samples · tokens, ...]. The number of samples
        may be 1, for a tensor that all samples share.
        """
        return self._has_dimension(shape) or self._flat_samples(shape) > 0

    def of_all(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the tensor with the tokens of all ranks."""
        before = shape[:_TOKENS] if self._has_dimension(shape) else ()
        tokens, *others = shape[len(before) :]
        return (*before, tokens * self.ranks, *others)

    def _has_dimension(self, shape: Sequence[int]) -> bool:
        is_long = len(shape) > _TOKENS and shape[0] in (1, self.samples)
        return is_long and shape[_TOKENS] in (self.tokens, self.between)

    def _flat_samples(self, shape: Sequence[int]) -> int:
        """Return the number of samples whose tokens form the first dimension, or 0 if it has other
        elements."""
        ways = product((self.tokens, self.between), (1, self.samples))
        return next((count for tokens, count in ways if shape[0] == count * tokens), 0)

    def register(self, modules: Iterable[nn.Module]) -> None:
        """Let the dropout of these modules' code use the masks, including recomputation in
        backward."""
        for module in modules:
            entered = _NestedPasses(self)
            module.register_forward_pre_hook(entered.enter)
            module.register_forward_hook(entered.leave, always_call=True)

    def drop(self, call: DropoutCall) -> Tensor:
        """Apply dropout to the rank's tokens. For any other tensor, all ranks draw the same
        mask."""
        x = call.input
        if isinstance(x, DTensor):  # tokens may be sharded over tp too
            own = self.drop(replace(call, input=x.to_local()))
            return DTensor.from_local(
                own, x.device_mesh, x.placements, shape=x.shape, stride=x.stride()
            )
        if not self.are_of(x.shape):
            return call.by_before()
        if not self._has_dimension(x.shape):
            by_samples = x.unflatten(0, (self._flat_samples(x.shape), -1))
            return self.drop(replace(call, input=by_samples)).flatten(0, 1)
        if x.is_cuda and not call.is_in_place:
            return self.drop_on_gpu(x, call.rate)
        kept = self._draw_noise(x, call.rate)
        return x.mul_(kept) if call.is_in_place else x * kept

    def _draw_noise(self, x: Tensor, rate: float) -> Tensor:
        """Return the factors of at::dropout on a CPU: 0 or 1 / (1 - rate)."""
        # The operator and the dtype of at::dropout on a CPU, so that a single device draws equal
        # numbers.
        own = self._local_part(x.new_empty(self.of_all(x.shape)).bernoulli_(1 - rate))
        return own.div_(1 - rate)

    def drop_on_gpu(self, x: Tensor, rate: float) -> Tensor:
        """Return the result of at::dropout on a GPU, which is one kernel with a mask of a byte per
        element.

        The kernel's backward applies a given mask to a gradient, and is used here to apply it to
        the input.

        Args:
            x: The rank's tokens.
            rate: The probability that an element is dropped, from 0 to less than 1.
        """
        # The input has arbitrary values: only the mask is used, and drawing it advances the
        # generator as a single device would.
        _, mask = torch.native_dropout(x.new_empty(self.of_all(x.shape)), rate, True)
        own = self._local_part(mask)
        left: Tensor = torch.ops.aten.native_dropout_backward(x, own, 1 / (1 - rate))
        return left

    def _local_part(self, mask: Tensor) -> Tensor:
        """Return a copy of the rank's part of the mask of all tokens.

        If another axis shards the tokens too, any part that no other rank of cp uses is correct,
        because ranks of that axis draw separately.
        """
        tokens = mask.shape[_TOKENS] // self.ranks
        if tokens == self.tokens:
            return take_spans(mask, self.spans)
        return take_spans(mask, ((self.index * tokens, (self.index + 1) * tokens),))


def masks_at(step: ContextParallel, index: int, cut: MicroBatchCut) -> SlicedMasks:
    """Return the dropout masks of a rank of cp.

    Args:
        step: The context parallelism of the plan.
        index: The rank's place along cp, from 0.
        cut: The samples of a micro-batch, and the slices of their tokens between blocks.
    """
    return SlicedMasks(
        spans=spans_at(step, index),
        index=index,
        ranks=step.ulysses * step.ring,
        samples=cut.samples,
        between=step.sequence // cut.slices,
    )


class _NestedPasses:
    """The running forward passes of a module, which may be nested."""

    def __init__(self, masks: SlicedMasks) -> None:
        self._masks = masks
        self._passes: list[ExitStack] = []

    def enter(self, *_: object) -> None:
        stack = ExitStack()
        stack.enter_context(dropout_by(self._masks.drop))
        self._passes.append(stack)

    def leave(self, *_: object) -> None:
        if self._passes:  # empty if an earlier pre-hook raised
            self._passes.pop().close()
