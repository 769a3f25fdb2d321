"""The fewest devices for a deadline or a budget, and the number of them at which tokens cost least:
a search for each power of two of devices."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from ptrain.errors import refused
from ptrain.selection.task import Ranked
from ptrain.units import format_count, parse_count

_UNITS = {"s": 1, "min": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_DAY = 86400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What a training of so many tokens may take: seconds in all, money in all; None: any."""

    tokens: int
    deadline: float | None = field(default=None, metadata={"key": "deadline_seconds"})
    budget: float | None = None

    def seconds(self, row: Ranked) -> float | None:
        """Return the time of the whole training; None where that of a step is unknown."""
        rate = row.tokens_per_second
        return None if rate is None else self.tokens / rate

    def money(self, row: Ranked) -> float | None:
        """Return the price of the whole training; None without a price."""
        return None if row.price is None else row.price * self.tokens / 1e9

    def is_met(self, row: Ranked) -> bool:
        """Return whether it is known to be met."""
        seconds, money = self.seconds(row), self.money(row)
        in_time = self.deadline is None or (seconds is not None and seconds <= self.deadline)
        return in_time and (self.budget is None or (money is not None and money <= self.budget))

    def described(self, row: Ranked) -> str:
        """Return what the whole training takes, in words."""
        time, money = self.figures(row)
        return time if self.money(row) is None else f"{time} at a cost of {money}"

    def figures(self, row: Ranked) -> tuple[str, str]:
        """Return the days and the money that the whole training takes."""
        seconds, money = self.seconds(row), self.money(row)
        return (
            "an unknown time" if seconds is None else f"{seconds / _DAY:.3g} days",
            "unknown" if money is None else f"{money:,.0f}",
        )

    @property
    def text(self) -> str:
        """Return what is demanded, in words."""
        said = [f"{format_count(self.tokens)} tokens"]
        if self.deadline is not None:
            said.append(f"within {self.deadline / _DAY:.3g} days")
        if self.budget is not None:
            said.append(f"at a cost of {self.budget:,.0f}")
        return " ".join(said)


def demand_of(tokens: str | None, deadline: str | None, budget: float | None) -> Demand | None:
    """Return the demand that options write; None where they write none. Raises SpecError for one
    that says too little."""
    if tokens is None:
        if deadline is not None or budget is not None:
            raise refused(
                "--tokens",
                "a deadline or a budget needs a number of tokens",
                "Add the tokens, for example `--tokens 1T`.",
            )
        return None
    try:
        number = parse_count(tokens)
    except ValueError:
        raise refused(
            "--tokens",
            f"{tokens[:40]} is not a number",
            "Use a number such as `1T`, `300B` or `15e12`.",
        ) from None
    return Demand(
        tokens=number, deadline=None if deadline is None else _duration(deadline), budget=budget
    )


def _duration(text: str) -> float:
    if (match := re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(s|min|h|d|w)\s*", text)) is None:
        raise refused(
            "--deadline",
            f"{text[:40]} is not a duration",
            "Use a duration such as `30d`, `12h` or `90min`.",
        )
    return float(match[1]) * _UNITS[match[2]]


def numbers(devices: int) -> Iterator[int]:
    """Yield the powers of two up to so many devices, and these."""
    number = 1
    while number < devices:
        yield number
        number *= 2
    yield devices


def cheapest(rows: Iterable[tuple[int, Ranked]]) -> tuple[int, Ranked] | None:
    """Return the number of devices whose best has the lowest price of a token, or, without prices,
    takes least of a device's time for one."""
    known = [(n, row) for n, row in rows if row.tokens_per_second is not None]
    return min(known, key=lambda pair: pair[0] / (pair[1].tokens_per_second or 1.0), default=None)
