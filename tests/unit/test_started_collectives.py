"""Whether ranks that wait for every collective at once would finish."""

from __future__ import annotations

import pytest

from ptrain.verification.jobs.trials import Started, can_finish

BOTH = [0, 1]
A, B, MESSAGE = ("a", BOTH), ("b", BOTH), ("a", [])
RANKS_OF_THREE: list[Started] = [
    [("ab", [0, 1]), ("ca", [2, 0])],
    [("bc", [1, 2]), ("ab", [0, 1])],
    [("ca", [2, 0]), ("bc", [1, 2])],
]


@pytest.mark.parametrize(
    ("everyones", "comes"),
    [
        ([[A, B, A], [A, B, A]], True),
        ([[A, B], [B, A]], False),
        ([[A, B], [A]], False),
        ([[], []], True),
        ([[A, MESSAGE], [MESSAGE, A]], False),  # one waits for the message, the other for the group
        ([[A, MESSAGE], [A, MESSAGE]], False),  # of messages nothing is known
        (RANKS_OF_THREE, False),
        ([RANKS_OF_THREE[0][::-1], *RANKS_OF_THREE[1:]], True),
    ],
)
def test_waiting_at_once_finishes(everyones: list[Started], comes: bool) -> None:
    assert can_finish(everyones) is comes
