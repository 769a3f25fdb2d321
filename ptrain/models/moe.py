"""Feed-forward layers: dense ones, and mixtures of experts with a router.

Note: no size depends on the routing, except the number of rows that travel to other ranks. With a
capacity every expert has the same number of places, some of which stay empty. Without one, rows are
sorted by expert, multiplied group by group and put back in order. torch's grouped product
multiplies the groups where it exists. Otherwise (fp64, or rows that do not fill 16 bytes) the
groups are multiplied one by one into one result.

Experts of a custom model may receive rows of other ranks. Their module is given rows with their
experts and weights, sorts them by expert, and passes each expert its rows. For experts of
transformers, the grouped product above computes the rows in any dtype. Any other module runs its
code on rows with one expert each and weights of one.

The balance losses of routers need counts over all tokens of the layer's samples.

Legend of shape suffixes: B samples, T tokens, N tokens of all samples, C hidden, E experts, K
experts of a token, G groups of e experts each (groups of the grouped product in its functions), M =
N·K rows sorted by expert, F features inside an expert, S places of an expert or of all experts, I
inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ptrain.errors import PtrainError
from ptrain.models.ledger import is_recomputing
from ptrain.models.numerics import widen
from ptrain.spec.block import Activation, Bias, Router
from ptrain.spec.model import ModelShape

ALIGNED = 16  # bytes: torch's grouped product needs rows that are a multiple
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def grouped_product(x_MI: Tensor, weights_EIO: Tensor, ends_E: Tensor) -> Tensor:
    """Return the product of each row with the matrix of its group: [M, O]. `ends_E` (int32) holds
    the exclusive end row of each group; a group may be empty."""
    y_MO: Tensor
    if _is_torchs(x_MI, weights_EIO):
        y_MO = F.grouped_mm(x_MI, weights_EIO, offs=ends_E)
    else:
        y_MO = _by_group(x_MI, weights_EIO, ends_E)
    return y_MO


def _is_torchs(x_MI: Tensor, weights_EIO: Tensor) -> bool:
    """Return True if torch's grouped product accepts these dtypes and widths."""
    is_even = all(width * x_MI.itemsize % ALIGNED == 0 for width in weights_EIO.shape[1:])
    return is_even and x_MI.dtype in DTYPES


# Same arguments and meaning as aten::_grouped_mm: the second factor has the groups in its first
# dimension, or the groups divide the inner dimension, as in a weight's gradient.
@torch.library.custom_op("ptrain::_grouped_mm", mutates_args=())
def _by_group(left: Tensor, right: Tensor, offs: Tensor) -> Tensor:
    result = _empty(left, right, offs)
    for group, (first, behind) in enumerate(pairwise([0, *offs.tolist()])):
        if right.dim() == 3:
            # into rows of the result, so that the product allocates nothing else
            torch.mm(left[first:behind], right[group], out=result[first:behind])
        else:
            torch.mm(left[:, first:behind], right[first:behind], out=result[group])
    return result


@_by_group.register_fake
def _empty(left: Tensor, right: Tensor, offs: Tensor) -> Tensor:
    groups = () if right.dim() == 3 else (offs.shape[0],)
    return left.new_empty(*groups, left.shape[0], right.shape[-1])


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, gradient_MO: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x_MI, weights_EIO, ends_E = ctx.saved_tensors
    needs_x, needs_weights, _ = ctx.needs_input_grad
    of_x = _by_group(gradient_MO, weights_EIO.mT, ends_E) if needs_x else None
    # computed transposed, because weights are stored transposed and need contiguous gradients
    of_weights = _by_group(gradient_MO.mT, x_MI, ends_E).mT if needs_weights else None
    return of_x, of_weights, None


_by_group.register_autograd(_backward, setup_context=_keep)


