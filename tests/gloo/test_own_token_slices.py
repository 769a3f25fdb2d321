"""Hand-written token slices: faults are named and confirmed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import ptrain
from tests.corpus import context
from tests.corpus.collectives import GatherParts
from tests.corpus.parts import (
    TokenWriter,
    adamw,
    average,
    axis,
    looped,
    rank,
    token_batches,
    token_loss,
    writer,
)
from tests.ranks import Ranks

pytestmark = pytest.mark.gloo

IGNORED = -100


def root_cause_of(case: str) -> dict[str, Any]:
    verdict = getattr(context, case)(True)
    return {"text": str(verdict)}


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("positions_begin_at_zero", "positions not offset by rank"),
        ("gathered_keys_keep_their_own_gradient", "other gradient in backward"),
        ("labels_shifted_within_a_slice", "differs by"),
    ],
)
def test_a_fault_of_a_slice_is_named_and_confirmed(ranks: Ranks, case: str, said: str) -> None:
    text = ranks.run(2, root_cause_of, case)[0]["text"]
    assert f"axis cp · {said}" in text
    certainty = "proven" if said.startswith("positions") else "located"
    assert f"{certainty} by trying" in text


def verify_ignored_labels(fault: str) -> dict[str, Any]:
    """Return the verdict with ignored labels, most of them in the first slice; `fault`: `means`
    divides by the local count, `lost` drops the label of a slice's last token, `weights` counts the
    first slice more."""
    left_out = torch.zeros(4, 8, dtype=torch.bool)
    left_out[:, :3] = True

    def labels_of(tokens: Tensor) -> Tensor:
        return tokens[:, 1:].masked_fill(left_out, IGNORED)

    def whole(model: Any, tokens: Tensor) -> Tensor:
        return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), labels_of(tokens).flatten())

    def sliced() -> ptrain.Job:
        model = writer()

        def loss(called: Any, tokens: Tensor) -> Tensor:
            inputs, _, first = context.tokens_of_rank(tokens)
            labels = labels_of(tokens).chunk(2, dim=1)[first // 4].clone()
            if fault == "lost":
                labels[:, -1] = IGNORED
            logits = called(inputs, first, lambda kv: GatherParts.apply(kv, 1))
            total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
            counted = (labels != IGNORED).sum() if fault == "means" else 20 / 2
            counted = counted / 1.3 if fault == "weights" and not first else counted
            return total / counted

        return looped(
            model, loss=loss, optimizer=adamw(model),
            before_update=lambda: average(model.parameters()),
        )  # fmt: skip

    def plain() -> ptrain.Job:
        return looped(writer(), loss=whole)

    terms = ptrain.Terms(mesh=axis("cp"))
    verdict = ptrain.verify(plain, sliced, token_batches(), terms=terms)
    return {"holds": verdict.holds, "text": str(verdict)}


@pytest.mark.parametrize("fault", ["means", "lost", "weights"])
def test_a_different_loss_on_slices_is_located(ranks: Ranks, fault: str) -> None:
    text = ranks.run(2, verify_ignored_labels, fault)[0]["text"]
    assert "the gradient of the loss by that output differs (over cp)" in text
    assert "possible causes: other labels, masks or weights of the loss" in text
    assert "located by trying" in text


def test_slices_with_ignored_labels_hold(ranks: Ranks) -> None:
    verdict = ranks.run(2, verify_ignored_labels, "")[0]
    assert verdict["holds"], verdict["text"]


class Attending(TokenWriter):
    """A model with torch's attention, whose keys `order` sorts by position in the full sample."""

    def __init__(self, mask: str = "") -> None:
        super().__init__()
        self.mask = mask

    def forward(self, tokens: Tensor, places: Tensor | None = None, gather: Any = None) -> Tensor:
        places = torch.arange(tokens.shape[1]) if places is None else places
        x = self.embed(tokens) + self.position(places)
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        k, v = (its if gather is None else gather(its) for its in (k, v))
        keys = torch.arange(k.shape[1]) if self.mask != "own keys" else places
        seen = places[:, None] >= keys
        if self.mask == "none":
            seen = torch.ones_like(seen)
        if self.mask == "local index":
            seen = torch.arange(len(places))[:, None] >= keys
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, attn_mask=seen))
        return self.head(x + self.mlp(x))


def verify_zigzag(mask: str) -> dict[str, Any]:
    """Return the verdict of hand-written zigzag slices (one early and one late chunk per rank);
    `mask` is the fault of the attention mask."""

    def built(**options: Any) -> Attending:
        torch.manual_seed(0)
        return Attending(**options)

    def zigzag(tensor: Tensor) -> Tensor:
        chunks = tensor.chunk(4, dim=1)
        return torch.cat([chunks[rank()], chunks[3 - rank()]], dim=1)

    def unsorted(tensor: Tensor) -> Tensor:
        if mask == "own keys":
            return tensor
        first, fourth, second, third = GatherParts.apply(tensor, 1).chunk(4, dim=1)
        return torch.cat([first, second, third, fourth], dim=1)

    def sliced() -> ptrain.Job:
        model = built(mask=mask)

        def loss(called: Any, tokens: Tensor) -> Tensor:
            places = zigzag(torch.arange(tokens.shape[1] - 1)[None])[0]
            logits = called(zigzag(tokens[:, :-1]), places, unsorted)
            return F.cross_entropy(logits.flatten(0, 1), zigzag(tokens[:, 1:]).flatten())

        def reduced() -> None:
            left_out = set(model.norm.parameters()) if mask == "norm not reduced" else set()
            average([its for its in model.parameters() if its not in left_out])

        return looped(model, loss=loss, optimizer=adamw(model), before_update=reduced)

    def plain() -> ptrain.Job:
        return looped(built(), loss=token_loss)

    terms = ptrain.Terms(mesh=axis("cp"))
    verdict = ptrain.verify(plain, sliced, token_batches(), terms=terms)
    return {"holds": verdict.holds, "text": str(verdict)}


@pytest.mark.parametrize("mask", ["none", "local index", "own keys"])
def test_wrong_attention_is_found_between_the_modules_around_it(ranks: Ranks, mask: str) -> None:
    text = ranks.run(2, verify_zigzag, mask)[0]["text"]
    assert "between qkv and proj. In attention these are the mask" in text
    assert "with the reference's input of proj and the reference's gradient" in text


def test_hand_written_zigzag_slices_hold(ranks: Ranks) -> None:
    verdict = ranks.run(2, verify_zigzag, "")[0]
    assert verdict["holds"], verdict["text"]


def test_labels_and_positions_of_zigzag_slices_are_not_blamed(ranks: Ranks) -> None:
    text = ranks.run(2, verify_zigzag, "norm not reduced")[0]["text"]
    assert "missing all-reduce over cp" in text and "norm" in text
