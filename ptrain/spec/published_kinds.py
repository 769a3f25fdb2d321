"""The kinds of published models that are built in, each as a row.

A row lists which fields of a config.json are which keys of the spec's section `model`, the keys
that all models of the kind have, and the values that a field may have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ptrain.spec.config_fields import Config, FieldFault

Keys = dict[str, Any]  # of the spec's section `model`
Faults = list[FieldFault]


@dataclass(frozen=True, kw_only=True)
class PublishedKind:
    """The models of one `model_type`.

    `sizes`: keys by field; `usual`: values of fields that a file leaves out; `keys`: keys that all
    of them have; `demands`: the values that a field may have, the first of which is written. `read`
    adds keys of a config and appends its faults, `write` fields of keys.
    """

    architecture: str
    sizes: Mapping[str, str]
    usual: Mapping[str, Any] = field(default_factory=dict)
    keys: Mapping[str, Any] = field(default_factory=dict)
    demands: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    read: Callable[[Config, Faults], Keys] = lambda _, __: {}
    write: Callable[[Keys], Keys] = lambda _: {}


_SIZES = {
    "num_hidden_layers": "layers",
    "hidden_size": "hidden",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "intermediate_size": "ffn",
    "vocab_size": "vocab",
    "rms_norm_eps": "norm_eps",
    "tie_word_embeddings": "tied",
    "head_dim": "head_dim",
}
_OF_EXPERTS = {"num_experts_per_tok": "experts_per_token"}
_PLAIN = {"hidden_act": ("silu", "swish"), "attention_bias": (False,), "mlp_bias": (False,)}
_NO_WINDOW = {"use_sliding_window": (False,)}  # which switches sliding_window off
_OF_GEMMA = {"attention_bias": (False,), "use_bidirectional_attention": (False, None)}
_SCALINGS = {"default": "none", "linear": "linear", "llama3": "llama3"}
_PARTIAL = "partial_rotary_factor"
ANOTHER = "Name another model's folder."
WHOLE = "Name a folder whose config.json is complete."
_GEMMA = {"norm": "rms-plus-one", "activation": "geglu"}
_OF_LLAMA3 = {
    "low_freq_factor": "rope_low_factor",
    "high_freq_factor": "rope_high_factor",
    "original_max_position_embeddings": "rope_original",
}


def _rope(config: Config, faults: Faults) -> Keys:
    """Return the keys of rotations: `rope_parameters`, or in older files `rope_theta` and
    `rope_scaling`."""
    scaling = config.get("rope_scaling") or {}
    rope = {"rope_theta": config.get("rope_theta", 1e4), **scaling}
    rope |= config.get("rope_parameters") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if rope.get(_PARTIAL, config.get(_PARTIAL)) not in (1, None):
        finding = f"{_PARTIAL}: heads that turn in part are not read"
        faults.append(FieldFault(_PARTIAL, finding, ANOTHER))
    if kind not in _SCALINGS:
        finding = f"rotations of the kind {kind!r} are not read"
        faults.append(FieldFault("rope_type", finding, f"Kinds that are: {', '.join(_SCALINGS)}."))
        return {}
    names = {"factor": "rope_factor"} if kind != "default" else {}
    names |= _OF_LLAMA3 if kind == "llama3" else {}
    if missing := [name for name in ("rope_theta", *names) if name not in rope]:
        finding = f"the rotations lack {', '.join(missing)}"
        faults.append(FieldFault("rope_scaling", finding, WHOLE))
        return {}
    keys: Keys = {"rope_base": float(rope["rope_theta"])}
    if names:
        keys["rope_scaling"] = _SCALINGS[kind]
    return keys | {
        key: float(rope[name]) if name == "factor" else rope[name] for name, key in names.items()
    }


def _of_rope(keys: Keys) -> Keys:
    """Return the fields, as files of all ages have them."""
    fields: Keys = {"rope_theta": keys["rope_base"], "rope_scaling": None}
    if (kind := keys["rope_scaling"]) != "none":
        words = {name: keys[key] for name, key in _OF_LLAMA3.items()} if kind == "llama3" else {}
        fields["rope_scaling"] = {"rope_type": kind, "factor": keys["rope_factor"], **words}
    return fields


def _windowed(config: Config, faults: Faults) -> Keys:
    return {**_rope(config, faults), "window": config.get("sliding_window")}


def _of_window(keys: Keys) -> Keys:
    return {**_of_rope(keys), "sliding_window": keys["window"]}


def _gemma(config: Config, faults: Faults) -> Keys:
    return {**_rope(config, faults), "embedding_scale": config["hidden_size"] ** 0.5}


def _gemma2(config: Config, faults: Faults) -> Keys:
    scale = config["query_pre_attn_scalar"] ** -0.5
    keys = {**_gemma(config, faults), "window": config.get("sliding_window")}
    return {**keys, "attention_scale": scale}


def _of_gemma2(keys: Keys) -> Keys:
    scale = keys["attention_scale"] or keys["head_dim"] ** -0.5
    return {**_of_window(keys), "query_pre_attn_scalar": round(scale**-2)}  # a whole number there


def _gemma3(config: Config, faults: Faults) -> Keys:
    """Return the keys of layers by turns, those with windows with rotations of their own, which
    newer files have by kind of layer and older ones beside the others."""
    by_layer = config.get("rope_parameters") or {}
    older = {"rope_theta": config.get("rope_local_base_freq", 1e4)}
    local = _rope({"rope_parameters": by_layer.get("sliding_attention", older)}, faults)
    if local.keys() > {"rope_base"}:
        finding = "rotations of layers with windows are scaled"
        faults.append(FieldFault("rope_parameters", finding, ANOTHER))
    whole = {**config, "rope_parameters": by_layer.get("full_attention")}
    every = config.get(_TURNS, config.get(f"_{_TURNS}", 6))
    own = {"window_rope_base": local.get("rope_base"), "global_every": every}
    return {**_gemma2(whole, faults), **own}


def _of_gemma3(keys: Keys) -> Keys:
    own = {"rope_local_base_freq": keys["window_rope_base"], _TURNS: keys["global_every"]}
    return {**_of_gemma2(keys), **own}


_TURNS = "sliding_window_pattern"
_KIND_OF_GEMMA2 = {
    **_SIZES,
    "attn_logit_softcapping": "attention_soft_cap",
    "final_logit_softcapping": "logit_soft_cap",
}
KINDS: Mapping[str, PublishedKind] = {
    "llama": PublishedKind(
        architecture="LlamaForCausalLM",
        sizes=_SIZES,
        usual={"tie_word_embeddings": False, "rms_norm_eps": 1e-6},
        demands={**_PLAIN, "pretraining_tp": (1,)},
        read=_rope,
        write=_of_rope,
    ),
    "mistral": PublishedKind(
        architecture="MistralForCausalLM",
        sizes=_SIZES,
        usual={"tie_word_embeddings": False, "rms_norm_eps": 1e-6, "sliding_window": 4096},
        demands=_PLAIN,
        read=_windowed,
        write=_of_window,
    ),
    "qwen2": PublishedKind(
        architecture="Qwen2ForCausalLM",
        sizes={name: key for name, key in _SIZES.items() if name != "head_dim"},
        usual={"tie_word_embeddings": False, "rms_norm_eps": 1e-6},
        keys={"bias": "qkv"},
        demands={"hidden_act": _PLAIN["hidden_act"], **_NO_WINDOW},
        read=_rope,
        write=_of_rope,
    ),
    "qwen3": PublishedKind(
        architecture="Qwen3ForCausalLM",
        sizes=_SIZES,
        usual={"tie_word_embeddings": False, "rms_norm_eps": 1e-6, "head_dim": 128},
        keys={"qk_norm": True},
        demands={**_PLAIN, **_NO_WINDOW},
        read=_rope,
        write=_of_rope,
    ),
    "gemma": PublishedKind(
        architecture="GemmaForCausalLM",
        sizes=_SIZES,
        usual={"tie_word_embeddings": True, "rms_norm_eps": 1e-6, "head_dim": 256},
        keys=_GEMMA,
        demands={  # files of its authors say gelu, and mean its approximation
            "hidden_act": ("gelu_pytorch_tanh", "gelu"),
            "hidden_activation": ("gelu_pytorch_tanh", None),
            **_OF_GEMMA,
        },
        read=_gemma,
        write=_of_rope,
    ),
    "gemma2": PublishedKind(
        architecture="Gemma2ForCausalLM",
        sizes=_KIND_OF_GEMMA2,
        usual={
            "tie_word_embeddings": True,
            "rms_norm_eps": 1e-6,
            "head_dim": 256,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
        },
        keys={**_GEMMA, "post_norm": True, "global_every": 2},
        demands={"hidden_activation": ("gelu_pytorch_tanh",), **_OF_GEMMA},
        read=_gemma2,
        write=_of_gemma2,
    ),
    "gemma3_text": PublishedKind(
        architecture="Gemma3ForCausalLM",
        sizes=_KIND_OF_GEMMA2,
        usual={
            "tie_word_embeddings": True,
            "rms_norm_eps": 1e-6,
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "rope_theta": 1e6,
        },
        keys={**_GEMMA, "post_norm": True, "qk_norm": True},
        demands={"hidden_activation": ("gelu_pytorch_tanh",), **_OF_GEMMA},
        read=_gemma3,
        write=_of_gemma3,
    ),
    "starcoder2": PublishedKind(
        architecture="Starcoder2ForCausalLM",
        sizes={
            **{name: key for name, key in _SIZES.items() if key not in ("norm_eps", "head_dim")},
            "norm_epsilon": "norm_eps",
        },
        usual={"tie_word_embeddings": True, "norm_epsilon": 1e-5, "sliding_window": None},
        keys={"family": "gpt", "activation": "gelu-tanh", "positions": "rope"},
        demands={"hidden_act": ("gelu_pytorch_tanh",), "use_bias": (True,)},
        read=_windowed,
        write=_of_window,
    ),
    "phi3": PublishedKind(
        architecture="Phi3ForCausalLM",
        sizes={name: key for name, key in _SIZES.items() if key != "head_dim"},
        usual={"tie_word_embeddings": False, "rms_norm_eps": 1e-5, "sliding_window": None},
        demands={"hidden_act": _PLAIN["hidden_act"], "attention_bias": (False,)},
        read=_windowed,
        write=_of_window,
    ),
    "gpt2": PublishedKind(
        architecture="GPT2LMHeadModel",
        sizes={
            "n_layer": "layers",
            "n_embd": "hidden",
            "n_head": "heads",
            "n_inner": "ffn",
            "vocab_size": "vocab",
            "layer_norm_epsilon": "norm_eps",
            "tie_word_embeddings": "tied",
        },
        usual={"tie_word_embeddings": True, "layer_norm_epsilon": 1e-5},
        keys={"family": "gpt", "activation": "gelu-tanh"},
        demands={
            "activation_function": ("gelu_new",),
            "scale_attn_by_inverse_layer_idx": (False,),
            "scale_attn_weights": (True,),
            "add_cross_attention": (False,),
        },
    ),
    "mixtral": PublishedKind(
        architecture="MixtralForCausalLM",
        sizes={**_SIZES, **_OF_EXPERTS, "num_local_experts": "experts"},
        usual={
            "tie_word_embeddings": False,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "num_experts_per_tok": 2,
        },
        demands=_PLAIN,
        read=_windowed,
        write=_of_window,
    ),
    "qwen3_moe": PublishedKind(
        architecture="Qwen3MoeForCausalLM",
        sizes={
            **_SIZES,
            **_OF_EXPERTS,
            "num_experts": "experts",
            "moe_intermediate_size": "expert_ffn",
            "norm_topk_prob": "router_norm",
        },
        usual={
            "tie_word_embeddings": False,
            "rms_norm_eps": 1e-6,
            "norm_topk_prob": False,
            "num_experts_per_tok": 8,
        },
        keys={"qk_norm": True},
        demands={
            **_PLAIN,
            **_NO_WINDOW,
            "decoder_sparse_step": (1,),
            "mlp_only_layers": ([], None),
        },
        read=_rope,
        write=_of_rope,
    ),
}
# The fields that each reader turns into keys.
_ROPE_FIELDS = ("rope_theta", "rope_scaling", "rope_parameters", _PARTIAL)
_WINDOW_FIELDS = (*_ROPE_FIELDS, "sliding_window")
_GEMMA2_FIELDS = (*_WINDOW_FIELDS, "query_pre_attn_scalar")
FIELDS: Mapping[Callable[[Config, Faults], Keys], tuple[str, ...]] = {
    _rope: _ROPE_FIELDS,
    _windowed: _WINDOW_FIELDS,
    _gemma: _ROPE_FIELDS,
    _gemma2: _GEMMA2_FIELDS,
    _gemma3: (*_GEMMA2_FIELDS, "rope_local_base_freq", _TURNS, f"_{_TURNS}"),
}
