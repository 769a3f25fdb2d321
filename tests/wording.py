"""How many names and docstrings are to be reworded, by file, and the share of comments by package.

    python -m tests.wording [--write]

Prints the figures of the checkout as this file has them; --write puts them here. The figures of a
file may only fall. A module that is moved or merged takes its figures along: --write.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from tests.budgets import with_table
from tests.source_tree import AXES, SourceTree

WRITE = "python -m tests.wording --write"
# Participles that do not end in -ed, and words of other kinds that do.
IRREGULAR = {
    "said", "held", "sent", "kept", "known", "given", "found", "told", "made", "taken", "drawn",
    "left", "lost", "met", "written", "shown", "built", "spent", "gone", "done", "seen", "hidden",
    "chosen", "broken", "begun", "torn", "born", "died",
}  # fmt: skip
REGULAR = {"seed", "need", "feed", "speed", "embed", "shed"}
# Prepositions, adjectives and pronouns, which name neither a thing nor an action.
EMPTY = {
    "of", "at", "in", "on", "by", "to", "for", "from", "with", "without", "around", "apart",
    "beside", "behind", "ahead", "within", "after", "before", "between", "beyond", "then", "alike",
    "own", "whole", "plain", "alone", "only", "same", "other", "another", "each", "every", "what",
    "who", "why", "how", "when", "where", "which", "none", "nothing", "but", "not", "such",
}  # fmt: skip
FILLERS = {"found", "told", "asked", "made", "each"}  # also counted as variables and parameters
FRAGMENT = re.compile(
    r"(?:Return|Yield)s? (?:what|by|of|those|it|them|where|how|whose|which|whether|that)\b"
    r"|(?:What|Of|Whether|Nothing|Those|Its|Every|The same|None|Whose|Which|As|By|In|Within|Where"
    r"|With|How)\b"
)
SLACK = 2  # tenths of a percent by which a package's comments may fall

Functions = ast.FunctionDef | ast.AsyncFunctionDef


class Words(NamedTuple):
    """The figures of one file."""

    one_word: int  # functions whose names are one word
    bare: int  # distinct names that are a participle, preposition, adjective or pronoun
    fragments: int  # docstrings that open with a fragment


# begin
FILES: dict[str, Words] = {
    "ptrain/activations/run/apply.py": Words(8, 0, 0),
    "ptrain/algebra/legality.py": Words(2, 0, 0),
    "ptrain/axes/candidates.py": Words(5, 1, 0),
    "ptrain/axes/context/attention.py": Words(0, 2, 0),
    "ptrain/axes/context/cost.py": Words(2, 0, 0),
    "ptrain/axes/context/run/apply.py": Words(8, 0, 0),
    "ptrain/axes/context/run/rehearsal.py": Words(7, 1, 0),
    "ptrain/axes/context/run/slices.py": Words(8, 2, 0),
    "ptrain/axes/data/cuts.py": Words(2, 0, 0),
    "ptrain/axes/data/run/apply.py": Words(3, 0, 0),
    "ptrain/axes/data/run/flat.py": Words(13, 0, 0),
    "ptrain/axes/data/run/flat_target.py": Words(26, 0, 0),
    "ptrain/axes/data/run/summing.py": Words(1, 0, 0),
    "ptrain/axes/data/run/target.py": Words(16, 0, 0),
    "ptrain/axes/data/theta.py": Words(15, 0, 0),
    "ptrain/axes/data/units.py": Words(11, 1, 0),
    "ptrain/axes/data/update.py": Words(14, 0, 0),
    "ptrain/axes/expert/cost.py": Words(2, 0, 0),
    "ptrain/axes/expert/form.py": Words(2, 1, 0),
    "ptrain/axes/expert/run/apply.py": Words(8, 1, 0),
    "ptrain/axes/pipeline/orders.py": Words(4, 0, 0),
    "ptrain/axes/pipeline/run/cut.py": Words(8, 0, 0),
    "ptrain/axes/pipeline/run/passes.py": Words(1, 0, 0),
    "ptrain/axes/pipeline/run/stage.py": Words(13, 0, 0),
    "ptrain/axes/pipeline/schedule.py": Words(1, 0, 0),
    "ptrain/axes/pipeline/simulate.py": Words(6, 0, 0),
    "ptrain/axes/ring.py": Words(1, 0, 0),
    "ptrain/axes/rule.py": Words(1, 1, 0),
    "ptrain/axes/tensor/cost.py": Words(3, 0, 0),
    "ptrain/axes/tensor/run/apply.py": Words(10, 0, 0),
    "ptrain/axes/tensor/run/styles.py": Words(41, 1, 0),
    "ptrain/by_rank.py": Words(7, 0, 0),
    "ptrain/calibration/bench.py": Words(5, 0, 0),
    "ptrain/calibration/host.py": Words(8, 3, 0),
    "ptrain/calibration/session.py": Words(9, 0, 0),
    "ptrain/calibration/write.py": Words(1, 0, 0),
    "ptrain/charts/canvas.py": Words(1, 0, 0),
    "ptrain/charts/memory.py": Words(1, 0, 0),
    "ptrain/charts/schedule.py": Words(0, 1, 0),
    "ptrain/charts/sheet.py": Words(3, 1, 0),
    "ptrain/cli/arguments.py": Words(1, 0, 0),
    "ptrain/cli/cache.py": Words(1, 0, 0),
    "ptrain/cli/calibrate.py": Words(1, 0, 0),
    "ptrain/cli/checkpoints.py": Words(1, 0, 0),
    "ptrain/cli/compare.py": Words(1, 0, 0),
    "ptrain/cli/completion.py": Words(3, 0, 0),
    "ptrain/cli/convert.py": Words(1, 1, 0),
    "ptrain/cli/doctor.py": Words(1, 1, 0),
    "ptrain/cli/export.py": Words(1, 0, 0),
    "ptrain/cli/help.py": Words(1, 0, 0),
    "ptrain/cli/main.py": Words(2, 0, 0),
    "ptrain/cli/plan.py": Words(1, 0, 0),
    "ptrain/cli/predict.py": Words(1, 0, 0),
    "ptrain/cli/progress.py": Words(2, 0, 0),
    "ptrain/cli/report.py": Words(1, 0, 0),
    "ptrain/cli/sample.py": Words(1, 0, 0),
    "ptrain/cli/schema.py": Words(1, 0, 0),
    "ptrain/cli/select.py": Words(1, 0, 0),
    "ptrain/cli/selftest.py": Words(2, 1, 0),
    "ptrain/cli/simulate.py": Words(1, 0, 0),
    "ptrain/cli/specs.py": Words(2, 0, 0),
    "ptrain/cli/tokenize.py": Words(2, 0, 0),
    "ptrain/cli/train.py": Words(1, 0, 0),
    "ptrain/cli/validate.py": Words(1, 0, 0),
    "ptrain/cli/verify.py": Words(1, 0, 0),
    "ptrain/cli/why_oom.py": Words(1, 0, 0),
    "ptrain/cli/xray.py": Words(1, 0, 0),
    "ptrain/codec.py": Words(4, 1, 0),
    "ptrain/command_options.py": Words(3, 0, 0),
    "ptrain/convert/export.py": Words(0, 3, 0),
    "ptrain/convert/saved.py": Words(8, 0, 0),
    "ptrain/cost.py": Words(1, 7, 0),
    "ptrain/data/chat_rows.py": Words(1, 1, 0),
    "ptrain/data/chats.py": Words(1, 0, 0),
    "ptrain/data/corpus.py": Words(10, 0, 0),
    "ptrain/data/sampler.py": Words(5, 3, 0),
    "ptrain/data/tokenized.py": Words(6, 3, 0),
    "ptrain/data/vocabulary.py": Words(11, 0, 0),
    "ptrain/derivation/allocator.py": Words(7, 1, 0),
    "ptrain/derivation/archive.py": Words(3, 0, 0),
    "ptrain/derivation/blocks.py": Words(0, 4, 0),
    "ptrain/derivation/clock.py": Words(13, 5, 0),
    "ptrain/derivation/computing.py": Words(6, 4, 0),
    "ptrain/derivation/estimate.py": Words(1, 0, 0),
    "ptrain/derivation/flat.py": Words(10, 0, 0),
    "ptrain/derivation/ghosts/fsdp2.py": Words(12, 0, 0),
    "ptrain/derivation/ghosts/in_place.py": Words(19, 1, 0),
    "ptrain/derivation/ghosts/table.py": Words(10, 0, 2),
    "ptrain/derivation/ghosts/wrapping.py": Words(5, 1, 0),
    "ptrain/derivation/in_flight.py": Words(12, 6, 0),
    "ptrain/derivation/interconnect.py": Words(6, 0, 0),
    "ptrain/derivation/kernels.py": Words(6, 2, 0),
    "ptrain/derivation/layers.py": Words(5, 5, 0),
    "ptrain/derivation/machine.py": Words(4, 2, 0),
    "ptrain/derivation/paper.py": Words(8, 0, 0),
    "ptrain/derivation/pipeline.py": Words(4, 0, 0),
    "ptrain/derivation/tables.py": Words(13, 3, 0),
    "ptrain/derivation/tape.py": Words(13, 0, 0),
    "ptrain/derivation/tensor.py": Words(2, 0, 0),
    "ptrain/errors.py": Words(1, 0, 0),
    "ptrain/facts/cache.py": Words(1, 0, 0),
    "ptrain/facts/float8.py": Words(0, 1, 0),
    "ptrain/facts/model.py": Words(0, 16, 0),
    "ptrain/facts/parameters.py": Words(1, 0, 0),
    "ptrain/facts/stages.py": Words(0, 7, 0),
    "ptrain/files.py": Words(3, 0, 0),
    "ptrain/installed.py": Words(1, 0, 0),
    "ptrain/internals/compiled.py": Words(2, 0, 0),
    "ptrain/internals/fsdp1.py": Words(1, 0, 0),
    "ptrain/internals/fsdp2.py": Words(3, 0, 0),
    "ptrain/internals/zero_redundancy.py": Words(1, 0, 0),
    "ptrain/interpreter/construction.py": Words(3, 2, 0),
    "ptrain/interpreter/execute.py": Words(8, 0, 0),
    "ptrain/interpreter/look.py": Words(1, 0, 0),
    "ptrain/interpreter/loss.py": Words(15, 0, 0),
    "ptrain/interpreter/program.py": Words(12, 0, 0),
    "ptrain/meters/blocked.py": Words(3, 0, 0),
    "ptrain/meters/holdings.py": Words(5, 0, 0),
    "ptrain/meters/measure.py": Words(7, 0, 0),
    "ptrain/meters/memory.py": Words(8, 1, 0),
    "ptrain/meters/replicas.py": Words(2, 0, 0),
    "ptrain/meters/routing.py": Words(5, 0, 0),
    "ptrain/meters/traffic.py": Words(6, 1, 0),
    "ptrain/models/attention.py": Words(8, 1, 0),
    "ptrain/models/chain.py": Words(2, 3, 0),
    "ptrain/models/compiled.py": Words(8, 0, 0),
    "ptrain/models/contract.py": Words(1, 0, 0),
    "ptrain/models/cross_entropy.py": Words(2, 0, 0),
    "ptrain/models/cuttable.py": Words(5, 1, 0),
    "ptrain/models/drawn.py": Words(5, 1, 0),
    "ptrain/models/external.py": Words(3, 0, 0),
    "ptrain/models/facts.py": Words(6, 2, 0),
    "ptrain/models/initialize.py": Words(1, 0, 0),
    "ptrain/models/kernels.py": Words(7, 3, 0),
    "ptrain/models/ledger.py": Words(4, 0, 0),
    "ptrain/models/meta.py": Words(1, 1, 0),
    "ptrain/models/modes.py": Words(4, 2, 0),
    "ptrain/models/moe.py": Words(15, 0, 0),
    "ptrain/models/numerics.py": Words(1, 0, 0),
    "ptrain/models/objective.py": Words(18, 1, 0),
    "ptrain/models/parting.py": Words(2, 0, 0),
    "ptrain/models/pretrained.py": Words(2, 0, 0),
    "ptrain/models/products.py": Words(9, 2, 0),
    "ptrain/models/published_config.py": Words(1, 2, 0),
    "ptrain/models/quantized.py": Words(4, 0, 0),
    "ptrain/models/slices.py": Words(5, 0, 0),
    "ptrain/models/trace.py": Words(1, 4, 0),
    "ptrain/models/transformer.py": Words(12, 1, 0),
    "ptrain/models/work.py": Words(0, 1, 0),
    "ptrain/optimizers/build.py": Words(6, 0, 0),
    "ptrain/optimizers/ghost.py": Words(2, 0, 0),
    "ptrain/optimizers/groups.py": Words(2, 1, 0),
    "ptrain/optimizers/update.py": Words(14, 2, 0),
    "ptrain/output.py": Words(2, 0, 0),
    "ptrain/plan/composition.py": Words(0, 1, 0),
    "ptrain/plan/lower.py": Words(2, 0, 0),
    "ptrain/processor.py": Words(2, 0, 0),
    "ptrain/pytest_plugin.py": Words(1, 1, 0),
    "ptrain/rates/measured.py": Words(9, 0, 0),
    "ptrain/rates/pace.py": Words(1, 0, 0),
    "ptrain/report/comparison.py": Words(2, 0, 0),
    "ptrain/report/copies.py": Words(0, 1, 0),
    "ptrain/report/finding.py": Words(0, 4, 0),
    "ptrain/report/printed.py": Words(4, 0, 0),
    "ptrain/report/record.py": Words(0, 4, 0),
    "ptrain/report/recorded.py": Words(1, 1, 0),
    "ptrain/report/routing.py": Words(0, 1, 0),
    "ptrain/report/screen.py": Words(1, 0, 0),
    "ptrain/report/simulation.py": Words(0, 6, 0),
    "ptrain/report/summary.py": Words(1, 1, 0),
    "ptrain/report/sweep.py": Words(2, 0, 0),
    "ptrain/report/table.py": Words(2, 1, 0),
    "ptrain/runtime/comm.py": Words(8, 0, 0),
    "ptrain/runtime/ghost.py": Words(14, 0, 0),
    "ptrain/runtime/interface.py": Words(16, 0, 0),
    "ptrain/runtime/patches.py": Words(4, 1, 0),
    "ptrain/runtime/queue.py": Words(4, 0, 0),
    "ptrain/runtime/torch.py": Words(16, 0, 0),
    "ptrain/runtime/world.py": Words(2, 0, 0),
    "ptrain/selection/algorithm1.py": Words(3, 0, 0),
    "ptrain/selection/bound.py": Words(16, 6, 0),
    "ptrain/selection/choose.py": Words(19, 5, 0),
    "ptrain/selection/deriver.py": Words(13, 5, 0),
    "ptrain/selection/fit.py": Words(2, 1, 0),
    "ptrain/selection/job.py": Words(13, 8, 0),
    "ptrain/selection/preflight.py": Words(15, 7, 0),
    "ptrain/selection/profile.py": Words(3, 4, 0),
    "ptrain/selection/ranking.py": Words(13, 16, 0),
    "ptrain/selection/recompute.py": Words(10, 4, 0),
    "ptrain/selection/search.py": Words(20, 8, 0),
    "ptrain/selection/space.py": Words(15, 10, 0),
    "ptrain/selection/where.py": Words(12, 3, 0),
    "ptrain/simulation/equal_blocks.py": Words(1, 2, 0),
    "ptrain/simulation/execute.py": Words(4, 1, 0),
    "ptrain/simulation/living.py": Words(4, 0, 0),
    "ptrain/simulation/replay.py": Words(5, 2, 0),
    "ptrain/spec/activations.py": Words(4, 2, 0),
    "ptrain/spec/batch.py": Words(2, 1, 0),
    "ptrain/spec/block.py": Words(0, 2, 0),
    "ptrain/spec/check.py": Words(2, 0, 0),
    "ptrain/spec/cluster.py": Words(3, 0, 0),
    "ptrain/spec/dials.py": Words(0, 0, 1),
    "ptrain/spec/foreign.py": Words(0, 2, 0),
    "ptrain/spec/foreign_files.py": Words(2, 1, 0),
    "ptrain/spec/groups.py": Words(5, 0, 0),
    "ptrain/spec/job.py": Words(2, 5, 0),
    "ptrain/spec/keys.py": Words(2, 0, 0),
    "ptrain/spec/leaf.py": Words(28, 4, 0),
    "ptrain/spec/load.py": Words(3, 0, 0),
    "ptrain/spec/misfits.py": Words(1, 0, 0),
    "ptrain/spec/model.py": Words(1, 8, 1),
    "ptrain/spec/names.py": Words(1, 0, 0),
    "ptrain/spec/pipeline.py": Words(3, 0, 0),
    "ptrain/spec/placement.py": Words(1, 0, 0),
    "ptrain/spec/precision.py": Words(0, 2, 0),
    "ptrain/spec/published.py": Words(0, 1, 0),
    "ptrain/spec/resolve.py": Words(1, 0, 0),
    "ptrain/spec/routing.py": Words(3, 0, 0),
    "ptrain/spec/spec.py": Words(2, 3, 0),
    "ptrain/spec/text.py": Words(5, 0, 0),
    "ptrain/steps/experts.py": Words(5, 2, 0),
    "ptrain/steps/step.py": Words(0, 3, 0),
    "ptrain/steps/wraps.py": Words(0, 4, 0),
    "ptrain/testing.py": Words(1, 0, 0),
    "ptrain/timeline.py": Words(2, 4, 0),
    "ptrain/traces/attention_kernels.py": Words(2, 0, 0),
    "ptrain/traces/block_tables.py": Words(11, 0, 0),
    "ptrain/traces/facts.py": Words(4, 2, 0),
    "ptrain/traces/layer_works.py": Words(4, 5, 0),
    "ptrain/traces/rank_part.py": Words(14, 2, 0),
    "ptrain/traces/record.py": Words(23, 5, 0),
    "ptrain/traces/settings.py": Words(10, 0, 0),
    "ptrain/traces/stage_parts.py": Words(7, 1, 0),
    "ptrain/traces/tensor_parts.py": Words(4, 0, 0),
    "ptrain/traces/work_tables.py": Words(22, 3, 0),
    "ptrain/traces/write.py": Words(3, 0, 0),
    "ptrain/train/checkpoint.py": Words(1, 0, 0),
    "ptrain/train/comparison.py": Words(1, 2, 0),
    "ptrain/train/elastic.py": Words(1, 0, 0),
    "ptrain/train/exchange.py": Words(9, 1, 0),
    "ptrain/train/failure_point.py": Words(1, 0, 0),
    "ptrain/train/finite.py": Words(5, 1, 0),
    "ptrain/train/folder.py": Words(6, 1, 0),
    "ptrain/train/journal.py": Words(10, 1, 0),
    "ptrain/train/launch.py": Words(2, 2, 0),
    "ptrain/train/loop.py": Words(1, 0, 0),
    "ptrain/train/manifest.py": Words(4, 1, 0),
    "ptrain/train/notebook.py": Words(1, 0, 0),
    "ptrain/train/options.py": Words(0, 1, 0),
    "ptrain/train/rank_start.py": Words(1, 0, 0),
    "ptrain/train/saving.py": Words(2, 0, 0),
    "ptrain/train/session.py": Words(2, 1, 0),
    "ptrain/train/tracker.py": Words(21, 0, 0),
    "ptrain/units.py": Words(5, 0, 0),
    "ptrain/verification/capture.py": Words(1, 1, 0),
    "ptrain/verification/compare.py": Words(5, 2, 0),
    "ptrain/verification/examine.py": Words(7, 1, 0),
    "ptrain/verification/jobs/draws.py": Words(1, 5, 0),
    "ptrain/verification/jobs/evidence.py": Words(6, 7, 0),
    "ptrain/verification/jobs/gradients.py": Words(3, 0, 0),
    "ptrain/verification/jobs/inquiry.py": Words(1, 0, 0),
    "ptrain/verification/jobs/job.py": Words(12, 3, 0),
    "ptrain/verification/jobs/localise.py": Words(1, 2, 0),
    "ptrain/verification/jobs/metamorphic.py": Words(3, 0, 0),
    "ptrain/verification/jobs/modules.py": Words(5, 4, 0),
    "ptrain/verification/jobs/record.py": Words(4, 2, 0),
    "ptrain/verification/jobs/run.py": Words(4, 4, 0),
    "ptrain/verification/jobs/shards.py": Words(6, 0, 0),
    "ptrain/verification/jobs/step.py": Words(16, 3, 0),
    "ptrain/verification/jobs/trials.py": Words(8, 2, 0),
    "ptrain/verification/parts.py": Words(4, 0, 0),
    "ptrain/verification/preconditions.py": Words(5, 0, 0),
    "ptrain/verification/protocol.py": Words(1, 0, 0),
    "ptrain/verification/reference.py": Words(6, 0, 0),
    "ptrain/verification/references.py": Words(6, 0, 0),
    "ptrain/verification/tolerances.py": Words(1, 3, 0),
    "ptrain/verification/trajectory.py": Words(6, 2, 0),
    "ptrain/verification/updates/clip.py": Words(4, 1, 0),
    "ptrain/verification/updates/explain.py": Words(2, 2, 0),
    "ptrain/verification/updates/repeat.py": Words(0, 2, 0),
    "ptrain/verification/user_loop.py": Words(4, 0, 0),
    "ptrain/xray/watch.py": Words(2, 0, 0),
}
COMMENTS: dict[str, int] = {
    "ptrain": 22,
    "ptrain/activations": 46,
    "ptrain/algebra": 19,
    "ptrain/axes": 15,
    "ptrain/axes/context": 36,
    "ptrain/axes/data": 31,
    "ptrain/axes/expert": 33,
    "ptrain/axes/pipeline": 30,
    "ptrain/axes/tensor": 35,
    "ptrain/calibration": 30,
    "ptrain/charts": 29,
    "ptrain/cli": 19,
    "ptrain/convert": 23,
    "ptrain/data": 25,
    "ptrain/derivation": 37,
    "ptrain/facts": 26,
    "ptrain/internals": 38,
    "ptrain/interpreter": 28,
    "ptrain/meters": 32,
    "ptrain/models": 28,
    "ptrain/optimizers": 42,
    "ptrain/plan": 22,
    "ptrain/rates": 38,
    "ptrain/report": 17,
    "ptrain/runtime": 24,
    "ptrain/selection": 30,
    "ptrain/simulation": 31,
    "ptrain/spec": 23,
    "ptrain/steps": 22,
    "ptrain/traces": 28,
    "ptrain/train": 35,
    "ptrain/verification": 32,
    "ptrain/xray": 21,
}
# end


def words_of(tree: SourceTree, path: Path) -> Words:
    """Return the figures of a file."""
    functions = [*tree.nodes(path, ast.FunctionDef, ast.AsyncFunctionDef)]
    documented = (*functions, *tree.nodes(path, ast.ClassDef, ast.Module))
    docstrings = (ast.get_docstring(node) or "" for node in documented)
    return Words(
        one_word=sum(map(_is_one_word, functions)),
        bare=len({*_bare_names(tree, path)}),
        fragments=sum(FRAGMENT.match(text) is not None for text in docstrings),
    )


def is_bare(name: str) -> bool:
    """Return True if a name is only a participle, preposition, adjective or pronoun."""
    word = name.strip("_")
    is_participle = word.endswith("ed") and "_" not in word and word not in REGULAR
    return is_participle or word in IRREGULAR | EMPTY


def _is_one_word(function: Functions) -> bool:
    is_value = any("property" in ast.unparse(each) for each in function.decorator_list)
    return not is_value and not function.name.startswith("__") and "_" not in function.name[1:]


def _bare_names(tree: SourceTree, path: Path) -> Iterator[str]:
    for node in tree.nodes(path, ast.FunctionDef, ast.AsyncFunctionDef):
        yield from [node.name] * is_bare(node.name)
    for kind in tree.nodes(path, ast.ClassDef):
        for field in kind.body:
            match field:
                case ast.AnnAssign(target=ast.Name(id=name)) if is_bare(name):
                    yield f"{kind.name}.{name}"
    for node in tree.nodes(path, ast.Name, ast.arg):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name) if name in FILLERS:
                yield f"a variable {name}"


def files(tree: SourceTree) -> dict[str, Words]:
    """Return the figures of all modules that have some."""
    counts = {tree.short(path): words_of(tree, path) for path in tree.modules.values()}
    return {file: words for file, words in counts.items() if any(words)}


def comments(tree: SourceTree) -> dict[str, int]:
    """Return the comments of each package, in tenths of a percent of its lines."""
    lines, marks = Counter[str](), Counter[str]()
    for path in tree.modules.values():
        text = path.read_text(encoding="utf-8")
        folders = path.relative_to(tree.root).parent.parts
        package = "/".join(folders[: 3 if folders[1:2] == (AXES,) else 2])
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        lines[package] += text.count("\n")
        marks[package] += sum(token.type == tokenize.COMMENT for token in tokens)
    return {package: 1000 * marks[package] // max(1, lines[package]) for package in sorted(lines)}


def above(figures: Mapping[str, Words], held: Mapping[str, Words]) -> Iterator[str]:
    """Yield each file with a figure above the table's."""
    for file, words in figures.items():
        old = held.get(file, Words(0, 0, 0))
        for title, now, before in zip(Words._fields, words, old, strict=True):
            if now > before:
                yield f"{file}: {title} = {now}, {now - before} more than {before}"


def below(figures: Mapping[str, int], held: Mapping[str, int]) -> Iterator[str]:
    """Yield each package whose share of comments has fallen."""
    for package, share in held.items():
        if (now := figures.get(package, share)) < share - SLACK:
            yield f"{package}: {now / 10} % of the lines are comments, {share / 10} % before"


def table(tree: SourceTree) -> str:
    """Return the figures of a checkout as lines of this file."""
    rows = [f'    "{file}": Words{tuple(words)},\n' for file, words in files(tree).items()]
    shares = [f'    "{package}": {share},\n' for package, share in comments(tree).items()]
    return (
        f"FILES: dict[str, Words] = {{\n{''.join(rows)}}}\n"
        f"COMMENTS: dict[str, int] = {{\n{''.join(shares)}}}\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="put the figures into this file")
    path = Path(__file__)
    lines = table(SourceTree(path.parents[1]))
    if parser.parse_args().write:
        path.write_text(with_table(path.read_text(encoding="utf-8"), lines), encoding="utf-8")
    print(lines, end="")


if __name__ == "__main__":
    main()
