"""The slices of the GPU kit (`benchmarks/gpu.sh`), and the page of their results."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import _gpu_steps
import torch
import torch.nn.functional as F
from _gpu_cases import GROUPS, SLICES, STEP_SLICES, StepCase, asked_words, capability
from _script import Script, table_head, table_row
from torch._subclasses.fake_tensor import FakeTensorMode

import ptrain.internals
from ptrain.cost import Phase
from ptrain.derivation.allocator import steady_reserved
from ptrain.errors import SpecError
from ptrain.internals.compiled import lacks_compiler
from ptrain.internals.part import replace_attributes
from ptrain.runtime import simulated_gpu
from ptrain.selection.recompute import resolve_auto
from ptrain.simulation.execute import simulate
from ptrain.spec.load import load

SCRIPT = Script("gpu")
RESERVED_BOUND, RESERVED_BOUNDS = 0.03, {"bytes": 0.01}
SPEED = 0.98
BYTE_CLAIMS = (
    "bytes: live bytes at peaks are those simulated, 0 off",
    "bytes: reserved within 1 % of the rules",
)
OK = "ok"
Case = tuple[str, ...]  # the words of a spec

CASES: dict[str, list[Case]] = SLICES


# -- which kernels attention takes


def choices(device: str) -> dict[str, str]:
    """Return the function that torch selects for scaled_dot_product_attention, by setting."""
    taken = {}
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for head, dropout, key_heads, is_causal in (
            (64, 0.0, 8, True), (128, 0.0, 8, True), (128, 0.1, 8, True), (128, 0.0, 2, True),
            (256, 0.0, 8, True), (72, 0.0, 8, True), (128, 0.0, 8, False),
        ):  # fmt: skip
            query = torch.empty(2, 8, 256, head, device=device, dtype=dtype, requires_grad=True)
            key = torch.empty(2, key_heads, 256, head, device=device, dtype=dtype)
            output = F.scaled_dot_product_attention(
                query, key, key, dropout_p=dropout, is_causal=is_causal, enable_gqa=key_heads != 8
            )
            name = f"{dtype} head {head} dropout {dropout} keys {key_heads} causal {is_causal}"
            taken[name] = type(output.grad_fn).__name__
    return taken


# -- peaks


@contextmanager
def requested_peaks() -> Iterator[list[int]]:
    """Temporarily collect the peaks of the bytes that were requested of the GPU's allocator.

    The meter resets the allocator's statistics at every phase, and they are read before that.
    """
    peaks: list[int] = []
    reset = torch.cuda.reset_peak_memory_stats

    def note(*arguments: Any) -> None:
        peaks.append(torch.cuda.memory_stats().get("requested_bytes.all.peak", 0))
        reset(*arguments)

    with replace_attributes(torch.cuda, reset_peak_memory_stats=note):
        yield peaks


def peaks(case: Case, *, is_real: bool, is_dry: bool) -> dict[str, Any]:
    """Return by phase the bytes that live at most, and what the allocator reserves: as measured, or
    by its rules of segments as PYTORCH_CUDA_ALLOC_CONF leaves them. Where a spec cannot be
    simulated, return why."""
    spec = resolve_auto(load(case[0], asked_words(case, is_dry=is_dry)[1:]))
    on_gpu = is_real and not is_dry
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        with requested_peaks() if on_gpu else nullcontext([]) as requested:
            simulated = simulate(spec, rehearse=is_real, every_block=is_real)
    except SpecError as error:
        return {"unknown": str(error).splitlines()[0]}
    by_rule = steady_reserved(simulated.allocated_step(spec), expands=False)
    held = torch.cuda.max_memory_reserved() if on_gpu else by_rule and by_rule.device_bytes
    return {
        "lives": {str(peak.phase): peak.device_bytes for peak in simulated.estimate.peak},
        "allocated": {str(peak.phase): peak.allocator_bytes for peak in simulated.estimate.peak},
        "reserved": held,
        "requested": max(requested, default=0),
    }


# -- what the kit needs


def parts(device: str) -> dict[str, str]:
    """Return the required parts of the machine, each with `ok` or its fault."""
    found = {"Python": sys.version.split()[0], "torch": torch.__version__}
    for module in sorted(Path(ptrain.internals.__path__[0]).glob("*.py")):
        if module.stem not in ("__init__", "part"):
            own = import_module(f"ptrain.internals.{module.stem}").PARTS
            faults = [fault for part in own for fault in part.find_differences(torch.__version__)]
            found[f"private names: {module.stem}"] = "; ".join(faults) or OK
    found["C compiler"] = OK if shutil.which("gcc") or shutil.which("clang") else "missing"
    found["C++ compiler"] = "missing" if lacks_compiler() else OK
    if device != "cpu":
        found["Triton"] = OK if find_spec("triton") else "missing"
    found["a compiled program"] = _compiled_program(device)
    lacks = None if device == "cpu" else simulated_gpu.missing_requirement()
    found["fakes of CUDA's libraries"] = lacks or OK
    return found


def _compiled_program(device: str) -> str:
    """Return `ok` if inductor builds a program of a block's kind, and it equals the operators."""
    x = torch.randn(64, 64, device=device, requires_grad=True)
    weight = torch.randn(64, device=device)

    def forward(x: torch.Tensor) -> torch.Tensor:
        return F.gelu(F.rms_norm(x, (64,), weight)) @ x

    try:
        found = torch.compile(forward, fullgraph=True, dynamic=False)(x)
        mine, theirs = (torch.autograd.grad(y.sum(), x)[0] for y in (found, forward(x)))
    except (RuntimeError, ImportError, OSError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return OK if torch.allclose(mine, theirs, atol=1e-2, rtol=1e-2) else "differs from operators"


def sliced(name: str, *, is_real: bool, is_dry: bool) -> dict[str, Any]:
    """Return one side's results for every case of a slice."""
    device = "cpu" if is_dry else "cuda"
    if name == "parts":
        return parts(device)
    if name in STEP_SLICES:
        return _gpu_steps.measure(STEP_SLICES[name], is_dry=is_dry)
    if name == "kernels":
        if is_real:
            return choices(device)
        with FakeTensorMode():
            return choices(device)
    return {" ".join(case): peaks(case, is_real=is_real, is_dry=is_dry) for case in CASES[name]}


def on_fakes(name: str, sm: int, *, is_dry: bool) -> dict[str, Any]:
    """Return the results of a process with a stub GPU of this compute capability."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "fakes.json")
        words = [__file__, "fakes", name, "--out", str(path), *["--dry"] * is_dry]
        if not is_dry and (why := simulated_gpu.missing_requirement()):
            raise SystemExit(f"fakes cannot be asked: {why}")
        if (
            subprocess.call([sys.executable, *words])
            if is_dry
            else simulated_gpu.run_python(words, sm)
        ):
            raise SystemExit(f"{name}: the process on fakes failed")
        said: dict[str, Any] = json.loads(path.read_text())
        return said


# -- the page


@dataclass(slots=True)
class Findings:
    """The findings of a page's sections: failures, gaps, and the rows of claims."""

    failed: list[str] = field(default_factory=list)
    unproven: list[str] = field(default_factory=list)
    claims: list[tuple[str, str, bool | None]] = field(default_factory=list)


def kernel_lines(slice_: dict[str, Any], found: Findings) -> Iterator[str]:
    yield from table_head("attention", "on the GPU", "believed")
    for setting, real in slice_["real"].items():
        believed = slice_["fake"][setting]
        yield table_row(setting, real, believed)
        if real != believed:
            found.failed.append(f"{setting}: {real}, not {believed}")


def part_lines(slice_: dict[str, Any], found: Findings) -> Iterator[str]:
    yield from table_head("needed", "found")
    for name, state in slice_["real"].items():
        yield table_row(name, state)
        if state != OK and name not in ("Python", "torch"):
            found.failed.append(f"{name}: {state}")


def peak_lines(name: str, slice_: dict[str, Any], found: Findings) -> Iterator[str]:
    beside = ("simulated − lives", "allocated − lives")
    yield from table_head(
        "spec", "phase", "lives", *beside, "requested − lives", "reserved", "by rule"
    )
    limit = RESERVED_BOUNDS.get(name, RESERVED_BOUND)
    wrong, excesses = 0, []
    for case, real in slice_["real"].items():
        fake = slice_["fake"][case]
        if why := real.get("unknown") or fake.get("unknown"):
            yield table_row(case, f"unknown: {why}", *["–"] * 6)
            found.unproven.append(f"{case}: {why}")
            continue
        for phase in map(str, Phase):
            if phase not in real["lives"]:
                continue
            lives = real["lives"][phase]
            off = fake["lives"].get(phase, 0) - lives
            allocated = real["allocated"][phase]
            more = f"{allocated - lives:+,}" if allocated else "–"
            yield table_row(case, phase, f"{lives:,}", f"{off:+,}", more, "", "", "")
            if off:
                wrong += 1
                found.failed.append(f"{case}: {phase}, {off:+,} bytes")
        held, by_rule = real["reserved"], fake["reserved"]
        excess = by_rule / held - 1 if held and by_rule else None
        said = "–" if excess is None else f"{excess:+.1%}"
        asked = real.get("requested")
        within = f"{asked - max(real['lives'].values()):+,}" if asked else ""
        yield table_row(case, "", "", "", "", within, f"{held or 0:,}", said)
        excesses.append(float("inf") if excess is None else abs(excess))
        if excess is None or abs(excess) > limit:
            found.failed.append(f"{case}: reserved by rule {said}")
    if name == "bytes" and excesses:
        most = max(excesses)
        found.claims += [
            (BYTE_CLAIMS[0], f"{wrong} peaks off", not wrong),
            (BYTE_CLAIMS[1], f"{most:.1%} at most", most <= limit),
        ]


def step_lines(name: str, slice_: dict[str, Any], found: Findings) -> Iterator[str]:
    yield from _gpu_steps.lines(slice_, STEP_SLICES[name], found.failed, found.unproven)
    flops = _gpu_steps.peak_flops(slice_["device"])
    for case in STEP_SLICES[name]:
        entry = slice_["real"].get(case.title, {})
        if "runs" not in entry:
            continue
        run = case.runs[-1]
        if case.floor is not None:
            share = None if flops is None else _gpu_steps.mfu(entry, run, flops)[0]
            figure = "the peak of the device is unknown" if share is None else f"{share:.1%}"
            held = None if share is None else share >= case.floor
            found.claims.append((mfu_claim(case), figure, held))
        if case.is_judged:
            speed = _gpu_steps.of_hand(entry, run)[0]
            found.claims.append((speed_claim(case), f"{speed:.3f}", speed >= SPEED))


def mfu_claim(case: StepCase) -> str:
    return f"{case.title}: MFU of `{case.runs[-1]}` at least {case.floor:.0%}"


def speed_claim(case: StepCase) -> str:
    return f"{case.title}: `{case.runs[-1]}` at least {SPEED} of the hand-written loop's speed"


def claims_made() -> Iterator[tuple[str, str]]:
    """Yield the claims of the slices of steps and bytes, each with its slice."""
    for name, cases in STEP_SLICES.items():
        for case in cases:
            if case.floor is not None:
                yield name, mfu_claim(case)
            if case.is_judged:
                yield name, speed_claim(case)
    yield from (("bytes", claim) for claim in BYTE_CLAIMS)


def claim_lines(asked: Sequence[str], found: Findings, *, is_dry: bool) -> Iterator[str]:
    """Yield the table of the claims; without a measurement on a GPU a claim is unproven."""
    known = {claim: (figure, held) for claim, figure, held in found.claims}
    yield from table_head("claim", "measured", "verdict")
    for name, claim in claims_made():
        if name not in asked:
            continue
        figure, held = known.get(claim, ("–", None))
        if is_dry or held is None:
            yield table_row(claim, "–" if is_dry else figure, "unproven")
            found.unproven.append(claim)
            continue
        yield table_row(claim, figure, "holds" if held else "fails")
        if not held:
            found.failed.append(f"{claim}: {figure}")


def page(args: argparse.Namespace) -> int:
    """Print the results of the slices and the claims; return 1 if one fails or is unproven."""
    asked, found = chosen(args.slices), Findings()
    lines: list[str] = []
    for name in asked:
        path = args.out / f"{name}.json"
        if not path.exists():
            found.unproven.append(f"{name} has not run")
            continue
        slice_ = json.loads(path.read_text())
        if slice_["device"] == "cpu" and not args.dry:
            found.failed.append(f"{name} ran dry: its measurements are not a GPU's")
            continue
        lines += [f"\n{name}: {slice_['device']}, torch {slice_['torch']}\n"]
        if name == "parts":
            lines += part_lines(slice_, found)
        elif name == "kernels":
            lines += kernel_lines(slice_, found)
        elif name in STEP_SLICES:
            lines += step_lines(name, slice_, found)
        else:
            lines += peak_lines(name, slice_, found)
    lines = [*SCRIPT.head(), *claim_lines(asked, found, is_dry=args.dry), *lines]
    if args.dry:
        said = "Dry, on a CPU on both sides: the script runs, and nothing is proven."
        print(*lines, "", *found.failed, "", said, sep="\n")
        return 1
    return SCRIPT.conclude(lines, found.failed, args, unproven=found.unproven)


def names() -> Sequence[str]:
    """Return the slices in their order."""
    return ("parts", "kernels", *CASES, *STEP_SLICES)


def chosen(words: Sequence[str]) -> list[str]:
    """Return the slices named individually or as a group; by default all."""
    return [name for word in words for name in GROUPS.get(word, [word])] or [*names()]


def main() -> int:
    parser = SCRIPT.parser()
    parser.add_argument("verb", choices=["names", "run", "anew", "fakes", "page"])
    parser.add_argument("slices", nargs="*", help=f"slices, or {', '.join(GROUPS)}; default: all")
    parser.add_argument("--out", type=Path, help="the folder of the slices")
    parser.add_argument("--dry", action="store_true", help="on a CPU, with tiny models")
    args = parser.parse_args()
    if wrong := set(args.slices) - {*names(), *GROUPS}:
        parser.error(f"no slice has the name {min(wrong)!r}; the names are {', '.join(names())}")
    if args.verb == "names":
        print(*chosen(args.slices), sep="\n")
        return 0
    if args.out is None or (args.verb != "page" and len(args.slices) != 1):
        parser.error("name a slice and --out")
    if args.verb == "page":
        return page(args)
    name = args.slices[0]
    if args.verb == "fakes":
        args.out.write_text(json.dumps(sliced(name, is_real=False, is_dry=args.dry)))
        return 0
    path = args.out / f"{name}.json"
    if args.verb == "anew":
        said = json.loads(path.read_text())
        if said["torch"].split("+")[0] != torch.__version__.split("+")[0]:
            print(f"the slice was measured with torch {said['torch']}", file=sys.stderr)
            return 2
    elif not args.dry and not torch.cuda.is_available():
        print("no GPU was found; --dry tests the script on a CPU", file=sys.stderr)
        return 2
    else:
        said = {
            "device": "cpu" if args.dry else torch.cuda.get_device_name(),
            "sm": 0 if args.dry else capability(),
            "torch": torch.__version__,
        }
    if name == "parts" or name in STEP_SLICES:
        said["real"] = sliced(name, is_real=True, is_dry=args.dry)
    else:
        with ThreadPoolExecutor() as pool:  # the other process computes nothing on the GPU
            of_fakes = pool.submit(on_fakes, name, said["sm"], is_dry=args.dry)
            if args.verb == "run":
                said["real"] = sliced(name, is_real=True, is_dry=args.dry)
            said["fake"] = of_fakes.result()
    whole = path.with_suffix(".part")
    whole.write_text(json.dumps(said, indent=1))
    whole.replace(path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
