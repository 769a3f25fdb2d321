"""The architecture as tests: direction of imports, the torch boundary, sizes, and banned code.

A folder is a layer, an axis is two: its rules and cost are pure, `axes/*/run` is torch. A module
imports only from its own layer and from those above it.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from pathlib import Path

from ptrain.spec.job import OPTIMIZERS
from ptrain.steps.wraps import WrapStep
from tests import budgets
from tests.source_tree import SourceTree

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "ptrain"

# One line a layer, read downwards; a pattern matches a whole module name.
LAYERS = (
    r"ptrain\.version",
    r"ptrain\.(errors|units|by_rank|cost|word|wording|timeline|import_path|installed|processor"
    r"|output|codec|command_options|commands|files)",
    r"ptrain\.spec(\..*)?",
    r"ptrain\.facts(\..*)?",
    r"ptrain\.rates(\..*)?",
    r"ptrain\.steps(\..*)?",
    r"ptrain\.runtime\.(interface|ghost)",
    r"ptrain\.optimizers\.(update|ghost|groups)",
    r"ptrain\.axes(\.\w+)?|ptrain\.axes\.(context|data|expert|pipeline|tensor)\.(?!run)\w+"
    r"|ptrain\.activations(\.rules)?|ptrain\.plan(\..*)?|ptrain\.algebra(\..*)?",
    r"ptrain\.derivation(\..*)?",
    r"ptrain\.selection(\..*)?",
    r"ptrain\.report(\..*)?",
    r"ptrain\.xray(\.(observation|infer|findings|screen|hook))?",
    # -------- the torch line
    r"ptrain\.internals(\..*)?",
    r"ptrain\.models(\..*)?",
    r"ptrain\.data(\..*)?",
    r"ptrain\.runtime(\..*)?",
    r"ptrain\.optimizers(\..*)?",
    r"ptrain\.(axes\.\w+|activations)\.run(\..*)?",
    r"ptrain\.interpreter(\..*)?",
    r"ptrain\.traces(\..*)?",
    r"ptrain\.meters(\..*)?",
    r"ptrain\.xray\.watch",
    r"ptrain\.train(\..*)?",
    r"ptrain\.calibration(\..*)?",
    r"ptrain\.simulation(\..*)?",
    r"ptrain\.verification(\..*)?",
    r"ptrain\.charts(\..*)?",
    r"ptrain\.convert(\..*)?",
    r"ptrain\.cli(\..*)?|ptrain\.testing",
    r"ptrain\.pytest_plugin",
    r"ptrain|ptrain\.__main__",
)
TORCH_LINE = next(i for i, layer in enumerate(LAYERS) if "internals" in layer)
PURE_PACKAGES = {"yaml", "ptrain"}

# A closed form is a second opinion: it reads neither what derives nor the orders that run. Those of
# a pipeline's chunks in flight are read by a search, too, and stand in its axis.
CLOSED_FORM = r"tests\.oracles\..*|ptrain\.axes\.pipeline\.cost"
FIRST_OPINION = (
    r"ptrain\.(derivation|runtime|interpreter|optimizers)\b.*"
    r"|ptrain\.axes\.data\.(cuts|theta|gradients|route|update|units|run\b.*)"
    r"|ptrain\.axes\.pipeline\.(instructions|simulate|orders|catalogue|holdings)"
    r"|ptrain\.axes\.(context|expert|tensor)\.cost"
)

# Where an import may be lazy: the dispatcher, the package's __getattr__, one module per extra,
# what a prediction of one sound spec does without, and the functions that a spec's `target:` or a
# user's test names.
LAZY = {
    "ptrain.errors",  # libraries that not everybody has
    "ptrain.cli.doctor",  # torch, in a process of its own
    "ptrain.cli.main",
    "ptrain.cli.arguments",
    "ptrain.cli.predict",
    "ptrain.cli.report",  # torch, to simulate a rank
    "ptrain.cli.progress",  # rich, where a command takes longer than two seconds
    "ptrain.internals.compiled",  # inductor, which starts worker processes when imported
    "ptrain.derivation.archive",
    "ptrain.spec.resolve_sections",
    "ptrain.spec.pipeline",  # csv, for schedules in files
    "ptrain.spec.slips",
    "ptrain",
    "ptrain.xray.hook",  # torch's half, once the job has taken a step
    "ptrain.models.external",
    "ptrain.models.pretrained",
    "ptrain.convert.export",
    "ptrain.cli.export",
    "ptrain.cli.sample",
    "ptrain.train.tracker",
    "ptrain.charts.canvas",
    "ptrain.wording",  # pictures, which only notebooks need
    "ptrain.testing",  # torch, in a rank of a test alone
    "ptrain.pytest_plugin",
}
# The world reads the environment; a launcher hands it on to the ranks it starts; an entry sees in
# it whether the current folder was put on the import path by name; the cache, where it is to be.
ENVIRONMENT = {
    "ptrain.runtime.world",
    "ptrain.train.environment",
    "ptrain.import_path",
    "ptrain.facts.cache",
    "ptrain.report.screen",  # COLUMNS, NO_COLOR and TERM
    "ptrain.runtime.simulated_gpu",  # of the process that it starts
    "ptrain.processor",  # whether ranks may share a GPU
    "ptrain.xray.hook",  # the folder that a watched process writes to
}

# Out of a user's own code anything may come; it ends as one message.
BOUNDARY = {"ptrain.models.boundary", "ptrain.xray.hook"}  # meters must not end a watched job

# A checkpoint's index is a pickle; its reader admits the classes of an index and nothing else.
UNPICKLERS = {"ptrain.train.checkpoint"}

# Rooms (of tests/source_tree.py) that import each other. What is not listed is an error, and so is
# what is listed and gone: the list only shrinks.
MUTUAL_IMPORTS: set[tuple[str, str]] = set()

# Names that classes of two or more modules bear: one noun, one class. This list only shrinks too.
REPEATED_CLASSES = {"Run"}
# Where an axis is named: elsewhere a room is asked, or a notion that another axis may join.
NAMING_CONTEXT = (
    r"ptrain\.axes\.context\..*|ptrain\.spec\.placement|ptrain\.traces\.(settings|work_tables)"
)

MAX_FILE, MAX_FUNCTION = 600, 60


SOURCES = SourceTree(ROOT)
MODULES = SOURCES.modules
CHECKED = MODULES | SOURCES.oracles
PYTHON_FILES = SOURCES.python_files
imports, tree, short = SOURCES.imports, SOURCES.parsed, SOURCES.short
nodes = SOURCES.nodes


def rank(module: str) -> int:
    return next(i for i, layer in enumerate(LAYERS) if re.fullmatch(layer, module))


def calls(path: Path) -> Iterator[tuple[ast.Call, str]]:
    for node in nodes(path, ast.Call):
        yield node, dotted_name(node.func)


def dotted_name(node: ast.AST) -> str:
    """`a.b.c` of names and attributes, else nothing."""
    if isinstance(node, ast.Attribute):
        value = dotted_name(node.value)
        return f"{value}.{node.attr}" if value else ""
    return node.id if isinstance(node, ast.Name) else ""


def strategy_names() -> set[str]:
    """Names of specs that are not also the name of an axis, a layout or an optimizer."""
    other = {"pp", "dp_replicate", "dp_shard", "cp", "ep", "tp", "fsdp-mixed", "muon"}
    return {path.stem for path in (ROOT / "specs" / "strategies").glob("*.yaml")} - other


def test_every_module_has_a_layer():
    for module in MODULES:
        assert any(re.fullmatch(layer, module) for layer in LAYERS), module


def of_all(
    cases: Iterable[Path] | Iterable[str],
) -> Callable[[Callable[..., None]], Callable[[], None]]:
    """One test of all cases, which names all that fail: a test for each would be 4,700, whose
    reports take longer than they do."""

    cases = list(cases)
    assert cases

    def decorated(check: Callable[..., None]) -> Callable[[], None]:
        @wraps(check)
        def test() -> None:
            failures = []
            for case in cases:
                try:
                    check(case)
                except AssertionError as error:
                    failures.append(f"{short(case) if isinstance(case, Path) else case}: {error}")
            assert not failures, "\n".join(failures)

        del test.__wrapped__  # pytest would take its parameter for a fixture
        return test

    return decorated


@of_all(sorted(set(MODULES) - {"ptrain"}))
def test_imports_point_upwards(module):
    downwards = {
        found
        for found in imports(module)
        if found.split(".")[0] == "ptrain" and rank(found) > rank(module) and found != "ptrain"
    }
    assert not downwards, f"{module} imports from below itself: {sorted(downwards)}"


def test_packages_import_each_other_only_if_listed():
    assert SOURCES.mutual_imports() == MUTUAL_IMPORTS


def test_a_class_name_is_repeated_only_if_listed():
    repeated = SOURCES.repeated_classes()
    unlisted = {name: repeated[name] for name in repeated.keys() - REPEATED_CLASSES}
    assert not unlisted, f"a class of that name is elsewhere already: {unlisted}"
    assert repeated.keys() == REPEATED_CLASSES, "names that stand once: take them off the list"


@of_all([m for m in sorted(MODULES) if rank(m) < TORCH_LINE])
def test_the_pure_half_needs_the_standard_library_and_yaml_only(module):
    packages = {found.split(".")[0] for found in imports(module)}
    foreign = packages - PURE_PACKAGES - set(sys.stdlib_module_names)
    assert not foreign, f"{module} stands above the torch line and imports {sorted(foreign)}"


def reachable(module: str) -> set[str]:
    """Return the modules that a module imports, directly or indirectly."""
    seen, left = set[str](), [module]
    while left:
        for name in imports(left.pop()):
            if name in CHECKED and name not in seen:
                seen.add(name)
                left.append(name)
    return seen


@of_all([m for m in sorted(CHECKED) if re.fullmatch(CLOSED_FORM, m)])
def test_closed_forms_do_not_import_the_code_they_check(module):
    known = [name for name in reachable(module) if re.fullmatch(FIRST_OPINION, name)]
    assert not known, f"{module} is a second opinion and must not know {sorted(known)}"


@of_all(sorted(MODULES))
def test_nothing_of_the_package_imports_tests(module):
    foreign = {name for name in imports(module) if name.split(".")[0] == "tests"}
    assert not foreign, f"{module} imports {sorted(foreign)}"


def test_meters_do_not_import_the_prediction():
    expectation = re.compile(r"ptrain\.(plan|derivation|algebra|selection)\b.*")
    for module in MODULES:
        if module.startswith("ptrain.meters"):
            known = [found for found in imports(module) if expectation.fullmatch(found)]
            assert not known, f"{module} measures and must not know {known}"


def reachable_modules(modules: list[str]) -> set[str]:
    """These and all that they import, and what that imports …; the package itself, which names
    what stands in it, leads nowhere."""
    known, to_come = set(modules), list(modules)
    while to_come:
        following = {m for m in imports(to_come.pop()) if m in MODULES and m != "ptrain"}
        to_come += following - known
        known |= following
    return known


def test_executing_code_does_not_import_the_prediction():
    """The program, its loop and their parts. The train command prints prediction and measurement;
    it derives the prediction and passes it on."""
    runs = re.compile(
        r"ptrain\.(models|data|runtime|optimizers|interpreter|train\.(loop|finite|checkpoint))(\..*)?"
        r"|ptrain\.(axes\.\w+|activations)\.run(\..*)?"
    )
    predicts = re.compile(r"ptrain\.(derivation|selection)(\..*)?")
    starts = [module for module in MODULES if runs.fullmatch(module)]
    assert "ptrain.interpreter.program" in starts and "ptrain.train.loop" in starts
    assert not {m for m in reachable_modules(starts) if predicts.fullmatch(m)}
    assert any(predicts.fullmatch(m) for m in reachable_modules(["ptrain.train.session"]))


def test_models_import_no_parallelism():
    """Models import no axis, no activation mode, and nothing that axes build on."""
    below = re.compile(r"ptrain\.(models|data|runtime|optimizers)(\..*)?")
    parallel = re.compile(r"ptrain\.(axes|activations|algebra|derivation|selection)(\..*)?")
    starts = [module for module in MODULES if below.fullmatch(module)]
    assert "ptrain.models.transformer" in starts
    assert not {m for m in reachable_modules(starts) if parallel.fullmatch(m)}


def test_the_program_names_no_axis_and_no_optimizer():
    text = (PACKAGE / "interpreter" / "program.py").read_text(encoding="utf-8")
    axes = r"\b(dp_replicate|dp_shard|tp|pp|cp|ep|Axis|\w+_AXES)\b|plan\.(tensor|pipeline|keep)\b"
    assert not re.search(axes, text)
    assert not re.search(rf"\b({'|'.join(OPTIMIZERS)}|isinstance\(plan)\b", text)
    of_axes = {
        node.name
        for module in MODULES
        if ".axes." in module
        for node in nodes(MODULES[module], ast.ClassDef)
    }
    assert {"StagedModel", "LocalStage", "PipelinedPasses", "FlatWrap"} <= of_axes
    read = ast.walk(SOURCES.parsed(PACKAGE / "interpreter" / "program.py"))
    assert not of_axes & {node.id for node in read if isinstance(node, ast.Name)}
    named = {name for name in imports("ptrain.interpreter.program") if ".axes." in name}
    assert named == {"ptrain.axes.data.run.target"}, "the type of what it exports"


# Where a kind of wrap is named: what lowers to it, words it, executes it, and derives it by hand.
KNOW_WRAPS = re.compile(
    r"ptrain\.steps\.(step|wraps)|ptrain\.plan\.(lower|show)|ptrain\.interpreter\.execute|ptrain\.axes\.data\..*"
    r"|ptrain\.derivation\..*"
)


@of_all(sorted(MODULES))
def test_a_wrap_answers_by_its_interface_alone(module):
    kinds = {kind.__name__ for kind in WrapStep.__subclasses__()}
    assert {"LocalGradients", "Replicate", "FullyShard", "FlatUnits"} <= kinds
    if KNOW_WRAPS.fullmatch(module):
        return
    for node in nodes(MODULES[module], ast.ImportFrom):
        if node.module == "ptrain.steps.wraps":
            named = kinds & {alias.name for alias in node.names}
            assert not named, f"{module} names {sorted(named)}: ask the step, or the wrap"


@of_all(PYTHON_FILES)
def test_files_and_functions_keep_to_the_size_budget(path):
    lines = path.read_text(encoding="utf-8").count("\n")
    assert lines <= MAX_FILE, f"{short(path)} has {lines} lines, more than {MAX_FILE}"
    for name, length in SOURCES.functions(path):
        assert length <= MAX_FUNCTION, f"{short(path)}: {name} has {length} lines"


def test_no_package_has_more_statements_than_its_budget_or_many_fewer():
    wrong = [*budgets.over_or_under(SOURCES.statements_by_package(), budgets.BUDGETS)]
    assert not wrong, "\n".join(wrong)


def test_modules_with_one_importer_only_become_fewer():
    number = len(SOURCES.modules_with_one_importer())
    what, held = "modules with one importer", budgets.ONE_IMPORTER
    wrong = budgets.not_as_held("ONE_IMPORTER", what, number, held)
    assert wrong is None, wrong


def test_modules_of_few_lines_only_become_fewer():
    number = len(SOURCES.modules_below(budgets.SMALL))
    what, held = f"modules below {budgets.SMALL} lines", budgets.SMALL_MODULES
    wrong = budgets.not_as_held("SMALL_MODULES", what, number, held)
    assert wrong is None, wrong


def test_the_loop_has_at_most_120_lines_and_names_no_axis():
    text = (PACKAGE / "train" / "loop.py").read_text(encoding="utf-8")
    assert text.count("\n") <= 120
    assert not re.search(r"\b(dp_replicate|dp_shard|tp|pp|cp|ep|Axis\.\w+)\b", text)


@of_all(sorted(MODULES))
def test_every_module_has_a_docstring_and_packages_are_otherwise_empty(module):
    path = MODULES[module]
    is_package = path.name == "__init__.py" and module != "ptrain"
    is_room = is_package and not re.search(r"\.(run|ghosts|causes|jobs)$", module)
    if not is_package or is_room:
        assert ast.get_docstring(tree(path)), f"{short(path)} has no docstring"
    if is_package:
        assert len(tree(path).body) == is_room, f"{short(path)} holds more than its docstring"


@of_all(sorted(MODULES))
def test_no_module_holds_a_strategys_name(module):
    names = strategy_names()
    held = {node.value for node in nodes(MODULES[module], ast.Constant) if node.value in names}
    assert not held, f"{module} knows the strategies {sorted(held)}: drive it by modes instead"


@of_all(sorted(set(MODULES) - LAZY))
def test_imports_are_at_the_top(module):
    for node in nodes(MODULES[module], ast.FunctionDef, ast.AsyncFunctionDef):
        lazy = [inner for inner in ast.walk(node) if isinstance(inner, ast.Import | ast.ImportFrom)]
        assert not lazy, f"{module}: {node.name} imports lazily"
    called = {name for _, name in calls(MODULES[module])}
    assert not called & {"import_module", "importlib.import_module", "__import__"}, module


@of_all(PYTHON_FILES)
def test_nothing_executes_text_or_unpickles(path):
    for call, name in calls(path):
        assert name not in ("eval", "exec", "os.system", "os.popen", "yaml.unsafe_load"), name
        keywords = {keyword.arg: keyword.value for keyword in call.keywords}
        if name == "yaml.load":
            raise AssertionError(f"{short(path)}: yaml.load; use the loader of ptrain.spec.load")
        shell = keywords.get("shell")
        assert not (isinstance(shell, ast.Constant) and shell.value), f"{short(path)}: shell=True"
        weights_only = keywords.get("weights_only")
        assert not (isinstance(weights_only, ast.Constant) and not weights_only.value), short(path)
    if path.is_relative_to(PACKAGE):
        for node in nodes(path, ast.Import, ast.ImportFrom):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if SOURCES.name_of(path) not in UNPICKLERS:
                assert not {"pickle", "marshal", "shelve", "dill"} & set(names), short(path)


@of_all(sorted(set(MODULES) - BOUNDARY))
def test_no_handler_catches_everything(module):
    for node in nodes(MODULES[module], ast.ExceptHandler):
        kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
        caught = {ast.unparse(kind) if kind else "everything" for kind in kinds}
        assert not caught & {"everything", "Exception", "BaseException"}, f"{module}:{node.lineno}"


@of_all(sorted(set(MODULES) - ENVIRONMENT))
def test_only_the_world_reads_the_environment(module):
    for node in nodes(MODULES[module], ast.Attribute):
        assert dotted_name(node) not in ("os.environ", "os.getenv"), f"{module}:{node.lineno}"


@of_all(MODULES)
def test_only_its_package_names_the_context_axis(module):
    path = MODULES[module]
    named = any(dotted_name(node) == "Axis.CP" for node in nodes(path, ast.Attribute))
    assert not named or re.fullmatch(NAMING_CONTEXT, module)
