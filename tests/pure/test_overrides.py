"""Overrides `a.b=c` obey the rules of a file; lists without brackets sweep."""

from __future__ import annotations

import pytest

from ptrain.algebra.legality import require_runnable
from ptrain.errors import Fault, SpecError
from ptrain.spec.dials import SyncPolicy
from ptrain.spec.load import expand, expand_sweeps, load, split_arguments
from ptrain.spec.names import list_files
from ptrain.spec.placement import Axis
from ptrain.spec.spec import Spec


def load_with(name: str, *overrides: str) -> Spec:
    return load(name, overrides).spec


def is_fully_sharded(spec: Spec) -> bool:
    tuples = [str(factor.placement) for factor in spec.factors]
    return tuples == ["S*,S,S,R"] and spec.sync == SyncPolicy()


SHARDED = next(name for name in list_files("strategies") if is_fully_sharded(load(name).spec))


@pytest.mark.parametrize(
    ("override", "read"),
    [
        ("mesh.dp_shard=4", lambda spec: spec.world_size == 4),
        ("mesh.dp=4", lambda spec: spec.world_size == 4),
        ("--mesh.dp_shard=4", lambda spec: spec.world_size == 4),
        ("mesh={dp_shard: 4}", lambda spec: spec.world_size == 4),
        ("train.steps=7", lambda spec: spec.train.steps == 7),
        ("optimizer.lr=3e-4", lambda spec: spec.optimizer.lr == 3e-4),
        ("optimizer.clip=null", lambda spec: spec.optimizer.clip is None),
        ("optimizer.betas=[0.8, 0.9]", lambda spec: spec.optimizer.betas == (0.8, 0.9)),
        ("optimizer.schedule.warmup=3", lambda spec: spec.optimizer.schedule.warmup == 3),
        ("cluster=null", lambda spec: spec.cluster is None),
        ("batch.global=512 tokens", lambda spec: spec.batch.global_samples == 4),
        ("placement.dp_shard=R,S,R,R", lambda spec: str(spec.factors[0].placement) == "R,S,R,R"),
        ("placement.dp_shard.gradients=R", lambda spec: str(spec.factors[0].placement)[5] == "R"),
        ("checkpoint=at_end", lambda spec: spec.checkpoint.at_end),
        ("checkpoint.every=5", lambda spec: spec.checkpoint.every == 5),
        ("profile=3", lambda spec: spec.profile == (3,)),
        ("name=mine", lambda spec: spec.name == "mine"),
        ("model.tied=true", lambda spec: spec.model.tied),
        ("data.path='a,b.bin'", lambda spec: spec.data.path == "a,b.bin"),
    ],
)
def test_an_override_sets_one_key(override, read):
    extra = ["data={tokenizer: bytes}"] if override.startswith("data") else []
    assert read(load_with(SHARDED, *extra, override))
    assert not read(load_with(SHARDED))


def test_the_last_of_two_overrides_wins():
    assert load_with(SHARDED, "train.steps=3", "train.steps=4").train.steps == 4


def test_a_named_strategy_is_written_out_when_an_override_reaches_into_it(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(
        "model: {preset: llama-tiny}\nmesh: {dp_shard: 2}\n"
        f"placement: {SHARDED}\nbatch: {{sequence: 8}}\n"
    )
    plain, changed = load(file).spec, load(file, ["placement.dp_shard.optimizer=R"]).spec
    assert str(plain.factors[0].placement).split(",")[1] == "S"
    assert str(changed.factors[0].placement).split(",")[1] == "R"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["mesh.dp_shard=1,2,4"], [1, 2, 4]),
        (["mesh.dp_shard=1,2", "train.steps=3,4"], [1, 1, 2, 2]),
        (["mesh.dp_shard=2", "optimizer.betas=[0.8,0.9]"], [2]),
        (["placement.dp_shard=S*,S,S,R"], [2]),
        ([], [2]),
    ],
)
def test_a_list_without_brackets_sweeps(overrides, expected):
    documents = expand(SHARDED, overrides)
    assert [document.spec.degree(Axis.DP_SHARD) for document in documents] == expected


def test_a_sweep_over_strategies_names_them():
    sharding = [
        name
        for name in list_files("strategies")
        if [factor.axis for factor in load(name).spec.factors] == [Axis.DP_SHARD]
    ]
    documents = expand(SHARDED, [f"placement={','.join(sharding)}"])
    placements = [document.spec.factors for document in documents]
    assert placements == [load(name).spec.factors for name in sharding]


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("a=1", ["a=1"]),
        ("a=1,2", ["a=1", "a=2"]),
        ("a=[1,2],[3,4]", ["a=[1,2]", "a=[3,4]"]),
        ("a='x,y',z", ["a='x,y'", "a=z"]),
        ("a={b: 1, c: 2}", ["a={b: 1, c: 2}"]),
        ("nothing", ["nothing"]),
        ("placement.dp_shard=X,S,S,R", ["placement.dp_shard=X,S,S,R"]),
        ("placement=S*,S,S,R", ["placement=S*,S,S,R"]),
        ("a=X,Y", ["a=X", "a=Y"]),
        ('a="x,y",z', ['a="x,y"', "a=z"]),
        ("a='\",',z", ["a='\",'", "a=z"]),
        ("a=[{b: 1}, 2],3", ["a=[{b: 1}, 2]", "a=3"]),
    ],
)
def test_commas_in_brackets_and_quotes_do_not_sweep(argument, expected):
    assert [chosen[0] for chosen in expand_sweeps([argument])] == expected


