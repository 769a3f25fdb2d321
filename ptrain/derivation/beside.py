"""What a pass sends beside its operators: a message sets out where the pass sends it and is awaited
where the pass reads it, and of the way between the two the operators hide what they take.

Messages over one axis move one after the other. A ring's hop sets out ahead of the block's product
and is read behind it (Liu et al. 2023).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain

from ptrain.facts.operators import InnerCollective, Operator, PassWork

Message = tuple[InnerCollective, float, float]


def messages(
    work: PassWork,
    operator_seconds: Callable[[Operator], float],
    message_seconds: Callable[[InnerCollective], float],
) -> Iterator[Message]:
    """Yield each message of a pass, as it arrives, how long it is on its way, and how long the rank
    waits for it. Collectives that are awaited at once are not among them."""
    now, free = 0.0, dict[str, float]()
    under_way = dict[int, list[tuple[InnerCollective, float, float]]]()  # by who awaits them

    def awaited(arriving: list[tuple[InnerCollective, float, float]]) -> Iterator[Message]:
        nonlocal now
        for item, seconds, arrival in arriving:
            yield item, seconds, max(0.0, arrival - now)
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
