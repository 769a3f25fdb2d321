"""Does every strategy train like one device?

Claim: `ptrain verify` holds for every spec in specs/strategies/, with 100 steps of each trajectory.
The specs are verified one after the other, as the command does it, on the ranks of their meshes;
references that several of them have in common are computed once, by the first. What a spec gave is
kept in --work as soon as it is done, so that --only takes some of them, a run that was broken off
goes on, and the page is made of all that lies there. Writes a result only with --save. All specs
take an hour on two cores, most of it in programs and references that compute in fp64.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from _machine import commit, conclude, header, this_command

from ptrain.errors import PtrainError
from ptrain.selection.recompute import settled
from ptrain.spec.load import load
from ptrain.spec.names import listing
from ptrain.verification.options import STEPS, VerifyOptions
from ptrain.verification.start import start

Result = dict[str, Any]
KEPT = ("verdict", "checks", "notes", "seconds", "trajectories")
FP64, FP32_LOSS = 1e-12, 1e-4  # what verification allows, relative and absolute
EXACT, OWN = "trajectory in fp64", "trajectory in own dtypes"


def verify(name: str, steps: int, work: Path, changed: Sequence[str]) -> Result:
    """One spec on its ranks; what of it the page shows. A rank that fails is a result too."""
    folder = work / f"{name}.run"
    shutil.rmtree(folder, ignore_errors=True)
    references = work / "references"
    known = len(list(references.glob("*.pt")))
    asked = VerifyOptions(
        spec=name, steps=steps, every_collective=True, json=True, references=references
    )
    spec = settled(load(name, changed))
    began, spent = time.perf_counter(), _cpu_seconds()
    try:
        found = start(spec, asked, folder)
    except PtrainError as error:
        found = {"verdict": f"error: {error}", "checks": [], "notes": []}
        found |= {"seconds": {}, "trajectories": {}}
    return {
        "name": name,
        "ranks": spec.world_size,
        "layout": spec.precision.layout.name,
        "steps": steps,
        "set": list(changed),
        "wall": time.perf_counter() - began,
        "cpu": _cpu_seconds() - spent,
        "references": len(list(references.glob("*.pt"))) - known,
        "load": os.getloadavg()[0],
        "commit": commit(),
        **{key: found[key] for key in KEPT},
    }


def known(name: str, steps: int, work: Path, changed: Sequence[str]) -> Result | None:
    """What the same run of the spec gave, if it is kept."""
    file = work / f"{name}.json"
    found = json.loads(file.read_text()) if file.exists() else {}
    is_same = (found.get("steps"), found.get("set", [])) == (steps, list(changed))
    return found if is_same else None


def _cpu_seconds() -> float:
    """User and system, of all ranks that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def row(found: Result) -> str:
    """A line of the table."""
    checks = {check["name"]: check for check in found["checks"]}
    held = sum(check["holds"] for check in found["checks"])
    cells = [
        found["name"],
        found["ranks"],
        f"{held} of {len(checks)}",
        _against(checks.get(f"{EXACT}: loss of every step")),
        _kept(found, EXACT),
        _against(checks.get(f"{EXACT}: gradient of step 0")),
        _against(checks.get(f"{OWN}: loss of every step")),
        _kept(found, OWN),
        _against(checks.get(f"{OWN}: gradient of step 0")),
        _against(checks.get(f"{OWN}: gradient of step 0 by parameter")),
        _largest(found, "examination: "),
        f"{found['cpu']:.0f}",
        f"{found['wall']:.0f}",
        found["references"] or "",
        found["verdict"].partition("\n")[0],
    ]
    return f"| {' | '.join(map(str, cells))} |"


def _against(check: Result | None) -> str:
    return f"{check['measured']:.1e} ≤ {check['tolerance']:.1e}" if check else "–"


def _kept(found: Result, stage: str) -> str:
    """For how many steps the run keeps within the fixed figure, and permuted references do, where
    some were run."""
    steps = found.get("trajectories", {}).get(stage)
    if steps is None:
        return "–"
    fixed = [FP64 * loss if stage == EXACT else FP32_LOSS for loss in steps["losses"]]
    counts = [
        next((i for i, off in enumerate(steps[who]) if not off <= fixed[i]), found["steps"])
        for who in ("differences", "references")
        if steps[who]
    ]
    return " ".join([str(counts[0]), *(f"({count})" for count in counts[1:])])


