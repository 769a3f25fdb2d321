"""A GPU kernel's attention of a token slice to gathered keys equals the slice of full attention."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from ptrain.axes.context.run.apply import GatheredCore
from ptrain.runtime.comm import TagRegistry
from ptrain.spec.dials import ReduceScatterVia

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="kernels are a GPU's"),
]

DEVICE = torch.device("cuda")
BATCH, HEADS, TOKENS, HEAD_DIM, RANKS = 2, 8, 256, 64, 4


class OneOfMany(GatheredCore):
    """The core of rank `own` of RANKS, with the keys and values of all ranks available."""

    def __init__(self, own: int, keys: Tensor, values: Tensor) -> None:
        super().__init__(ProcessGroup(own, RANKS), None, ReduceScatterVia.NATIVE, TagRegistry())
        self.own, self.whole = own, (keys, values)
        self.sums: tuple[Tensor, Tensor] | None = None

    def gather_kv(self, k_BGTD: Tensor, v_BGTD: Tensor) -> tuple[Tensor, Tensor]:
        return self.whole

    def sum_kv_gradients(self, k_BGSD: Tensor, v_BGSD: Tensor) -> tuple[Tensor, Tensor]:
        self.sums = k_BGSD, v_BGSD
        return own_of(k_BGSD, self.own), own_of(v_BGSD, self.own)


def own_of(whole: Tensor, rank: int) -> Tensor:
    return whole.tensor_split(RANKS, dim=2)[rank]


@pytest.mark.parametrize("kv_heads", [HEADS, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_attention_of_slices_equals_full_attention(dtype: torch.dtype, kv_heads: int) -> None:
    torch.manual_seed(0)
    shapes = [(BATCH, heads, TOKENS, HEAD_DIM) for heads in (HEADS, kv_heads, kv_heads)]
    whole = [torch.randn(shape, device=DEVICE, dtype=dtype).requires_grad_() for shape in shapes]
    q, k, v = whole
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    gradient = torch.randn_like(expected)
    by_whole = torch.autograd.grad(expected, whole, gradient)
    query, *others = (tensor.detach() for tensor in whole)
    outputs, queries = [], []
    sums = [torch.zeros_like(other) for other in others]
    for rank in range(RANKS):
        core = OneOfMany(rank, others[0], others[1])
        parts = [own_of(tensor, rank).clone().requires_grad_() for tensor in (query, *others)]
        output = core(*parts)
        output.backward(own_of(gradient, rank))
        outputs.append(output.detach())
        queries.append(parts[0].grad)
        assert core.sums is not None
        sums = [sum_ + part for sum_, part in zip(sums, core.sums, strict=True)]
    by_slices = [torch.cat(outputs, 2), torch.cat(queries, 2), *sums]
    for ours, theirs in zip(by_slices, (expected, *by_whole), strict=True):
        assert torch.dist(ours, theirs) <= 0.01 * theirs.norm()
