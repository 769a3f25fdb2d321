"""Failures that were reported in the field, and faults in scripts on somebody else's wrapping: does
`ptrain.verify` catch each, name it, and let the same script with its cure pass?

Claim: every fault fails the verdict with the state, the axis and the factor that it has, in words
that every rank has alike; every script without its fault holds.

Each story is a loop of tests/gloo/stories.py on two gloo ranks, in fp64, three steps, against the
plain module on the whole batch. accelerate's is left out where it is not installed. Prints; writes
a result only with --save.
"""

from __future__ import annotations

import argparse
import inspect
import os
import sys
import time
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, here and in the ranks

from _machine import conclude, header, this_command

RANKS = 2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/")
    args = parser.parse_args()
    head = header(
        "field_stories: failures from the field, and faults on others' wrapping", this_command()
    )
    from tests.gloo.stories import STORIES
    from tests.gloo.test_field_stories import NAMED
    from tests.ranks import Ranks

    lines = [head, "Claim: every fault is named, every script with its cure holds.", ""]
    failed: list[str] = []
    skipped = [] if find_spec("accelerate") else ["accelerated"]
    ranks = Ranks()
    ranks.run(RANKS, _warm)
    for name, story in STORIES.items():
        if name not in skipped:
            lines += _section(ranks, name, inspect.getdoc(story) or "", NAMED[name], failed)
    ranks.close()
    return conclude(
        "field_stories",
        lines,
        failed=failed,
        not_covered="GPUs; larger meshes; faults below the tolerance of the dtype."
        + "".join(f" {name}: its package is not installed." for name in skipped),
        is_saved=args.save,
    )


def _section(
    ranks: object, name: str, story: str, expected: tuple[str, ...], failed: list[str]
) -> list[str]:
    """A story's own words, and what is printed with the fault and with the cure."""
    from tests.gloo.stories import told
    from tests.ranks import Ranks

    assert isinstance(ranks, Ranks)
    lines = [f"## {name}", "", story, ""]
    for fault in (True, False):
        began = time.perf_counter()
        found = ranks.run(RANKS, told, name, fault)
        seconds = time.perf_counter() - began
        if any(each != found[0] for each in found):
            failed.append(f"{name}: the ranks' verdicts differ")
        culprit = found[0]["culprit"]
        if fault:
            named = culprit and (culprit["state"], culprit["axis"], culprit["factor"])
            if named != expected[:3]:
                failed.append(f"{name}: named {named}, the fault is {expected[:3]}")
        elif not found[0]["holds"]:
            failed.append(f"{name}: the cure does not hold")
        what = "With the fault" if fault else "With its cure"
        text = found[0]["text"]
        lines += [f"{what} ({seconds:.1f} s wall):", "", "```", text, "```", ""]
    return lines


def _warm() -> None:
    """Torch and its wrappers imported, so that no story pays for it."""
    import tests.gloo.stories  # noqa: F401


if __name__ == "__main__":
    sys.exit(main())
