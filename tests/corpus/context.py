"""Faults of context parallelism by hand: a rank has a slice of every sample's tokens, and gathers
keys and values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import ptrain
from tests.corpus.collectives import GatherCopies, GatherParts
from tests.corpus.fault import CONTEXT, NOT_REDUCED, TOO_SMALL, planted
from tests.corpus.parts import (
    LENGTH,
    TokenWriter,
    adamw,
    average,
    axis,
    looped,
    rank,
    size,
    token_batches,
    token_loss,
    writer,
)

Slice = tuple[Tensor, Tensor, int]  # inputs, labels, first position


def tokens_of_rank(tokens: Tensor) -> Slice:
    """Return this rank's inputs, labels (shifted before they are cut) and first position."""
    inputs, labels = (part.chunk(size(), dim=1)[rank()] for part in (tokens[:, :-1], tokens[:, 1:]))
    return inputs, labels, rank() * LENGTH // size()


def sliced(
    *,
    start: Callable[[int], int] = lambda first: first,
    mask_start: Callable[[int], int] = lambda first: first,
    gather: Any = GatherParts,
    scale: float = 1.0,
    reduced: Callable[[TokenWriter], list[Tensor]] = lambda model: list(model.parameters()),
) -> ptrain.Job:
    """Return the loop on a slice of the tokens; each option replaces one part of it."""
    model = writer()

    def forward_backward(batch: Slice) -> Tensor:
        inputs, labels, first = batch
        logits = model(
            inputs, start(first), lambda kv: gather.apply(kv, 1), mask_start=mask_start(first)
        )
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        (loss * scale).backward()
        average(reduced(model))
        return loss.detach()

    optimizer = adamw(model)

    def step(batch: Slice) -> Tensor:
        loss = forward_backward(batch)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return ptrain.Job(model=model, step=step)


def compared(job: Callable[[], ptrain.Job], share: Any = tokens_of_rank) -> Any:
    terms = ptrain.Terms(mesh=axis("cp"))
    return ptrain.verify(
        lambda: looped(writer(), loss=token_loss), job, token_batches(), share=share, terms=terms
    )


@planted(
    source="https://github.com/NVIDIA/Megatron-LM/issues/560",
    wrong=("loss", "activations"), axis="cp", place="position", step=0,
    sentence="positions begin at 0 on every rank of cp",
    right=("position|loss|forward|activation|output", CONTEXT),
    wrong_if=("not reduced", "learning rate", "head.weight lacks"),
)  # fmt: skip
def positions_begin_at_zero(fault: bool) -> Any:
    return compared(lambda: sliced(start=(lambda first: 0) if fault else (lambda first: first)))


@planted(
    source="https://github.com/NVIDIA/Megatron-LM/issues/7452",
    wrong=("loss", "activations"), axis="cp", place="*", step=0,
    sentence="rank 1's causal mask begins at token 0: it sees too few of the earlier keys",
    right=("mask|attention|loss|forward|activation|output", CONTEXT),
    wrong_if=("not reduced", "learning rate", "position"),
)  # fmt: skip
def mask_of_the_first_slice(fault: bool) -> Any:
    return compared(lambda: sliced(mask_start=(lambda first: 0) if fault else (lambda at: at)))


@planted(
    source="https://github.com/NVIDIA-NeMo/Automodel/pull/2995",
    wrong=("gradients",), axis="cp", place="qkv.*", step=0,
    sentence="gradients of keys and values lack the other ranks': the gather keeps only its own",
    right=(NOT_REDUCED, CONTEXT, "qkv|embed|norm|key|value"),
    wrong_if=("head.weight", "learning rate"),
)  # fmt: skip
def gathered_keys_keep_their_own_gradient(fault: bool) -> Any:
    return compared(lambda: sliced(gather=GatherCopies if fault else GatherParts))


@planted(
    source="https://github.com/NVIDIA/Megatron-LM/issues/673",
    wrong=("gradients",), axis="cp", place="*", step=0,
    sentence="gradients are half of what they should be: divided by cp twice",
    right=(TOO_SMALL, "gradient"),
    wrong_if=("not reduced", "lack"),
)  # fmt: skip
def loss_divided_by_context_twice(fault: bool) -> Any:
    return compared(lambda: sliced(scale=0.5 if fault else 1.0))


@planted(
    source="https://github.com/huggingface/transformers/pull/36607",
    wrong=("loss", "data"), axis="cp", place="*", step=0,
    sentence="labels are shifted within a slice: the last token of each has no right label",
    right=("label|loss|data|sample|token", CONTEXT),
    wrong_if=("not reduced", "learning rate"),
)  # fmt: skip
def labels_shifted_within_a_slice(fault: bool) -> Any:
    def share(tokens: Tensor) -> Slice:
        inputs, labels, first = tokens_of_rank(tokens)
        return inputs, inputs.roll(-1, dims=1) if fault else labels, first

    return compared(sliced, share)


@planted(
    source="https://github.com/NVIDIA/TransformerEngine/issues/435",
    wrong=("gradients",), axis="cp", place="norm.*", step=0,
    sentence="gradients of norm are not reduced over cp",
    right=(NOT_REDUCED, CONTEXT, "norm"),
    wrong_if=("head.weight", "qkv.weight", "learning rate"),
)  # fmt: skip
def norm_not_reduced_over_context(fault: bool) -> Any:
    def reduced(model: TokenWriter) -> list[Tensor]:
        left_out = set(model.norm.parameters()) if fault else set()
        return [parameter for parameter in model.parameters() if parameter not in left_out]

    return compared(lambda: sliced(reduced=reduced))


@planted(
    source="https://github.com/NVIDIA-BioNeMo/bionemo-recipes/pull/1449",
    wrong=("loss", "data"), axis="cp", place="*", step=0,
    sentence="inputs are cut in two slices a rank, zigzag, labels are not",
    right=("label|loss|data|sample|token|forward|activation", CONTEXT),
    wrong_if=("not reduced", "learning rate"),
)  # fmt: skip
def zigzag_of_inputs_alone(fault: bool) -> Any:
    """Rank 0 has slices 0 and 3 of four, rank 1 has 1 and 2; keys come in their order."""

    def zigzag(part: Tensor) -> Tensor:
        quarters = part.chunk(4, dim=1)
        return torch.cat([quarters[rank()], quarters[3 - rank()]], dim=1)

    def job() -> ptrain.Job:
        model = writer(causal=False)  # the order of the keys does not matter then

        def loss(called: Any, tokens: Tensor) -> Tensor:
            places = zigzag(torch.arange(LENGTH)[None])[0]
            x = called.embed(zigzag(tokens[:, :-1])) + called.position(places)
            q, k, v = called.qkv(called.norm(x)).chunk(3, dim=-1)
            k, v = GatherParts.apply(k, 1), GatherParts.apply(v, 1)
            x = x + called.proj(F.scaled_dot_product_attention(q, k, v))
            logits = called.head(x + called.mlp(x))
            asked = tokens.roll(3, 1)[:, 1:]  # not the next token, which it sees
            labels = asked.chunk(size(), dim=1)[rank()] if fault else zigzag(asked)
            return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

        return looped(model, loss=loss, before_update=lambda: average(model.parameters()))

    def whole(called: Any, tokens: Tensor) -> Tensor:
        logits = called(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), tokens.roll(3, 1)[:, 1:].flatten())

    return ptrain.verify(
        lambda: looped(writer(causal=False), loss=whole),
        job,
        token_batches(),
        terms=ptrain.Terms(mesh=axis("cp")),
    )
