"""Steps of ptrain on one GPU and of hand-written loops, in turns: slices of the GPU kit."""

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from _by_hand import adamw, fully_sharded, loop, zero_redundancy_adamw
from _gpu_cases import RANKS, StepCase, asked_words
from _script import table_head, table_row
from _steps import bound, legal, paired, program_steps, replicated, samples
from torch import nn
from torch.distributed import GradBucket

from ptrain.derivation.estimate import token_operations
from ptrain.errors import SpecError
from ptrain.models import compiled
from ptrain.models.initialize import build_model, initialize
from ptrain.models.numerics import TORCH_DTYPES
from ptrain.plan.lower import built_in_facts
from ptrain.runtime.world import World, fake_world
from ptrain.spec.dials import Compiled
from ptrain.spec.load import load
from ptrain.spec.model import ModelShape
from ptrain.spec.spec import Spec

HAND = "by hand"
SAME = 1e-3  # losses before the first update, relative: compiled blocks round less often
WARM_UP, TURNS, STEPS = 3, 14, 4  # turns before and in a measurement, steps of a turn
DRY_TURNS = 6  # the fewest of which there is an interval of 95 %
# Clusters by which the peak FLOP/s of a device of this name are known: bf16, dense.
CLUSTERS = {"H200": "h200-8", "H100": "h100-8"}
Step = Callable[[], torch.Tensor]


def spec_of(case: StepCase, run: str, *, is_dry: bool) -> Spec:
    """Return the legal spec of one of a case's runs."""
    name, *words = asked_words(case.words(run), is_dry=is_dry)
    return legal(name, words)


def by_hand(spec: Spec, strategy: str, device: torch.device) -> Step:
    """Return the next step of a hand-written loop on the same model and the same samples.

    It is fully_shard of compiled blocks, DDP with AdamW, or DDP with torch's sharded optimizer.
    """
    model = _on_device(spec, device)
    if strategy == "zero3":
        if spec.compile is not Compiled.NONE:
            for block in model.blocks:
                block.compile(fullgraph=True, dynamic=False, backend=compiled.BACKEND)
        wrapped = fully_sharded(model, spec, device.type)
        optimizer = adamw(spec, wrapped)
    else:
        wrapped = replicated(model, spec)
        # DDP's own hook takes no answer of fake ranks
        wrapped.register_comm_hook(None, _average)
        optimizer = (adamw if strategy == "ddp" else zero_redundancy_adamw)(spec, wrapped)
    rows = samples(spec, index=0, groups=RANKS)

    def rows_of(number: int) -> torch.Tensor:
        held = rows(number)
        if device.type == "cuda":  # a copy from pageable memory would wait for the device
            held = held.pin_memory()
        return held.to(device, non_blocking=True)

    step: Step = loop(spec, wrapped, optimizer, rows_of=rows_of, read=_copied)
    return step


def _copied(loss: torch.Tensor) -> torch.Tensor:
    """Return a copy that is read after the turn: ptrain sums each step's loss in one tensor."""
    return loss.detach().clone()


def _on_device(spec: Spec, device: torch.device) -> nn.Module:
    """Return the spec's model with parameters in their dtype; buffers keep theirs."""
    model = build_model(spec.model, sequence=spec.batch.sequence)
    initialize(model, spec.train.seed)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(TORCH_DTYPES[spec.precision.layout.parameters])
    return model.to(device)


