"""The specs of gpu_cases.yaml: slices of the GPU kit, blocks, and classes of transformers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

_CONTENT = yaml.safe_load(Path(__file__).with_name("gpu_cases.yaml").read_text(encoding="utf-8"))
CAPABILITIES = (80, 90, 100)


def words_of(line: str) -> tuple[str, ...]:
    """Return what is typed behind a command, with what stands for names written out."""
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
        """What is typed behind a command."""
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
    """Yield every class in bf16 and fp32 on every GPU, then those that are cut."""
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
