"""What the gradients of a rank's queries, keys and values lack: the queries of all ranks of cp have
a share of those of keys and values, which come home, and the keys of all that a query sees of its
own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ptrain.models.attention import Core
from ptrain.spec.model import ModelShape
from ptrain.verification.causes.rerun import Heads, core_of, gradient_with
from ptrain.verification.causes.scene import EXACT, Investigation
from ptrain.verification.causes.token_layout import Own, TokenLayout, ranks_text
from ptrain.verification.causes.values import Explanation
from ptrain.verification.factors import lacking
from ptrain.verification.parts import relative


def shares_of(
    scene: Investigation,
    layout: TokenLayout,
    attend: Callable[[Tensor, Core, Heads, Tensor | None], Tensor],
) -> list[Tensor]:
    """Return what the tokens of each rank, `attend`'s first argument, have a share of the departing
    gradient; nothing where no attention stands beside it."""
    path, shares = core_of(scene), []
    for owner in range(layout.degree) if path and path != scene.first.name else ():
        share = gradient_with(scene, path, partial(attend, layout.owners == owner))
        if share is None:
            return []
        shares.append(share)
    return shares


def not_home(scene: Investigation, layout: TokenLayout, own: Own) -> Iterator[Explanation]:
    """Of the gradients of keys and values some ranks' share has not come, or another rank's has."""
    if shares := shares_of(scene, layout, _seen_by):
        yield from _share_missing(scene, own, shares)
        yield from _of_other_tokens(scene, layout, own, shares)
        yield from _of_other_strides(scene, own, shares)


def _seen_by(rows: Tensor, core: Core, heads: Heads, mask: Tensor | None) -> Tensor:
    """Return what is attended to; gradients reach keys and values from these queries alone."""
    queries, keys, values = heads
    whole: Tensor = core.forward(queries, keys, values, mask)
    apart: Tensor = core.forward(queries, keys.detach(), values.detach(), mask)
    return torch.where(rows[:, None], whole, apart)


def _share_missing(
    scene: Investigation, own: Own, shares: Sequence[Tensor]
) -> Iterator[Explanation]:
    owners = lacking(own.tensor, [own.part(share) for share in shares], EXACT)
    if not owners:
        return
    ranks = ranks_text(scene, owners)
    sentence = (
        f"rank {scene.rank} has no gradient of its keys and values from the queries of {ranks}: "
        "send every share of dK and dV home, and add them"
    )
    yield Explanation("missing dK and dV", sentence, whose=f" from {ranks}")


def _of_other_tokens(
    scene: Investigation, layout: TokenLayout, own: Own, shares: Sequence[Tensor]
) -> Iterator[Explanation]:
    whole = torch.stack(list(shares)).sum(0)
    for owner, spans in enumerate(layout.spans):
        if relative(own.tensor, own.part(whole, spans)) <= EXACT:
            its = ranks_text(scene, [owner])
            sentence = (
                f"rank {scene.rank} has the gradients of the keys and values of {its}: send dK and "
                "dV on to the rank whose tokens they are of"
            )
            yield Explanation("dK and dV", sentence, whose=f" of {its}")


def _of_other_strides(
    scene: Investigation, own: Own, shares: Sequence[Tensor]
) -> Iterator[Explanation]:
    """Elements went from memory with heads in front of tokens to memory with tokens in front, or
    the reverse, in the order in which they lay there."""
    if not isinstance(scene.spec.model, ModelShape):
        return
    sum_BTC = own.part(torch.stack(list(shares)).sum(0))
    sum_BTGD = sum_BTC.unflatten(-1, (-1, scene.spec.model.head_dim))
    if any(relative(own.tensor, x_BTC) <= EXACT for x_BTC in under_other_strides(sum_BTGD)):
        sentence = (
            f"rank {scene.rank} has the gradients of its keys and values with their elements in "
            "the places that they have under other strides, as torch.distributed.nn.functional's "
            "all_gather gives them on gloo: make what it is given in backward contiguous, or use "
            "functional collectives"
        )
        yield Explanation("dK and dV in the order of other strides", sentence)


def under_other_strides(x_BTGD: Tensor) -> tuple[Tensor, Tensor]:
    """Return [samples, tokens, features] of memory with heads in front that is read as if tokens
    were, and of memory with tokens in front that is read as if heads were."""
    x_BGTD = x_BTGD.transpose(1, 2)
    taken_for_heads = x_BTGD.reshape(x_BGTD.shape).transpose(1, 2)
    return x_BGTD.reshape(x_BTGD.shape).flatten(2), taken_for_heads.flatten(2)


def of_some_keys(scene: Investigation, layout: TokenLayout, own: Own) -> Iterator[Explanation]:
    """The gradients of queries lack what they get from the keys of some ranks."""
    shares = [own.part(share) for share in shares_of(scene, layout, _by_keys)]
    if shares and (owners := lacking(own.tensor, shares, EXACT)):
        ranks = ranks_text(scene, owners)
        sentence = (
            f"rank {scene.rank} has no gradient of its queries from the keys of {ranks}: add up "
            "dQ over all hops"
        )
        yield Explanation("missing dQ", sentence, whose=f" from the keys of {ranks}")


def _by_keys(columns: Tensor, core: Core, heads: Heads, mask: Tensor | None) -> Tensor:
    """Return what is attended to; gradients reach queries from these keys alone. Queries and keys
    have twice the features: half of them give the scores of these keys, the others, whose queries
    are detached, those of the rest."""
    queries, keys, values = heads
    features = queries.shape[-1]
    scores = replace(core.scores, scale=core.scores.scale or features**-0.5)
    chosen = columns[:, None]
    y_BHTD: Tensor = type(core)(core.dropout, scores).forward(
        torch.cat((queries, queries.detach()), -1),
        torch.cat((keys * chosen, keys * ~chosen), -1),
        F.pad(values, (0, features)),
        mask,
    )
    return y_BHTD[..., :features]
