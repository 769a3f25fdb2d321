"""Which keys the gradients of a rank's queries are of: they are a sum over the keys of all ranks of
cp that a query sees."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ptrain.models.attention import Core
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


def of_some_keys(scene: Investigation, layout: TokenLayout, own: Own) -> Iterator[Explanation]:
    """The gradients of queries lack what they get from the keys of some ranks."""
    shares = [own.part(share) for share in shares_of(scene, layout, _by_keys)]
    if shares and (owners := lacking(own.tensor, shares, EXACT)):
        ranks = ranks_text(scene, owners)
        sentence = (
            f"rank {scene.rank} has no gradient of its queries from the keys of {ranks}: add up "
            "dQ over all hops"
        )
        yield Explanation("missing dQ", sentence, f" from the keys of {ranks}")


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
