"""The config.json of a published model as the keys of a built-in one, and back.

A kind of model is a row: which of its fields is which key, what all models of the kind have, and
what a field has to be where nothing else is built here. Words that say nothing of what is computed
(ids of tokens, how weights are drawn, dropout, which is the spec's to say) are passed over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Keys = dict[str, Any]  # of the spec's section `model`
Config = Mapping[str, Any]


class UnfitConfig(Exception):
    """A config that no built-in model has; a finding and a remedy."""

    def __init__(self, finding: str, remedy: str) -> None:
        super().__init__(finding)
        self.finding, self.remedy = finding, remedy


@dataclass(frozen=True, kw_only=True)
class PublishedKind:
    """Models of one `model_type`. `sizes`: keys by field; `usual`: what a field is where a file
    leaves it out; `keys`: those that all have; `demands`: what fields may be, the first of which is
    written. `read` adds keys of a config, `write` fields of keys."""

    architecture: str
    sizes: Mapping[str, str]
    usual: Mapping[str, Any] = field(default_factory=dict)
    keys: Mapping[str, Any] = field(default_factory=dict)
    demands: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    read: Callable[[Config], Keys] = lambda _: {}
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
_NO_WINDOW = {"use_sliding_window": (False,)}
_OF_GEMMA = {"attention_bias": (False,), "use_bidirectional_attention": (False, None)}
_SCALINGS = {"default": "none", "linear": "linear", "llama3": "llama3"}
_PARTIAL = "partial_rotary_factor"
_ANOTHER = "name another model's folder"
_GEMMA = {"norm": "rms-plus-one", "activation": "geglu"}
_OF_LLAMA3 = {
    "low_freq_factor": "rope_low_factor",
    "high_freq_factor": "rope_high_factor",
    "original_max_position_embeddings": "rope_original",
}


def _rope(config: Config) -> Keys:
    """Return the keys of rotations: `rope_parameters`, or in older files `rope_theta` and
    `rope_scaling`."""
    scaling = config.get("rope_scaling") or {}
    rope = {"rope_theta": config.get("rope_theta", 1e4), **scaling}
    rope |= config.get("rope_parameters") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in _SCALINGS:
        finding = f"rotations of the kind {kind!r} are not read"
        raise UnfitConfig(finding, f"what is read: {', '.join(_SCALINGS)}")
    if rope.get(_PARTIAL, config.get(_PARTIAL)) not in (1, None):
        raise UnfitConfig(f"{_PARTIAL}: heads that turn in part are not read", _ANOTHER)
    keys: Keys = {"rope_base": float(rope["rope_theta"])}
    if kind != "default":
        keys |= {"rope_scaling": _SCALINGS[kind], "rope_factor": float(rope["factor"])}
    if kind == "llama3":
        keys |= {key: rope[name] for name, key in _OF_LLAMA3.items()}
    return keys


def _of_rope(keys: Keys) -> Keys:
    """Return the fields, as files of all ages have them."""
    fields: Keys = {"rope_theta": keys["rope_base"], "rope_scaling": None}
    if (kind := keys["rope_scaling"]) != "none":
        words = {name: keys[key] for name, key in _OF_LLAMA3.items()} if kind == "llama3" else {}
        fields["rope_scaling"] = {"rope_type": kind, "factor": keys["rope_factor"], **words}
    return fields


def _windowed(config: Config) -> Keys:
    return {**_rope(config), "window": config.get("sliding_window")}


def _of_window(keys: Keys) -> Keys:
    return {**_of_rope(keys), "sliding_window": keys["window"]}


def _gemma(config: Config) -> Keys:
    return {**_rope(config), "embedding_scale": config["hidden_size"] ** 0.5}


def _gemma2(config: Config) -> Keys:
    scale = config["query_pre_attn_scalar"] ** -0.5
    return {**_gemma(config), **_windowed(config), "attention_scale": scale}


def _of_gemma2(keys: Keys) -> Keys:
    scale = keys["attention_scale"] or keys["head_dim"] ** -0.5
    return {**_of_window(keys), "query_pre_attn_scalar": round(scale**-2)}  # a whole number there


def _gemma3(config: Config) -> Keys:
    """Return the keys of layers by turns, those with windows with rotations of their own, which
    newer files have by kind of layer and older ones beside the others."""
    by_layer = config.get("rope_parameters") or {}
    older = {"rope_theta": config.get("rope_local_base_freq", 1e4)}
    local = _rope({"rope_parameters": by_layer.get("sliding_attention", older)})
    if local.keys() != {"rope_base"}:
        raise UnfitConfig("rotations of layers with windows are scaled", _ANOTHER)
    whole = {**config, "rope_parameters": by_layer.get("full_attention")}
    every = config.get(_TURNS, config.get(f"_{_TURNS}", 6))
    return {**_gemma2(whole), "window_rope_base": local["rope_base"], "global_every": every}


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
# A field that another one stands for in files of other versions.
_ALIASES = {"num_experts": "num_local_experts"}
REFUSED = {
    "auto_map": "it names code that comes with the weights, which never runs",
    "quantization_config": "its weights are quantized, and those of a training are precision's",
}


def require_plain(config: Config) -> None:
    """Raises UnfitConfig for code and quantized weights."""
    for name, finding in REFUSED.items():
        if config.get(name):
            remedy = "name a folder of plain weights of a class that transformers has itself"
            if name == "auto_map":
                remedy += "; if this class is one, take the field out of config.json"
            raise UnfitConfig(f"{name}: {finding}", remedy)


def keys_of(config: Config) -> Keys:
    """Return the keys of the built-in model that a config is of. Raises UnfitConfig where there is
    none, and as `require_plain`."""
    require_plain(config)
    kind = KINDS.get(name := str(config.get("model_type")))
    if kind is None:
        finding = f"model_type {name!r} is not read as a built-in model"
        remedy = f"what is read: {', '.join(KINDS)}; any other causal language model of "
        raise UnfitConfig(finding, f"{remedy}transformers with model.hf, its class, beside it")
    config = {**kind.usual, **_with_aliases(kind, config)}
    for name, allowed in kind.demands.items():
        if name in config and config[name] not in allowed:
            finding = f"{name} is {config[name]!r}, and built here is {allowed[0]!r}"
            raise UnfitConfig(finding, _ANOTHER)
    said = {key: config.get(name) for name, key in kind.sizes.items()}
    if said["tied"] is None:
        said["tied"] = kind.usual["tie_word_embeddings"]
    try:
        keys = {**kind.keys, **said, **kind.read(config)}
        _require_layers(config, keys)
        return {key: value for key, value in keys.items() if not _is_void(key, value, keys)}
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        finding = f"a field is missing or no number: {error}"
        raise UnfitConfig(finding, "name a folder whose config.json is whole") from error


def config_of(name: str, keys: Keys) -> Keys:
    """Return the config of a model with these keys, said in full, as one of the kind `name`. Which
    keys it cannot say shows when it is read again."""
    kind = KINDS[name]
    config = {
        "architectures": [kind.architecture],
        "model_type": name,
        **{field: allowed[0] for field, allowed in kind.demands.items()},
        **{field: keys[key] for field, key in kind.sizes.items()},
        **kind.write(keys),
    }
    return config | {other: config[field] for field, other in _ALIASES.items() if field in config}


def _with_aliases(kind: PublishedKind, config: Config) -> Config:
    more = {
        name: config[other]
        for name, other in _ALIASES.items()
        if name in kind.sizes and name not in config and other in config
    }
    return {**config, **more}


def _require_layers(config: Config, keys: Keys) -> None:
    """Raises UnfitConfig where layers have windows other than by turns, as `global_every` says."""
    has_windows, every = keys.get("window") is not None, keys.get("global_every")
    for layer, kind in enumerate(config.get("layer_types") or ()):
        is_global = not has_windows or (every and (layer + 1) % every == 0)
        if kind != (own := "full_attention" if is_global else "sliding_attention"):
            finding = f"layer_types: layer {layer} is {kind!r}, and built here is {own!r}"
            raise UnfitConfig(finding, _ANOTHER)


def _is_void(key: str, value: object, keys: Keys) -> bool:
    """Return whether a key says what stands without it too."""
    usual = {
        "head_dim": keys["hidden"] / keys["heads"],
        "attention_scale": (keys.get("head_dim") or keys["hidden"] / keys["heads"]) ** -0.5,
    }
    return value is None or (key in usual and value == usual[key])
