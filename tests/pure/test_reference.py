"""A key is declared once: reading, writing and documentation follow from the declaration."""

from __future__ import annotations

from dataclasses import fields

import pytest

from ptrain.errors import SpecError
from ptrain.spec.check import KeyRow, iter_key_rows
from ptrain.spec.grammar import SpecRaw
from ptrain.spec.keys import Keys, data_axis_dials
from ptrain.spec.leaf import Leaf, Section, section_keys
from ptrain.spec.load import load
from ptrain.spec.spec import Spec
from ptrain.spec.text import parse_value, to_flow_yaml
from ptrain.spec.write import section_mapping, to_yaml


def rows() -> dict[str, KeyRow]:
    return {row.place: row for row in iter_key_rows()}


def test_every_key_of_the_grammar_has_a_row_with_type_and_meaning():
    assert {place.split(".")[0] for place in rows()} == set(section_keys(SpecRaw))
    assert all(row.takes and len(row.about) > 5 for row in rows().values())


def test_every_example_is_accepted_and_differs_from_the_default():
    accepted = leaves(SpecRaw)
    for row in rows().values():
        place, _, value = row.example.partition("=")
        if not row.example:  # a table of measurements, or a key with one supported value
            is_table = row.place.startswith("cluster.rates.")
            assert row.is_section or is_table or accepted[row.place].supported is not None, (
                row.place
            )
        elif not row.is_section:
            leaf = accepted[place]
            taken = leaf.parse(parse_value(value, "example").root)
            assert taken is not None, row.example
            assert leaf.supported is None or value in map(to_flow_yaml, leaf.supported), row.example
            assert value != row.default or leaf.describe_values() == f"one of {value}", row.example


def leaves(kind: type, above: str = "") -> dict[str, Leaf]:
    """Return the leaf of each dotted key."""
    found: dict[str, Leaf] = {}
    for key, (_, holds) in section_keys(kind).items():
        if isinstance(holds, Section):
            found |= leaves(holds.kind, f"{above}{key}.")
        else:
            found[f"{above}{key}"] = holds
    return found


def test_values_that_are_not_supported_yet_are_marked():
    takes = {place: row.takes for place, row in rows().items()}
    assert not takes["mesh.ep"].startswith("not supported") and takes["mesh.ep"] == takes["mesh.pp"]
    for key, (_, holds) in section_keys(SpecRaw).items():
        executed = getattr(holds, "supported", None)
        if executed is None:
            continue
        words = [to_flow_yaml(value) for value in executed]
        assert ("; not supported yet: " in takes[key]) is bool(words), key
        assert takes[key].startswith(" or ".join(words) or "not supported yet: "), key


@pytest.mark.parametrize(
    ("place", "takes", "default"),
    [
        ("train.steps", "an integer in 1..1000000000", "50"),
        ("optimizer.betas", "a list of 2 numbers in 0..0.999999", "follows"),
        ("optimizer.momentum", "a finite number >= 0 and <= 0.999999", "follows"),
        ("sync.gradients", "one of every, last", "follows"),
        ("deterministic", "true or false", "false"),
        ("prefetch", "an integer in 0..10000, or null", "–"),
        ("batch.sequence", "an integer in 1..100000000", "required"),
        ("unit", "block, sub-block, ends, n blocks or model, or null", "–"),
    ],
)
def test_a_row_describes_the_form_in_a_file(place, takes, default):
    row = rows()[place]
    assert (row.takes, row.default) == (takes, default)


def test_a_default_of_the_reference_is_the_one_that_a_resolved_spec_has():
    resolved = load("zero3").spec.resolved
    for place in ("bucket", "reduce_scatter", "device"):
        assert str(resolved[place]) == rows()[place].default


def test_keys_of_files_and_resolved_specs_are_one_field():
    """A key added to `Keys`, or to a section of it, is read and written by that alone."""
    assert {spot.name for spot in fields(Keys)} < {spot.name for spot in fields(Spec)}
    assert {spot.name for spot in fields(Keys)} < {spot.name for spot in fields(SpecRaw)}


