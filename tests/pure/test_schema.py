"""The committed JSON Schema equals the grammar's: editors accept what the loader accepts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from ptrain.cli import schema as verb
from ptrain.commands import add_arguments
from ptrain.errors import PtrainError
from ptrain.spec.check import FILE, schema, schema_text
from ptrain.spec.grammar import SpecRaw
from ptrain.spec.leaf import MODE_MEANINGS, Section, section_keys
from ptrain.spec.load import load
from ptrain.spec.names import SPEC_FOLDERS, list_files, specs_folder
from ptrain.spec.placement import MODES, Mode
from ptrain.spec.text import read

VALIDATOR = jsonschema.Draft7Validator(schema())
FILES = list_files(*SPEC_FOLDERS)

RESERVED = [
    "name",
    "context",
    "model",
    "mesh",
    "placement",
    "precision",
    "batch",
    "optimizer",
    "data",
    "step",
    "train",
    "cluster",
    "activations",
    "recompute",
    "pipeline",
    "expert",
    "attention",
    "loss",
    "unit",
    "reshard",
    "overlap",
    "bucket",
    "prefetch",
    "gather_after_update",
    "reduce_scatter",
    "sync",
    "offload",
    "frozen",
    "tensor",
    "device",
    "backend",
    "compile",
    "deterministic",
    "eval",
    "checkpoint",
    "profile",
    "consistency_every",
    "verify_every",
    "overlap_shared_experts",
    "routing",
    "timeout",
    "log",
]


def is_valid(**changes: object) -> bool:
    base = {"model": {"preset": "llama-tiny"}, "mesh": {}, "batch": {"sequence": 8}}
    return bool(VALIDATOR.is_valid(base | changes))


def test_the_committed_schema_is_the_generated_one():
    assert (specs_folder() / FILE).read_text(encoding="utf-8") == schema_text(), (
        "run: ptrain schema --out specs/ptrain.schema.json"
    )


def test_it_is_a_draft_7_schema():
    assert schema()["$schema"] == "http://json-schema.org/draft-07/schema#"
    jsonschema.Draft7Validator.check_schema(schema())


def test_every_key_of_the_contract_is_reserved():
    assert sorted(schema()["properties"]) == sorted(RESERVED)
    assert schema()["additionalProperties"] is False


@pytest.mark.parametrize("name", FILES)
def test_every_spec_and_its_resolved_form_validate(name):
    tree = read(FILES[name])
    VALIDATOR.validate(tree.root)
    VALIDATOR.validate(load(name).spec.resolved)


@pytest.mark.parametrize("name", FILES)
def test_every_spec_names_its_schema_for_editors(name):
    first = FILES[name].read_text(encoding="utf-8").splitlines()[0]
    assert first == f"# yaml-language-server: $schema=../{FILE}"
    assert (FILES[name].parent / ".." / FILE).is_file()


def test_modes_are_completed_with_their_meaning():
    modes = schema()["$defs"]["TupleRaw"]["properties"]["parameters"]["oneOf"]
    offered = {entry["const"]: entry["description"] for entry in modes}
    assert offered == MODE_MEANINGS
    assert {str(mode) for mode in MODES} <= set(offered)
    assert {"R@host", "S@file"} <= set(offered)
    assert all(len(text) > 20 for text in offered.values())
    assert all(Mode.parse(mode) for mode in offered)


def leaves(kind: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    for name, (_, marker) in section_keys(kind).items():
        yield f"{place}{name}", marker
        if isinstance(marker, Section):
            yield from leaves(marker.kind, f"{place}{name}.")


KEYS = dict(leaves(SpecRaw))


@pytest.mark.parametrize("place", KEYS)
def test_every_key_has_a_hover_text(place):
    assert len(KEYS[place].description) > 5


@pytest.mark.parametrize(
    "changes",
    [
        {"mesh": {"dp_shard": 0}},
        {"mesh": {"tpp": 2}},
        {"mesh": {"dp_shard": "two"}},
        {"placement": {"dp_shard": {"parameters": "Q"}}},
        {"optmizer": {}},
        {"optimizer": {"lr": "1e-5"}},
        {"optimizer": {"lr": 0}},
        {"batch": {"global": "many", "sequence": 8}},
        {"train": {"steps": 0}},
        {"device": "tpu"},
        {"name": "a/b"},
        {"cluster": {"device_memory": "80 apples"}},
    ],
)
def test_an_editor_marks_errors_of_the_loader(changes):
    assert is_valid()
    assert not is_valid(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"placement": "a-strategy"},
        {"placement": {"dp_shard": "a-strategy"}},
        {"placement": {"dp_shard": ["S*", "S", "S", "R"]}},
        {"mesh": {"dp_shard": "auto"}},
        {"batch": {"global": "4M tokens", "sequence": 8}},
        {"checkpoint": "at_end"},
        {"checkpoint": {"keep": 3}},
        {"timeout": 60},
        {"bucket": "25 MiB"},
        {"bucket": "per-tensor"},
        {"cluster": {"intra_node_bandwidth": "450 GB/s"}},
        {"activations": {"0-7": "M", "8-": "R"}},
        {"unit": "2 blocks"},
        {"optimizer": {"clip": None}},
        {"sync": {"reshard_after_forward": 2}},
        {"sync": {"reshard_after_forward": "non-root"}},
        {"reshard": "non-root"},
        {"offload": {"tier": "file", "path": "/nvme", "update": "host"}},
        {"frozen": "S*"},
        {"frozen": {"dp_replicate": "O", "dp_shard": "R@host"}},
        {"pipeline": {"schedule": "1f1b", "stages": 4}},
        {"placement": {"ep": {"experts": "S,S,S,S", "rest": "R,R,R,R"}}},
        {"reduce_scatter": "all_to_all"},
        {"reduce_scatter": "stock"},
        {"reduce_scatter": True},
    ],
)
def test_an_editor_accepts_every_form_of_the_grammar(changes):
    assert is_valid(**changes)


def test_the_verb_prints_or_writes_it(tmp_path, capsys):
    from argparse import ArgumentParser

    parser = ArgumentParser()
    add_arguments(parser, "schema")
    assert verb.run(parser.parse_args([])) == 0
    assert json.loads(capsys.readouterr().out) == schema()
    out = tmp_path / "schema.json"
    assert verb.run(parser.parse_args(["--out", str(out)])) == 0
    assert out.read_text(encoding="utf-8") == schema_text()
    with pytest.raises(PtrainError, match="cannot write"):
        verb.run(parser.parse_args(["--out", str(Path(tmp_path, "none", "x.json"))]))
