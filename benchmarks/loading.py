"""The bytes that ranks read and hold while they load a published model's weights."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, here and in the ranks

from _script import Script, table_head, table_row

if TYPE_CHECKING:
    from ptrain.interpreter.program import Program

RANKS, FILES = 4, 4
SLACK = 64 * 2**20
LOOKED_AT = 2**20  # bytes of a model that is not built in, before it is cut
MOST_READ = 1.001  # of flat units whole rows, of which two ranks may have parts
MIB = 2**20
SCRIPT = Script(
    "loading",
    ranks=RANKS,
    slack=SLACK // MIB,
    looked_at=LOOKED_AT // MIB,
    most_read=f"{MOST_READ - 1:.1%}",
)
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
    "pp-zero3": "{pp: 2, dp_shard: 2}",
    "cp-ring": "{cp: 4}",
    "ep": "{ep: 4}",
}
FLAT_SHARDS = {"zero-offload"}
BUILT_IN, CLASS, OWN = "built in", "hf: llama", "of one's own"
EXPERTS = "hf: mixtral"
# Which placements are measured of each model.
MODELS: Mapping[str, Sequence[str]] = {
    BUILT_IN: ("ddp", "zero3", "hsdp", "tp", "tp-zero3", "pp-1f1b", "zero1", "zero-offload"),
    CLASS: ("tp", "pp-1f1b", "cp-ring", "tp-zero3"),
    OWN: ("tp", "pp-1f1b", "zero3"),
    EXPERTS: ("ep",),
}
LARGE = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 8}
SMALL = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 8}  # with --quick
LESS = {"num_hidden_layers": 4, "vocab_size": 8000}  # of what is not built in
OTHERS = {
    "model_type": "llama",
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "tie_word_embeddings": False,
}
ROUTED = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
BARE = ("optimizer.name=sgd", "batch={global: 8, micro: 1, sequence: 16}")  # no moments


@dataclass(frozen=True)
class Loaded:
    """The loading of one rank: its bytes of parameters, of the largest unit (0 if its full buffer
    is no part of the claim), the bytes it read, and resident memory before and at the peak."""

    kept: int
    unit: int
    read: int
    before: int
    peak: int
    seconds: float

    @property
    def above(self) -> int:
        """Return the bytes at the peak above the initial memory and the kept parameters."""
        return self.peak - self.before - self.kept

    @property
    def allowed(self) -> int:
        return SLACK + self.unit


def write_folder(folder: Path, config: Mapping[str, object]) -> int:
    """Write a model with random weights; return their bytes."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir()
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
    """Return the shapes of the tensors of a llama or a mixtral by name."""
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
    if experts := int(str(config.get("num_local_experts", 0))):
        block = {name: shape for name, shape in block.items() if not name.startswith("mlp.")}
        block["block_sparse_moe.gate"] = (experts, hidden)
        for number in range(experts):
            expert = f"block_sparse_moe.experts.{number}"
            block |= {f"{expert}.{name}": (ffn, hidden) for name in ("w1", "w3")}
            block[f"{expert}.w2"] = (hidden, ffn)
    shapes = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(layers):
        shapes |= {f"model.layers.{layer}.{name}.weight": block[name] for name in block}
    return shapes | {"model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}


@dataclass(frozen=True)
class Case:
    """A model from a folder in a placement; `warm` is a small randomly initialized one of its
    kind."""

    kind: str
    placement: str
    model: str
    warm: str
    size: int  # bytes of the folder

    def words(self, model: str) -> tuple[str, ...]:
        """Return the arguments for a spec of the placement."""
        return (f"mesh={PLACEMENTS[self.placement]}", *BARE, f"model={model}")


@dataclass
class Reading:
    """The bytes of tensors that this process reads from folders."""

    size: int = field(default=0)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Temporarily count reads."""
        from ptrain.models.pretrained import PretrainedFolder

        read: Any = PretrainedFolder.read_piece

        def counted(folder: PretrainedFolder, *given: Any) -> None:
            before = folder.bytes_read
            read(folder, *given)
            self.size += folder.bytes_read - before

        PretrainedFolder.read_piece = counted
        try:
            yield
        finally:
            PretrainedFolder.read_piece = read


def load_rank(case: Case) -> Loaded:
    """Load on one rank; return the bytes it reads and holds."""
    import gc

    from ptrain.axes.data.run.flat import parameters_by_unit
    from ptrain.interpreter.program import interpret
    from ptrain.runtime.world import World
    from ptrain.spec.load import load

    placement, reading = case.placement, Reading()
    spec = load(placement, case.words(case.model)).spec
    world = World.join(spec.timeout)
    interpret(load(placement, case.words(case.warm)).spec, world=world, allow_import=True)
    gc.collect()
    before, began = resident("VmRSS"), time.perf_counter()
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM is VmRSS from now on
    with reading.counting():
        program = interpret(spec, world=world, allow_import=True)
    seconds, peak = time.perf_counter() - began, resident("VmHWM")
    assert not program.whole_because, program.whole_because
    units = (
        parameters_by_unit(program.model, program.plan.units) if placement in FLAT_SHARDS else ()
    )
    sizes = [sum(4 * parameter.numel() for _, parameter in named) for _, named in units]
    return Loaded(
        kept=kept_of(program),
        unit=max(sizes, default=0),
        read=reading.size,
        before=before,
        peak=peak,
        seconds=seconds,
    )


def kept_of(program: Program) -> int:
    """Return the bytes of a rank's parameters."""
    from ptrain.cost import State
    from ptrain.models.ledger import storage_of

    held = (storage_of(x) for state, x in program.storages() if state is State.PARAMETERS)
    return sum({storage._cdata: storage.nbytes() for storage in held}.values())


def resident(field: str) -> int:
    """Return the resident bytes of this process according to the kernel."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


def run(case: Case) -> list[Loaded]:
    """Run all ranks of a placement."""
    import loading  # the ranks import this file by its name

    from tests.ranks import Ranks

    pool = Ranks()
    try:
        return pool.run(RANKS, loading.load_rank, case, timeout=600)
    finally:
        pool.close()


def cases(root: Path, kinds: Sequence[str], *, is_quick: bool) -> Iterator[Case]:
    """Yield the cases, each after its folder is written."""
    sizes = SMALL if is_quick else LARGE
    large, less = {**OTHERS, **sizes}, {**OTHERS, **sizes, **LESS}
    routed = {**less, **ROUTED, "num_hidden_layers": 1}
    written = {
        name: (root / name, write_folder(root / name, config))
        for name, config in (("large", large), ("less", less), ("routed", routed))
    }
    small = {**SMALL, **OTHERS, "num_hidden_layers": 4, "vocab_size": 512}
    fields = {name: value for name, value in small.items() if name != "model_type"}
    own = "target: '_decoder:build', arguments"
    of_kind = {
        BUILT_IN: ("large", "", "{preset: llama-tiny, layers: 4, kv_heads: 4}"),
        CLASS: ("less", ", hf: llama", f"{{hf: llama, config: {json.dumps(fields)}}}"),
        OWN: ("less", f", {own}: {arguments(less)}", f"{{{own}: {arguments(small)}}}"),
        EXPERTS: (
            "routed",
            ", hf: mixtral",
            f"{{hf: mixtral, config: {json.dumps({**fields, 'num_local_experts': 4})}}}",
        ),
    }
    for kind in kinds:
        name, beside, warm = of_kind[kind]
        folder, size = written[name]
        for placement in MODELS[kind]:
            yield Case(kind, placement, f"{{pretrained: {folder}{beside}}}", warm, size)


def arguments(config: Mapping[str, object]) -> str:
    """Return the arguments of a user model with the sizes of a config."""
    names = {"hidden": "hidden_size", "ffn": "intermediate_size", "layers": "num_hidden_layers"}
    return json.dumps({own: config[its] for own, its in {**names, "vocab": "vocab_size"}.items()})


def row(case: Case, ranks: Sequence[Loaded]) -> tuple[str, list[str]]:
    """Return the table row of a case, and violations of the claim."""
    worst = max(ranks, key=lambda rank: rank.above - rank.allowed)
    greedy = max(ranks, key=lambda rank: rank.read / rank.kept)
    failed = []
    if worst.above > worst.allowed:
        above = f"{worst.above / MIB:.1f} MiB beside what is kept"
        failed.append(f"{case.kind}, {case.placement}: {above}, at most {worst.allowed / MIB:.1f}")
    if greedy.read > MOST_READ * greedy.kept + LOOKED_AT * (case.kind != BUILT_IN):
        failed.append(
            f"{case.kind}, {case.placement}: {greedy.read:,} bytes read for {greedy.kept:,} kept"
        )
    cells = (
        case.kind,
        case.placement,
        f"{max(rank.kept for rank in ranks) / MIB:,.1f}",
        f"{max(rank.read for rank in ranks) / MIB:,.1f}",
        f"{sum(rank.read for rank in ranks) / case.size:.4g}",
        f"{max(rank.peak - rank.before for rank in ranks) / MIB:,.1f}",
        f"{worst.above / MIB:.1f}",
        f"{worst.allowed / MIB:.1f}",
        f"{max(rank.seconds for rank in ranks):.1f}",
        "fails" if failed else "holds",
    )
    return table_row(*cells), failed


def main() -> int:
    parser = SCRIPT.parser()
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--quick", action="store_true", help="folders of less than 100 MB")
    args = parser.parse_args()
    head = SCRIPT.head()
    lines, failed, sizes = [], [], []
    with tempfile.TemporaryDirectory() as temporary:
        for case in cases(Path(temporary), args.models, is_quick=args.quick):
            line, wrong = row(case, run(case))
            lines, failed, sizes = [*lines, line], [*failed, *wrong], [*sizes, case.size]
            print(line, file=sys.stderr, flush=True)
    read = ("kept", "read", "read by all / folder")
    held = ("peak above before", "beside", "bound")
    table = [*table_head("model", "placement", *read, *held, "s", "verdict"), *lines]
    method = SCRIPT.method(least=min(sizes), most=max(sizes), files=FILES)
    return SCRIPT.conclude([*head, *method, *table], failed, args)


if __name__ == "__main__":
    sys.exit(main())
