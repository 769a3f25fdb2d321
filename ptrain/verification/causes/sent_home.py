"""What came home of the gradients of a rank's keys and values, which the queries of all ranks of cp
have a share of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ptrain.models.attention import Core
from ptrain.spec.model import ModelShape
from ptrain.verification.causes.rerun import Heads
from ptrain.verification.causes.scene import EXACT, Investigation
from ptrain.verification.causes.token_layout import (
    Explanation,
    Own,
    TokenLayout,
    ranks_text,
    shares_of,
)
from ptrain.verification.factors import lacking
from ptrain.verification.parts import relative


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
    yield Explanation("missing dK and dV", sentence, f" from {ranks}")


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
            yield Explanation("dK and dV", sentence, f" of {its}")


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
