"""The slices of the GPU kit (`benchmarks/gpu.sh`), and the page of what they gave."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from _gpu_cases import SLICES
from _script import Script, table_head, table_row
from torch._subclasses.fake_tensor import FakeTensorMode

from ptrain.cost import Phase
from ptrain.derivation.allocator import steady_reserved
from ptrain.rooms import pretence
from ptrain.selection.recompute import resolve_auto
from ptrain.simulation.execute import simulate
from ptrain.spec.load import load

SCRIPT = Script("gpu")
RESERVED_BOUND = 0.03
Case = tuple[str, ...]  # the words of a spec

CASES: dict[str, list[Case]] = SLICES
TINY = (
    "model.layers=4",
    "model.hidden=64",
    "model.heads=8",
    "model.kv_heads=8",
    "model.ffn=96",
    "model.vocab=264",
    "batch.sequence=32",
)
TINY_GPT = tuple(word for word in TINY if "kv_heads" not in word)


# -- which kernels attention takes


def choices(device: str) -> dict[str, str]:
    """Return by setting which function torch takes for scaled_dot_product_attention."""
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


def capability() -> int:
    """Return the GPU's compute capability: 90."""
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


def words_of(case: Case, *, is_dry: bool) -> list[str]:
    """Return what is asked of a case: of a GPU's memory, or tiny."""
    if not is_dry:
        return [*case, "device=cuda", f"cluster={{preset: h100-8, sm: {capability()}}}"]
    tiny = TINY_GPT if any("gpt" in word for word in case) else TINY
    if any("hf:" in word for word in case):
        tiny = ("batch.sequence=32",)
    return [*case, *tiny, "device=cpu"]


def peaks(case: Case, *, is_real: bool, is_dry: bool) -> dict[str, Any]:
    """Return by phase the bytes that live at most, and what the allocator reserves: as measured, or
    by its rules of segments as PYTORCH_CUDA_ALLOC_CONF leaves them."""
    spec = resolve_auto(load(case[0], words_of(case, is_dry=is_dry)[1:]))
    on_gpu = is_real and not is_dry
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    simulated = simulate(spec, rehearse=is_real, every_block=is_real)
    by_rule = steady_reserved(simulated.allocated(spec), expands=False)
    held = torch.cuda.max_memory_reserved() if on_gpu else by_rule and by_rule.device_bytes
    return {
        "lives": {str(peak.phase): peak.device_bytes for peak in simulated.estimate.peak},
        "allocated": {str(peak.phase): peak.allocator_bytes for peak in simulated.estimate.peak},
        "reserved": held,
    }


def sliced(name: str, *, is_real: bool, is_dry: bool) -> dict[str, Any]:
    """Return what one side says of every case of a slice."""
    if name == "kernels":
        device = "cpu" if is_dry else "cuda"
        if is_real:
            return choices(device)
        with FakeTensorMode():
            return choices(device)
    return {" ".join(case): peaks(case, is_real=is_real, is_dry=is_dry) for case in CASES[name]}


def on_fakes(name: str, sm: int, *, is_dry: bool) -> dict[str, Any]:
    """Return what a process says that only believes in a GPU of this compute capability."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "fakes.json")
        words = [__file__, "fakes", name, "--out", str(path), *["--dry"] * is_dry]
        if not is_dry and (why := pretence.missing_requirement()):
            raise SystemExit(f"fakes cannot be asked: {why}")
        if (
            subprocess.call([sys.executable, *words])
            if is_dry
            else pretence.run_with_simulated_gpu(words, sm)
        ):
            raise SystemExit(f"{name}: the process on fakes failed")
        said: dict[str, Any] = json.loads(path.read_text())
        return said


# -- the page


def kernel_lines(slice_: dict[str, Any], failed: list[str]) -> list[str]:
    lines = [*table_head("attention", "on the GPU", "believed")]
    for setting, real in slice_["real"].items():
        believed = slice_["fake"][setting]
        lines.append(table_row(setting, real, believed))
        if real != believed:
            failed.append(f"{setting}: {real}, not {believed}")
    return lines


def peak_lines(slice_: dict[str, Any], failed: list[str]) -> list[str]:
    beside = ("simulated − lives", "allocated − lives")
    lines = [*table_head("spec", "phase", "lives", *beside, "reserved", "by rule")]
    for case, real in slice_["real"].items():
        fake = slice_["fake"][case]
        for phase in map(str, Phase):
            if phase not in real["lives"]:
                continue
            lives = real["lives"][phase]
            off = fake["lives"].get(phase, 0) - lives
            allocated = real["allocated"][phase]
            more = f"{allocated - lives:+,}" if allocated else "–"
            lines.append(table_row(case, phase, f"{lives:,}", f"{off:+,}", more, "", ""))
            if off:
                failed.append(f"{case}: {phase}, {off:+,} bytes")
        held, by_rule = real["reserved"], fake["reserved"]
        excess = by_rule / held - 1 if held and by_rule else None
        said = "–" if excess is None else f"{excess:+.1%}"
        lines.append(table_row(case, "", "", "", "", f"{held or 0:,}", said))
        if excess is None or abs(excess) > RESERVED_BOUND:
            failed.append(f"{case}: steady_reserved by rule {said}")
    return lines


def page(args: argparse.Namespace) -> int:
    """Print what is there of the slices; 1 where the claim fails or one is missing."""
    failed: list[str] = []
    lines = SCRIPT.head()
    for name in names():
        path = args.out / f"{name}.json"
        if not path.exists():
            failed.append(f"{name} has not run")
            continue
        slice_ = json.loads(path.read_text())
        write: Callable[[dict[str, Any], list[str]], list[str]]
        write = kernel_lines if name == "kernels" else peak_lines
        lines += [
            f"\n{name}: {slice_['device']}, torch {slice_['torch']}\n",
            *write(slice_, failed),
        ]
    if args.dry:
        said = "Dry, on a CPU on both sides: the script runs, and nothing is proven."
        print(*lines, "", said, sep="\n")
        return int(bool(failed))
    return SCRIPT.conclude(lines, failed, args)


def names() -> Sequence[str]:
    """Return the slices in their order."""
    return ("kernels", *CASES)


def main() -> int:
    parser = SCRIPT.parser()
    parser.add_argument("verb", choices=["names", "run", "anew", "fakes", "page"])
    parser.add_argument("slice", nargs="?", choices=names())
    parser.add_argument("--out", type=Path, help="the folder of the slices")
    parser.add_argument("--dry", action="store_true", help="on a CPU, with tiny models")
    args = parser.parse_args()
    if args.verb == "names":
        print(*names(), sep="\n")
        return 0
    if args.out is None or (args.verb in ("run", "anew", "fakes") and args.slice is None):
        parser.error("name a slice and --out")
    if args.verb == "fakes":
        args.out.write_text(json.dumps(sliced(args.slice, is_real=False, is_dry=args.dry)))
        return 0
    if args.verb == "page":
        return page(args)
    path = args.out / f"{args.slice}.json"
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
    with ThreadPoolExecutor() as pool:  # the other process computes nothing on the GPU
        of_fakes = pool.submit(on_fakes, args.slice, said["sm"], is_dry=args.dry)
        if args.verb == "run":
            said["real"] = sliced(args.slice, is_real=True, is_dry=args.dry)
        said["fake"] = of_fakes.result()
    whole = path.with_suffix(".part")
    whole.write_text(json.dumps(said, indent=1))
    whole.replace(path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
