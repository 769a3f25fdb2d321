"""Hand-written loops with one fault each, as reported by users."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

import ptrain
from tests.gloo.own_loops import MICRO_BATCHES, gradients, loop, mean_loss, single_pass_loop

Pair = tuple[ptrain.Job, ptrain.Job]
Between = Callable[[nn.Module], None]
CLIP = 0.05  # far below the norm of the first gradients


def _add_fault(change: Between) -> Callable[[nn.Module, ptrain.Job, Between], Pair]:
    """Return the correct loop with an action inserted between backward and update."""

    def fault(model: nn.Module, sound: ptrain.Job, between: Between) -> Pair:
        def both(model: nn.Module) -> None:
            between(model)
            change(model)

        return loop(model, micro_batches=MICRO_BATCHES, between=both), sound

    return fault


def _divide(model: nn.Module) -> None:
    for gradient in gradients(model):
        gradient /= dist.get_world_size()


def _multiply(model: nn.Module) -> None:
    for gradient in gradients(model):
        gradient *= dist.get_world_size()


def _infinite(model: nn.Module) -> None:
    if dist.get_rank() == 1:
        next(gradients(model)).flatten()[0] = torch.inf


def _zero(model: nn.Module) -> None:
    for gradient in gradients(model):
        gradient.zero_()


def _freeze(model: nn.Module) -> None:
    """Zero the gradient of the second MLP on one rank."""
    if dist.get_rank() == 1:
        for name, parameter in model.named_parameters():
            if "blocks.1.up" in name:
                parameter.grad = None


def local_clip(model: nn.Module, sound: ptrain.Job, between: Between) -> Pair:
    """Clip by the norm of the local shard, while the reference clips by the full norm."""

    def clip(model: nn.Module) -> None:
        between(model)
        norm = torch.sqrt(sum(gradient.square().sum() for gradient in gradients(model)))
        for gradient in gradients(model):
            gradient *= CLIP / norm

    def whole(model: nn.Module) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)

    return (
        loop(model, micro_batches=MICRO_BATCHES, between=clip),
        loop(sound.model, micro_batches=MICRO_BATCHES, between=whole),
    )


def stale(model: nn.Module, sound: ptrain.Job, between: Between) -> Pair:
    """From the second step on, update with the previous step's gradients."""
    kept: list[list[Tensor]] = []

    def swap(model: nn.Module) -> None:
        between(model)
        kept.append([gradient.clone() for gradient in gradients(model)])
        if len(kept) > 1:
            for gradient, old in zip(gradients(model), kept[-2], strict=True):
                gradient.copy_(old)

    return loop(model, micro_batches=MICRO_BATCHES, between=swap), sound


def _own_loop(
    model: nn.Module,
    between: Between,
    *,
    zero: Callable[[torch.optim.Optimizer, int], None] | None = None,
    share: float = 1 / MICRO_BATCHES,
    updates: int = 1,
    after: Between | None = None,
    left_out: str = "",
) -> ptrain.Job:
    trained = [p for name, p in model.named_parameters() if not left_out or left_out not in name]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)

    def step(tokens: Tensor) -> Tensor:
        total = torch.zeros(())
        for number, micro in enumerate(tokens.chunk(MICRO_BATCHES)):
            if zero is not None:
                zero(optimizer, number)
            loss = mean_loss(model, micro)
            (loss * share).backward()
            total = total + loss.detach() / MICRO_BATCHES
        between(model)
        for _ in range(updates):
            optimizer.step()
        if after is not None:
            after(model)
        if zero is None:
            model.zero_grad()
        return total

    return ptrain.Job(model=model, step=step)


def last_only(model: nn.Module, sound: ptrain.Job, between: Between) -> Pair:
    def zero(optimizer: torch.optim.Optimizer, number: int) -> None:
        optimizer.zero_grad()

    return _own_loop(model, between, zero=zero), sound


