"""What others published of steps that they timed: rows, with the specs that say the same."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

TITAN = "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md"
TRAINY = "torchtitan, benchmarks/llama3-8b_h200_202506_trainy-whitefiber.md"
FOUNDRY = "llm-foundry, scripts/train/benchmarking/README.md"
KORTHIKANTI = "Korthikanti et al. 2022 (arXiv 2205.05198), table 5, not looked up again"
NARAYANAN = "Narayanan et al. 2021 (arXiv 2104.04473), table 2, not looked up again"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What was published. `tokens` per second and GPU; `words` load the spec that is predicted."""

    family: str
    name: str
    kind: str  # eager, or how it ran otherwise
    tokens: float
    words: tuple[str, ...]
    source: str


def titan() -> Iterator[Row]:
    """Llama 3.1 on H100s of 96 GB (500 W): slower ones than the rates are of."""
    selective = ("activations=M", "recompute=selective", "precision.reduced=fp32")
    for gpus, by_kind in (
        (8, {"eager": 5762, "compiled": 6667, "compiled, float8": 8532}),
        (128, {"eager": 5605, "compiled": 6514, "compiled, float8": 8380}),
    ):
        for kind, tokens in by_kind.items():
            yield Row(
                family="torchtitan 8B",
                name=f"FSDP {gpus}",
                kind=kind,
                tokens=tokens,
                words=(
                    "fsdp-mixed",
                    *selective,
                    "model.preset=llama3-8b",
                    f"mesh.dp_shard={gpus}",
                    f"cluster.preset=h100-{gpus}",
                    f"batch={{global: {2 * gpus}, micro: 2, sequence: 8192}}",
                ),
                source=TITAN,
            )
    yield from _titan_large()
    for gpus, tokens in ((32, 10938), (64, 10753)):
        yield Row(
            family="torchtitan H200",
            name=f"8B, FSDP {gpus}",
            kind="compiled, float8",
            tokens=tokens,
            words=(
                "fsdp-mixed",
                *selective,
                "model.preset=llama3-8b",
                f"mesh.dp_shard={gpus}",
                "cluster.preset=h200-8",
                f"cluster.devices={gpus}",
                f"batch={{global: {2 * gpus}, micro: 2, sequence: 8192}}",
            ),
            source=TRAINY,
        )


def _titan_large() -> Iterator[Row]:
    """70B and 405B, recomputed whole."""
    full = ("activations=M", "recompute=full", "precision.reduced=fp32")
    slices = ("mesh.tp=8", "placement.tp=S,S,S,S", "cluster.preset=h100-64")
    yield Row(
        family="torchtitan large",
        name="70B, FSDP 32 x TP 8",
        kind="compiled, float8",
        tokens=829,
        words=(
            "fsdp-mixed",
            *full,
            "model.preset=llama3-70b",
            "mesh.dp_shard=32",
            "batch={global: 512, micro: 16, sequence: 8192}",
            *slices,
            "cluster.devices=256",
        ),
        source=TITAN,
    )
    for schedule, tokens in (("1f1b", 100), ("interleaved", 128)):
        yield Row(
            family="torchtitan large",
            name=f"405B, FSDP 8 x TP 8 x PP 8, {schedule}",
            kind="compiled, float8, async TP",
            tokens=tokens,
            words=(
                "fsdp-mixed",
                *full,
                "model.preset=llama3-405b",
                "mesh.dp_shard=8",
                "mesh.pp=8",
                "placement.pp=S,S,S,R",
                f"pipeline.schedule={schedule}",
                "sync={gradients: last, reshard_after_forward: false, "
                "reshard_after_backward: false}",
                "batch={global: 256, micro: 4, sequence: 8192}",
                *slices,
                "cluster.devices=512",
            ),
            source=TITAN,
        )