def test_a_section_is_written_as_the_mapping_that_loads_to_it(tmp_path):
    spec = load(
        "pp-zbv", ["optimizer.clip=null", "profile=[1, 2]", "cluster.price=2.5", "bucket=whole"]
    ).spec
    file = tmp_path / "again.yaml"
    file.write_text(to_yaml(spec.resolved), encoding="utf-8")
    assert load(file).spec == spec
    assert spec.cluster is not None and spec.cluster.price == 2.5
    assert section_mapping(spec.optimizer)["clip"] is None


def test_every_option_can_be_set_to_a_value_that_all_placements_accept():
    spec = load("zero3").spec
    for dial in data_axis_dials():
        assert dial.is_free(dial.replace_value(spec, dial.dial.free))
        if dial.dial.other is not None:
            assert not dial.is_free(dial.replace_value(spec, dial.dial.other))
        key, _, text = dial.default_override.partition("=")
        assert key == dial.place and dial.is_free(load("zero3", [f"{key}={text}"]).spec)


def remedy(argument: str) -> str:
    with pytest.raises(SpecError) as caught:
        load("zero3", [argument])
    (fault,) = caught.value.faults
    return fault.remedy


@pytest.mark.parametrize(
    ("argument", "meant"),
    [
        ("seq_len=128", "Use `batch.sequence=128`."),
        ("batch.seq_len=128", "Did you mean 'sequence'?"),
        ("lr=0.1", "Use `optimizer.lr=0.1`."),
        ("optimizer.max_grad_norm=1", "Did you mean 'clip'?"),
        ("optimizer.clip=none", "Use `null`."),
        ("model.n_layers=3", "Did you mean 'layers'?"),
        ("model=llama-tiny", "Use `model.preset=llama-tiny`."),
        ("cluster=h100-8", "Use `cluster.preset=h100-8`."),
        ("precision=bf16", "Use `precision.layout=bf16`."),
        ("train.steps=1e3", "Use `1000`."),
        ("train.steps=1e300", ""),
        ("optimizer.lr=0.0", ""),
        ("precision.layout=float64", ""),
        ("precision=half", "Use `precision.layout=fp16`."),
        ("devices=8", "Did you mean 'cluster.devices'?"),
        ("train.log_every=5", "Did you mean 'log.every'?"),
        ("train.step=5", "Did you mean 'steps'?"),
        ("schedule=3", "Did you mean 'optimizer.schedule' or 'pipeline.schedule'?"),
        ("train.device=cpu", "'device' belongs to the top level of the spec, not to train"),
        ("model=gpu", "Run `ptrain help model` to list all keys."),
        ("cluster=h100", "Use `cluster.preset=h100-8`."),
        ("sede=1", "Did you mean 'train.seed'?"),
        ("foo=1", "Run `ptrain help keys` to list all keys."),
        ("model.foo=1", "Run `ptrain help model` to list all keys."),
        ("tensor.foo=1", "Keys here: plan, loss_parallel, experts, asynchronous."),
    ],
)
def test_a_slip_gets_one_suggestion_in_the_form_of_the_command_line(argument, meant):
    assert remedy(argument) == meant


def test_a_suggestion_uses_the_form_of_the_file(tmp_path):
    file = tmp_path / "own.yaml"
    text = to_yaml(load("zero3").spec.resolved).replace("precision: {layout: fp32}", "")
    file.write_text(f"{text}\nprecision: bf16\n", encoding="utf-8")
    with pytest.raises(SpecError) as caught:
        load(file)
    assert caught.value.faults[0].remedy == "Use `precision: {layout: bf16}`."


def test_a_model_of_a_file_is_written_out_without_the_files_name(tmp_path):
    """What ran can be rerun from another folder."""
    shape = "family: llama\nlayers: 2\nhidden: 64\nheads: 2\nffn: 96\nvocab: 259\n"
    (tmp_path / "shape.yaml").write_text(shape, encoding="utf-8")
    file = tmp_path / "own.yaml"
    file.write_text(
        "model: {preset: shape.yaml}\nmesh: {dp_shard: 1}\nbatch: {micro: 1, sequence: 16}\n",
        encoding="utf-8",
    )
    spec = load(file).spec
    assert "preset" not in spec.resolved["model"]
    assert load(spec.resolved).spec.model == spec.model


def test_roles_of_nothing_are_no_roles():
    assert load("zero3", ["tensor={plan: {}}"]).spec.tensor.plan == "paired"
