"""The specs of gpu_cases.yaml: slices of the GPU kit, blocks, and classes of transformers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

_CONTENT = yaml.safe_load(Path(__file__).with_name("gpu_cases.yaml").read_text(encoding="utf-8"))
CAPABILITIES = (80, 90, 100)
RANKS = 2  # of steps: one is played, and a single one would not be sharded
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


def words_of(line: str) -> tuple[str, ...]:
    """Return the arguments of a command with placeholders replaced."""
    return tuple(word for name in line.split() for word in _CONTENT["words"].get(name, [name]))


BLOCKS = {name: words_of(line) for name, line in _CONTENT["blocks"].items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassCase:
    """A class on a placement, of a dtype, on GPUs of a compute capability."""

    name: str
    placement: str
    dtype: str
    sm: int

    @property
    def words(self) -> tuple[str, ...]:
        """Return the arguments of the command."""
        its = _CONTENT["classes"][self.name]
        return (
            *words_of(_CONTENT["placements"][self.placement]),
            "batch={global: 4, micro: 2, sequence: 1000}",
            f"model={{hf: {its['hf']}, config: {{{its['config']}}}}}",
            f"attention={its.get('attention', 'sdpa')}",
            f"precision.layout={self.dtype}",
            f"cluster={{preset: h100-8, sm: {self.sm}}}",
        )


def class_cases() -> Iterator[ClassCase]:
    """Yield every class in bf16 and fp32 on every GPU, then the sharded ones."""
    for name in _CONTENT["classes"]:
        for dtype in ("bf16", "fp32"):
            for sm in CAPABILITIES:
                yield ClassCase(name=name, placement="ddp", dtype=dtype, sm=sm)
    for name, placement, dtype in _CONTENT["cut"]:
        yield ClassCase(name=name, placement=placement, dtype=dtype, sm=90)


SLICES = {
    **{name: [words_of(line) for line in lines] for name, lines in _CONTENT["slices"].items()},
    "classes": [case.words for case in class_cases() if case.sm == 90],
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCase:
    """A model, the tokens of a step, and the runs that take turns, of which the last is held
    against the hand-written loop.

    Attributes:
        model: The word that gives the model.
        tokens: Samples and their length.
        runs: Names of `contenders`.
        floor: The MFU that is claimed of the last run, None without a claim.
        is_judged: The speed is compared with the hand-written loop's by a claim.
        has_hand: There is a hand-written loop.
        needs: The key without which the case is left out.
    """

    name: str
    model: str
    tokens: tuple[int, int]
    runs: tuple[str, ...]
    strategy: str = "zero3"
    floor: float | None = None
    is_judged: bool = True
    has_hand: bool = True
    needs: str = ""

    @property
    def title(self) -> str:
        """The name and the strategy."""
        return f"{self.name}, {self.strategy}"

    def words(self, run: str) -> tuple[str, ...]:
        """Return a spec's name and overrides."""
        micro, sequence = self.tokens
        axis = "dp_replicate" if self.strategy == "ddp" else "dp_shard"
        return (
            self.strategy,
            *words_of(self.model),
            f"mesh.{axis}={RANKS}",
            f"batch={{global: {RANKS * micro}, micro: {micro}, sequence: {sequence}}}",
            "precision.layout=bf16",
            "optimizer.lr=3e-4",
            *words_of(_CONTENT["contenders"][run]),
        )


def _step_cases(entry: dict[str, Any]) -> Iterator[StepCase]:
    """Yield the cases of an entry: one for each of its strategies."""
    fields = {**entry, "tokens": tuple(entry["tokens"]), "runs": tuple(entry["runs"])}
    for strategy in fields.pop("strategies", ["zero3"]):
        yield StepCase(**fields, strategy=strategy)


STEP_SLICES = {
    name: [case for entry in entries for case in _step_cases(entry)]
    for name, entries in _CONTENT["steps"].items()
}
GROUPS: dict[str, list[str]] = _CONTENT["groups"]


def capability() -> int:
    """Return the GPU's compute capability: 90."""
    import torch

    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


def asked_words(case: tuple[str, ...], *, is_dry: bool) -> list[str]:
    """Return the arguments of a case: for a GPU's memory, or tiny."""
    if not is_dry:
        return [*case, "device=cuda", f"cluster={{preset: h100-8, sm: {capability()}}}"]
    tiny = TINY_GPT if any("gpt" in word for word in case) else TINY
    if any("hf:" in word for word in case):
        tiny = ("batch.sequence=32",)
    return [*case, *tiny, "device=cpu"]
