"""The fidelity matrix: models from outside ptrain on every axis.

Each cell is predicted, measured on gloo ranks and compared with a single device, or rejected with a
reason."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks._machine import header, save
from ptrain.algebra.legality import require_runnable
from ptrain.derivation.estimate import derive
from ptrain.errors import PtrainError
from ptrain.meters.measure import join_estimates
from ptrain.report.record import Check, compare_estimates
from ptrain.spec.load import load
from ptrain.spec.spec import Spec
from ptrain.traces.facts import facts_of
from tests.gloo.matrix import MEASURED, STEPS
from tests.gloo.matrix import run_spec as run_exactly
from tests.gloo.recording import checks_of_kind, relative_difference
from tests.gloo.runs import train_on_rank
from tests.models_from_outside import NANO_PLAN
from tests.models_vision import VECTORS
from tests.ranks import Ranks
from tests.trajectories import FP64, Tolerances

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 260,
    "max_position_embeddings": 64,
}
GROUPED = SIZES | {"num_key_value_heads": 2, "pad_token_id": 32}  # a space, never updated
WINDOWED = GROUPED | {"head_dim": 8, "sliding_window": 4}
GPT2 = {
    "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64, "vocab_size": 260,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
}  # fmt: skip
STILL = {"attention_dropout": 0.0, "residual_dropout": 0.0, "embedding_dropout": 0.0}
EXPERTS = GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2}


def user_model(function: str, **arguments: Any) -> dict[str, Any]:
    """Return the model section of a model of tests.models_from_outside."""
    return {"model": {"target": f"tests.models_from_outside:{function}", "arguments": arguments}}


def transformers_model(kind: str, config: Mapping[str, Any], **sections: Any) -> dict[str, Any]:
    """Return the model section of a class of transformers."""
    return {"model": {"hf": kind, "config": dict(config)}, **sections}


# Further keys of a spec.
MODELS: dict[str, dict[str, Any]] = {
    "plain nanoGPT": user_model("nano"),
    "nested and tied": user_model("nested"),
    "fused qkv": user_model("fused"),
    "dropout 0.1": user_model("dropping"),
    "conv and recurrent": user_model("conv"),
    "(logits, loss)": user_model("nano", loss=True)
    | {"step": {"target": "tests.models_from_outside:loss_of"}},
    "ViT, its own loss": {
        "model": {"target": "tests.models_vision:vit", "arguments": {"layers": 4}},
        "data": {"target": "tests.models_vision:images"},
        "loss": {"target": "tests.models_vision:label_loss"},
        "batch": {"global": 8, "micro": 2, "sequence": VECTORS},
    },
    "llama": transformers_model("LlamaForCausalLM", GROUPED),
    "qwen2": transformers_model("Qwen2ForCausalLM", GROUPED),
    "qwen3": transformers_model("Qwen3ForCausalLM", GROUPED | {"head_dim": 8}),
    "gemma2": transformers_model("Gemma2ForCausalLM", WINDOWED),
    "gemma3": transformers_model("Gemma3ForCausalLM", WINDOWED),
    "mistral": transformers_model("MistralForCausalLM", WINDOWED),
    "gpt2": transformers_model("GPT2LMHeadModel", GPT2),
    "gpt-neox": transformers_model("GPTNeoXForCausalLM", SIZES),
    "phi": transformers_model("PhiForCausalLM", GROUPED | {"resid_pdrop": 0.0, "embd_pdrop": 0.0}),
    "starcoder2": transformers_model("Starcoder2ForCausalLM", GROUPED | STILL),
    "mixtral": transformers_model("MixtralForCausalLM", EXPERTS),
}
# Several ranks draw other masks than one device does.
BESIDE_ONE_DEVICE = {"dropout 0.1": user_model("dropping", dropout=0.0)}
COLUMNS: dict[str, dict[str, Any]] = {
    "ddp": {"mesh": {"dp_replicate": 2}, "placement": "ddp"},
    "zero2": {"mesh": {"dp_shard": 2}, "placement": "zero2"},
    "zero3": {"mesh": {"dp_shard": 2}, "placement": "zero3"},
    "tp": {"mesh": {"tp": 2}, "placement": "tp"},
    "tp-sp": {"mesh": {"tp": 2}, "placement": "tp-sp"},
    "pp-1f1b": {"mesh": {"pp": 2}, "placement": {"pp": "S,S,S,R"}},
    "pp x zero3": {
        "mesh": {"pp": 2, "dp_shard": 2},
        "placement": {"pp": "S,S,S,R", "dp_shard": "zero3"},
    },
}
# Their norms compute in fp32 whatever they are given, so that an order of sums shows by its
# roundings: 6e-8 in each of 25 norms, in every step.
IN_FP32 = Tolerances(losses=1e-6, gradient_norms=1e-5, parameters=1e-5)
TOLERANCES = {"gemma2": IN_FP32, "gemma3": IN_FP32}
# tp plans in the spec for models without a plan.
PLANS = {name: {"tensor": {"plan": NANO_PLAN}} for name in ("plain nanoGPT", "(logits, loss)")}
# Cells that are refused, with the words of the refusal.
DEBTS = {
    ("conv and recurrent", "tp-sp"): "a module between the sub-blocks does not compute each token"
}


def cell_spec(model: str, column: str, *, exactly: bool) -> Spec:
    """Return the legal spec of a cell, in fp64 if `exactly`."""
    layout = {"layout": "fp32", "compute": "fp64"} if exactly else {"layout": "fp32"}
    sections = BESIDE_ONE_DEVICE.get(model, MODELS[model]) if exactly else MODELS[model]
    written = {
        "name": re.sub(r"[^a-z0-9.]+", "-", f"cell-{model}-{column}".lower()),
        "batch": {"global": 8, "micro": 2, "sequence": 16},
        "precision": layout,
        "optimizer": {"name": "adamw", "lr": 1e-2, "clip": 1.0},
        **sections,
        **COLUMNS[column],
        **(PLANS.get(model, {}) if column.startswith("tp") else {}),
    }
    return require_runnable(load(written))


@dataclass(frozen=True, kw_only=True)
class Cell:
    """The result of a model on an axis: the checks in its default dtypes and in fp64, or the reason
    of the rejection."""

    checks: tuple[Check, ...] = ()
    refusal: str = ""

    @property
    def failed(self) -> list[str]:
        return [f"{c.name}: {c.predicted} {c.measured}" for c in self.checks if not c.holds]

    @property
    def mark(self) -> str:
        if self.refusal:
            return "refused"
        return "fails" if self.failed else "holds"


def run_cell(ranks: Ranks, model: str, column: str) -> Cell:
    """Run a cell and return its result."""
    try:
        own_dtypes = cell_spec(model, column, exactly=False)
        exact = derive(own_dtypes, facts_of(own_dtypes)).exact
        reports = ranks.run(own_dtypes.world_size, train_on_rank, own_dtypes, STEPS, MEASURED)
        measured = join_estimates([report.measured for report in reports if report.measured])
        exactly = cell_spec(model, column, exactly=True)
        beside = run_exactly(ranks, exactly, TOLERANCES.get(model, FP64))
    except PtrainError as error:
        return Cell(refusal=str(error))
    return Cell(checks=(*compare_estimates(exact, measured), *beside.checks, *beside.against))


@dataclass
class Fidelity:
    """All cells of a run, for the page."""

    cells: dict[tuple[str, str], Cell] = field(default_factory=dict)

    def run(self, ranks: Ranks, model: str, column: str) -> Cell:
        """Run a cell and record its result."""
        self.cells[model, column] = outcome = run_cell(ranks, model, column)
        return outcome

    def write(self) -> list[Any]:
        """Write the page, if any cell has run."""
        return [save("fidelity", self._page())] if self.cells else []

    def _page(self) -> str:
        columns = [name for name in COLUMNS if any(name == of for _, of in self.cells)]
        lines = [
            header("fidelity: models as people have them, on every axis", [COMMAND]),
            CLAIM,
            f"| model | {' | '.join(columns)} |",
            "|---|" + "---|" * len(columns),
        ]
        for model in MODELS:
            marks = [self._mark(model, column) for column in columns]
            lines.append(f"| {model} | {' | '.join(marks)} |")
        lines += ["", *self._sums(columns), "", "Refused:", *self._refusals()]
        return "\n".join(lines)

    def _mark(self, model: str, column: str) -> str:
        outcome = self.cells.get((model, column))
        return outcome.mark if outcome else "not run"

    def _sums(self, columns: list[str]) -> list[str]:
        holding = [key for key, outcome in self.cells.items() if outcome.mark == "holds"]
        failing = [key for key, outcome in self.cells.items() if outcome.mark == "fails"]
        peaks = [
            relative_difference(check)
            for outcome in self.cells.values()
            for check in checks_of_kind(outcome.checks, "peak")
        ]
        return [
            f"Verdict: {len(holding)} of {len(self.cells)} hold, {len(failing)} fail, "
            f"{len(self.cells) - len(holding) - len(failing)} are refused.",
            "By column: "
            + ", ".join(f"{c} {sum(c == of for _, of in holding)}" for c in columns)
            + f". Largest difference of a peak: {max(peaks, default=0.0):.3%}.",
        ]

    def _refusals(self) -> list[str]:
        return [
            f"- {model}, {column}: {' '.join(outcome.refusal.split())}"
            for (model, column), outcome in self.cells.items()
            if outcome.refusal
        ]


COMMAND = "pytest tests/gloo/test_fidelity.py -m 'nightly or not nightly' --record"
CLAIM = f"""\
Claim: a cell that holds differs from `exact` by 0 in resident memory and traffic and by at most 2 %
in each phase's peak, in fp32 and with `compute: fp64`; and in fp64 its losses over {STEPS} steps
are those of one device to 1e-12 and its parameters to 1e-9 (of Gemma, whose norms compute in fp32
by themselves, to 1e-6 and 1e-5). Models have four layers of width 32. Beside one device nothing is
dropped out. nanoGPT's plan on tp stands in the spec.
"""
MATRIX = Fidelity()
