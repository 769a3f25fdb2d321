"""Parameter groups of the optimizer: `optimizer.groups` and `optimizer.decay`.

A group overrides hyperparameters for the parameters that its `match` selects, as a parameter group
of torch.optim does. The first group that matches a parameter applies. `match` has kinds, such as
`norms`, and names. Kinds depend only on name and shape, so that a prediction without torch and a
module agree.
"""

import re
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

from ptrain.spec.leaf import (
    Choice,
    Leaf,
    Numbers,
    Real,
    Shape,
    check_part,
    describe,
    find_similar,
    grammar_dataclass,
    reject,
)
from ptrain.spec.placement import matches_pattern

KINDS: Mapping[str, str] = {
    "embeddings": "token and position embeddings",
    "head": "weight and bias of the output layer",
    "matrices": "parameters with two or more dimensions, embeddings and head included",
    "vectors": "parameters with less than two dimensions",
    "norms": "parameters of normalization layers",
    "biases": "parameters that are named `bias`",
}
ALL, MATRICES, NO_NORMS_BIASES = "all", "matrices", "no-norms-biases"
DECAYS: Mapping[str, str] = {
    ALL: "all parameters",
    MATRICES: "parameters with two or more dimensions, as in nanoGPT and Megatron-LM",
    NO_NORMS_BIASES: "all but norms and biases, as in Transformers",
}
# The names of modules in Llama, GPT-2, GPT-NeoX, BERT and their kin, and in this project's models.
_NAMES = {
    "embeddings": r"(.*\.)?(w[tp]e|positions|\w*(?<!un)embed(?!_out)\w*)(\.\d+)?\.weight",
    # not within a numbered layer, whose attention may have an `output`
    "head": r"((?!\d+\.)\w+\.)*(head|lm_head|output|unembed\w*|embed_out|score|classifier)"
    r"\.(weight|bias)",
    "norms": r"(.*\.)?(ln_?\w{0,3}|\w*norm\w*)(\.\d+)?\.\w+",
    "biases": r"(.*[._])?bias",
}


class ParameterGroup(NamedTuple):
    """Hyperparameters of the parameters that `match` selects. None: the optimizer's own value.

    Attributes:
        match: Kinds of parameters, or names of parameters and modules with `*` for a number.
        lr: The peak learning rate.
        lr_factor: The learning rate relative to `optimizer.lr`, instead of `lr`.
    """

    match: tuple[str, ...]
    name: str | None = None
    lr: float | None = None
    lr_factor: float | None = None
    betas: tuple[float, ...] | None = None
    eps: float | None = None
    weight_decay: float | None = None
    momentum: float | None = None

    def selects(self, name: str, dims: int) -> bool:
        """Return True if the group selects a parameter.

        Args:
            name: The dotted name of the parameter.
            dims: Its number of dimensions.
        """
        return any(selects(word, name, dims) for word in self.match)


def selects(word: str, name: str, dims: int) -> bool:
    """Return True if a kind or a name pattern selects a parameter.

    Args:
        word: A kind, or the name of a parameter or a module, with `*` for a number.
        name: The dotted name of the parameter.
        dims: Its number of dimensions.

    Example:
        >>> selects("blocks.*.mlp", "blocks.3.mlp.up.weight", 2)
        True
    """
    match word:
        case "matrices":
            return dims > 1
        case "vectors":
            return dims < 2
        case _ if word in KINDS:
            return _pattern_of(word).fullmatch(name) is not None
    parts = name.split(".")
    return any(matches_pattern(word, ".".join(parts[: n + 1])) for n in range(len(parts)))


@cache
def _pattern_of(kind: str) -> re.Pattern[str]:
    return re.compile(_NAMES[kind], re.IGNORECASE)


def is_decayed(decay: str, name: str, dims: int) -> bool:
    """Return True if the weight decay of the optimizer applies to a parameter.

    Args:
        decay: A key of `DECAYS`.
        name: The dotted name of the parameter.
        dims: Its number of dimensions.
    """
    if decay == MATRICES:
        return dims > 1
    return decay == ALL or not (selects("norms", name, dims) or selects("biases", name, dims))


