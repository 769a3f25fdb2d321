"""Feed-forward layers: one for all tokens, or experts of which a router chooses some for every
token.

Legend of shape suffixes: B samples, T tokens, N tokens of all samples, C hidden, E experts, K
experts of a token, G groups of e experts each, M = N·K rows, F features inside an expert, S places
of all experts.

Note: no size depends on the routing. Without a capacity all rows are sorted by expert and
multiplied group by group; with one every expert has equally many places, some of which stay empty.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ptrain.models.balance import Balance, SampleTokens, with_loss
from ptrain.models.dropless import Journey, dropless, grouped_product
from ptrain.models.numerics import widen
from ptrain.models.recomputing import runs_again
from ptrain.spec.block import Activation, Bias
from ptrain.spec.experts import Router
from ptrain.spec.model import ModelShape


class FeedForward(nn.Module):
    """`width`: features between its projections."""

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
    """Return what stands between the projections of a feed-forward part."""
    return _FUNCTIONS[shape.activation]


class Score(nn.Module):
    """Makes scores of a router's logits."""

    def __init__(self, router: Router) -> None:
        super().__init__()
        self.router = router

    def forward(self, logits_NE: Tensor) -> Tensor:
        return logits_NE.softmax(-1) if self.router is Router.SOFTMAX else logits_NE.sigmoid()