# MPT: layers, hidden, heads; biases, learned positions, a tied head, 50,368 words.
_MPT = {
    "125m": (12, 768, 12),
    "350m": (24, 1024, 16),
    "760m": (24, 1536, 12),
    "1b": (24, 2048, 16),
    "3b": (32, 2560, 20),
    "7b": (32, 4096, 32),
    "13b": (40, 5120, 40),
    "30b": (48, 7168, 56),
    "70b": (80, 8192, 64),
}
# model, sequence, GPUs, micro-batch, accumulated, checkpointed, tokens per second and GPU
_ON_H100 = """
70b 2048 64 8 4 1 1039
70b 2048 32 2 16 1 882
30b 8192 8 1 21 1 1384
30b 4096 8 1 21 1 1802
30b 2048 32 14 3 1 2308
30b 2048 16 10 3 1 2263
30b 2048 8 3 21 1 2002
30b 1024 8 6 21 1 2084
13b 4096 8 10 3 1 4717
13b 2048 64 2 1 0 4800
13b 2048 32 2 1 0 4811
13b 2048 16 2 1 0 4767
13b 2048 8 2 1 0 4792
13b 1024 8 40 3 1 5502
7b 8192 8 8 2 1 6935
7b 4096 8 16 2 1 8611
7b 2048 8 6 1 0 10643
7b 1024 8 64 2 1 10203
3b 8192 8 3 6 0 16578
3b 4096 8 5 6 0 20964
3b 2048 64 6 3 0 22525
3b 2048 32 6 3 0 23021
3b 2048 16 10 3 0 24142
3b 1024 8 20 6 0 27046
3b 512 8 40 6 0 27965
1b 8192 8 3 4 0 29157
1b 4096 8 7 4 0 38535
1b 2048 64 20 1 0 44402
1b 2048 32 20 1 0 45130
1b 2048 16 20 1 0 46037
1b 2048 8 14 1 0 45455
1b 1024 8 18 4 0 48910
1b 512 8 56 4 0 52275
760m 8192 8 6 2 0 41825
760m 4096 8 12 2 0 55459
760m 2048 32 24 1 0 67971
760m 2048 16 24 1 0 68551
760m 2048 8 24 2 0 63147
760m 1024 8 48 2 0 78581
760m 512 8 96 2 0 83749
"""
_ON_A100 = """
30b 8192 8 1 21 1 574
30b 4096 8 1 21 1 814
30b 2048 8 3 21 1 916
13b 8192 8 5 3 1 1795
13b 4096 8 10 3 1 2060
13b 2048 8 2 3 0 2262
7b 8192 8 8 2 1 3206
7b 4096 8 16 2 1 3684
7b 2048 8 6 2 0 4641
3b 8192 8 3 6 0 7695
3b 4096 8 5 6 0 9457
3b 2048 8 10 2 0 10811
1b 8192 8 3 4 0 13814
1b 4096 8 7 4 0 17807
1b 2048 8 14 4 0 20513
760m 8192 8 6 2 0 20933
760m 4096 8 12 2 0 27351
760m 2048 8 24 2 0 32434
350m 8192 8 8 2 0 36569
350m 4096 8 16 2 0 49555
350m 2048 8 32 2 0 58782
125m 8192 8 8 2 0 90392
125m 4096 8 16 2 0 118396
125m 2048 8 32 2 0 141737
"""


def foundry() -> Iterator[Row]:
    """MPT under FSDP1, bf16 by mixed precision, flash attention, nothing compiled."""
    for device, text in (("h100", _ON_H100), ("a100", _ON_A100)):
        for line in text.split("\n"):
            if not line:
                continue
            model, *numbers = line.split()
            sequence, gpus, micro, accumulated, kept, tokens = map(int, numbers)
            layers, hidden, heads = _MPT[model]
            yield Row(
                family=f"MPT on {device.upper()}",
                name=f"{model}, {sequence} tokens, FSDP {gpus}, {micro} x {accumulated}"
                + (", recomputed" if kept else ""),
                kind="eager",
                tokens=tokens,
                words=(
                    "fsdp-mixed",
                    f"model={{family: gpt, layers: {layers}, hidden: {hidden}, heads: {heads}, "
                    f"ffn: {4 * hidden}, vocab: 50368, tied: true}}",
                    *(("activations=M", "recompute=full") if kept else ()),
                    f"mesh.dp_shard={gpus}",
                    f"cluster.preset={device}-8",
                    f"cluster.devices={gpus}",
                    f"batch={{global: {gpus * micro * accumulated}, micro: {micro}, "
                    f"sequence: {sequence}}}",
                    *(("sync.gradients=last",) if accumulated > 1 else ()),
                ),
                source=FOUNDRY,
            )