@pytest.mark.parametrize(
    ("override", "place", "finding"),
    [
        ("mesh.dp_shard=x", "mesh.dp_shard", "must be an integer in 1..131072"),
        ("mesh.dp_shard=", "mesh.dp_shard", "got nothing"),
        ("mesh.dp_shad=2", "mesh.dp_shad", "unknown key"),
        ("mseh.dp_shard=2", "mseh", "unknown key"),
        ("mesh.dp_shard", "", "needs a value"),
        ("=3", "", "must start with a key"),
        ("a..b=3", "", "must start with a key"),
        ("a b=3", "", "must start with a key"),
        ("train.steps.x=3", "train.steps.x", "not a mapping"),
        ("train.steps=[1", "train.steps", "not valid YAML"),
        ("train.steps=*x", "train.steps", "aliases"),
        ("train.steps=&x 3", "train.steps", "anchors"),
        ("train.steps=!!int 3", "train.steps", "tags (!!int)"),
        ("train={steps: 3, steps: 4}", "train", "appears twice"),
        ("train.steps=3 # five", "", ""),
        ("optimizer.lr='1e-5'", "optimizer.lr", "got the string '1e-5'"),
        ("optimizer=3", "optimizer", "must be a mapping"),
        ("placement.dp_shard=X,S,S,R", "placement.dp_shard.parameters", "must be a mode"),
        ("placement.dp_shard=R@disk,S,S,R", "placement.dp_shard.parameters", "must be a mode"),
        ("placement=S*,S,S,R", "placement", "four modes need an axis"),
    ],
)
def test_an_error_in_an_override_points_to_the_command_line(override, place, finding):
    if not finding:
        assert load_with(SHARDED, override).train.steps == 3
        return
    with pytest.raises(SpecError) as caught:
        load_with(SHARDED, override)
    (fault,) = caught.value.faults
    assert (fault.source, fault.place, fault.line) == (f"command line: {override}", place, 0)
    assert finding in fault.finding


def test_faults_of_file_and_command_line_come_together(tmp_path):
    file = tmp_path / "bad.yaml"
    file.write_text("model: {preset: llama-tiny}\nmesh: {}\nbatch: {sequence: 0}\n")
    with pytest.raises(SpecError) as caught:
        load(file, ["train.steps=0", "nothing", "optimizer.lr=-1"])
    places = [fault.place for fault in caught.value.faults]
    assert places == ["batch.sequence", "train.steps", "", "optimizer.lr"]


def test_a_token_file_on_the_command_line_replaces_the_files_corpus():
    spec = load("zero3", ["data.path=tokens.npy"]).spec
    assert (spec.data.path, spec.data.corpus) == ("tokens.npy", None)
    again = load(spec.resolved, ["data.corpus=synthetic"]).spec
    assert (again.data.path, again.data.corpus) == (None, "synthetic")
    with pytest.raises(SpecError, match="both a corpus and a path"):
        load("zero3", ["data.path=tokens.npy", "data.corpus=synthetic"])


EXAMPLE = "Use `key=value`, for example `mesh.dp_shard=4`."


def test_spaces_around_the_equals_sign_are_named():
    with pytest.raises(SpecError) as caught:
        split_arguments(["zero3", "mesh.dp_shard", "=", "4"])
    assert caught.value.faults == (
        Fault(
            place="",
            finding="there is a space before '='",
            remedy=f"Remove the spaces around `=`. {EXAMPLE}",
            source="command line",
        ),
    )
    assert split_arguments(["zero3", "a/b=c.yaml", "--a.b=1", "c-d_e=x"]) == (
        ["zero3", "a/b=c.yaml"],
        ["--a.b=1", "c-d_e=x"],
    )


@pytest.mark.parametrize(
    ("override", "finding", "remedy"),
    [
        ("mesh", "an override needs a value; got 'mesh'", EXAMPLE),
        ("a..b=3", "an override must start with a key; got 'a..b'", EXAMPLE),
        (
            "train.steps.x=3",
            "train.steps is the number 50, not a mapping",
            "Set `train.steps` instead.",
        ),
    ],
)
def test_an_override_without_effect_names_one_with_effect(override, finding, remedy):
    with pytest.raises(SpecError) as caught:
        load(SHARDED, ["log.every=5", override])
    (fault,) = caught.value.faults
    assert (fault.finding, fault.remedy) == (finding, remedy)


@pytest.mark.parametrize(("length", "shown"), [(80, "b" * 80), (81, "b" * 77 + "...")])
def test_a_long_override_is_named_by_its_beginning(length, shown):
    with pytest.raises(SpecError) as caught:
        load(SHARDED, ["b" * length])
    assert caught.value.faults[0].source == f"command line: {shown}"


@pytest.mark.parametrize(
    ("override", "is_named"),
    [
        ("optimizer.clip=1.0", True),
        ("batch.micro=2", True),
        ("precision.layout=fp16", True),
        ("gather_after_update=blocking", False),
        ("train.steps=3", False),
        ("name=gradients", False),
    ],
)
def test_an_error_in_the_file_names_the_override_that_causes_it(override, is_named):
    """Consumed gradients are legal in the file, but not with one of these overrides."""
    needed = [] if is_named else ["optimizer.clip=1.0"]
    file = next(path for name, path in list_files("strategies").items() if "in-backward" in name)
    with pytest.raises(SpecError) as caught:
        require_runnable(load(file, [*needed, override]))
    (fault,) = caught.value.faults
    assert fault.line > 0
    named = f"(with {override} from the command line)"
    assert (named in fault.finding) is is_named
    assert needed == [] or f"(with {needed[0]} from" in fault.finding


def test_a_fault_at_an_override_needs_no_other_word_for_it():
    with pytest.raises(SpecError) as caught:
        require_runnable(load(SHARDED, ["bucket=whole"]))
    assert "from the command line" not in caught.value.faults[0].finding
