"""A rank's slice of the tokens of a batch, with the documents, random numbers and routers' choices
that reach beyond it.

Documents: a rank has a slice of a sample's tokens, so the edges of documents are all-gathered.

Dropout outside attention: the mask of a token follows from its place in the full sequence. Ranks of
cp draw the same mask of all tokens, as one device draws it, and each keeps its part. No generator
can be set to the middle of a mask. This costs the mask of all tokens while it is drawn (on a CPU in
the dtype of the input), and nothing afterwards.

Routers: each rank has a slice of the tokens, so their choices are counted over all ranks.

Legend of shape suffixes: B samples, H heads, G key-value heads, T tokens of a rank (of a ring's
place, in its hops), D elements per head, N ranks, S tokens of all of them, L stretches of a rank's
tokens, K choices of a token, E experts.
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
from ptrain.errors import refused
from ptrain.internals.functional_collectives import all_gathered, all_summed
from ptrain.models.attention import Documents, added_mask, are_apart, hiding
from ptrain.models.modes import DropoutCall, dropout_by
from ptrain.models.moe import Balance, ExpertPlaces, SampleTokens, weigh
from ptrain.models.objective import SampleBatch, StepBatch, TokenPair
from ptrain.rooms.comm import Registry, all_gather
from ptrain.steps.step import ContextParallel


def route_slices(model: nn.Module, tokens: SampleSlices, parts: int) -> None:
    """Let the routers of `model` choose for slices of the tokens as they would for all of them: an
    expert has its places, and a loss its mean, over the whole sample. A slice is one in so many
    `parts` of what was routed before, so that its mean is as large a share of that."""
    weigh(model, 1.0 / parts)
    for module in model.modules():
        if isinstance(module, (Balance, ExpertPlaces)):
            module.tokens = tokens


class SampleSlices(SampleTokens):
    """The tokens of samples of which each rank of `group` has those in its spans. What is counted
    is an integer, of which there is no gradient."""

    def __init__(
        self, group: dist.ProcessGroup, registry: Registry, spans: Sequence[Sequence[Span]]
    ) -> None:
        """`spans` are those of every rank, in order; of a rank with fewer than others some are
        empty."""
        self.group, self.registry, self.slices = group, registry, len(spans)
        most = max(map(len, spans))
        padded = [[*own, *[(0, 0)] * (most - len(own))] for own in spans]
        starts = [span for own in padded for span in own]
        self._order = sorted(range(len(starts)), key=starts.__getitem__)
        own = group.rank() * most
        self._own = [self._order.index(own + stretch) for stretch in range(most)]
        self._lengths = [behind - first for first, behind in padded[group.rank()]]

    def summed(self, counts_BE: Tensor) -> Tensor:
        self.registry.tag(counts_BE, State.ACTIVATIONS)
        return all_summed(counts_BE, self.group)

    def before(self, before_BKT: Tensor, chosen_BKT: Tensor, *, num_experts: int) -> Tensor:
        parts = chosen_BKT.split(self._lengths, dim=-1)
        counts_LBKE = torch.stack([_counts(part, num_experts) for part in parts])
        self.registry.tag(counts_LBKE, State.ACTIVATIONS)
        all_ = all_gathered(counts_LBKE, self.group)  # [N * L, B, K, E], by rank
        in_order = torch.stack([all_[place] for place in self._order], dim=2)  # [B, K, N * L, E]
        elsewhere_BKLE = _ahead(in_order)[:, :, self._own] - _ahead(counts_LBKE.movedim(0, 2))
        ahead = [
            elsewhere_BKLE[:, :, stretch].gather(-1, part) for stretch, part in enumerate(parts)
        ]
        return before_BKT + torch.cat(ahead, dim=-1)


def _counts(chosen_BKT: Tensor, num_experts: int) -> Tensor:
    """Return how many tokens chose each expert first, second and so on [B, K, E]."""
    zeros_BKE = chosen_BKT.new_zeros(*chosen_BKT.shape[:-1], num_experts)
    return zeros_BKE.scatter_add(-1, chosen_BKT, torch.ones_like(chosen_BKT))


def _ahead(counts_BKLE: Tensor) -> Tensor:
    """Return how many choices come before the first of each count: all of lower ones, and of equal
    ones those of earlier stretches."""
    flat = counts_BKLE.flatten(1, 2)
    return (flat.cumsum(1) - flat).unflatten(1, counts_BKLE.shape[1:3])


@dataclass(frozen=True, slots=True, kw_only=True)
class SlicedTokens:
    """Of every sample of a data rank's share of a step the tokens that one rank has: `inputs` and
    `targets` are int64 [K · micro, sequence / ranks]. Losses are divided by the targets of the
    whole global batch that count, of all ranks."""

    inputs: Tensor
    targets: Tensor
    global_samples: int
    global_tokens: int
    sample_ids: tuple[int, ...]

    @property
    def tensors(self) -> list[Tensor]:
        return [self.inputs, self.targets]

    def micro_batches(self, micro: int) -> Iterator[SampleBatch]:
        """Views of `micro` samples each."""
        pairs = zip(self.inputs.split(micro), self.targets.split(micro), strict=True)
        yield from (SampleBatch(TokenPair(*pair)) for pair in pairs)

    def shape_for(self, rows: int, sequence: int) -> list[int]:
        """Return the shape that its inputs should have, of a rank's tokens of a sample."""
        return [rows, sequence]

    def to(self, device: torch.device) -> SlicedTokens:
        return replace(self, inputs=self.inputs.to(device), targets=self.targets.to(device))


