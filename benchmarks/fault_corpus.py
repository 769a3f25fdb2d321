"""The verdicts of `ptrain.verify` on loops with faults reported in the field."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, here and in the ranks

from _script import Script, table

from tests.corpus.fault import FieldFault
from tests.corpus.registry import FAULTS, SOUND, is_blind, run
from tests.ranks import RankError, Ranks

SCRIPT = Script("fault_corpus")
SECONDS = 90.0
# Of the faults that the engine was mended by, and of those that were written without reading it.
LEAST = {"caught": 0.95, "localised": 0.90, "named by a trial": 0.75}
LEAST_BLIND = {"caught": 0.95, "localised": 0.85, "named by a trial": 0.55}
STATES = {
    "data": ("data", "sample", "batch", "input"),
    "loss": ("loss",),
    "activations": ("activation", "output"),
    "gradients": ("gradient",),
    "parameters": ("parameter", "update", "learning rate", "step counter", "optimizer"),
    "optimizer state": ("optimizer",),
    "buffers": ("buffer",),
    "averages": ("average",),
}
# As a root cause calls it where nobody said which axes the ranks are.
AXES = {"dp": ("dp", "ranks", "replicate", "shard"), "none": ("",)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of a case: whether the verdict holds, the output, and the parts of the root
    cause."""

    holds: bool
    text: str
    state: str = ""
    axis: str = ""
    place: str = ""
    ranks: tuple[int, ...] = ()
    step: int | None = None
    error: str = ""
    seconds: float = 0.0

    @property
    def cause(self) -> str:
        """Return the printed cause: all lines except the verdict and its checks."""
        lines = self.text.splitlines()
        text = " ".join(line.strip() for line in lines[1:] if not line.startswith(CHECKS))
        return re.sub(r", called at \S+", "", text)  # a file's name blames nothing

    @property
    def is_unexplained(self) -> bool:
        """Return True if no cause is claimed: the difference is unexplained, or only its place is
        known."""
        return "not explained: " in self.cause or self.is_located

    @property
    def is_located(self) -> bool:
        """Return True if a replay found the place and no reason is claimed."""
        return "located by trying: " in self.cause

    @property
    def is_proven(self) -> bool:
        """Return True if a fix was tried and helped."""
        return "proven by trying: " in self.cause

    @property
    def failing(self) -> str:
        """Return the checks that fail."""
        lines = [line.strip() for line in self.text.splitlines()]
        return "; ".join(line.removeprefix("FAIL ") for line in lines if line.startswith("FAIL"))

    @property
    def has_root_cause(self) -> bool:
        return bool(self.state)


CHECKS = ("  ok", "  FAIL")


def judged(name: str, fault: bool) -> dict[str, Any]:
    """Run a case on a rank; return the parts of its verdict as JSON."""
    verdict = run(name, fault)
    root_cause = verdict.root_cause
    parts: dict[str, Any] = {"holds": verdict.holds, "text": str(verdict)}
    if root_cause is not None:
        parts |= {
            "state": str(root_cause.state.value),
            "axis": root_cause.axis,
            "place": root_cause.place,
        }
        parts |= {"ranks": list(root_cause.ranks), "step": root_cause.step}
    return parts


def outcome(ranks: Ranks, name: str, fault: bool) -> Outcome:
    """Run a case on its ranks."""
    began = time.perf_counter()
    case = FAULTS[name] if name in FAULTS else SOUND[name]
    try:
        parts = ranks.run(case.ranks, judged, name, fault, timeout=SECONDS)[0]
    except RankError as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Exit)\b", line)]
        parts = {"holds": False, "text": str(error), "error": (errors or lines[-1:])[0]}
    seconds = round(time.perf_counter() - began, 1)
    return Outcome(**parts | {"ranks": tuple(parts.get("ranks", ())), "seconds": seconds})


def has(text: str, alternatives: str) -> bool:
    """Return True if one of the alternatives begins a word of the text."""
    return any(
        re.search(rf"(?<!\w){re.escape(word)}", text, re.IGNORECASE)
        for word in alternatives.split("|")
    )


def is_named(fault: FieldFault, given: Outcome) -> bool:
    """Return True if the printed cause is the truth."""
    text = given.cause
    return all(has(text, words) for words in fault.right) and not accused(fault, given)


def accused(fault: FieldFault, given: Outcome) -> list[str]:
    """Return the correct parts that the printed cause blames; a list of several possible causes
    blames none."""
    claimed = re.sub(r"possible causes: .*?(?= fix: )", "", given.cause)
    return [words for words in fault.wrong_if if has(claimed, words)]


