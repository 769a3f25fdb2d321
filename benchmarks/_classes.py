"""Classes of transformers, small, on GPUs: what `cuda_kernels.py` compares of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

_SHAPE = (
    "num_hidden_layers: 2, hidden_size: 1024, num_attention_heads: 8, num_key_value_heads: 2, "
    "intermediate_size: 2816, vocab_size: 512, max_position_embeddings: 1024"
)
_WIDE_HEADS = f"{_SHAPE}, head_dim: 128"
_GPT2 = "n_layer: 2, n_embd: 1024, n_head: 8, vocab_size: 512"
_NO_DROPOUT = "attn_pdrop: 0.0, resid_pdrop: 0.0, embd_pdrop: 0.0"
_BATCH = "batch={global: 4, micro: 2, sequence: 1000}"
_PLACEMENTS = {
    "ddp": ("ddp", "mesh.dp_replicate=2"),
    "tp": ("tp", "mesh.tp=2"),
    "pp": ("pp-1f1b", "mesh.pp=2"),
    "A = M": ("ddp", "mesh.dp_replicate=2", "activations=M"),
}
# a class, its config, how attention is computed
_CLASSES = {
    "Llama": ("LlamaForCausalLM", _SHAPE, "sdpa"),
    "GPT-2": ("GPT2LMHeadModel", _GPT2, "sdpa"),
    "GPT-2, no dropout": ("GPT2LMHeadModel", f"{_GPT2}, {_NO_DROPOUT}", "sdpa"),
    "Qwen2": ("Qwen2ForCausalLM", _SHAPE, "sdpa"),
    "Qwen3": ("Qwen3ForCausalLM", _WIDE_HEADS, "sdpa"),
    "Mistral": ("MistralForCausalLM", _SHAPE, "sdpa"),
    "Gemma2": ("Gemma2ForCausalLM", _WIDE_HEADS, "eager"),
}
_CAPABILITIES = (80, 90, 100)
_CUT = (  # beside every class by itself: class, placement, dtype
    ("Llama", "tp", "bf16"),
    ("Llama", "pp", "bf16"),
    ("Llama", "A = M", "bf16"),
    ("Llama", "A = M", "fp32"),
    ("Qwen3", "tp", "bf16"),
    ("Qwen3", "pp", "fp32"),
    ("GPT-2", "A = M", "bf16"),
    ("Gemma2", "pp", "bf16"),
)


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
        hf, config, attention = _CLASSES[self.name]
        return (
            *_PLACEMENTS[self.placement],
            _BATCH,
            f"model={{hf: {hf}, config: {{{config}}}}}",
            f"attention={attention}",
            f"precision.layout={self.dtype}",
            f"cluster={{preset: h100-8, sm: {self.sm}}}",
        )


def class_cases() -> Iterator[ClassCase]:
    """Yield every class in bf16 and fp32 on every GPU, then those that are cut."""
    for name in _CLASSES:
        for dtype in ("bf16", "fp32"):
            for sm in _CAPABILITIES:
                yield ClassCase(name=name, placement="ddp", dtype=dtype, sm=sm)
    for name, placement, dtype in _CUT:
        yield ClassCase(name=name, placement=placement, dtype=dtype, sm=90)