def _largest(found: Result, stage: str) -> str:
    own = [check["measured"] for check in found["checks"] if check["name"].startswith(stage)]
    return f"{max(own):.1e}" if own else "–"


COLUMNS = (
    "spec",
    "ranks",
    "checks that hold",
    "loss, fp64",
    "1e-12 kept (by references)",
    "gradient, fp64",
    "loss, own dtypes",
    "1e-4 kept (by references)",
    "gradient, own dtypes",
    "its worst parameter",
    "module by module",
    "CPU s",
    "wall s",
    "new references",
    "verdict",
)


def page(
    results: Sequence[Result], missing: Sequence[str], steps: int, changed: Sequence[str]
) -> list[str]:
    """The claim, what each column is, the table, and what the notes of the specs say."""
    table = [f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
    table += [row(found) for found in results]
    told: dict[str, list[str]] = {}
    for found in results:
        for note in found["notes"]:
            told.setdefault(note, []).append(found["name"])
    notes = [f"- {note} ({', '.join(names)})" for note, names in told.items()]
    commits = ", ".join(dict.fromkeys(found["commit"] for found in results))
    as_it_is = f"with {' '.join(changed)}" if changed else "as it stands"
    left = [f"Not run: {', '.join(missing)}.", ""] if missing else []
    return [
        f"Claim: for each of the {len(results) + len(missing)} specs in specs/strategies/, `ptrain "
        f"verify {' '.join(['SPEC', *changed])} --steps {steps} --every-collective` holds.",
        "",
        f"Two trajectories of {steps} steps of each spec {as_it_is}, in fp64 and in its own "
        "dtypes, against one device. *Loss*: the step with the largest difference in units of what "
        "is allowed there, absolute, ≤ what is allowed in that step: 1e-12, relative, in fp64, and "
        "1e-4, absolute, in fp32; a run that does not keep that, or is in 16 bits, may be as far "
        "off as references are that differ in the order of their sums alone. *Kept* says for how "
        "many steps the run keeps it, and in brackets, where such references were run, for how "
        "many all of these do. *Gradient*: of step 0, the 2-norm of the difference of "
        "the whole vector over one device's; *its worst parameter* is that with the largest share "
        "of what is allowed of its own. *Module by module*: the largest relative difference "
        "of three steps in fp64, over all module outputs, their gradients, parameter gradients, "
        "parameters and optimizer state. CPU seconds are those of all ranks, from their start to "
        "their end, imports, references and trajectories in it; wall seconds depend on what else "
        "the machine does. A reference is a run of one device; specs that train the same share "
        "theirs, and the first of them has them in its seconds (*new references*).",
        "",
        f"Commits that the specs ran at: {commits}.",
        "",
        *table,
        "",
        *left,
        "What the specs say beside their verdict:",
        "",
        *notes,
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--only", nargs="+", metavar="SPEC", help="these specs, and no other")
    parser.add_argument("--set", nargs="+", default=[], metavar="a.b=c", help="overrides of all")
    parser.add_argument("--work", type=Path, required=True, help="where results are kept meanwhile")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/")
    args = parser.parse_args()
    head = header("verify: every strategy against one device", this_command())
    (args.work / "references").mkdir(mode=0o700, parents=True, exist_ok=True)
    names = list(listing("strategies"))
    for name in args.only or sorted(names, key=lambda name: load(name).spec.world_size):
        if not args.only and known(name, args.steps, args.work, args.set) is not None:
            continue
        found = verify(name, args.steps, args.work, args.set)
        (args.work / f"{name}.json").write_text(json.dumps(found))
        print(row(found), flush=True)
    every = (known(name, args.steps, args.work, args.set) for name in names)
    results = [found for found in every if found is not None]
    missing = sorted(set(names) - {found["name"] for found in results})
    failed = [f"{found['name']}: {found['verdict']}" for found in results]
    return conclude(
        "verify",
        [head, *page(results, missing, args.steps, args.set)],
        failed=[each for each in failed if not each.endswith(": holds")]
        + [f"{name} was not run" for name in missing],
        not_covered="other models, batches, layouts and seeds than those of the specs (the tests "
        "have more), GPUs, and more than one machine.",
        is_saved=args.save,
    )


if __name__ == "__main__":
    sys.exit(main())
