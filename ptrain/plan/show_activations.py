"""What blocks leave for backward, as text: those that are kept alike together."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise

from ptrain.spec.activations import Kept, Operators, Scope
from ptrain.spec.placement import Tier
from ptrain.steps.step import ChunkedLoss, Keep

_TO = {Tier.HOST: "to the host", Tier.FILE: "to files"}
_ON = {Tier.DEVICE: "", Tier.HOST: " on the host", Tier.FILE: " in files"}
_RESULTS = {
    Operators.MATMUL: "matrix products",
    Operators.ATTENTION: "fused attention",
    Operators.SOFTMAX: "softmax",
    Operators.NORM: "norms",
    Operators.COLLECTIVE: "collectives",
}


def keep_text(step: Keep) -> str:
    """`recompute blocks 0-7, keeping inputs; offload the saved tensors of block 8 …`."""
    alike: dict[Kept, list[str]] = {}
    for name, kept in step.blocks:
        alike.setdefault(kept, []).append(name)
    texts = [_alike(kept, _blocks(names)) for kept, names in alike.items()]
    files = [f"files in {step.path}"] if step.path is not None else []
    return "; ".join([*texts, *files])


def loss_text(step: ChunkedLoss) -> str:
    how = "by torch's linear_cross_entropy" if step.fused else "again in backward"
    tokens = f"{step.tokens} token{'' if step.tokens == 1 else 's'}"
    return f"compute logits and loss of {tokens} at a time, {how}"


def _alike(kept: Kept, blocks: str) -> str:
    if kept.policy is None:
        to = _TO[kept.tier]
        return f"offload the saved tensors of {blocks} {to}, and bring them back for backward"
    what = blocks
    if kept.policy.scope is Scope.ATTENTION:
        what = f"the scores and softmax of {blocks}"
    inputs = f"inputs{_ON[kept.tier]}"
    results = [_RESULTS[kind] for kind in kept.policy.keep]
    too = f" and the results of {_and(results)}" if results else ""
    return f"recompute {what}, keeping {inputs}{too}"


def _and(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _blocks(names: Sequence[str]) -> str:
    """`blocks 0-7`, `blocks 0, 2, 4`, `every 2nd of blocks 0-78`, `encoder.layers.0-5`."""
    return _and([_numbered(prefix, numbers) for prefix, numbers in _by_list(names)])


def _by_list(names: Sequence[str]) -> Iterator[tuple[str, list[int]]]:
    """Yield prefix and numbers of names that differ in their last number alone; a name without one
    is its own prefix and has no numbers."""
    parts = [re.fullmatch(r"(.*\.|)(\d+)", name) for name in names]
    pairs = [
        (match[1], int(match[2])) if match else (name, -1)
        for name, match in zip(names, parts, strict=True)
    ]
    for prefix, entries in groupby(pairs, key=lambda pair: pair[0]):
        yield prefix, [number for _, number in entries if number >= 0]


def _numbered(prefix: str, numbers: list[int]) -> str:
    if not numbers:
        return prefix
    first, last = numbers[0], numbers[-1]
    is_ours = prefix == "blocks."
    if first == last:
        return f"{'block ' if is_ours else prefix}{first}"
    said = "blocks " if is_ours else prefix
    steps = {right - left for left, right in pairwise(numbers)}
    if steps == {1}:
        return f"{said}{first}-{last}"
    if len(steps) == 1 and len(numbers) > _FEW:
        return f"every {_ordinal(steps.pop())} of {said}{first}-{last}"
    return f"{said}{', '.join(_ranges(numbers))}"


_FEW = 3  # numbers that are shown as they are


def _ranges(numbers: list[int]) -> Iterator[str]:
    """`0-3`, `5`."""
    for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        members = [number for _, number in run]
        yield f"{members[0]}-{members[-1]}" if len(members) > 1 else str(members[0])


def _ordinal(number: int) -> str:
    ends = {1: "st", 2: "nd", 3: "rd"}
    return f"{number}{'th' if 10 < number % 100 < 14 else ends.get(number % 10, 'th')}"
