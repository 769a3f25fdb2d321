"""What a pass takes, and what it sends beside its operators: a message sets out where the pass
sends it and is awaited where the pass reads it, and of its way the operators between the two hide
what they take.

Messages over one axis move one after the other. A ring's hop sets out ahead of the block's product
and is read behind it (Liu et al. 2023).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain

from ptrain.costs import Collective
from ptrain.facts.operators import InnerCollective, Operator, PassWork
from ptrain.rates.pace import Pace

Sent = tuple[str, Collective]  # over an axis


@dataclass(frozen=True, slots=True)
class Messages:
    """Messages of a kind: how long they are on their way, and how long the rank waits for them;
    `spare` is how much later the first could set out without a wait."""

    moving: float
    waited: float
    spare: float

    def and_then(self, other: Messages) -> Messages:
        """Return both as one, the other behind it."""
        return Messages(self.moving + other.moving, self.waited + other.waited, self.spare)


@dataclass(frozen=True, slots=True)
class PassSeconds:
    """What a pass takes of a layer's operators, of the collectives between them that are awaited at
    once, by axis, and of the hooks of these. `messages`: those that are awaited later. `launches`:
    in which the host issues the operators, where a device computes beside it."""

    compute: float = 0.0
    sums: tuple[tuple[Sent, float], ...] = ()
    hooks: float = 0.0
    messages: tuple[tuple[Sent, Messages], ...] = ()
    launches: float = 0.0

    def in_a_row(self, pace: Pace) -> float:
        """Return the seconds of all this, one thing after the other; of a device that computes by
        itself without its host's, which meet them in whole steps (`derivation.launches`)."""
        sums = sum(seconds for _, seconds in self.sums)
        waited = sum(messages.waited for _, messages in self.messages)
        taken = self.compute + sums + waited
        return taken if pace.overlaps else taken + self.on_host

    @property
    def on_host(self) -> float:
        """Return the seconds of the host's."""
        return self.launches + self.hooks


def messages_of(
    work: PassWork,
    operator_seconds: Callable[[Operator], float],
    message_seconds: Callable[[InnerCollective], float],
) -> Iterator[tuple[InnerCollective, Messages]]:
    """Yield each message of a pass, as it is awaited. Collectives that are awaited at once are not
    among them."""
    if not any(isinstance(item, InnerCollective) and item.beside for item in work):
        return  # then nobody asks how long the operators take
    now, free = 0.0, dict[str, float]()
    under_way = dict[int, list[tuple[InnerCollective, float, float]]]()  # by who awaits them

    def awaited(
        arriving: list[tuple[InnerCollective, float, float]],
    ) -> Iterator[tuple[InnerCollective, Messages]]:
        nonlocal now
        for item, seconds, arrival in arriving:
            yield item, Messages(seconds, max(0.0, arrival - now), max(0.0, now - arrival))
            now = max(now, arrival)

    for place, item in enumerate(work):
        yield from awaited(under_way.pop(place, []))
        if isinstance(item, Operator):
            now += operator_seconds(item)
        elif item.beside:
            seconds = message_seconds(item)
            free[item.axis] = arrival = max(now, free.get(item.axis, 0.0)) + seconds
            following = place + 1 + item.beside
            under_way.setdefault(following, []).append((item, seconds, arrival))
    yield from awaited([*chain.from_iterable(under_way.values())])