class Gate(nn.Module):
    """Chooses the experts of each token, and what theirs counts. Its parameter is a matrix.

    Where a shape says so it has two buffers beside it: a bias that is added to the scores of each
    expert for the choice alone, and how often each was chosen since somebody cleared it. What moves
    the bias stands elsewhere (`interpreter.construction`): no pass does.
    """

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        assert shape.experts is not None, "there is something to choose"
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
        load_E = torch.zeros(experts, dtype=torch.int64) if has_bias else None
        self.register_buffer("load_E", load_E, persistent=False)

    def reset_buffers(self) -> None:
        """No expert is favoured, and none has been chosen."""
        for buffer in (self.bias_E, self.load_E):
            if buffer is not None:
                buffer.zero_()

    def forward(self, x_BTC: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights [N, K] and experts [N, K], the best first."""
        x_NC = x_BTC.flatten(0, 1)
        logits_NE = F.linear(widen(x_NC), widen(self.weight))
        scores_NE: Tensor = self.score(logits_NE)
        if self.bias_E is None and self.groups is None:
            weights_NK, chosen_NK = scores_NE.topk(self.num_chosen)
        else:
            chosen_NK = self._choice(scores_NE.detach())
            weights_NK = scores_NE.gather(1, chosen_NK)
        if self.load_E is not None and self.training and not runs_again():
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

    def _choice(self, scores_NE: Tensor) -> Tensor:
        """Return the experts [N, K] whose scores and biases together are best, of all groups, or of
        those whose two best have the largest sum (DeepSeek-V3, arXiv:2412.19437, equations 15 and
        16, and its section 2.1.2 on nodes)."""
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
    """One linear layer of every expert, their matrices in one tensor."""

    def __init__(self, experts: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, outputs, inputs))

    def forward(self, x: Tensor, ends_E: Tensor | None = None) -> Tensor:
        """Return what rows give with the matrices of their experts: sorted by expert, with where
        each one's rows end; or as many of each [E, S, inputs]."""
        if ends_E is None:
            return x @ self.weight.mT
        return grouped_product(x, self.weight.mT, ends_E)


class Experts(nn.Module):
    """All experts of a layer: of each of their projections one module."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        assert shape.experts is not None, "somebody is one"
        self.activate, self.num_experts = activation_of(shape), shape.experts
        inner, outer = shape.width_of_expert, shape.hidden
        is_gated = shape.activation.is_gated
        self.gate = ExpertProjections(shape.experts, outer, inner) if is_gated else None
        self.up = ExpertProjections(shape.experts, outer, inner)
        self.down = ExpertProjections(shape.experts, inner, outer)

    def forward(self, x: Tensor, ends_E: Tensor | None = None) -> Tensor:
        """Return what rows become; both as of a projection."""
        if self.gate is None:
            h = self.activate(self.up(x, ends_E))
        else:
            h = self.activate(self.gate(x, ends_E)) * self.up(x, ends_E)
        y: Tensor = self.down(h, ends_E)
        return y


class ExpertPlaces(nn.Module):
    """Finds each choice a place among those of all experts. An expert has as many of every sample,
    for the first choices of its tokens before the second ones, and for earlier tokens before later
    ones (GShard, arXiv:2006.16668, algorithm 1)."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        assert shape.experts is not None, "they have places"
        self.shape, self.num_experts = shape, shape.experts
        self.tokens = SampleTokens()

    def forward(self, chosen_BTK: Tensor) -> Tensor:
        """Return the place [N, K] of each choice, which is the number of places where there is
        none."""
        num_samples, num_tokens, num_chosen = chosen_BTK.shape
        chosen_BQ = chosen_BTK.transpose(1, 2).flatten(1)  # in the order of their places
        is_own_BQE = F.one_hot(chosen_BQ, self.num_experts)
        before_BQ = (is_own_BQE.cumsum(1) * is_own_BQE).sum(-1) - 1
        samples_B1 = torch.arange(num_samples, device=chosen_BQ.device)[:, None]
        places_BQ = (chosen_BQ * num_samples + samples_B1) * self._own(num_tokens) + before_BQ
        own = (x_BQ.unflatten(1, (num_chosen, num_tokens)) for x_BQ in (before_BQ, chosen_BQ))
        before_BQ = self.tokens.before(*own, num_experts=self.num_experts).flatten(1)
        is_late_BQ = before_BQ >= self._capacity(num_tokens)
        places_BQ = places_BQ.masked_fill(is_late_BQ, self.number(num_samples, num_tokens))
        return places_BQ.unflatten(1, (num_chosen, num_tokens)).transpose(1, 2).flatten(0, 1)

    def number(self, num_samples: int, num_tokens: int) -> int:
        """Return the places that all experts have for so many tokens of each sample."""
        return self.num_experts * num_samples * self._own(num_tokens)

    def _capacity(self, num_tokens: int) -> int:
        return self.shape.capacity(num_tokens * self.tokens.slices)

    def _own(self, num_tokens: int) -> int:
        """As many as the expert takes of all of a sample's tokens, should they all be here."""
        return min(self._capacity(num_tokens), num_tokens)


class MoE(nn.Module):
    """Router and experts, and those that all tokens go to. `journey` makes what rows go through in
    a forward pass, before their experts and behind them."""

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
            journey.compute_beside(lambda: shared(x_BTC))
        if self.places is None:
            num_experts = self.experts.num_experts
            rows_NKC = dropless(x_NC, chosen_NK, num_experts, journey, self.experts)
        else:
            places_NK = self.places(chosen_NK.unflatten(0, x_BTC.shape[:2]))
            num_places = self.places.number(*x_BTC.shape[:2])
            rows_NKC = self._in_places(journey, x_NC, places_NK, num_places)
        y_BTC = (rows_NKC * weights_NK[..., None]).sum(1).view_as(x_BTC)
        return y_BTC if shared is None else y_BTC + journey.computed_beside()

    def _in_places(
        self, journey: Journey, x_NC: Tensor, places_NK: Tensor, num_places: int
    ) -> Tensor:
        """Return what each token's experts give [N, K, C], where these have a capacity: of a choice
        that finds no place, zeros."""
        num_experts = self.experts.num_experts
        tokens_S = places_NK.new_full((num_places + 1,), len(x_NC))  # an empty place has row N
        owners_NK = torch.arange(len(x_NC), device=x_NC.device)[:, None].expand_as(places_NK)
        tokens_S = tokens_S.scatter(0, places_NK.flatten(), owners_NK.flatten())[:-1]
        x_ESC = journey.places_there(
            F.pad(x_NC, (0, 0, 0, 1))[tokens_S].unflatten(0, (num_experts, -1))
        )
        y_ESC = journey.places_back(self.experts(x_ESC))
        del x_ESC
        return F.pad(y_ESC.flatten(0, 1), (0, 0, 0, 1))[places_NK]
