"""The description of a field fault: its script, its report, and the truth about it.

The truth was written before `ptrain.verify` was run on any of the scripts. A printed cause names
the fault if it has a keyword of every entry of `right` and none of `wrong_if`; an entry gives
alternatives, `a|b`, which match where a word begins, whatever the case.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# Keywords that several truths share.
NOT_REDUCED = (
    "not reduced|not all-reduced|unreduced|not summed|not averaged|never reduced|never summed|"
    "lack|without all-reduce|no all-reduce|missing|not synchronised|not synchronized|"
    "own share|its own|their own|only a part|partial|not exchanged"
)
DATA = "dp|data|rank|replica"
TENSOR = "tp|tensor|rank"
CONTEXT = "cp|context|sequence|rank"
TOO_LARGE = "twice|double|times 2|2 times|x2|2x|factor 2|factor of 2|not divided|summed|2.0|by 2"
TOO_SMALL = "half|halv|0.5|factor 1/2|divided|1/2|mean taken twice|averaged twice"
NEW_MOMENTS = "optimizer|optimiser|moment|state|exp_avg"


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldFault:
    """A loop with a fault, and the same loop with its fix (`script(False)`).

    wrong: the states that the fault spoils first. axis: dp, tp, pp, cp, ep or none. place: a glob
    of modules or parameters, or ranks. step: the first at which it shows, from 0.
    """

    name: str
    script: Callable[[bool], Any]
    source: str
    wrong: tuple[str, ...]
    axis: str
    place: str
    step: int
    sentence: str
    right: tuple[str, ...]
    wrong_if: tuple[str, ...] = ()
    ranks: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SoundProgram:
    """A loop that computes the result of one device in an unusual way."""

    name: str
    script: Callable[[], Any]
    way: str
    ranks: int = 2


FAULTS: dict[str, FieldFault] = {}
SOUND: dict[str, SoundProgram] = {}

Script = Callable[[bool], Any]
Program = Callable[[], Any]


def planted(**truth: Any) -> Callable[[Script], Script]:
    """Return a decorator that enters a script under its own name, with the truth about it."""

    def enter(script: Script) -> Script:
        name = script.__name__
        assert name not in FAULTS, f"two faults are called {name}"
        FAULTS[name] = FieldFault(name=name, script=script, **truth)
        return script

    return enter


def sound(way: str, *, ranks: int = 2) -> Callable[[Program], Program]:
    """Return a decorator that enters a sound program under its own name."""

    def enter(script: Program) -> Program:
        name = script.__name__
        assert name not in SOUND, f"two programs are called {name}"
        SOUND[name] = SoundProgram(name=name, script=script, way=way, ranks=ranks)
        return script

    return enter