def is_localised(fault: FieldFault, given: Outcome) -> bool:
    """Return True if state, axis and place of the root cause agree with the truth."""
    if not given.has_root_cause:
        return False
    state = any(has(given.state, word) for kind in fault.wrong for word in STATES[kind])
    axes = AXES.get(fault.axis, (fault.axis, "ranks"))
    axis = any(given.axis == name or (name and given.axis.startswith(name)) for name in axes)
    axis = axis or (not given.axis and fault.ranks <= 2)  # which has room for one axis
    return state and axis and _is_place(fault.place, given)


def _is_place(place: str, given: Outcome) -> bool:
    globs = place.split(", ")
    if globs == ["*"]:
        return True
    if place.startswith("rank "):
        return given.ranks == (int(place.split()[1]),) or has(given.cause, place)
    listed = re.sub(r" and \d+ more$", "", given.place).split(", ")
    names = [name.split(" · ")[0].removeprefix("module.") for name in listed if name]
    return bool(names) and all(
        any(
            fnmatchcase(name, glob)
            or name == glob.removesuffix(".*")
            or name.startswith(f"{glob}.")
            for glob in globs
        )
        for name in names
    )


def is_wrong(fault: FieldFault, given: Outcome) -> bool:
    """Return True if the output is untrue: a wrong root cause, blame of a correct part, or the
    truth among excluded causes."""
    if not given.has_root_cause:
        return False
    if given.is_unexplained:
        return bool(accused(fault, given)) or rules_out_truth(fault, given)
    return not is_named(fault, given)


def rules_out_truth(fault: FieldFault, given: Outcome) -> bool:
    """Return True if the truth is among the excluded causes."""
    _, _, listed = given.cause.partition("ruled out: ")
    return bool(listed) and all(has(listed, words) for words in fault.right)


class Kept:
    """Outcomes by case, in a file that is written after each."""

    def __init__(self, path: Path) -> None:
        self.path = path
        held = json.loads(path.read_text()) if path.exists() else {}
        self.outcomes = {
            key: Outcome(**parts | {"ranks": tuple(parts["ranks"])}) for key, parts in held.items()
        }

    def get(self, key: str, make: Callable[[], Outcome]) -> Outcome:
        if key not in self.outcomes:
            self.outcomes[key] = make()
            held = {key: asdict(given) for key, given in self.outcomes.items()}
            self.path.write_text(json.dumps(held, indent=1))
            print(f"{key}: {_short(self.outcomes[key])}", flush=True)
        return self.outcomes[key]


def _named(fault: FieldFault, given: Outcome) -> str:
    explains = given.has_root_cause and (given.is_located or not given.is_unexplained)
    if not (explains and is_named(fault, given)):
        return _mark(False)
    return "proven" if given.is_proven else "located" if given.is_located else "yes"


def _short(given: Outcome) -> str:
    if given.error:
        return f"error: {given.error}"
    return "holds" if given.holds else given.cause or f"fails: {given.failing}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")[:420]


def fault_rows(faults: dict[str, tuple[Outcome, Outcome]]) -> Iterator[list[str]]:
    """Yield one row per fault: the truth, its classification, and the output."""
    for name, (given, fix) in faults.items():
        fault = FAULTS[name]
        marks = [
            "error" if given.error else _mark(not given.holds),
            _mark(is_localised(fault, given)),
            _named(fault, given),
            "WRONG" if is_wrong(fault, given) else "",
            "error" if fix.error else "" if fix.holds else "ALARM",
        ]
        step = "" if given.step is None else str(given.step)
        yield [
            f"`{name}`", f"{fault.wrong[0]}, {fault.axis}, {fault.place}", f"{fault.step} / {step}",
            *marks, _cell(_short(given)), _cell(fault.sentence), _cell(fault.source),
        ]  # fmt: skip


def _mark(is_so: bool) -> str:
    return "yes" if is_so else "no"


def totals(faults: dict[str, tuple[Outcome, Outcome]]) -> list[tuple[str, int]]:
    """Return the totals; `WRONG` counts root causes that do not name the fault."""
    pairs = [(FAULTS[name], given) for name, (given, _) in faults.items()]
    return [
        ("faults", len(pairs)),
        ("caught", sum(not given.holds and not given.error for _, given in pairs)),
        ("localised", sum(is_localised(fault, given) for fault, given in pairs)),
        ("named", sum(_named(fault, given) != _mark(False) for fault, given in pairs)),
        ("named, located", sum(_named(fault, given) == "located" for fault, given in pairs)),
        ("named, proven", sum(_named(fault, given) == "proven" for fault, given in pairs)),
        ("said to be unexplained", sum(given.is_unexplained for _, given in pairs)),
        ("WRONG", sum(is_wrong(fault, given) for fault, given in pairs)),
        ("accusing what is right", sum(bool(accused(*pair)) for pair in pairs)),
        ("caught without a root cause", sum(
            not given.holds and not given.error and not given.has_root_cause for _, given in pairs
        )),
        ("ended with an error", sum(bool(given.error) for _, given in pairs)),
    ]  # fmt: skip