def sliced(batch: StepBatch, spans: Sequence[Span]) -> SlicedTokens:
    """Return the tokens in these spans of a share of tokens, copied."""
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
    """Return inputs and targets in these spans of whole samples of tokens, copied."""
    return SampleBatch(TokenPair(taken(whole.inputs, spans), taken(whole.targets, spans)))


def taken(whole: Tensor, spans: Sequence[Span]) -> Tensor:
    """Return what is in these spans of a tensor [samples, tokens, ...], copied."""
    return torch.cat([whole[:, first:behind] for first, behind in spans], dim=1)


# The kernels of attention that give the logarithm of the sums, which blocks of keys are joined by,
# and take fewer heads of keys and values than of queries.


_ATEN = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Kernel:
    """`forward` and `backward` as torch's ring calls them, and what both are given beside."""

    forward: Callable[..., tuple[Tensor, ...]]
    backward: Callable[..., tuple[Tensor, ...]]
    given: dict[str, Any]


def kernel_of(query: Tensor, scale: float | None, *, is_masked: bool = False) -> Kernel:
    """Return the kernel for queries like these; `is_masked`: each call is given an `attn_mask` too.
    Raises SpecError where there is none."""
    given: dict[str, Any] = {"dropout_p": 0.0, "scale": scale}
    if not query.is_cuda:
        return Kernel(
            _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
            _ATEN._scaled_dot_product_flash_attention_for_cpu_backward.default,
            given,
        )
    if is_masked:
        raise refused(
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
    raise refused(
        "precision",
        f"not supported yet: attention over cp in {query.dtype} on CUDA (flash "
        "attention does not support it)",
        "Compute in bf16 or fp16, or use `context.attention=ulysses`.",
    )


class SlicedDocuments(Documents):
    """The documents of samples whose tokens the ranks of `group` have as `step` says."""

    def __init__(
        self,
        whole: Documents,
        step: ContextParallel,
        group: dist.ProcessGroup,
        registry: Registry,
    ) -> None:
        super().__init__(whole.edge, ends=whole.ends)
        self.step, self.group, self.registry = step, group, registry
        self._stretches = [span for spans in all_spans(step) for span in spans]  # rank by rank

    def forward(self, tokens_BT: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the mask of the rank's own queries and all keys [B, 1, T, S] where these are
        gathered, and of all tokens [B, 1, S, S] with Ulysses. Of a ring it is the number of every
        token's document [B, S], rank by rank, of which hops make masks of their own: one of all
        keys would take as much as all of them."""
        documents_BS = self.numbered(self._edges(tokens_BT))
        if self.step.gathers:
            num_tokens = tokens_BT.shape[1]
            first = self.group.rank() * num_tokens
            own_BT = documents_BS[:, first : first + num_tokens]
            return added_mask(own_BT, documents_BS, dtype, first=first)
        if self.step.ring == 1:
            return added_mask(documents_BS, documents_BS, dtype)
        return taken(documents_BS, self._stretches)

    def _edges(self, tokens_BT: Tensor) -> Tensor:
        """Return which tokens of whole samples are edges, in the samples' order."""
        own_BT = (tokens_BT == self.edge).to(torch.uint8)
        whole = own_BT.new_empty(self.group.size() * own_BT.numel())
        self.registry.tag(whole, State.ACTIVATIONS)
        all_gather(whole, own_BT.view(-1), self.group, self.registry)
        by_rank_BS = whole.view(-1, *own_BT.shape).transpose(0, 1).flatten(1)
        if not self.step.is_balanced:
            return by_rank_BS
        lengths = [behind - first for first, behind in self._stretches]
        parts = zip(self._stretches, by_rank_BS.split(lengths, dim=1), strict=True)
        return torch.cat([part for _, part in sorted(parts, key=_first)], dim=1)


def _first(part: tuple[tuple[int, int], Tensor]) -> int:
    (first, _), _ = part
    return first


class HopKernel:
    """A kernel as torch's ring calls it in one pass, hop by hop, with a mask for each: tokens
    attend to their own document alone. What is causal in a hop, torch's ring says.

    Behind h hops a place has the keys of the one h before it. Hops whose keys are all to come are
    left out; of contiguous slices these are the last ones, and of early and late chunks there is
    none, so that the h-th call is the h-th hop's.
    """

    def __init__(self, kernel: Kernel, documents_BS: Tensor, group: dist.ProcessGroup) -> None:
        self._kernel, self._place = kernel, group.rank()
        self._places = documents_BS.chunk(group.size(), dim=1)
        self._hop = 0

    def forward(
        self, q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, **given: Any
    ) -> tuple[Tensor, ...]:
        """Return what the kernel does. Of a query all of whose keys are of other documents the sum
        is 0, whose logarithm the kernel gives as 0: another hop's would be joined with it."""
        apart_BTT = self._are_apart(q_BHTD, k_BGTD)
        has_none_B1T = apart_BTT.all(-1).unsqueeze(1)
        mask_B1TT = hiding(apart_BTT, q_BHTD.dtype)
        del apart_BTT
        y_BHTD, sums_BHT, *others = self._kernel.forward(
            q_BHTD, k_BGTD, v_BGTD, attn_mask=mask_B1TT, **given
        )
        return y_BHTD, sums_BHT.masked_fill_(has_none_B1T, float("-inf")), *others

    def backward(self, *, query: Tensor, key: Tensor, **given: Any) -> tuple[Tensor, ...]:
        """Return the gradients of queries, keys and values."""
        mask_B1TT = hiding(self._are_apart(query, key), query.dtype)
        return self._kernel.backward(query=query, key=key, attn_mask=mask_B1TT, **given)

    def _are_apart(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Return it of the next hop. Queries are all of the place's own or its late chunk, keys all
        of another's or its early chunk."""
        source_BT = self._places[(self._place - self._hop) % len(self._places)]
        self._hop += 1
        own_BT = self._places[self._place][:, -queries.shape[-2] :]
        return are_apart(own_BT, source_BT[:, : keys.shape[-2]])


_TOKENS = 1  # the dimension of tokens, behind that of samples


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchCut:
    """How many `samples` a micro-batch has, and into how many `slices` their tokens are cut between
    the blocks, over other axes too."""

    samples: int
    slices: int


@dataclass(frozen=True, slots=True)
class SlicedMasks:
    """The masks of the tokens in `spans` of so many `samples`, those of the `index`-th of `ranks`;
    a rank has `between` tokens of a sample between the blocks, fewer where another axis cuts them.
    """

    spans: tuple[Span, ...]
    index: int
    ranks: int
    samples: int
    between: int

    @property
    def tokens(self) -> int:
        """How many tokens of a sample the rank has."""
        return sum(behind - first for first, behind in self.spans)

    def are_of(self, shape: Sequence[int]) -> bool:
        """Whether something of this shape, [samples, tokens, ...] or [samples · tokens, ...], is of
        the rank's tokens; samples may be one, with what is alike in all of them behind."""
        return self._has_dimension(shape) or self._flat_samples(shape) > 0

    def of_all(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of what all ranks have."""
        before = shape[:_TOKENS] if self._has_dimension(shape) else ()
        tokens, *others = shape[len(before) :]
        return (*before, tokens * self.ranks, *others)

    def _has_dimension(self, shape: Sequence[int]) -> bool:
        is_long = len(shape) > _TOKENS and shape[0] in (1, self.samples)
        return is_long and shape[_TOKENS] in (self.tokens, self.between)

    def _flat_samples(self, shape: Sequence[int]) -> int:
        """Return how many samples' tokens are one dimension, the first; 0 where none are."""
        ways = product((self.tokens, self.between), (1, self.samples))
        return next((count for tokens, count in ways if shape[0] == count * tokens), 0)

    def around(self, modules: Iterable[nn.Module]) -> None:
        """Let what these drop out by their own code have such masks, in backward again too."""
        for module in modules:
            entered = _Entered(self)
            module.register_forward_pre_hook(entered.enter)
            module.register_forward_hook(entered.leave, always_call=True)

    def drop(self, call: DropoutCall) -> Tensor:
        """Return what is left of the rank's tokens; of anything else what all ranks draw alike."""
        x = call.input
        if isinstance(x, DTensor):  # its slice of the tokens over tp, if it has one
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
            return self.masked(x, call.rate)
        kept = self._noise(x, call.rate)
        return x.mul_(kept) if call.is_in_place else x * kept

    def _noise(self, x: Tensor, rate: float) -> Tensor:
        """Return what at::dropout multiplies by on a processor: 0, or 1 / (1 - rate)."""
        own = self._own(x.new_empty(self.of_all(x.shape)).bernoulli_(1 - rate))
        return own.div_(1 - rate)

    def masked(self, x: Tensor, rate: float) -> Tensor:
        """Return what at::dropout gives on a GPU, where it is one kernel, whose mask is a byte an
        element: by this mask its backward pass does to a gradient what it does to its input."""
        _, mask = torch.native_dropout(x.new_empty(self.of_all(x.shape)), rate, True)
        own = self._own(mask)
        left: Tensor = torch.ops.aten.native_dropout_backward(x, own, 1 / (1 - rate))
        return left

    def _own(self, mask: Tensor) -> Tensor:
        """Return a copy of the rank's part of the mask of all tokens. Of slices over another axis
        any that no other rank has will do, since ranks of that axis draw apart."""
        tokens = mask.shape[_TOKENS] // self.ranks
        if tokens == self.tokens:
            return taken(mask, self.spans)
        return taken(mask, ((self.index * tokens, (self.index + 1) * tokens),))


def masks_at(step: ContextParallel, index: int, cut: MicroBatchCut) -> SlicedMasks:
    """Return the masks of one of the ranks of cp."""
    return SlicedMasks(
        spans=spans_at(step, index),
        index=index,
        ranks=step.ulysses * step.ring,
        samples=cut.samples,
        between=step.sequence // cut.slices,
    )


class _Entered:
    """Forward passes of a module that are under way: one may be within another."""

    def __init__(self, masks: SlicedMasks) -> None:
        self._masks = masks
        self._passes: list[ExitStack] = []

    def enter(self, *_: object) -> None:
        stack = ExitStack()
        stack.enter_context(dropout_by(self._masks.drop))
        self._passes.append(stack)

    def leave(self, *_: object) -> None:
        if self._passes:  # else a hook before ours has raised
            self._passes.pop().close()
