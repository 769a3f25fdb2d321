"""Whether ranks that wait for every collective where it starts come to the end."""

from __future__ import annotations

import pytest

from ptrain.verification.jobs.trials import Started, come_to_end

BOTH = [0, 1]
A, B = ("a", BOTH), ("b", BOTH)
FORTH, BACK = ("0 to 1", BOTH), ("1 to 0", BOTH)
RANKS_OF_THREE: list[Started] = [
    [("ab", [0, 1]), ("ca", [2, 0])],
    [("bc", [1, 2]), ("ab", [0, 1])],
    [("ca", [2, 0]), ("bc", [1, 2])],
]
# Rank 0 is between 1 and 2, which reduce together: 1 before it sends, 2 after it has received.
STAGES: list[Started] = [
    [("1 to 0", [1, 0]), ("0 to 2", [0, 2])],
    [("x", [1, 2]), ("1 to 0", [1, 0])],
    [("0 to 2", [0, 2]), ("x", [1, 2])],
]


@pytest.mark.parametrize(
    ("everyones", "comes"),
    [
        ([[A, B, A], [A, B, A]], True),
        ([[A, B], [B, A]], False),
        ([[A, B], [A]], False),
        ([[], []], True),
        ([[FORTH, BACK, A], [FORTH, BACK, A]], True),
        ([[FORTH, BACK], [BACK, FORTH]], True),  # both messages are on their way
        ([[A, FORTH], [FORTH, A]], False),  # one waits for the message, the other for the group
        ([[("any to 0", BOTH)], [FORTH]], False),
        (RANKS_OF_THREE, False),
        ([RANKS_OF_THREE[0][::-1], *RANKS_OF_THREE[1:]], True),
        (STAGES, False),
        ([STAGES[0], STAGES[1][::-1], STAGES[2]], True),
    ],
)
def test_waiting_comes_to_the_end(everyones: list[Started], comes: bool) -> None:
    assert come_to_end(everyones) is comes
