"""What ranks read and hold while a published model's weights are loaded.

Claim: of a folder of 2 GB, on four ranks, in every placement below, (1) no rank's resident memory
is at its peak more than 64 MiB above what it was before, what it keeps of the parameters, and where
flat units are kept as shards the largest unit; (2) a rank reads of the files what it keeps and at
most 0.1 % more.
The folder is a llama's with drawn weights in fp32, in four files, and is removed at the end. Each
placement has ranks of its own, which before have built a small model in it, so that what is
imported and connected then is not counted. Resident memory is VmRSS, its peak VmHWM, set back
before: both count the pages of the files that are mapped. Inside is `interpret` as a whole: from
files to a program that is ready for its first step, by one run of each.
Prints; writes a result only with --save. Takes two minutes, and 10 GB of memory under ddp.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, here and in the ranks

from _machine import conclude, header, this_command

RANKS, FILES = 4, 4
SLACK = 64 * 2**20
MOST_READ = 1.001  # of flat units whole rows, of which two ranks may have parts
MIB = 2**20
# The mesh of each placement.
PLACEMENTS: Mapping[str, str] = {
    "ddp": "{dp_replicate: 4}",
    "zero3": "{dp_shard: 4}",
    "hsdp": "{dp_replicate: 2, dp_shard: 2}",
    "tp": "{tp: 4}",
    "tp-zero3": "{dp_shard: 2, tp: 2}",
    "pp-1f1b": "{pp: 4}",
    "zero1": "{dp_shard: 4}",
    "zero-offload": "{dp_shard: 4}",
}
FLAT_SHARDS = {"zero-offload"}
LARGE = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 8}
SMALL = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 8}  # with --quick
OTHERS = {
    "model_type": "llama",
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "tie_word_embeddings": False,
}
BARE = ("optimizer.name=sgd", "batch={global: 8, micro: 1, sequence: 16}")  # no moments


@dataclass(frozen=True)
class Loaded:
    """One rank's loading: bytes that it keeps of the parameters, of the largest unit (0 where its
    whole buffer is no part of the claim), that it read, and resident before and at the peak."""

    kept: int
    unit: int
    read: int
    before: int
    peak: int
    seconds: float

    @property
    def above(self) -> int:
        """Bytes at the peak beside what it had before and what it keeps."""
        return self.peak - self.before - self.kept

    @property
    def allowed(self) -> int:
        return SLACK + self.unit


def write_folder(folder: Path, sizes: Mapping[str, int]) -> int:
    """Write a model with drawn weights; return their bytes."""
    import torch
    from safetensors.torch import save_file

    config = {**OTHERS, **sizes}
    shapes = tensors_of(config)
    names = list(shapes)
    index: dict[str, str] = {}
    written = 0
    generator = torch.Generator().manual_seed(0)
    for number in range(FILES):
        file = f"model-{number + 1:05}-of-{FILES:05}.safetensors"
        own = names[len(names) * number // FILES : len(names) * (number + 1) // FILES]
        tensors = {name: torch.randn(shapes[name], generator=generator) for name in own}
        save_file(tensors, folder / file)
        index |= dict.fromkeys(own, file)
        written += sum(tensor.nbytes for tensor in tensors.values())
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (folder / "config.json").write_text(json.dumps(config))
    return written


def tensors_of(config: Mapping[str, object]) -> dict[str, tuple[int, ...]]:
    """The shapes of a llama's tensors by name."""
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    hidden, ffn, heads, kv_heads = (int(str(config[name])) for name in names)
    vocab, layers = int(str(config["vocab_size"])), int(str(config["num_hidden_layers"]))
    narrow = hidden // heads * kv_heads
    block: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (narrow, hidden),
        "self_attn.v_proj": (narrow, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (ffn, hidden),
        "mlp.up_proj": (ffn, hidden),
        "mlp.down_proj": (hidden, ffn),
    }
    shapes = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(layers):
        shapes |= {f"model.layers.{layer}.{name}.weight": block[name] for name in block}
    return shapes | {"model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}


def load_rank(placement: str, words: Sequence[str], warm: Sequence[str]) -> Loaded:
    """On one rank: what it reads and holds."""
    import gc

    from ptrain.axes.data.run.flat import parameters_by_unit
    from ptrain.costs import State
    from ptrain.derivation.estimate import derive
    from ptrain.interpreter.program import interpret
    from ptrain.models.pretrained import weights_of
    from ptrain.rooms.world import World
    from ptrain.spec.load import load

    spec = load(placement, words).spec
    world = World.join(spec.timeout)
    interpret(load(placement, warm).spec, world=world)
    gc.collect()
    before, began = resident("VmRSS"), time.perf_counter()
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM is VmRSS from now on
    program = interpret(spec, world=world)
    seconds, peak = time.perf_counter() - began, resident("VmHWM")
    memory = derive(spec).exact.of_rank(world.rank)
    kept = sum(
        row.device_bytes + row.host_bytes for row in memory.memory if row.state is State.PARAMETERS
    )
    units = (
        parameters_by_unit(program.model, program.plan.units) if placement in FLAT_SHARDS else ()
    )
    sizes = [sum(4 * parameter.numel() for _, parameter in named) for _, named in units]
    return Loaded(
        kept=kept,
        unit=max(sizes, default=0),
        read=weights_of(spec.model).bytes_read,
        before=before,
        peak=peak,
        seconds=seconds,
    )


def resident(field: str) -> int:
    """Bytes that the kernel counts for this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


def run(placement: str, folder: Path) -> list[Loaded]:
    """All ranks of a placement."""
    import loading  # the ranks import this file by its name

    from tests.ranks import Ranks

    mesh = f"mesh={PLACEMENTS[placement]}"
    words = (mesh, *BARE, f"model={{pretrained: {folder}}}")
    warm = (mesh, *BARE, "model={preset: llama-tiny, layers: 4, kv_heads: 4}")
    pool = Ranks()
    try:
        return pool.run(RANKS, loading.load_rank, placement, words, warm, timeout=600)
    finally:
        pool.close()


def row(placement: str, ranks: Sequence[Loaded], size: int) -> tuple[str, list[str]]:
    """The table's row of a placement, and what does not keep the claim."""
    worst = max(ranks, key=lambda rank: rank.above - rank.allowed)
    greedy = max(ranks, key=lambda rank: rank.read / rank.kept)
    failed = []
    if worst.above > worst.allowed:
        above = f"{worst.above / MIB:.1f} MiB beside what is kept"
        failed.append(f"{placement}: {above}, at most {worst.allowed / MIB:.1f}")
    if greedy.read > MOST_READ * greedy.kept:
        failed.append(f"{placement}: {greedy.read:,} bytes read for {greedy.kept:,} kept")
    cells = (
        placement,
        f"{max(rank.kept for rank in ranks) / MIB:,.1f}",
        f"{max(rank.read for rank in ranks) / MIB:,.1f}",
        f"{sum(rank.read for rank in ranks) / size:.4g}",
        f"{max(rank.peak - rank.before for rank in ranks) / MIB:,.1f}",
        f"{worst.above / MIB:.1f}",
        f"{worst.allowed / MIB:.1f}",
        f"{max(rank.seconds for rank in ranks):.1f}",
        "fails" if failed else "holds",
    )
    return f"| {' | '.join(cells)} |", failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--placements", nargs="+", default=list(PLACEMENTS), choices=PLACEMENTS)
    parser.add_argument("--quick", action="store_true", help="a folder of 90 MB")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/")
    args = parser.parse_args()
    title = header("loading: what ranks read and hold while weights are loaded", this_command())
    lines, failed = [], []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        size = write_folder(folder, SMALL if args.quick else LARGE)
        for placement in args.placements:
            line, wrong = row(placement, run(placement, folder), size)
            lines, failed = [*lines, line], [*failed, *wrong]
            print(line, file=sys.stderr, flush=True)
    return conclude(
        "loading",
        [title, *_explained(size), *lines],
        failed=failed,
        not_covered="weights of experts and of 16 bits, GPUs (whose memory holds what is kept), "
        "more ranks, files that no page cache has, and what disks read: of a slice along columns "
        "whole pages, and ahead.",
        is_saved=args.save,
    )


def _explained(size: int) -> list[str]:
    """The claim, what a row is, and the head of the table."""
    return [
        f"Claim: on {RANKS} ranks no rank's resident memory is at its peak more than "
        f"{SLACK / MIB:.0f} MiB above what it was before and what it keeps of the parameters, and "
        "where flat units are kept as shards the largest of them, whole; and a rank reads what it "
        f"keeps and at most {MOST_READ - 1:.1%} more.",
        "",
        f"A llama's folder with {size:,} bytes of fp32 in {FILES} files (its largest tensor has "
        "262 MB where it is not `--quick`), gloo, one thread a rank, sgd without momentum. "
        "Resident memory is VmRSS and its peak VmHWM, which count mapped pages of files too; "
        "before: after a small model of the same placement was built. Inside is `interpret`, from "
        "the spec to a program ready for its first step, once. MiB are of the rank that has most; "
        "`beside` is of the rank nearest to its bound: peak less before less kept.",
        "",
        "| placement | kept | read | read by all / folder | peak above before | beside | bound "
        "| s | verdict |",
        "|---|---|---|---|---|---|---|---|---|",
    ]


if __name__ == "__main__":
    sys.exit(main())
