"""Remedies name keys that exist, and those that are overrides are accepted and fix their fault."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import ptrain
from ptrain.algebra.legality import require_runnable
from ptrain.errors import Fault, SpecError
from ptrain.spec.load import load

PACKAGE = Path(ptrain.__file__).parent
_VALUE = r'[SRMO*@a-z]+(?:,[SRMO*@a-z]+){3}|"[^"]*"|\{[^}]*\}|\[[^\]]*\]|[^\s,;)`]+'
_OVERRIDE = re.compile(rf"(?<![\w.\-])([a-z_]+(?:\.[a-z_]+)*)=({_VALUE})")
_REMEDY = re.compile(
    r"^(,? ?or|write|give|set|add|use|put|change|name|leave|remove|choose|keep|take|supported"
    r"|what works)\b",
    re.IGNORECASE,
)
_KEY = re.compile(
    r"(?:\b(?:[Ww]rite|[Oo]r|with|[Ss]et|[Gg]ive|[Aa]dd|[Uu]se) |[(`])"
    r"([a-z_]+(?:\.[a-z_…]+)*)(=|: )(?=[\w{\[\"*…])"
)
_PYTHON = {"allow_import", "key"}  # arguments of functions, in remedies for programs
_CONVERTED = {"devices"}  # overrides of converted files only
SCHEMA = json.loads((PACKAGE.parent / "specs/ptrain.schema.json").read_text(encoding="utf-8"))


def properties(node: dict) -> dict:
    """Return the keys of a node of the schema, over all its alternatives."""
    while "$ref" in node:
        node = SCHEMA["$defs"][node["$ref"].rpartition("/")[2]]
    found = dict(node.get("properties", {}))
    for several in ("anyOf", "oneOf", "allOf"):
        for alternative in node.get(several, []):
            found |= properties(alternative)
    return found


def is_route(route: str) -> bool:
    """Return True if a dotted key exists from the top of a spec; `…` stands for any key."""
    node = SCHEMA
    for part in route.split("."):
        if part == "…":
            return True
        known = properties(node)
        if part not in known:
            return False
        node = known[part]
    return True


def names_of_keys(node: dict, depth: int = 0) -> Iterator[str]:
    if depth < 6:
        for name, inner in properties(node).items():
            yield name
            yield from names_of_keys(inner, depth + 1)


def literals(path: Path) -> Iterator[str]:
    """Yield the texts of a module without its docstrings; `…` stands for what is filled in."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    skipped: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            skipped |= {id(value) for value in node.values}
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and isinstance(body[0], ast.Expr):
            skipped.add(id(body[0].value))
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            yield "".join(str(getattr(value, "value", "…")) for value in _filled(node))


def _filled(node: ast.JoinedStr) -> Iterator[ast.Constant]:
    for value in node.values:
        yield value if isinstance(value, ast.Constant) else ast.Constant(value="…")


ROOMS = ("activations", "algebra", "axes", "data", "models", "selection", "spec", "train", "traces")


@pytest.mark.parametrize("room", ROOMS)
def test_keys_in_fixes_are_written_from_the_top_of_a_spec(room):
    keys = set(names_of_keys(SCHEMA))
    wrong = [
        f"{path.name}: {found[1]}{found[2]} in {text!r}"
        for path in sorted((PACKAGE / room).rglob("*.py"))
        for text in literals(path)
        if _REMEDY.search(text)
        for found in _KEY.finditer(text)
        if (found[2] == "=" or found[1].rpartition(".")[2] in keys)
        and found[1] not in _PYTHON | _CONVERTED
        and not is_route(found[1])
    ]
    assert not wrong


def overrides_of(remedy: str) -> Iterator[tuple[str, ...]]:
    """Yield the alternatives of a remedy that are overrides; those joined by `with` together."""
    for alternative in re.split(r",? [Oo]r |; |\. ", remedy):
        found = [f"{key}={value}" for key, value in _OVERRIDE.findall(alternative)]
        if found and not any(re.search(r"=\[?([A-Z]{2,}|N\b|…)", said) for said in found):
            yield tuple(found)


def faults_of(name: str, *overrides: str) -> tuple[Fault, ...]:
    try:
        require_runnable(load(name, overrides))
    except SpecError as error:
        return error.faults
    return ()


REFUSED = [
    ("zero3", "context.attention=ring"),
    ("cp-ring", "batch.sequence=131"),
    ("cp-zigzag", "batch.sequence=130"),
    ("cp-ulysses", "model={preset: llama-tiny, heads: 3, kv_heads: 3, hidden: 96}"),
    ("cp-ring", "context.attention=all-gather"),
    ("cp-all-gather", "context.attention=ulysses"),
    ("cp-ring", "model.window=64"),
    ("cp-ring", "attention=eager"),
    ("cp-ring", "model.dropout=0.1"),
    ("tp-sp", "batch.sequence=127"),
    ("zero3", "tensor.plan=naive"),
    ("zero3", "tensor.experts=folded"),
    ("zero3", "pipeline.schedule=gpipe"),
    ("ddp", "sync.gradients=every"),
    ("optimizer-in-backward", "batch.micro=2"),
    ("optimizer-in-backward", "optimizer.clip=1"),
    ("optimizer-in-backward", "precision.layout=fp16"),
    ("zero1", "prefetch=1"),
    ("zero3", "unit=9 blocks"),
    ("zero1", "sync.reshard_after_forward=false"),
    ("ddp", "reduce_scatter=all_to_all"),
    ("zero3", "offload.update=device"),
    ("zero-offload", "offload.path=/tmp"),
    ("muon", "unit=model"),
    ("checkpoint-full", "recompute=none"),
    ("zero3", "recompute=selective"),
    ("zero3", "loss=vocab-parallel"),
    ("zero3", "loss={chunk: 4, kind: cross-entropy}"),
    ("zero3", "batch.global=15"),
    ("zero3", "batch.accumulate=3"),
    ("zero3", "activations=S"),
    ("pp-zero-bubble", "activations=M"),
    ("zero3", "attention=flex", "device=cpu"),
    ("zero3", "attention=flex", "model.attention_dropout=0.1"),
    ("checkpoint-full", "unit=sub-block"),
    ("tp-naive", "activations=M"),
    ("tp-sp", "tensor.plan=naive"),
    ("zero3", "mesh.dp_shard=64", "batch.global=128"),
    ("zero3", "model.vocab=100"),
    ("zero3", "model.rope_scaling=linear"),
    ("zero3", "placement.dp_shard=M,S,S,R"),
    ("zero3", "frozen.dp_replicate=R"),
    ("zero3", "data.loss_mask=mask.npy"),
    ("zero3", "batch.round=up"),
    ("zero3", "log.trackers=[wandb]", "train.steps=0"),
]


@pytest.mark.parametrize("words", REFUSED, ids=" ".join)
def test_an_override_in_a_fix_is_accepted_and_cures_its_fault(words):
    faults = faults_of(*words)
    assert faults
    for fault in faults:
        for said in overrides_of(fault.remedy):
            left = {(other.place, other.finding) for other in faults_of(*words, *said)}
            assert left < {(other.place, other.finding) for other in faults}, said