def never_zeroed(model: nn.Module, sound: ptrain.Job, between: Between) -> Pair:
    return _own_loop(model, between, zero=lambda optimizer, number: None), sound


def not_divided(model: nn.Module, sound: ptrain.Job, between: Between) -> Pair:
    return _own_loop(model, between, share=1.0), sound


def two_updates(model: nn.Module, sound: ptrain.Job, between: Between) -> Pair:
    return _own_loop(model, between, updates=2), sound


def head_left_out(model: nn.Module, sound: ptrain.Job, between: Between) -> Pair:
    return _own_loop(model, between, left_out="head"), sound


def other_rate(model: nn.Module, sound: ptrain.Job, between: Between) -> Pair:
    return loop(model, micro_batches=MICRO_BATCHES, between=between, rate=2e-2), sound


def unsynchronised(model: nn.Module, sound: ptrain.Job, between: Between) -> Pair:
    """Run every micro-batch under no_sync, including the last one."""
    job = loop(model, micro_batches=MICRO_BATCHES)

    def step(tokens: Tensor) -> Tensor:
        with model.no_sync():
            return job.step(tokens)

    return ptrain.Job(model=model, step=step), sound


def drift(model: nn.Module, sound: ptrain.Job, between: Between) -> Pair:
    """Flip the last bit of a parameter on one rank after the update."""

    @torch.no_grad()
    def flip(model: nn.Module) -> None:
        if dist.get_rank() == 1:
            weight = next(model.parameters())
            weight.view(torch.int64)[0, 0] ^= 1

    return _own_loop(model, between, after=flip), sound


def other_weights(model: nn.Module, sound: ptrain.Job, between: Between) -> Pair:
    if dist.get_rank() == 1:
        with torch.no_grad():
            model.get_parameter("head.weight").mul_(1.5)
    return loop(model, micro_batches=MICRO_BATCHES, between=between), sound


def _other_rows(model: nn.Module, rows: Callable[[Tensor], Tensor], between: Between) -> ptrain.Job:
    job = loop(model, micro_batches=MICRO_BATCHES, between=between)
    return ptrain.Job(model=model, step=lambda tokens: job.step(rows(tokens)))


def doubled_sample(model: nn.Module, sound: ptrain.Job, between: Between) -> Pair:
    """Replace a rank's second sample by its first."""
    rows = (lambda t: t[[0, 0, 2, 3]]) if dist.get_rank() == 1 else (lambda t: t)
    return _other_rows(model, rows, between), sound


def autocast(model: nn.Module, sound: ptrain.Job, between: Between) -> Pair:
    job = loop(model, micro_batches=MICRO_BATCHES, between=between)

    def step(tokens: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return job.step(tokens)

    return ptrain.Job(model=model, step=step), sound


def not_brought_back(model: nn.Module, sound: ptrain.Job, between: Between) -> Pair:
    """Update every other parameter on each rank without broadcasting the result."""
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters[dist.get_rank() :: 2], lr=1e-2)
    return single_pass_loop(model, partial(mean_loss, model), optimizer=optimizer), sound


def shard_skipped(model: nn.Module, sound: ptrain.Job, between: Between) -> Pair:
    """Skip the update of one rank's shards."""
    return _own_loop(model, between, updates=dist.get_rank()), sound


FAULTS = {
    "divided twice": _add_fault(_divide),
    "summed": _add_fault(_multiply),
    "infinite": _add_fault(_infinite),
    "zero": _add_fault(_zero),
    "frozen shard": _add_fault(_freeze),
    "local clip": local_clip,
    "stale": stale,
    "last micro-batch only": last_only,
    "never zeroed": never_zeroed,
    "not divided by K": not_divided,
    "two updates": two_updates,
    "head left out": head_left_out,
    "other rate": other_rate,
    "unsynchronised": unsynchronised,
    "drift": drift,
    "other weights": other_weights,
    "doubled sample": doubled_sample,
    "not copied back": not_brought_back,
    "shard skipped": shard_skipped,
    "autocast": autocast,
}
