"""The command `ptrain convert`: another tool's config as a spec, or the way back.

Other commands convert files on the way: `--model` and `--devices` become overrides.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ptrain.charts.canvas import write_atomically
from ptrain.cli.arguments import print_json
from ptrain.errors import PtrainError, SpecError, input_error
from ptrain.report.printed import minimal_spec, sparse_mapping
from ptrain.report.screen import print_lines, screen_width
from ptrain.report.table import Importance, TableColumn, name_column, render_table
from ptrain.spec.foreign import (
    ANSWER,
    DIFFERS,
    NODE_SIZE,
    Conversion,
    KeyEffect,
    KeyOutcome,
    Said,
    find_answer,
    foreign_keys,
    is_spec,
    load_hints,
    set_value,
    shared_answer,
)
from ptrain.spec.foreign_files import iter_leaves, read_tree
from ptrain.spec.foreign_rows import (
    DATA_NAMES,
    PlacementRow,
    as_tuple,
    choose_rows,
    is_case,
    is_number,
    placement_rows,
    value_text,
)
from ptrain.spec.leaf import Route
from ptrain.spec.load import load, read_conversion, split_arguments
from ptrain.spec.model import ModelShape
from ptrain.spec.names import load_names
from ptrain.spec.precision import LAYOUTS
from ptrain.spec.spec import Spec
from ptrain.spec.text import parse_value, to_flow_yaml
from ptrain.spec.write import SIZES, keys_of_shape, to_yaml

_SHOWN = 28  # letters of a value
_OPTIONS = {  # the options of a strategy that decide its row, by family
    "pp": (("pipeline", "schedule"),),
    "cp": (("context", "attention"),),
    "tp": (("tensor", "plan"),),
}


def run(args: Namespace) -> int:
    """Convert one file; return 0.

    Raises:
        PtrainError: If the file has no equivalent, or is no config of a known tool.
    """
    sources, overrides = split_arguments(args.arguments)
    if len(sources) != 1:
        raise PtrainError(f"ptrain convert: takes one FILE or SPEC; got {len(sources)}")
    if args.out is not None and not args.out.parent.is_dir():
        raise input_error("--out", f"there is no folder {args.out.parent}", "Name another file.")
    conversion = read_conversion(sources[0], overrides)
    if args.to is None:
        if conversion is None:
            finding = "is a spec, not a config of another tool"
            raise input_error(sources[0], finding, "Add `--to TOOL`, such as `--to accelerate`.")
        return _write_spec(conversion, sources[0], overrides, args)
    config, outcomes = write_config(load(sources[0], overrides).spec, args.to)
    text = _config_text(config, str(load_hints()["tools"][args.to]["form"]))
    _print_result(text, config, outcomes, args)
    return 0


def _write_spec(
    conversion: Conversion, source: str, overrides: Sequence[str], args: Namespace
) -> int:
    """Print the spec of a file and the outcome of each of its keys.

    Raises:
        SpecError: If the file has no equivalent spec. The outcomes are printed before.
    """
    try:
        spec = load(source, overrides).spec
    except SpecError as error:
        if args.json:
            faults = [
                {"key": f.place, "finding": f.finding, "remedy": f.remedy} for f in error.faults
            ]
            print_json({"spec": None, "faults": faults, "keys": _as_records(conversion.outcomes)})
            return error.exit_code
        print_lines(_outcome_table(conversion.outcomes), stream=sys.stderr)
        raise
    mapping = sparse_mapping(spec)
    _print_result(to_yaml(mapping), mapping, conversion.outcomes, args)
    return 0


def _print_result(
    text: str, mapping: Mapping[str, Any], outcomes: Sequence[KeyOutcome], args: Namespace
) -> None:
    if args.json:
        print_json(
            {"spec" if args.to is None else "config": mapping, "keys": _as_records(outcomes)}
        )
        return
    print_lines(_outcome_table(outcomes), _summary_line(outcomes), stream=sys.stderr)
    if args.out is None:
        print(text, end="")
    else:
        write_atomically(args.out, text.encode(), "--out")


def _as_records(outcomes: Iterable[KeyOutcome]) -> list[dict[str, object]]:
    return [{**row._asdict(), "outcome": row.outcome.value} for row in outcomes]


def _outcome_table(outcomes: Sequence[KeyOutcome]) -> str:
    """Return a line for each key: the ones that a user must read first."""
    order = list(KeyEffect)[::-1]
    rows = sorted(outcomes, key=lambda row: order.index(row.outcome))
    values = [to_flow_yaml(row.value) for row in rows]
    short = [text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…" for text in values]
    columns = [
        name_column("key", [row.key for row in rows]),
        TableColumn("value", Importance.DETAIL, short, left=True),
        TableColumn("outcome", Importance.RESULT, [row.outcome.value for row in rows], left=True),
        TableColumn("spec", Importance.FIGURE, [row.setting for row in rows], left=True),
    ]
    notes = dict.fromkeys(
        f"{row.key}: {row.note}"
        for row in rows
        if row.note and row.outcome in (KeyEffect.DIFFERS, KeyEffect.UNSUPPORTED, KeyEffect.ASSUMED)
    )
    return "\n".join([render_table(columns, screen_width()), *notes])


def _summary_line(outcomes: Sequence[KeyOutcome]) -> str:
    counts = Counter(row.outcome for row in outcomes)
    parts = [f"{counts[outcome]} {outcome.value}" for outcome in KeyEffect if counts[outcome]]
    return f"{len(outcomes)} keys: {', '.join(parts)}"


def _config_text(config: dict[str, Any], form: str) -> str:
    """Return the text of a config in the format of its tool."""
    match form:
        case "json":
            return json.dumps(config, indent=2) + "\n"
        case "arguments":
            return " \\\n".join(map(_argument_text, config.items())) + "\n"
        case "toml":
            return "\n".join(_toml_lines(config)) + "\n"
    return to_yaml(config)


def _argument_text(item: tuple[str, object]) -> str:
    key, value = item
    is_of_launcher = key in ("nproc_per_node", "nnodes")
    name = f"--{key if is_of_launcher else key.replace('_', '-')}"
    return name if value is True else f"{name} {value}"


def _toml_lines(config: Mapping[str, Any]) -> Iterator[str]:
    for section, inner in config.items():
        yield f"[{section}]"
        yield from (f"{key} = {json.dumps(value)}" for key, value in inner.items())


def convert_arguments(args: Namespace) -> None:
    """Turn `--model` and `--devices` of another command into overrides, and print a line for each
    file that is converted.

    Args:
        args: The parsed arguments, which are changed.
    """
    if args.model is not None:
        args.arguments.append(f"model={to_flow_yaml(_model_section(args.model))}")
    sources, overrides = split_arguments(args.arguments)
    devices = [] if args.devices is None else [f"devices={args.devices}"]
    for source in sources:
        is_file = os.path.isfile(source)
        if not is_file and args.verb != "convert":
            continue
        conversion = read_conversion(Path(source) if is_file else source, [*overrides, *devices])
        if conversion is None:
            if is_file and args.verb == "convert" and not is_spec(read_tree(Path(source)).root):
                finding = "is neither a spec nor a config of a known tool: it has no key of either"
                raise input_error(source, finding, "`ptrain help other-tools` lists the tools.")
            continue
        args.arguments += devices
        args.devices, devices = None, []
        if args.verb != "convert":
            line = f"{source} ({conversion.tool['title']}): {_summary_line(conversion.outcomes)}"
            print_lines(f"{line}. `ptrain convert {source}` lists them.", stream=sys.stderr)
    if args.devices is not None and args.verb not in ("predict", "select"):
        finding = "needs a config of another tool; the number of ranks of a SPEC is its mesh"
        raise input_error("--devices", finding, f"Use `mesh.dp_shard={args.devices}`.")


def _model_section(name: str) -> dict[str, object]:
    """Return the section of a model: a preset, or the folder of a published model. Without weights
    in the folder it is the shape or the class of its config.json.

    Raises:
        SpecError: If the config.json is wrong.
    """
    folder = Path(name).parent if name.endswith(".json") else Path(name)
    if not os.path.exists(name):
        return {"preset": name}
    if any(folder.glob("*.safetensors")):
        return {"pretrained": str(folder)}
    probe = {
        "mesh": {"dp_shard": 1},
        "batch": {"global": 1, "sequence": 1},
        "placement": load_names().default,
    }
    try:
        shape = minimal_spec(load({"model": {"pretrained": str(folder)}, **probe}).spec)
    except SpecError as error:
        if "is not a built-in model" not in str(error):
            raise
        return {"config": str(folder / "config.json")}
    section = shape.mapping["model"]
    assert isinstance(section, dict), "a model is a section"
    return {key: value for key, value in section.items() if key != "pretrained"}


def write_config(spec: Spec, name: str) -> tuple[dict[str, Any], list[KeyOutcome]]:
    """Return the config of a tool for a spec, and the outcome of each key of the spec.

    Args:
        spec: A resolved spec.
        name: The tool, a row of `specs/hints.yaml`.

    Returns:
        The config, nested as in the tool's file, and the outcomes.
    """
    tool = load_hints()["tools"][name]
    mapping = _full_mapping(spec)
    plain = {key: mapping[key] for key in ("model", "mesh", "placement", "batch")}
    if isinstance(spec.model, ModelShape):
        plain["model"] = {size: getattr(spec.model, size) for size in SIZES} | tool.get("shape", {})
    return _Writer(mapping, _full_mapping(load(plain).spec), tool).write_keys()


def _full_mapping(spec: Spec) -> dict[str, Any]:
    """Return a spec with all options of a built-in model, and without the model's family."""
    mapping = minimal_spec(spec).mapping
    if isinstance(shape := spec.model, ModelShape):
        rates = {f"{place}_dropout": rate for place, rate in shape.dropouts._asdict().items()}
        keys = keys_of_shape(shape) | rates | {"head_dim": shape.own_head_dim}
        mapping["model"] = {key: keys[key] for key in keys if key not in ("family", "dropout")}
    return mapping