_WORD = r"[\w*]+(\.[\w*]+)*"


@grammar_dataclass
class GroupList(Leaf):
    """A list of parameter groups. `optimizers` are the names and meanings of optimizers."""

    optimizers: Mapping[str, str]

    def _keys(self) -> dict[str, Leaf]:
        return {
            "name": Choice("Optimizer of the group.", self.optimizers),
            "lr": Real("Peak learning rate.", 0.0, 1e6, excludes_low=True),
            "lr_factor": Real("Learning rate relative to `optimizer.lr`.", 0.0, 1e6),
            "betas": Numbers("Two decay rates.", 0.0, 0.999999, count=2),
            "eps": Real("Epsilon.", 0.0, 1.0, excludes_low=True),
            "weight_decay": Real("Decoupled weight decay.", 0.0, 1e3),
            "momentum": Real("Momentum.", 0.0, 0.999999),
        }

    def describe_values(self) -> str:
        return f"a list of {{match, {', '.join(self._keys())}}}"

    def convert(self, value: Any) -> object:
        if not isinstance(value, list):
            reject(
                f"must be {self.describe_values()}; got {describe(value)}",
                "Use `[{match: norms, weight_decay: 0}]`.",
            )
        return tuple(self._parse_group(number, group) for number, group in enumerate(value, 1))

    def _parse_group(self, number: int, group: object) -> ParameterGroup:
        """Parse one entry; its faults name the group and the key."""
        where, keys = f"group {number}", self._keys()
        if not isinstance(group, dict):
            reject(f"{where} must be a mapping; got {describe(group)}", "Use `{match: norms, …}`.")
        for key in group:
            if key not in keys and key != "match":
                reject(f"{where} has no key {key!r}", f"Allowed keys: match, {', '.join(keys)}.")
        if "lr" in group and "lr_factor" in group:
            reject(f"{where} has lr and lr_factor", "Remove one of the two.")
        if len(group) < 2 or "match" not in group:
            lacks = "no match" if "match" not in group else "no hyperparameter"
            reject(f"{where} has {lacks}", "Use `{match: norms, weight_decay: 0}`.")
        values: dict[str, Any] = {
            key: check_part(keys[key].parse, value, f"{where}, {key}", "Use another value.")
            for key, value in group.items()
            if key != "match"
        }
        return ParameterGroup(match=_parse_match(where, group["match"]), **values)

    def dump(self, value: object) -> object:
        assert isinstance(value, tuple), "parameter groups"
        return [_dump_group(group) for group in value]

    def value_schemas(self) -> tuple[Shape, ...]:
        word: Shape = {"type": "string", "pattern": f"^{_WORD}$"}
        match = {"oneOf": [word, {"type": "array", "items": word, "minItems": 1}]}
        keys = {key: leaf.schema() for key, leaf in self._keys().items()}
        items = {
            "type": "object",
            "properties": {"match": match, **keys},
            "required": ["match"],
            "minProperties": 2,
            "additionalProperties": False,
        }
        return ({"type": "array", "items": items},)


def _dump_group(group: ParameterGroup) -> dict[str, object]:
    """Return a group in file syntax; a single word of `match` is written without a list."""
    said = {key: value for key, value in group._asdict().items() if value is not None}
    said["match"] = group.match[0] if len(group.match) == 1 else group.match
    return {key: list(value) if isinstance(value, tuple) else value for key, value in said.items()}


def _parse_match(where: str, written: object) -> tuple[str, ...]:
    words = written if isinstance(written, list) else [written]
    for word in words:
        if not isinstance(word, str) or not re.fullmatch(_WORD, word):
            reject(
                f"{where}, match must be a kind or a name, or a list of them; got {describe(word)}",
                f"Kinds: {', '.join(KINDS)}. A name is like `blocks.*.mlp`.",
            )
        guess = "" if word in KINDS or "." in word else find_similar(word, tuple(KINDS))
        if guess:
            reject(f"{where}, match: {word} is no kind", f"Did you mean `{guess}`?")
    if not words:
        reject(f"{where}, match is an empty list", f"Kinds: {', '.join(KINDS)}.")
    return tuple(words)