class Journey:
    """The exchange of rows in one forward pass; this base class keeps all rows on the rank."""

    def __init__(self) -> None:
        self._beside: Callable[[], Tensor] | None = None

    def set_overlapped(self, compute: Callable[[], Tensor]) -> None:
        """Set the computation that may overlap with the exchange; call it before rows are sent."""
        self._beside = compute

    def overlapped_result(self) -> Tensor:
        """Return the result of the overlapped computation, after rows are back."""
        assert self._beside is not None, "set_overlapped was called first"
        return self._beside()

    def send_rows(self, x_MC: Tensor, ends_E: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows for this rank's experts, and the end row of each expert."""
        return x_MC, ends_E

    def return_rows(self, y_MC: Tensor) -> Tensor:
        """Return the results of the rows that were sent, in their order."""
        return y_MC

    def send_places(self, x_ESC: Tensor) -> Tensor:
        """Return the places of this rank's experts."""
        return x_ESC

    def return_places(self, y_ESC: Tensor) -> Tensor:
        """Return the results of the places that were sent."""
        return y_ESC


OnRows = Callable[[Tensor, Tensor], Tensor]  # (rows [M, C], where each expert's end) -> [M, C]


def run_dropless(
    x_NC: Tensor, chosen_NK: Tensor, num_experts: int, journey: Journey, experts: OnRows
) -> Tensor:
    """Return the outputs of each token's experts [N, K, C], without a capacity limit."""
    num_chosen, chosen_M = chosen_NK.shape[1], chosen_NK.flatten()
    # Stable, so that rows of an expert keep the order of tokens, and sums do not depend on the
    # device's sort.
    order_M = chosen_M.argsort(stable=True)
    x_MC, ends_E = journey.send_rows(x_NC[order_M // num_chosen], ends_of(chosen_M, num_experts))
    # nested, so that no local variable keeps the experts' output alive while rows return
    y_MC = journey.return_rows(experts(x_MC, ends_E))
    del x_MC, ends_E
    return y_MC[order_M.argsort()].unflatten(0, (-1, num_chosen))


def ends_of(chosen_M: Tensor, num_experts: int) -> Tensor:
    """Return the exclusive end row of each expert in rows sorted by expert: int32 [E], as torch's
    grouped product takes it."""
    counts_E = torch.zeros(num_experts, dtype=torch.int64, device=chosen_M.device)
    counts_E = counts_E.scatter_add(0, chosen_M, torch.ones_like(chosen_M))
    return counts_E.cumsum(0, dtype=torch.int32)


NUMBER = "num_experts"  # optional attribute of such a module: the rank's number of experts

_GATE = "_apply_gate"  # a method of all experts classes in transformers
_LOST = (
    "{name} would send no gradient to its parameters and to the ranks whose rows it "
    "received. Call every expert, even with zero rows."
)


class RoutedRows(nn.Module):
    """The mixin that lets a custom module of experts exchange rows with other ranks.

    `journey` builds the exchange of one forward pass, `reading` returns a context around the use of
    the module's tensors, and `num_all` is the layer's number of experts over all ranks.
    """

    journey: Callable[[], Journey]
    reading: Callable[[nn.Module], AbstractContextManager[None]] | None = None
    num_all: int

    def forward(self, x_NC: Tensor, chosen_NK: Tensor, weights_NK: Tensor) -> Tensor:
        """Return the weighted sum of each token's experts [N, C]."""
        rows_NKC = run_dropless(x_NC, chosen_NK, self.num_all, self.journey(), self._of_own)
        return (rows_NKC * weights_NK[..., None]).sum(1).to(x_NC.dtype)

    def _of_own(self, x_MC: Tensor, ends_E: Tensor) -> Tensor:
        with self.reading(self) if self.reading else nullcontext():
            return self.of_rows(x_MC, ends_E)

    def of_rows(self, x_MC: Tensor, ends_E: Tensor) -> Tensor:
        """Return the outputs of rows sorted by expert. Raise PtrainError for an output without a
        graph, which would lose the gradients of other ranks' rows."""
        # Each row has one expert with weight 1 here. The weights of the router are applied where
        # the rows came from, so that their gradients stay on that rank.
        chosen_M1 = _experts_of(x_MC, ends_E)[:, None]
        y_MC: Tensor = super().forward(x_MC, chosen_M1, x_MC.new_ones(chosen_M1.shape))
        if torch.is_grad_enabled() and not y_MC.requires_grad:
            raise PtrainError(_LOST.format(name=type(self).__name__))
        return y_MC


class _TransformersRows(RoutedRows):
    """The mixin for experts of transformers, which have two projection tensors; the first may fuse
    gate and up projections."""

    def of_rows(self, x_MC: Tensor, ends_E: Tensor) -> Tensor:
        own: Any = self
        h_MF = self._product(x_MC, "gate_up_proj" if own.has_gate else "up_proj", ends_E)
        h_MF = own._apply_gate(h_MF) if own.has_gate else own.act_fn(h_MF)
        y_MC = self._product(h_MF, "down_proj", ends_E)
        return own.post_expert_norm(y_MC) if own.has_post_expert_norm else y_MC

    def _product(self, x_MI: Tensor, name: str, ends_E: Tensor) -> Tensor:
        """Return the product of rows with one projection of their experts [M, outputs]."""
        own: Any = self
        weight = getattr(own, name)
        y_MO = grouped_product(x_MI, weight if own.is_transposed else weight.mT, ends_E)
        if own.has_bias:
            y_MO = y_MO + getattr(own, f"{name}_bias")[_experts_of(x_MI, ends_E)]
        return y_MO


def route_rows(model: nn.Module, modules: Iterable[str], number: int) -> None:
    """Make modules of a model, each with all `number` experts of a layer, sort their rows by
    expert. Their classes are replaced in place, as in torch's fully_shard; rows stay on the rank
    until `journey` is replaced."""
    for name in modules:
        experts: Any = model.get_submodule(name)
        if not isinstance(experts, RoutedRows):
            kind: Any = type(experts)
            experts.__class__ = _routed_class(kind)
            experts.journey, experts.num_all = Journey, number


@cache
def _routed_class(kind: type) -> type:
    """Return a subclass of a class of experts with the mixin that routes rows."""
    mixin = _TransformersRows if hasattr(kind, _GATE) else RoutedRows
    return type(kind.__name__, (mixin, kind), {"__module__": kind.__module__})


def _experts_of(x_MC: Tensor, ends_E: Tensor) -> Tensor:
    """Return the index of each row's expert."""
    rows_M = torch.arange(len(x_MC), dtype=ends_E.dtype, device=ends_E.device)
    return torch.searchsorted(ends_E, rows_M, right=True)


class SampleTokens:
    """The tokens of a sample that a rank has; here all of them. `slices`: the number of shards of a
    sample's tokens."""

    slices = 1

    def sum_counts(self, counts_BE: Tensor) -> Tensor:
        """Return counts over all tokens, given the counts over the rank's tokens."""
        return counts_BE

    def count_earlier(self, before_BKT: Tensor, chosen_BKT: Tensor, *, num_experts: int) -> Tensor:
        """Return the number of earlier choices of each choice's expert over all tokens, given the
        number within the rank's tokens. First choices come before second ones, earlier tokens
        before later ones."""
        return before_BKT


class Balance(nn.Module):
    """The auxiliary losses of one router, summed over the samples of a micro-batch (0-d).

    Each sample's loss covers exactly its tokens, so it does not depend on the placement. `weight`
    is one over the samples of the global batch, so that the sum is their mean. Ranks that route the
    same tokens, or shards of a sample, each add their share of it.
    """

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape, self.weight = shape, 1.0
        self.scale: Tensor | None = None  # 0-d: scale of the loss that backward starts from
        self.tokens = SampleTokens()

    @property
    def is_wanted(self) -> bool:
        """True if the model has an auxiliary loss or a z-loss."""
        return bool(self.shape.aux_loss or self.shape.z_loss)

    def forward(self, logits_BTE: Tensor, scores_BTE: Tensor, chosen_BTK: Tensor) -> Tensor:
        """Return the sum of the samples' losses, in at least fp32."""
        losses = []
        if self.shape.aux_loss:
            losses.append(self.shape.aux_loss * self._load_balancing_loss(scores_BTE, chosen_BTK))
        if self.shape.z_loss:  # Zoph et al. 2022 (arXiv:2202.08906), equation 5
            losses.append(self.shape.z_loss * logits_BTE.logsumexp(-1).square().mean(1).sum())
        return losses[0] if len(losses) == 1 else losses[0] + losses[1]

    def _load_balancing_loss(self, scores_BTE: Tensor, chosen_BTK: Tensor) -> Tensor:
        """Return the load-balancing loss: the number of experts times the sum, over experts, of
        choice share times mean score. A sample with even shares and scores has 1. See Fedus et al.
        2021 (arXiv:2101.03961, equations 4 to 6); per sample as in DeepSeek-V3 (arXiv:2412.19437,
        equations 17 to 20)."""
        num_experts = scores_BTE.shape[-1]
        if self.shape.router is Router.SIGMOID:  # sigmoid scores do not sum to 1
            scores_BTE = scores_BTE / scores_BTE.sum(-1, keepdim=True)
        chosen_BQ = chosen_BTK.flatten(1)
        ones_BQ = torch.ones_like(chosen_BQ, dtype=scores_BTE.dtype)
        counts_BE = ones_BQ.new_zeros(len(chosen_BQ), num_experts).scatter_add(
            1, chosen_BQ, ones_BQ
        )
        # The choices of the full sample: the counts are summed over all shards.
        choices = chosen_BQ.shape[1] * self.tokens.slices
        shares_BE = self.tokens.sum_counts(counts_BE) / choices
        return num_experts * (shares_BE * scores_BTE.mean(1)).sum()


def weight_router_losses(model: nn.Module, weight: float) -> None:
    """Multiply the weight of all router losses of a model."""
    for module in model.modules():
        if isinstance(module, Balance):
            module.weight *= weight


def scale_losses(model: nn.Module, scale: Tensor) -> None:
    """Multiply the router losses of a model by a scale (0-d), which is read when a backward pass
    reaches them, so that it equals the scale of the step's loss."""
    for module in model.modules():
        if isinstance(module, Balance):
            module.scale = scale


def with_loss(x: Tensor, loss: Tensor, weight: float, scale: Tensor | None = None) -> Tensor:
    """Return `x`, whose backward pass also sends the gradient `weight` times `scale` to `loss`
    (0-d)."""
    y: Tensor = _AddLoss.apply(x, loss, weight, scale)
    return y


class _AddLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, weight: float, scale: Tensor | None) -> Tensor:
        ctx.weight, ctx.scale, ctx.dtype = weight, scale, loss.dtype
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        if ctx.scale is None:
            of_loss = gradient.new_full((), ctx.weight, dtype=ctx.dtype)
        else:
            # The loss is not part of the model's output, so it would not get the scale of the
            # step's loss through backward.
            of_loss = ctx.scale.to(ctx.dtype) * ctx.weight
        return gradient, of_loss, None, None


class FeedForward(nn.Module):
    """A dense feed-forward layer with `width` features between its projections."""

    def __init__(self, shape: ModelShape, width: int) -> None:
        super().__init__()
        has_bias = shape.bias is Bias.ALL
        self.activate = activation_of(shape)
        is_gated = shape.activation.is_gated
        self.gate = nn.Linear(shape.hidden, width, bias=has_bias) if is_gated else None
        self.up = nn.Linear(shape.hidden, width, bias=has_bias)
        self.down = nn.Linear(width, shape.hidden, bias=has_bias)

    def forward(self, x_BTC: Tensor) -> Tensor:
        y: Tensor
        if self.gate is None:
            y = self.down(self.activate(self.up(x_BTC)))
        else:
            y = self.down(self.activate(self.gate(x_BTC)) * self.up(x_BTC))
        return y


def _squared_relu(x: Tensor) -> Tensor:
    return F.relu(x).square()


_GELU_BY_TANH = partial(F.gelu, approximate="tanh")
_FUNCTIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    Activation.GELU: F.gelu,
    Activation.GELU_TANH: _GELU_BY_TANH,
    Activation.RELU2: _squared_relu,
    Activation.SWIGLU: F.silu,
    Activation.GEGLU: _GELU_BY_TANH,
}


def activation_of(shape: ModelShape) -> Callable[[Tensor], Tensor]:
    """Return the activation function between the projections of a feed-forward layer."""
    return _FUNCTIONS[shape.activation]


class Score(nn.Module):
    """The function from router logits to scores: softmax or sigmoid."""

    def __init__(self, router: Router) -> None:
        super().__init__()
        self.router = router

    def forward(self, logits_NE: Tensor) -> Tensor:
        return logits_NE.softmax(-1) if self.router is Router.SOFTMAX else logits_NE.sigmoid()


class Gate(nn.Module):
    """The router, which chooses the experts of each token and their weights.

    Its parameter is a matrix [E, C]. If the model updates router biases, it has two buffers:
    `bias_E`, which is added to scores for the choice only, and `load_E`, which counts choices since
    it was last cleared. `interpreter.construction` updates the bias between steps.
    """

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        assert shape.experts is not None, "the model has experts"
        self.shape = shape
        self.score, self.is_normed = Score(shape.router), shape.router_norm
        self.scale, self.num_chosen = shape.router_scale, shape.experts_per_token
        self.groups, self.groups_chosen = shape.expert_groups, shape.groups_per_token
        self.balance = Balance(shape)
        self.weight = nn.Parameter(torch.empty(shape.experts, shape.hidden))
        self.bias_E: Tensor | None
        self.load_E: Tensor | None
        has_bias, experts = shape.bias_update_rate is not None, shape.experts
        self.register_buffer("bias_E", torch.zeros(experts) if has_bias else None)
        # Not persistent: it is zero between steps, when checkpoints are written.
        load_E = torch.zeros(experts, dtype=torch.int64) if has_bias else None
        self.register_buffer("load_E", load_E, persistent=False)

    def reset_buffers(self) -> None:
        """Zero the biases and the counts."""
        for buffer in (self.bias_E, self.load_E):
            if buffer is not None:
                buffer.zero_()

    def forward(self, x_BTC: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights [N, K] and expert indices [N, K] of each token's chosen experts."""
        x_NC = x_BTC.flatten(0, 1)
        # In at least fp32, because the choice is not continuous in the logits: a rounding can
        # change an expert.
        logits_NE = F.linear(widen(x_NC), widen(self.weight))
        scores_NE: Tensor = self.score(logits_NE)
        if self.bias_E is None and self.groups is None:
            weights_NK, chosen_NK = scores_NE.topk(self.num_chosen)
        else:
            chosen_NK = self._choose_experts(scores_NE.detach())
            # The weights come from the scores without bias: the bias balances the choice and must
            # not change the output (DeepSeek-V3, arXiv:2412.19437, section 2.1.2).
            weights_NK = scores_NE.gather(1, chosen_NK)
        # A recomputation would count the same choices again.
        if self.load_E is not None and self.training and not is_recomputing():
            chosen_M = chosen_NK.flatten()
            self.load_E.scatter_add_(0, chosen_M, torch.ones_like(chosen_M))
        if self.training and self.balance.is_wanted:
            routing = (logits_NE, scores_NE, chosen_NK)
            loss = self.balance(*(x.unflatten(0, x_BTC.shape[:2]) for x in routing))
            weights_NK = with_loss(weights_NK, loss, self.balance.weight, self.balance.scale)
        if self.is_normed:
            weights_NK = weights_NK / weights_NK.sum(-1, keepdim=True)
        if self.scale is not None:
            weights_NK = weights_NK * self.scale
        return weights_NK.to(x_NC.dtype), chosen_NK

    def _choose_experts(self, scores_NE: Tensor) -> Tensor:
        """Return the experts [N, K] with the highest biased scores: of all groups, or of those
        whose two best scores have the largest sum (DeepSeek-V3, arXiv:2412.19437, equations 15 and
        16, and section 2.1.2 on nodes)."""
        if self.bias_E is not None:
            scores_NE = scores_NE + self.bias_E
        if self.groups is not None:
            scores_NGe = scores_NE.unflatten(1, (self.groups, -1))
            best_NG = scores_NGe.topk(2).values.sum(-1)
            groups_NG = best_NG.topk(self.groups_chosen).indices
            hidden_NG = torch.ones_like(best_NG, dtype=torch.bool).scatter(1, groups_NG, False)
            scores_NE = scores_NGe.masked_fill(hidden_NG[..., None], float("-inf")).flatten(1)
        return scores_NE.topk(self.num_chosen).indices


class ExpertProjections(nn.Module):
    """One linear layer of all experts, with their matrices in one tensor [E, outputs, inputs]."""

    def __init__(self, experts: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, outputs, inputs))

    def forward(self, x: Tensor, ends_E: Tensor | None = None) -> Tensor:
        """Return the products of rows with their experts' matrices. Rows are sorted by expert with
        end rows `ends_E`, or have the shape [E, S, inputs]."""
        matrices = self.weight.mT
        return x @ matrices if ends_E is None else grouped_product(x, matrices, ends_E)


class Experts(nn.Module):
    """All experts of a layer, with one module per projection."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        assert shape.experts is not None, "the model has experts"
        self.activate, self.num_experts = activation_of(shape), shape.experts
        inner, outer = shape.width_of_expert, shape.hidden
        is_gated = shape.activation.is_gated
        self.gate = ExpertProjections(shape.experts, outer, inner) if is_gated else None
        self.up = ExpertProjections(shape.experts, outer, inner)
        self.down = ExpertProjections(shape.experts, inner, outer)

    def forward(self, x: Tensor, ends_E: Tensor | None = None) -> Tensor:
        """Return the outputs of rows; see `ExpertProjections.forward` for the arguments."""
        if self.gate is None:
            h = self.activate(self.up(x, ends_E))
        else:
            h = self.activate(self.gate(x, ends_E)) * self.up(x, ends_E)
        y: Tensor = self.down(h, ends_E)
        return y


class ExpertPlaces(nn.Module):
    """The assignment of choices to places of experts with a capacity.

    Each expert has the same number of places per sample. First choices of all tokens come before
    second ones, earlier tokens before later ones (GShard, arXiv:2006.16668, algorithm 1).
    """

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        assert shape.experts is not None, "the model has experts"
        self.shape, self.num_experts = shape, shape.experts
        self.tokens = SampleTokens()

    def forward(self, chosen_BTK: Tensor) -> Tensor:
        """Return the place [N, K] of each choice; the number of places if the expert is full."""
        num_samples, num_tokens, num_chosen = chosen_BTK.shape
        chosen_BQ = chosen_BTK.transpose(1, 2).flatten(1)  # in order of priority
        is_own_BQE = F.one_hot(chosen_BQ, self.num_experts)
        before_BQ = (is_own_BQE.cumsum(1) * is_own_BQE).sum(-1) - 1
        samples_B1 = torch.arange(num_samples, device=chosen_BQ.device)[:, None]
        places_BQ = (chosen_BQ * num_samples + samples_B1) * self._local_capacity(
            num_tokens
        ) + before_BQ
        own = (x_BQ.unflatten(1, (num_chosen, num_tokens)) for x_BQ in (before_BQ, chosen_BQ))
        # The place comes from the rank's tokens, which decide where a row lies in local memory.
        # Whether the expert is full comes from all tokens of the sample.
        before_BQ = self.tokens.count_earlier(*own, num_experts=self.num_experts).flatten(1)
        is_late_BQ = before_BQ >= self._sample_capacity(num_tokens)
        places_BQ = places_BQ.masked_fill(is_late_BQ, self.count_places(num_samples, num_tokens))
        return places_BQ.unflatten(1, (num_chosen, num_tokens)).transpose(1, 2).flatten(0, 1)

    def count_places(self, num_samples: int, num_tokens: int) -> int:
        """Return the number of places of all experts, for `num_tokens` tokens of each sample."""
        return self.num_experts * num_samples * self._local_capacity(num_tokens)

    def _sample_capacity(self, num_tokens: int) -> int:
        return self.shape.capacity(num_tokens * self.tokens.slices)

    def _local_capacity(self, num_tokens: int) -> int:
        """Return an expert's places per sample on this rank: its capacity, but at most the rank's
        tokens."""
        return min(self._sample_capacity(num_tokens), num_tokens)


class MoE(nn.Module):
    """A feed-forward layer of a router, its experts, and shared experts that receive all tokens.
    `journey` builds the exchange of rows around the experts in a forward pass."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.journey: Callable[[], Journey] = Journey
        self.router = Gate(shape)
        self.places = None if shape.capacity_factor is None else ExpertPlaces(shape)
        self.experts = Experts(shape)
        width = shape.shared_experts * shape.width_of_expert
        self.shared = FeedForward(shape, width) if width else None

    def forward(self, x_BTC: Tensor) -> Tensor:
        x_NC = x_BTC.flatten(0, 1)
        weights_NK, chosen_NK = self.router(x_BTC)
        journey = self.journey()
        if (shared := self.shared) is not None:
            # Shared experts do not need the exchanged rows, so they fill the time of the exchange.
            journey.set_overlapped(lambda: shared(x_BTC))
        if self.places is None:
            rows_NKC = run_dropless(
                x_NC, chosen_NK, self.experts.num_experts, journey, self.experts
            )
        else:
            places_NK = self.places(chosen_NK.unflatten(0, x_BTC.shape[:2]))
            num_places = self.places.count_places(*x_BTC.shape[:2])
            rows_NKC = self._run_with_capacity(journey, x_NC, places_NK, num_places)
        y_BTC = (rows_NKC * weights_NK[..., None]).sum(1).view_as(x_BTC)
        return y_BTC if shared is None else y_BTC + journey.overlapped_result()

    def _run_with_capacity(
        self, journey: Journey, x_NC: Tensor, places_NK: Tensor, num_places: int
    ) -> Tensor:
        """Return the outputs of each token's experts [N, K, C]; zeros for choices without a
        place."""
        num_experts = self.experts.num_experts
        # One place more than there are: choices without a place are written to it and dropped,
        # which needs no mask and no read on the host.
        tokens_S = places_NK.new_full((num_places + 1,), len(x_NC))  # an empty place has row N
        owners_NK = torch.arange(len(x_NC), device=x_NC.device)[:, None].expand_as(places_NK)
        tokens_S = tokens_S.scatter(0, places_NK.flatten(), owners_NK.flatten())[:-1]
        x_ESC = journey.send_places(
            F.pad(x_NC, (0, 0, 0, 1))[tokens_S].unflatten(0, (num_experts, -1))
        )
        y_ESC = journey.return_places(self.experts(x_ESC))
        del x_ESC
        return F.pad(y_ESC.flatten(0, 1), (0, 0, 0, 1))[places_NK]