def megatron() -> Iterator[Row]:
    """GPT on A100s: full recomputation and selective with sequence parallelism, 2,048 tokens."""
    sizes = {
        "22B": (48, 6144, 64, 8, 1, 4, 4, 8),
        "175B": (96, 12288, 96, 8, 8, 64, 1, 64),
        "530B": (105, 20480, 128, 8, 35, 280, 1, 280),
        "1T": (128, 25600, 160, 8, 64, 512, 1, 512),
    }
    seconds = {
        "22B": (1.42, 1.10),
        "175B": (18.13, 13.75),
        "530B": (49.05, 37.83),
        "1T": (94.42, 71.49),
    }
    for name, (layers, hidden, heads, tp, pp, batch, micro, gpus) in sizes.items():
        for kept, taken in zip(("full", "attention"), seconds[name], strict=True):
            yield Row(
                family="Megatron-LM",
                name=f"{name}, TP {tp} x PP {pp}, recompute {kept}",
                kind="its own fused kernels",
                tokens=batch * 2048 / taken / gpus,
                words=_megatron(
                    (layers, hidden, heads), tp, pp, 1, batch, micro, kept, is_cut=kept != "full"
                ),
                source=KORTHIKANTI,
            )
    for name, shape, pp, batch, by_gpus in (
        ("175B", (96, 12288, 96), 12, 1536, {384: 153, 768: 149, 1536: 141}),
        ("530B", (105, 20480, 128), 35, 2240, {560: 171, 1120: 167, 2240: 159}),
    ):
        layers, hidden, _ = shape
        per_token = 96 * layers * hidden**2 * (1 + 2048 / 6 / hidden + 51200 / 16 / layers / hidden)
        for gpus, teraflops in by_gpus.items():
            yield Row(
                family="Megatron-LM",
                name=f"{name}, {gpus} GPUs, TP 8 x PP {pp}",
                kind="its own fused kernels",
                tokens=teraflops * 1e12 / per_token,  # its equation 3, recomputation included
                words=_megatron(shape, 8, pp, gpus // (8 * pp), batch, 1, "full", is_cut=False),
                source=NARAYANAN,
            )


def _megatron(
    shape: tuple[int, int, int],
    tp: int,
    pp: int,
    dp: int,
    batch: int,
    micro: int,
    kept: str,
    *,
    is_cut: bool,
) -> tuple[str, ...]:
    layers, hidden, heads = shape
    mesh = {"pp": pp, "dp_replicate": dp, "tp": tp}
    degrees = {axis: degree for axis, degree in mesh.items() if degree > 1}
    placement = {
        "pp": "pp-1f1b",
        "dp_replicate": "ddp",
        "tp": "tp-sp" if is_cut else "tp",
    }
    return (
        "ddp",
        "model={family: gpt, "
        f"layers: {layers}, hidden: {hidden}, heads: {heads}, ffn: {4 * hidden}, vocab: 51200, "
        "tied: true}",
        "attention=eager",
        f"mesh={{{', '.join(f'{axis}: {degree}' for axis, degree in degrees.items())}}}",
        f"placement={{{', '.join(f'{axis}: {placement[axis]}' for axis in degrees)}}}",
        "precision.layout=megatron18",
        "activations=M",
        f"recompute={kept}",
        *(("pipeline.schedule=1f1b",) if pp > 1 else ()),
        "cluster.preset=a100-8",
        f"cluster.devices={pp * dp * tp}",
        f"batch={{global: {batch}, micro: {micro}, sequence: 2048}}",
    )