def failures(
    faults: dict[str, tuple[Outcome, Outcome]], programs: dict[str, Outcome]
) -> Iterator[str]:
    """Yield violations of the claim."""
    for is_of_blind, bounds in ((False, LEAST), (True, LEAST_BLIND)):
        part = {name: pair for name, pair in faults.items() if is_blind(name) is is_of_blind}
        counts = dict(totals(part))
        counts["named by a trial"] = counts["named, located"] + counts["named, proven"]
        for name, least in bounds.items():
            if counts[name] < least * len(part):
                whose = "blind faults" if is_of_blind else "other faults"
                yield f"{counts[name]} of {len(part)} {whose} {name}, at least {least:.0%}"
    for name, (given, fix) in faults.items():
        if given.error:
            yield f"{name}: {given.error}"
        elif is_wrong(FAULTS[name], given):
            yield f"{name}: WRONG: {_short(given)}"
        if not fix.holds:
            yield f"{name}: its fix raises an alarm: {_short(fix)}"
    for name, given in programs.items():
        if not given.holds:
            yield f"{name}: a sound program raises an alarm: {_short(given)}"


def first_try(page: Path) -> Iterator[str]:
    """Yield the totals of an earlier page."""
    lines = page.read_text(encoding="utf-8").splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith("| – | faults"))
    yield (
        f"At the first try, before any of it was used to mend a verdict ([page]({page.name})). "
        "There a root_cause that claimed no cause did not exist, and an axis had to be named where "
        "the mesh has one alone:"
    )
    yield ""
    yield from (*lines[start : start + 5], "")


def report(
    faults: dict[str, tuple[Outcome, Outcome]], programs: dict[str, Outcome]
) -> Iterator[str]:
    alarms = [name for name, (_, fix) in faults.items() if not fix.holds]
    alarms += [name for name, given in programs.items() if not given.holds]
    counts = dict(totals(faults))
    yield "; ".join(f"{count} {name}" for name, count in counts.items()) + (
        f"; {len(alarms)} alarms among {len(faults)} fixes and {len(programs)} sound programs."
    )
    yield ""
    late = {name: pair for name, pair in faults.items() if FAULTS[name].step >= 1}
    both = {name: pair for name, pair in faults.items() if "shared" in _room(name)}
    later = {name: pair for name, pair in faults.items() if "accelerated" in _room(name)}
    blind = {name: pair for name, pair in faults.items() if is_blind(name)}
    groups = {
        "all": faults, "that show after step 0": late, "that both sides have": both,
        "added later": later, "written blind": blind,
    }  # fmt: skip
    rows = ([group, *(str(count) for _, count in totals(part))] for group, part in groups.items())
    yield table(["", *(name for name, _ in totals(faults))], rows)
    columns = ["fault", "truth", "step / printed", "caught", "localised", "named", "wrong", "fix"]
    yield table([*columns, "printed", "what is wrong", "source"], fault_rows(faults))
    rows = (
        [f"`{name}`", SOUND[name].way, "holds" if given.holds else _cell(f"ALARM: {_short(given)}")]
        for name, given in programs.items()
    )
    yield table(["sound program", "way", "verdict"], rows)


def _room(name: str) -> str:
    return FAULTS[name].script.__module__


def main() -> int:
    parser = SCRIPT.parser()
    parser.add_argument("--work", type=Path, required=True, help="where results are kept meanwhile")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these faults and programs")
    parser.add_argument("--first", type=Path, help="the page of the first try")
    args = parser.parse_args()
    chosen = args.only or [*FAULTS, *SOUND]
    unknown = [name for name in chosen if name not in FAULTS and name not in SOUND]
    if unknown:
        parser.error(f"no fault or program is called {', '.join(unknown)}")
    head = SCRIPT.head()
    ranks, kept = Ranks(), Kept(args.work)

    def of(name: str, fault: bool) -> Outcome:
        key = f"{name} {'fault' if fault else 'sound'}"
        return kept.get(key, lambda: outcome(ranks, name, fault))

    faults = {name: (of(name, True), of(name, False)) for name in chosen if name in FAULTS}
    programs = {name: of(name, False) for name in chosen if name in SOUND}
    ranks.close()
    earlier = first_try(args.first) if args.first else ()
    lines = [*head, *earlier, *report(faults, programs)]
    return SCRIPT.conclude(lines, list(failures(faults, programs)), args)


if __name__ == "__main__":
    sys.exit(main())