class _Writer:
    """Writes the config of a tool for a spec, by the tables that convert its files."""

    def __init__(
        self, spec: Mapping[str, Any], usual: Mapping[str, Any], tool: Mapping[str, Any]
    ) -> None:
        self.tool, self.usual = tool, dict(iter_leaves((), dict(usual)))
        self.flat = dict(iter_leaves((), dict(spec)))
        self.tuples = {axis: as_tuple(modes) for axis, modes in spec["placement"].items()}
        self.config: dict[str, object] = {}
        self.data: dict[str, tuple[str, ...]] = {}  # the modes of the data axes
        self.outcomes: list[KeyOutcome] = []
        self.settled: set[Route] = set()  # options of the rows that are written
        self.written: set[Route] = {("reshard",), ("activations",), ("recompute",)}
        reshard = self.flat.pop(("sync", "reshard_after_forward"), True)
        self.flat.setdefault(("reshard",), reshard)
        mesh = spec["mesh"]
        data = math.prod(n for axis, n in mesh.items() if axis in (*DATA_NAMES, "ep"))
        self.ranks = math.prod(mesh.values())
        if isinstance(micro := spec["batch"]["micro"], int):
            split = micro if tool.get("splits_batch") and mesh.get("pp", 1) > 1 else 1
            self.flat[("batch", "accumulate")] = spec["batch"]["global"] * split // (micro * data)
        if layout := LAYOUTS.get(spec["precision"]["layout"]):
            self.flat.setdefault(("precision", "reduced"), layout.reduced.value)

    def write_keys(self) -> tuple[dict[str, Any], list[KeyOutcome]]:
        """Return the config and the outcomes."""
        for at, key in enumerate(self.tool.get("devices", ())):
            self.config[key] = 1 if at else self.ranks
        self._write_placement()
        self.config = {**self.tool.get("always", {}), **self.config}
        first, *others = (load_hints()["keys"][name] for name in self.tool["tables"])
        table = dict(first)
        for key in self.tool.get("writes", ()):
            table[key] = next(rows[key] for rows in others if key in rows)
        written, placed = self.written, ("reshard", "activations", "mesh", "placement", "cluster")
        for key, said in table.items():
            if re.fullmatch(self.tool.get("unwritten", ""), key):
                continue
            for route, value, is_conditional, note in self._find_values(said):
                if self._is_usual(key, route, value):
                    continue
                if route not in written or is_conditional:
                    if self.config.get(key) in (None, self.tool.get("always", {}).get(key)):
                        self.config |= {key: value, **self.tool.get("implies", {}).get(key, {})}
                    outcome = KeyEffect.DIFFERS if note else KeyEffect.MAPPED
                    self._add_outcome(route, outcome, f"{key}={value_text(value)}", note)
                    written.add(route)
                    break
        # Each of the two sizes of a batch follows from the other.
        size = "global" if ("batch", "accumulate") in written else "accumulate"
        implied = {("name",), ("precision", "reduced"), ("recompute", "policy"), ("batch", size)}
        has_model = any(route[0] == "model" for route in written)
        for route, value in self.flat.items():
            is_told = route[0] in placed or route in written | implied | self.settled
            is_told |= route[0] == "model" and not has_model
            if not is_told and (route[0] == "batch" or value != self.usual.get(route)):
                self._add_outcome(
                    route, KeyEffect.UNSUPPORTED, note=f"{self.tool['title']} has no such key."
                )
        if not has_model:
            note = f"The model is not in a config of {self.tool['title']}."
            self.outcomes.append(KeyOutcome("model", None, KeyEffect.UNSUPPORTED, note=note))
        return self._nest_keys(), self.outcomes

    def _add_outcome(
        self, route: Route, outcome: KeyEffect, setting: str = "", note: str = ""
    ) -> None:
        key, note = ".".join(route), note.removeprefix(DIFFERS)
        self.outcomes.append(KeyOutcome(key, self.flat.get(route), outcome, setting, note))

    def _is_usual(self, key: str, route: Route, value: object) -> bool:
        """Return True if a file without the key has this value: 0, or the option of a model."""
        is_option = route[0] == "model" and route[-1] not in SIZES
        is_equal = self.flat[route] == self.usual.get(route) and (value == 0 or is_option)
        return is_equal and value is not False and key not in self.tool.get("defaults", {})

    def _write_placement(self) -> None:
        """Write the settings of the rows that place each axis as the spec does."""
        rows = placement_rows(self.tool["flags"][0])
        kept, casts, data = self.flat.get(("activations",), "R"), [], self.data
        for axis in (axis for axis in DATA_NAMES if axis in self.tuples):
            modes = self.tuples.pop(axis)
            kept = modes[3] if kept == "R" else kept
            casts = [row for row in rows if row.family == "cast" and modes[0] == "M"]
            data[axis] = ("S*" if casts else modes[0], *modes[1:3], "R")
        table = load_hints()["keys"][self.tool["tables"][0]]
        if any(str(said).startswith("mesh.ep=") for said in table.values()):
            self.tuples.pop("ep", None)  # the key of its degree is enough
        for axis, modes in self.tuples.items():
            fitting = [r for r in rows if r.family == axis and r.tuples[axis][3] == modes[3]]
            fitting = [row for row in fitting if self._has_options(row)]
            self._write_rows(fitting, "placement", f"{axis}: {','.join(modes)}")
        if data:
            is_by_node = len(data) == 1 or self.flat[("mesh", "dp_shard")] == NODE_SIZE
            fitting = [
                row
                for row in rows
                if row.family in ("data", "offload")
                and row.tuples == data
                and (is_by_node or "N" in row.cases[0].values())
            ]
            # Stable: the first is exact, if any; parameters that stay gathered are the farthest.
            is_kept = ("reshard",)
            fitting.sort(
                key=lambda row: (not self._has_options(row), row.settings.get(is_kept) is False)
            )
            shown = " ⊗ ".join(f"{axis}: {','.join(modes)}" for axis, modes in data.items())
            self._write_rows(
                [row.join_settings(casts) for row in fitting] + fitting, "placement", shown
            )
            self._write_case(casts)
            read = choose_rows(self.tool["flags"], {**self.tool.get("defaults", {}), **self.config})
            row = read.get("data", next(iter(fitting), None))
            resharded = row.settings.get(("reshard",), True) if row else self.flat[is_kept]
            if resharded != self.flat[is_kept]:
                written = to_flow_yaml(resharded)
                note = f"{self.tool['title']} has no setting for it: written as {written}."
                self._add_outcome(is_kept, KeyEffect.UNSUPPORTED, note=note)
        if kept != "R":
            self._write_activations([row for row in rows if row.family == "activations"], kept)

    def _write_activations(self, rows: Sequence[PlacementRow], kept: object) -> None:
        """Write the settings of the row that recomputes or offloads as the spec does."""
        policy = self.flat.get(("recompute",), self.flat.get(("recompute", "policy"), "full"))
        every = ("recompute", "every")
        fitting = [
            row
            for row in rows
            if next(iter(row.tuples.values()))[3] == kept
            and row.settings.get(("recompute",), "full") == policy
            and row.settings.get(every) in (None, self.flat.get(every))
        ]
        # Stable: a row with the number of blocks is the nearest.
        fitting.sort(key=lambda row: every not in row.settings)
        self._write_rows(fitting, "activations", str(kept))

    def _write_rows(self, rows: Sequence[PlacementRow], key: str, shown: str) -> None:
        case = self._write_case(rows)
        outcome = KeyEffect.MAPPED if case else KeyEffect.UNSUPPORTED
        note = "" if case else f"{self.tool['title']} has no setting for it."
        self.outcomes.append(KeyOutcome(key, shown, outcome, case, note))

    def _has_options(self, row: PlacementRow) -> bool:
        """Return True if the options of a row, such as its schedule, are the spec's."""
        if row.family in ("data", "offload"):
            wanted = row.settings.get(("reshard",), True)
            return row.family == "offload" or wanted == self.flat[("reshard",)]
        given, usual = {**self.usual, **self.flat}, self.usual
        options = iter_leaves((), {".".join(route): value for route, value in row.settings.items()})
        wanted = {tuple(".".join(route).split(".")): value for route, value in options}
        routes = _OPTIONS.get(row.family, ())
        return all(given.get(r) == wanted.get(r, usual.get(r)) for r in routes)

    def _write_case(self, rows: Sequence[PlacementRow]) -> str:
        """Write the first settings that contradict none before; return them, or ""."""
        for row, case in ((each, case) for each in rows for case in each.cases):
            if any(not self._can_write(key, text) for key, text in case.items()):
                continue
            fixed = {key: parse_value(text, "").root for key, text in case.items() if text != "N"}
            if all(self.config.get(key, value) == value for key, value in fixed.items()):
                self.config |= fixed
                leaves = iter_leaves((), {".".join(r): value for r, value in row.settings.items()})
                self.settled |= {tuple(".".join(route).split(".")) for route, _ in leaves}
                for name, axis in (self._degree_key(key) for key in case if case[key] == "N"):
                    self.config[name] = self.flat.get(("mesh", axis), 1)
                    self.written.add(("mesh", axis))
                return ", ".join(f"{key}={text}" for key, text in case.items()) or "(no key)"
        return ""

    def _can_write(self, key: str, text: str) -> bool:
        """Return True if a setting can be written: N only if it is the degree of an axis."""
        return text != "N" or bool(self._degree_key(key)[1])

    def _degree_key(self, key: str) -> tuple[str, str]:
        """Return the full name of a key, and the axis whose degree it is, or ""."""
        table = foreign_keys(*self.tool["tables"])
        full = next((name for name in table if name == key or name.endswith(f".{key}")), "")
        answer = find_answer((full,), 2, table)
        is_left_out = re.fullmatch(self.tool.get("unwritten", ""), full)
        match = None if is_left_out else re.match(r"mesh\.(\w+)=N", answer)
        return full, match[1] if match else ""

    def _find_values(self, said: Said) -> Iterator[tuple[Route, object, bool, str]]:
        """Yield the key of the spec that a key of the tool stands for, the tool's value, whether it
        depends on other keys, and a note if the tool does something else, for each answer that the
        spec agrees with."""
        cases = {"": said} if isinstance(said, str) else said
        for case, text in cases.items():
            word, *conditions = case.split(" & ")
            match = ANSWER.fullmatch(shared_answer(text))
            route = tuple(match[1].split(".")) if match else ()
            if not match or "=" in word or route not in self.flat or route[0] == "placement":
                continue
            note = match[3] if (match[3] or "").startswith(DIFFERS) else ""
            if note and self.flat[route] == self.usual.get(route):
                continue
            is_sharded = any(modes[0][0] in "SM" for modes in self.data.values())
            config = {**self.config, "placed": "sharded" if is_sharded else "replicated"}
            if not all(is_case(part, None, config) for part in conditions):
                continue
            right, given = match[2], self.flat[route]
            if right == "VALUE" and isinstance(given, list):
                yield route, given, False, note
            elif match := re.fullmatch(r"N/\{(\w+)\}", right):
                numbers = map(float, map(str, (given, self.config[match[1]])))
                yield route, float(f"{math.prod(numbers):.12g}"), True, note
            elif re.search(r"\bN\b", right):
                items = re.findall(r"[\w.]+", right)
                value = given[items.index("N")] if isinstance(given, list) else given
                if is_number(value) and (len(items) > 1) == isinstance(given, list):
                    yield route, value, isinstance(given, list), note
            elif parse_value(right, "").root == given and (word != "else" or "false" in cases):
                yield (
                    route,
                    True if word in ("", "else") else parse_value(word, "").root,
                    bool(conditions),
                    note,
                )

    def _nest_keys(self) -> dict[str, Any]:
        """Return the config with each key in its section."""
        nested: dict[str, Any] = {}
        for key, value in self.config.items():
            sections = self.tool.get("sections", {}).items()
            inside = [name for name, keys in sections if re.fullmatch(keys, key) and "." not in key]
            set_value(nested, (*inside[:1], *key.split(".")), value)
        return nested