def _average(_: None, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Return a local sum in place of one over ranks, divided as DDP divides it."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer().div_(RANKS))
    return future


# -- measuring


def measure(cases: Sequence[StepCase], *, is_dry: bool) -> dict[str, Any]:
    """Return for each case the times and losses of its contenders.

    A case whose key the spec does not have is left out with the reason, as is one that needs more
    memory than the device has.
    """
    if is_dry:  # programs are traced and split as on a GPU, but not built
        compiled.BACKEND = "aot_eager"
    device = torch.device("cpu" if is_dry else "cuda:0")
    world = fake_world(0, RANKS, device)
    found: dict[str, Any] = {}
    for case in cases:
        try:
            found[case.title] = _measure_case(case, world, is_dry=is_dry)
        except torch.OutOfMemoryError as error:
            found[case.title] = {"left out": str(error).splitlines()[0]}
        except SpecError as error:
            if not case.needs:
                raise
            found[case.title] = {"left out": str(error).splitlines()[0]}
        gc.collect()  # programs are cycles
        torch._dynamo.reset()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    world.close()
    return found


def _measure_case(case: StepCase, world: World, *, is_dry: bool) -> dict[str, Any]:
    specs = {run: spec_of(case, run, is_dry=is_dry) for run in case.runs}
    steps: dict[str, Step] = {
        run: program_steps(spec, world, _copied) for run, spec in specs.items()
    }
    last, first = specs[case.runs[-1]], specs[case.runs[0]]
    if case.has_hand:
        steps[HAND] = by_hand(last, case.strategy, world.device)
    turns, count = (DRY_TURNS, 1) if is_dry else (TURNS, STEPS)
    measured = _take_turns(steps, world.device, turns, count)
    assert isinstance(first.model, ModelShape), "the cases have built-in models"
    sequence = first.batch.sequence
    operations = token_operations(first.model, built_in_facts(first), sequence, is_causal=False)
    tokens = first.batch.micro * sequence
    return {"operations": operations * tokens, "runs": measured}


def _take_turns(
    steps: dict[str, Step], device: torch.device, turns: int, count: int
) -> dict[str, dict[str, list[float]]]:
    """Return seconds and processor's seconds of a step by turn, and the losses of all steps."""
    measured = {name: {"seconds": [], "processor": [], "losses": []} for name in steps}
    names = list(steps)
    for turn in range(-WARM_UP, turns):
        start = turn % len(names)
        for name in (*names[start:], *names[:start]):
            seconds, processor, losses = _time(steps[name], device, count)
            measured[name]["losses"] += losses
            if turn >= 0:
                measured[name]["seconds"].append(seconds)
                measured[name]["processor"].append(processor)
    return measured


def _time(step: Step, device: torch.device, count: int) -> tuple[float, float, list[float]]:
    """Return the seconds of a step, of its processor, and the losses of a turn.

    The host waits for the device after the turn only, so it may run ahead. On a GPU, events give
    the seconds.
    """
    is_gpu = device.type == "cuda"
    if is_gpu:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(device)
        start.record()
    began, busy = time.perf_counter(), time.process_time()
    shares = [step() for _ in range(count)]
    busy = time.process_time() - busy
    seconds = time.perf_counter() - began
    if is_gpu:
        end.record()
        torch.cuda.synchronize(device)
        seconds = start.elapsed_time(end) / 1e3
    return seconds / count, busy / count, [float(share) for share in shares]


# -- the page


def peak_flops(device: str) -> float | None:
    """Return the peak FLOP/s of a device by name, None if it is not known."""
    for word, cluster in CLUSTERS.items():
        if word in device:
            spec = load("zero3", (f"cluster.preset={cluster}",)).spec
            assert spec.cluster is not None, "the words name one"
            return spec.cluster.flops
    return None


def mfu(entry: dict[str, Any], run: str, flops: float) -> tuple[float, float, float]:
    """Return the median MFU of a run, with its 95 % bounds."""
    work = entry["operations"] / flops
    seconds = entry["runs"][run]["seconds"]
    low, high = bound(seconds)
    return work / statistics.median(seconds), work / high, work / low


def of_hand(entry: dict[str, Any], run: str) -> tuple[float, float, float]:
    """Return a run's speed as a multiple of the hand-written loop's, with its 95 % bounds."""
    theirs, mine = (entry["runs"][name]["seconds"] for name in (HAND, run))
    return paired(theirs, mine)


def lines(
    slice_: dict[str, Any], cases: Sequence[StepCase], wrong: list[str], left_out: list[str]
) -> Iterator[str]:
    """Yield the table of a slice of steps; append what is wrong, and what was left out."""
    flops = peak_flops(slice_["device"])
    figures = ("ms", "MFU", "95 %", "of by hand", "95 %", "processor, ms", "first loss")
    yield from table_head("model", "strategy", "run", *figures)
    for case in cases:
        entry = slice_["real"].get(case.title, {"left out": "not measured"})
        if why := entry.get("left out"):
            left_out.append(f"{case.title}: {why}")
            yield table_row(case.name, case.strategy, f"left out: {why}", *["–"] * len(figures))
            continue
        for run, taken in entry["runs"].items():
            share, held = ("–", "–"), ("–", "–")
            if flops is not None:
                share = _cells(mfu(entry, run, flops), "{:.1%}")
            if run != HAND and HAND in entry["runs"]:
                held = _cells(of_hand(entry, run), "{:.3f}")
            ms, busy = (1e3 * statistics.median(taken[key]) for key in ("seconds", "processor"))
            loss = taken["losses"][0]
            yield table_row(
                case.name, case.strategy, run, f"{ms:.2f}", *share, *held, f"{busy:.2f}",
                f"{loss:.5f}",
            )  # fmt: skip
        if HAND not in entry["runs"]:
            continue
        mine, theirs = (entry["runs"][run]["losses"][0] for run in (case.runs[-1], HAND))
        if not abs(mine - theirs) <= SAME * theirs:  # which no NaN is
            wrong.append(f"{case.title}: the first losses are {mine} and {theirs}")


def _cells(figure: tuple[float, float, float], form: str) -> tuple[str, str]:
    middle, low, high = (form.format(value) for value in figure)
    return middle, f"{low} – {high}"
