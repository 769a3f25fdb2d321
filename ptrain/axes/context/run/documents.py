"""Documents of samples of which a rank has a slice of the tokens: their edges are gathered.

Legend of shape suffixes: B samples, H heads, G key-value heads, T tokens of a rank (of a ring's
place, in its hops), D elements per head, N ranks, S tokens of all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ptrain.axes.context.attention import all_spans
from ptrain.axes.context.run.slices import taken
from ptrain.costs import State
from ptrain.errors import refused
from ptrain.models.documents import Documents, added_mask, are_apart, hiding
from ptrain.rooms.comm import all_gather
from ptrain.rooms.registry import Registry
from ptrain.steps.step import ContextParallel

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
        finding = (
            "not supported yet: document masks over keys of other ranks on CUDA (flash "
            "attention accepts no mask)"
        )
        raise refused("model", finding, "Use `context.attention=ulysses`.")
    if query.dtype in (torch.float16, torch.bfloat16):
        return Kernel(
            _ATEN._scaled_dot_product_flash_attention.default,
            _ATEN._scaled_dot_product_flash_attention_backward.default,
            given,
        )
    finding = (
        f"not supported yet: attention over cp in {query.dtype} on CUDA (flash "
        "attention does not support it)"
    )
    raise refused(
        "precision", finding, "Compute in bf16 or fp16, or use `context.attention=ulysses`."
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
