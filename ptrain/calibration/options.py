"""How much `ptrain calibrate` measures, and of which machine, as a command line. Torch-free."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ptrain.errors import refused

SECONDS = 100.0
MOST_RANKS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationOptions:
    """`ranks`: how many compute at once, in turn; none: 1, 2 and 4 on processors, on GPUs one for
    each. `cluster`: whose fields the file has beside the rates; none: this machine's. `part`: where
    a rank of ours leaves what it measured, for the command that started it, and `until` when it is
    to end (seconds of the system's clock)."""

    cluster: str | None = None
    ranks: tuple[int, ...] = ()
    out: Path = Path("cluster.yaml")
    seconds: float = SECONDS
    device: str = "auto"
    brief: bool = False
    force: bool = False
    json: bool = False
    part: Path | None = None
    until: float | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "cluster",
        nargs="?",
        metavar="CLUSTER",
        help="a name of specs/clusters or a file: its fields beside the rates; without: this "
        "machine's, as far as they can be known",
    )
    parser.add_argument(
        "--ranks", default="", metavar="N,N", help="ranks that compute at once, one after the other"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("cluster.yaml"), metavar="FILE", help="what is written"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=SECONDS,
        help=f"in which all of it is to end ({SECONDS:g}): of each table the largest points are "
        "left out; with more, wrapped modules and processors' collectives are measured more often",
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--brief", action="store_true", help="few points: to see that it works")
    parser.add_argument("--force", action="store_true", help="on a busy machine, and over any file")
    parser.add_argument("--json", action="store_true", help="print the rates as JSON, only that")
    parser.add_argument("--part", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)


def from_arguments(arguments: argparse.Namespace) -> CalibrationOptions:
    """Raises SpecError for numbers that are none."""
    if not 0 < arguments.seconds < math.inf:
        raise refused("--seconds", f"{arguments.seconds:g} is no time", "write 100, say")
    fields = vars(arguments) | {"ranks": _ranks(arguments.ranks)}
    return CalibrationOptions(
        **{name: fields[name] for name in CalibrationOptions.__dataclass_fields__}
    )


def parse(argv: Sequence[str]) -> CalibrationOptions:
    parser = argparse.ArgumentParser(prog="ptrain calibrate")
    add_arguments(parser)
    return from_arguments(parser.parse_args(argv))


def to_argv(options: CalibrationOptions) -> list[str]:
    """What `parse` reads as these options."""
    words = [options.cluster] if options.cluster else []
    if options.ranks:
        words += ["--ranks", ",".join(map(str, options.ranks))]
    words += ["--out", str(options.out), "--seconds", str(options.seconds)]
    words += ["--device", options.device]
    for name in ("brief", "force", "json"):
        words += [f"--{name}"] * getattr(options, name)
    for name in ("part", "until"):
        value = getattr(options, name)
        words += [] if value is None else [f"--{name}", str(value)]
    return words


def _ranks(text: str) -> tuple[int, ...]:
    if not text:
        return ()
    words = text.split(",")
    if not all(re.fullmatch(r"[1-9]\d{0,3}", word.strip()) for word in words):
        remedy = f"write numbers in 1..{MOST_RANKS}: --ranks 1,2,4"
        raise refused("--ranks", f"{text!r} is no list of numbers", remedy)
    ranks = tuple(sorted({int(word) for word in words}))
    if ranks[-1] > MOST_RANKS:
        remedy = f"at most {MOST_RANKS} start on one machine"
        raise refused("--ranks", f"{ranks[-1]} ranks", remedy)
    return ranks
