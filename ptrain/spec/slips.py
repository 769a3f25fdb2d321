"""Guesses for values that are nearly right, for the remedies of faults."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

TIER_SLIPS = {
    "nvme": "file", "disk": "file", "ssd": "file",
    "cpu": "host", "ram": "host",
    "gpu": "device", "cuda": "device",
}  # fmt: skip
_LAYERS = (
    "experts in some layers only; ptrain puts them in all layers after the first dense_layers",
    (
        "Use `model.dense_layers=N` if the first N layers are dense. Remove the key if it has no "
        "effect."
    ),
)
_FOLDED = (
    (
        "a separate tp degree for experts; ptrain shards experts over the same tp ranks, or "
        "keeps them full"
    ),
    "Remove it if it equals the tp degree. For 1, use `tensor.experts=folded`.",
)
_DISPATCH = "other dispatch methods; ptrain sorts rows by expert and computes one grouped product"
# Other tools' keys for features that are not supported yet: (the feature, the remedy).
UNSUPPORTED: Mapping[tuple[str, ...], tuple[str, str]] = {
    ("model", "decoder_sparse_step"): _LAYERS,
    ("model", "mlp_only_layers"): _LAYERS,
    ("model", "moe_layer_freq"): _LAYERS,
    ("model", "topk_method"): (
        "named routing methods; ptrain has one key per property",
        "Use `model.router`, `model.expert_groups` and `model.bias_update_rate`.",
    ),
    ("model", "shared_expert_intermediate_size"): (
        "a shared expert with a separate width and gate",
        "Use `model.shared_experts=N`, which is N x expert_ffn wide and has no gate.",
    ),
    ("model", "router_jitter_noise"): ("noise on the router's input", "Remove it."),
    ("model", "expert_capacity"): (
        "a capacity in tokens",
        (
            "Use `model.capacity_factor=c`: an expert takes at most c × experts_per_token × "
            "tokens / experts."
        ),
    ),
    ("model", "moe_token_dispatcher_type"): (_DISPATCH, "Remove it."),
    ("model", "moe_grouped_gemm"): (_DISPATCH, "Remove it."),
    ("mesh", "expert_tensor_parallel_size"): _FOLDED,  # Megatron-LM's name, then torchtitan's
    ("mesh", "expert_tensor_parallel_degree"): _FOLDED,
    ("mesh", "etp"): _FOLDED,
    ("expert_tensor_parallel_size",): _FOLDED,
    ("placement", "tp", "experts"): _FOLDED,
}
_RECOMPUTED = ("full", "selective", "attention", "block", "activations", "gradient", "true")
NEAR = 0.7  # difflib ratio below which two words count as unrelated; 0.6 is difflib's default


def closest_word(word: str, known: Iterable[str], *, cutoff: float) -> str:
    """Return the most similar word of `known`, or "" if none reaches `cutoff`."""
    # Imported here: only faults need it, and every start would pay for it.
    from difflib import get_close_matches

    folded = {name.lower(): name for name in reversed(tuple(known))}
    near = get_close_matches(word.lower(), list(folded), n=1, cutoff=cutoff)
    return folded[near[0]] if near else ""


def did_you_mean(meant: str) -> str:
    return f"Did you mean {meant!r}?" if meant else ""


def suggest_word(value: object, known: Iterable[str]) -> str:
    """Return the question whether a similar word of `known` was meant, or ""."""
    return did_you_mean(closest_word(value, known, cutoff=NEAR)) if isinstance(value, str) else ""


def find_by_part(word: str, known: Iterable[str]) -> str:
    """Return the first name that begins or ends with the word: `memory` gives device_memory."""
    names = (name for name in known if name.startswith(f"{word}_") or name.endswith(f"_{word}"))
    return next(names, "")


def normalize_mode(text: str) -> str:
    """Return a mode in standard form: `O@file` is S@file, `R@nvme` is R@file, `s*` is S*."""
    head, at, tier = text.partition("@")
    head, tier = head.upper(), TIER_SLIPS.get(tier.lower(), tier.lower())
    if head == "O" and at:
        head = "S"
    if (head, tier) == ("S", "host"):
        return "O"
    return f"{head}@{tier}" if at and tier != "device" else head


def with_article(noun: str) -> str:
    """Return the noun with its article: `a Linear`, `an Embedding`."""
    return f"{'an' if noun[:1].lower() in set('aeio') else 'a'} {noun}"


def suggest_unit(value: object) -> str:
    """Return a remedy for the size of a unit: `2` means 2 blocks; otherwise the most
    similar word."""
    number = re.fullmatch(r"([1-9][0-9]{0,4})[ _-]*(b[a-z]*)?", str(value).lower())
    if number and not isinstance(value, bool):
        return did_you_mean(f"{number[1]} blocks")
    words = re.fullmatch(r"[a-z _-]*", str(value).lower())  # `0 blocks` is a number, not a word
    return suggest_word(value, ("block", "sub-block", "model")) if words else ""


def suggest_recompute(value: object) -> str:
    """Return a remedy for `checkpoint: full`, which means activation checkpointing in other
    tools."""
    word = str(value).lower()
    if word not in _RECOMPUTED:
        return ""
    policy = word if word in ("selective", "attention") else "full"
    return (
        f"Did you mean `recompute={policy}` with `activations=M`? The section `checkpoint` "
        "controls when the training state is saved (`at_end`, `every`)."
    )


def suggest_size(value: object, size: int | None, low: int, words: Iterable[str]) -> str:
    """Return a remedy for a size below the minimum; a bare number probably means mebibytes."""
    if size is None or not 0 <= size < low:
        return ""
    number = re.fullmatch(r"([1-9][0-9]*)(\.0)? *B?", str(value).strip())
    other = " or ".join(f"`{word}`" for word in words)
    if number:
        return f"Did you mean `{number[1]} MiB`?" + (f" Or use {other}." if other else "")
    return f"Use at least {low} bytes{other and f' or {other}'}."


def suggest_unquoted(value: object) -> str:
    """Return a remedy for a number in quotes, with underscores, or as a list in one string."""
    if isinstance(value, str) and re.fullmatch(r"[-+]?[0-9_.:]+([eE][-+]?[0-9]+)?", value):
        plain = value.replace("_", "")
        return f"Use `{plain}` without quotes or underscores." if ":" not in plain else ""
    if isinstance(value, str) and re.fullmatch(r"[0-9.]+( *, *[0-9.]+)+", value):
        return "Use one number. Only `ptrain predict` and `ptrain validate` accept several: `1,2`."
    return ""


def suggest_null(value: object) -> str:
    """Return a remedy for `clip=none` and the like: YAML writes Python's None as null."""
    is_none = isinstance(value, str) and value.lower() in ("none", "no", "off", "never", "nil")
    return "Use `null`." if is_none or value is False else ""


def suggest_quotes(value: object) -> str:
    is_plain = isinstance(value, bool | int | float)
    return "Put it in quotes to make it a string." if is_plain else ""


def parse_toml(text: str) -> dict[str, object]:
    """Parse a TOML text, the format of torchtitan's job configs. Raises ValueError."""
    from tomllib import loads

    return loads(text)
