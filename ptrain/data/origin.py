"""Which tokenizer made a token file, as a record beside the file: the same numbers are other words
to another tokenizer, and nothing in a file of numbers says so."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from ptrain.codec import decode, encode
from ptrain.data.vocabulary import FILE
from ptrain.errors import refused
from ptrain.spec.model import ModelShape, ModelSpec

_BYTES = "bytes"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenOrigin:
    """What made the tokens of a file: the `tokenizer` as it was named, or bytes, and a digest of
    the words that its numbers mean."""

    tokenizer: str
    digest: str

    @property
    def is_of_bytes(self) -> bool:
        return self.digest == _BYTES

    @property
    def has_changed(self) -> bool:
        """Whether the tokenizer is gone, or gives other words to the same numbers now."""
        now = origin_of(Path(self.tokenizer))
        return now is None or now.digest != self.digest

    def differs(self, tokenizer: Path) -> bool:
        """Return whether a tokenizer.json is known to give other words to the same numbers."""
        other = origin_of(tokenizer)
        return other is not None and other.digest != self.digest


def origin_of(tokenizer: Path | None) -> TokenOrigin | None:
    """Return the origin of tokens that a tokenizer.json makes, or, of None, bytes; None of a file
    whose words cannot be read."""
    if tokenizer is None:
        return TokenOrigin(tokenizer=_BYTES, digest=_BYTES)
    try:
        digest = _digest(tokenizer, tokenizer.stat().st_mtime_ns)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return TokenOrigin(tokenizer=str(tokenizer), digest=digest)


def record_beside(path: Path) -> Path:
    """Return where the origin of a token file stands."""
    return path.with_suffix(".tokenizer.json")


def write_origin(path: Path, origin: TokenOrigin) -> None:
    record_beside(path).write_text(f"{json.dumps(encode(origin))}\n", encoding="utf-8")


def read_origin(path: Path) -> TokenOrigin | None:
    """Return the origin of a token file; None where nothing beside it says so."""
    try:
        plain = json.loads(record_beside(path).read_text(encoding="utf-8"))
        origin: TokenOrigin = decode(plain, TokenOrigin)
    except (OSError, ValueError):
        return None
    return origin


def require_tokenizer(name: str, origin: TokenOrigin | None, model: ModelSpec) -> None:
    """Raises SpecError where a model begins with a folder whose tokenizer gives other words to the
    numbers in the file of this name."""
    if origin is None or not isinstance(model, ModelShape) or model.pretrained is None:
        return
    own = Path(model.pretrained) / FILE
    if origin.differs(own):
        finding = f"{name} has tokens of {origin.tokenizer}, and the model's are of {own}"
        remedy = f"make it with: ptrain tokenize TEXT... --tokenizer {model.pretrained}; or, where "
        remedy += f"that is meant, remove {record_beside(Path(name))}"
        raise refused("data", finding, remedy)


def require_one_tokenizer(origins: Sequence[tuple[str, TokenOrigin | None]]) -> None:
    """Raises SpecError where two files, each with its name, are of tokenizers that give other words
    to the same numbers."""
    known = [(name, origin) for name, origin in origins if origin is not None]
    for name, origin in known[1:]:
        first, before = known[0]
        if origin.digest != before.digest:
            finding = f"{first} has tokens of {before.tokenizer}, and {name} of {origin.tokenizer}"
            raise refused(
                "data.sources", finding, "make them with one: ptrain tokenize --tokenizer"
            )


@lru_cache(maxsize=4)
def _digest(tokenizer: Path, changed: int) -> str:
    """Return a digest of the words and their numbers, of a file that was `changed` then; how texts
    are split may differ."""
    words = sorted(_words(json.loads(tokenizer.read_text(encoding="utf-8"))).items())
    return hashlib.blake2b(json.dumps(words).encode(), digest_size=8).hexdigest()


def _words(content: Any) -> dict[str, int]:
    """Return the number of each word: of models with probabilities its place in a list."""
    vocab = content["model"]["vocab"]
    if isinstance(vocab, list):
        vocab = {word: number for number, (word, _) in enumerate(vocab)}
    added = content.get("added_tokens") or ()
    return {**vocab, **{token["content"]: token["id"] for token in added}}
