"""The sections of a job: optimizer, data, training, evaluation, checkpoints, timeouts and logs.

The supported optimizers have one row each. Code that stores, places, predicts or times an update
reads these rows. `ptrain.optimizers.build` maps their names to torch classes.
"""

import os.path
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd
from typing import Annotated, Any, NamedTuple

from ptrain.spec.activations import WordList
from ptrain.spec.groups import ALL, DECAYS, GroupList, ParameterGroup
from ptrain.spec.leaf import (
    Boolean,
    Choice,
    Integer,
    Leaf,
    Numbers,
    Real,
    Section,
    Shape,
    Text,
    by_word,
    check_part,
    describe,
    grammar_dataclass,
    reject,
    section_dataclass,
)
from ptrain.spec.model import ARGUMENTS, FOLDER, FORM, PATH, UserFunction


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerRow:
    """The properties of an optimizer, except its arithmetic.

    Attributes:
        about: The meaning, for the schema and the help.
        keys: The keys that it reads besides `lr` and `weight_decay`, with their defaults.
        moments: The state tensors per parameter, in its shape, by torch's names.
        factors: For an optimizer that factors the moments of tensors with two or more dimensions,
            the names of the two factors, without the last dimension and without the one before it.
        needs_momentum: True if there are no moments with momentum 0.
        numbers: The fp32 scalars per parameter, with their initial values.
        remainder: For an optimizer of full matrices, the optimizer of all parameters other than the
            matrices in blocks; "" for an elementwise one.
        is_fused: True if one torch kernel updates in place, divides by the loss scale, and skips
            the update if a flag on the device is set. `ptrain calibrate` measures it.
        temporaries: The number of parameter-sized temporaries that exist at once in an update.
        operators: For each operator of an update that is not fused, in order, the number of
            parameter-sized tensors that it reads and writes.
        numbers_in_16_bits: On CPU, where torch's fused kernel is wrong for 16-bit dtypes, the fp32
            numbers that ptrain's update has at once: without and with momentum.
        enlarges_rounding: True if the update amplifies differences in summation order beyond the
            rounding error of the updated tensor's dtype.
    """

    description: str
    keys: Mapping[str, Any]
    moments: tuple[str, ...]
    factors: tuple[str, ...] = ()
    needs_momentum: bool = False
    numbers: Mapping[str, float] = field(default_factory=dict)
    remainder: str = ""
    is_fused: bool = False
    temporaries: int = 0
    operators: tuple[int, ...] = ()
    numbers_in_16_bits: tuple[int, int] | None = None
    enlarges_rounding: bool = False

    @property
    def is_elementwise(self) -> bool:
        """True if the update of a shard is the shard of the update."""
        return not (self.remainder or self.factors)


OPTIMIZERS: Mapping[str, OptimizerRow] = {
    "adamw": OptimizerRow(
        description="Adam with decoupled weight decay: two moments",
        keys={"betas": (0.9, 0.95), "eps": 1e-8},
        moments=("exp_avg", "exp_avg_sq"),
        numbers={"step": 0.0},
        is_fused=True,
    ),
    "sgd": OptimizerRow(
        description="stochastic gradient descent, with momentum if set",
        keys={"momentum": 0.0},
        moments=("momentum_buffer",),
        needs_momentum=True,
        is_fused=True,
        numbers_in_16_bits=(1, 3),
    ),
    "nadam": OptimizerRow(
        description="AdamW with Nesterov momentum: two moments",
        keys={"betas": (0.9, 0.999), "eps": 1e-8},
        moments=("exp_avg", "exp_avg_sq"),
        numbers={"step": 0.0, "mu_product": 1.0},
        temporaries=2,  # the bias-corrected second moment, and its root
        operators=(2, 3, 2, 3, 2, 2, 2, 4, 4),
    ),
    "lion": OptimizerRow(
        description="sign of the momentum, with decoupled weight decay: one moment",
        keys={"betas": (0.9, 0.99)},  # of its authors
        moments=("exp_avg",),
        temporaries=1,  # the direction
        operators=(3, 2, 2, 3, 3),
        enlarges_rounding=True,  # a flipped sign changes the update by twice the learning rate
    ),
    "muon": OptimizerRow(
        description="orthogonalized momentum for matrices in blocks, AdamW for all other "
        "parameters; needs full matrices",
        keys={"momentum": 0.95},  # of its authors
        moments=("momentum_buffer",),
        remainder="adamw",
        enlarges_rounding=True,  # it iterates in bf16
    ),
    "adafactor": OptimizerRow(
        description="factored second moment of matrices, a full one of vectors, as "
        "torch.optim.Adafactor; needs full tensors",
        keys={"beta2_decay": -0.8, "eps1": None, "eps2": 1e-3, "d": 1.0},
        moments=("variance",),
        factors=("row_var", "col_var"),
        numbers={"step": 0.0},
    ),
}
FUSED = tuple(name for name, row in OPTIMIZERS.items() if row.is_fused)


def list_defaults(key: str) -> str:
    """List the optimizers that read a key, with their defaults: `0.0 (sgd), 0.95 (muon)`."""
    rows = OPTIMIZERS.items()
    return ", ".join(f"{row.keys[key]} ({name})" for name, row in rows if key in row.keys)


CYCLE = 2**16  # samples, at most, in which every source has its share


class DataSource(NamedTuple):
    """A token file and its weight: its share of the samples is the weight over the sum of all
    weights."""

    path: str
    weight: float = 1.0
    loss_mask: str | None = None


_KEYS: Mapping[str, Leaf] = {
    "path": Text("a memory-mapped token file"),
    "weight": Real("its share of the samples, over the sum of all", 0.0, 1e9, excludes_low=True),
    "loss_mask": Text("as data.loss_mask, of this file", accepts_null=True),
}


@grammar_dataclass
class SourceList(Leaf):
    """A list of token files, each with a weight."""

    def describe_values(self) -> str:
        return "a list of {path, weight, loss_mask}"

    def convert(self, value: Any) -> object:
        if not isinstance(value, list) or not value:
            got = "an empty list" if value == [] else describe(value)
            reject(
                f"must be {self.describe_values()}; got {got}",
                "Use `[{path: a.npy, weight: 2}, …]`.",
            )
        sources = [_parse_source(number, source) for number, source in enumerate(value, 1)]
        numbers: dict[str, int] = {}
        for number, source in enumerate(sources, 1):
            first = numbers.setdefault(os.path.abspath(source.path), number)
            if first != number:
                reject(
                    f"source {number} repeats the file of source {first}: {source.path}",
                    "Remove one of the two and add up their weights.",
                )
        for number, quota in enumerate(cycle_quotas([source.weight for source in sources]), 1):
            if not quota:
                reject(
                    f"source {number} gets less than one sample in {CYCLE}",
                    "Use a larger weight, or remove the source.",
                )
        return tuple(sources)

    def dump(self, value: object) -> object:
        if value is None:
            return None
        assert isinstance(value, tuple), "sources"
        said = ({key: getattr(source, key) for key in _KEYS} for source in value)
        return [{key: one for key, one in keys.items() if one is not None} for keys in said]

    def value_schemas(self) -> tuple[Shape, ...]:
        items = {
            "type": "object",
            "properties": {key: leaf.schema() for key, leaf in _KEYS.items()},
            "required": ["path"],
            "additionalProperties": False,
        }
        return ({"type": "array", "items": items, "minItems": 1},)


def _parse_source(number: int, source: object) -> DataSource:
    """Parse one entry of the list; its faults name the source and the key."""
    if not isinstance(source, dict):
        reject(f"source {number} must be a mapping; got {describe(source)}", "Use `{path: FILE}`.")
    for key in source:
        if key not in _KEYS:
            reject(f"source {number} has no key {key!r}", f"Allowed keys: {', '.join(_KEYS)}.")
    if "path" not in source:
        reject(f"source {number} has no path", "Use `{path: FILE, weight: NUMBER}`.")
    other = "Use another value."
    return DataSource(
        **{
            key: check_part(_KEYS[key].parse, value, f"source {number}, {key}", other)
            for key, value in source.items()
        }
    )


def cycle_quotas(weights: Sequence[float]) -> tuple[int, ...]:
    """Return the number of samples of each source in a cycle.

    The cycle is the shortest one that has exactly the ratio of the weights. If that is longer than
    CYCLE, a cycle of CYCLE samples approximates the ratio.
    """
    whole = _smallest_integers(weights)
    if (total := sum(whole)) <= CYCLE:
        return whole
    quotas, rests = zip(*(divmod(weight * CYCLE, total) for weight in whole), strict=True)
    # Largest remainder: the quotas sum to CYCLE exactly, and each differs from its share by less
    # than one sample.
    longest = sorted(range(len(rests)), key=lambda n: -rests[n])[: CYCLE - sum(quotas)]
    return tuple(quota + (n in longest) for n, quota in enumerate(quotas))


def _smallest_integers(weights: Sequence[float]) -> tuple[int, ...]:
    """Return the smallest integers that have exactly the ratio of the weights' decimal digits."""
    # Decimal digits, because 0.1 and 0.2 have no exact ratio in binary.
    parts = [f"{weight!r}e0".split("e")[:2] for weight in weights]
    digits = [(text.partition(".")[2], text.replace(".", ""), int(power)) for text, power in parts]
    powers = [power - len(behind) for behind, _, power in digits]
    whole = [int(n) * 10 ** (p - min(powers)) for (_, n, _), p in zip(digits, powers, strict=True)]
    return tuple(number // gcd(*whole) for number in whole)


@section_dataclass
class ScheduleSpec:
    """Learning rate over the steps: linear warm-up, then constant or cosine decay."""

    warmup: Annotated[
        int,
        Integer("Number of linear warm-up steps.", 0, 10**9, aka=("warmup_steps", "warmup_iters")),
    ] = 0
    decay_steps: Annotated[
        int,
        Integer(
            "Step at which the cosine decay ends; 0 keeps the rate constant after warm-up.",
            0,
            10**9,
        ),
    ] = 0
    min_lr_ratio: Annotated[
        float, Real("Final learning rate of the cosine decay, as a fraction of `lr`.", 0.0, 1.0)
    ] = 0.1


@section_dataclass
class OptimizerSpec:
    """Update of the parameters."""

    name: Annotated[
        str, Choice("Optimizer.", {name: row.description for name, row in OPTIMIZERS.items()})
    ] = "adamw"
    lr: Annotated[
        float, Real("Peak learning rate.", 0.0, 1e6, excludes_low=True, aka=("learning_rate",))
    ] = 3e-4
    betas: Annotated[
        tuple[float, ...],
        Numbers(
            f"Two decay rates. Default: {list_defaults('betas')}.",
            0.0,
            0.999999,
            count=2,
            has_derived_default=True,
            aka=("beta1", "beta2"),
        ),
    ] = (0.9, 0.95)
    eps: Annotated[
        float, Real(f"Epsilon. Default: {list_defaults('eps')}.", 0.0, 1.0, excludes_low=True)
    ] = 1e-8
    weight_decay: Annotated[float, Real("Decoupled weight decay.", 0.0, 1e3, aka=("wd",))] = 0.1
    momentum: Annotated[
        float,
        Real(
            f"Momentum. Default: {list_defaults('momentum')}.",
            0.0,
            0.999999,
            has_derived_default=True,
        ),
    ] = 0.0
    beta2_decay: Annotated[
        float,
        Real("Adafactor: exponent of the step in the weight of new squared gradients.", -10.0, 0.0),
    ] = -0.8
    eps1: Annotated[
        float | None,
        Real(
            "Adafactor: lower bound of the root of the second moment; null is the machine epsilon.",
            0.0,
            1.0,
            accepts_null=True,
        ),
    ] = None
    eps2: Annotated[
        float,
        Real("Adafactor: lower bound of a parameter's root mean square, for the step.", 0.0, 1.0),
    ] = 1e-3
    d: Annotated[
        float,
        Real(
            "Adafactor: root mean square to which an update is clipped.",
            1.0,
            1e6,
            aka=("clip_threshold", "clipping_threshold"),
        ),
    ] = 1.0
    decay: Annotated[
        str,
        Choice("Parameters to which `weight_decay` applies.", DECAYS, aka=("no_decay", "no_wd")),
    ] = ALL
    groups: Annotated[
        tuple[ParameterGroup, ...],
        GroupList(
            "Parameter groups: hyperparameters for some parameters. The first match applies.",
            optimizers={name: row.description for name, row in OPTIMIZERS.items()},
            aka=("param_groups", "parameter_groups", "optimizer_grouped_parameters"),
        ),
    ] = ()
    schedule: Annotated[ScheduleSpec, Section(ScheduleSpec, "Learning-rate schedule.")] = field(
        default_factory=ScheduleSpec
    )
    clip: Annotated[
        float | None,
        Real(
            "Maximum global gradient norm; null disables clipping.",
            0.0,
            1e9,
            excludes_low=True,
            accepts_null=True,
            aka=("max_grad_norm", "grad_clip", "clip_grad", "gradient_clipping", "max_norm"),
        ),
    ] = 1.0

    @property
    def properties(self) -> OptimizerRow:
        """The properties of the optimizer."""
        return OPTIMIZERS[self.name]

    @property
    def rows(self) -> tuple[OptimizerRow, ...]:
        """The properties of this optimizer and of its groups' optimizers."""
        return tuple([OPTIMIZERS[name] for name in self.names])

    @property
    def names(self) -> tuple[str, ...]:
        """The names of this optimizer and of its groups' optimizers, each once."""
        return tuple(dict.fromkeys((self.name, *(g.name for g in self.groups if g.name))))

    @property
    def is_elementwise(self) -> bool:
        """True if the update of a shard is the shard of the update, for all parameters."""
        return not self.matrix_optimizer

    @property
    def matrix_optimizer(self) -> str:
        """The optimizer that needs full matrices; "" if none does."""
        return next((name for name in self.names if not OPTIMIZERS[name].is_elementwise), "")

    @property
    def is_uniform(self) -> bool:
        """True if all parameters have the same hyperparameters."""
        return not self.groups and (self.decay == ALL or not self.weight_decay)


@section_dataclass
class DataSpec:
    """Training data: a built-in corpus, one or several token files, or samples from a user's
    function. Exactly one of `corpus`, `path`, `sources` and `target` is set."""

    corpus: Annotated[
        str | None,
        Choice(
            "Built-in corpus that needs no network.",
            {
                "python-docs": "reference text that ships with CPython",
                "synthetic": "seeded random tokens, identical on every machine",
            },
        ),
    ] = "python-docs"
    path: Annotated[
        str | None, Text("Memory-mapped token file (.npy or .bin).", accepts_null=True)
    ] = None
    sources: Annotated[
        tuple[DataSource, ...] | None,
        SourceList(
            "Token files with their sampling weights, instead of `path`.",
            aka=("datasets", "mixture", "blend", "data_blend", "train_data_path", "mix"),
        ),
    ] = None
    loss_mask: Annotated[
        str | None,
        Text(
            "File of booleans, one per token of `path`; tokens marked false are not targets, "
            "for example prompts.",
            accepts_null=True,
            aka=("mask", "labels_mask", "train_on_input"),
        ),
    ] = None
    ignored: Annotated[
        tuple[int, ...] | None,
        Numbers(
            "Token ids that are never targets, for example padding.",
            0,
            10**9,
            is_integer=True,
            aka=("ignore_index", "ignored_tokens", "ignore", "pad_token_id", "eod_mask_loss"),
        ),
    ] = None
    tokenizer: Annotated[
        str,
        Choice(
            "Tokenizer for text corpora.",
            {"bytes": "256 bytes and 3 special tokens; vocabulary of 259"},
        ),
    ] = "bytes"
    target: Annotated[
        str | None,
        Text(
            "Function that returns a map-style dataset with samples of any kind; runs only with"
            " --allow-import.",
            PATH,
            FORM,
        ),
    ] = None
    arguments: Annotated[dict[str, object] | None, ARGUMENTS] = None
    folder: Annotated[str | None, FOLDER] = field(default=None, compare=False)

    @property
    def ignores_targets(self) -> bool:
        """True if some targets are excluded from the loss."""
        return self.ignored is not None or self.is_masked

    @property
    def is_masked(self) -> bool:
        """True if a file excludes tokens from the targets."""
        masks = [self.loss_mask, *(source.loss_mask for source in self.sources or ())]
        return any(mask is not None for mask in masks)

    @property
    def is_of_files(self) -> bool:
        """True if the data are tokens from one or several of the user's files."""
        return self.path is not None or self.sources is not None

    @property
    def function(self) -> UserFunction | None:
        """The function that returns the dataset; None if tokens are read."""
        if self.target is None:
            return None
        return UserFunction(
            section="data", target=self.target, arguments=self.arguments or {}, folder=self.folder
        )


@section_dataclass
class TrainSpec:
    """Length of the training, and its seed."""

    steps: Annotated[
        int,
        Integer(
            "Number of optimizer steps.", 1, 10**9, aka=("max_steps", "num_steps", "train_iters")
        ),
    ] = 50
    seed: Annotated[
        int, Integer("Seed of the weights, the sample order and dropout.", 0, 2**63 - 1)
    ] = 0


@section_dataclass
class EvalSpec:
    """Mean loss on data that is never trained on."""

    every: Annotated[int, Integer("Steps between evaluations; 0 disables them.", 0, 10**9)] = 0
    batches: Annotated[
        int, Integer("Number of global batches per evaluation.", 1, 10**6, aka=("eval_iters",))
    ] = 4


@section_dataclass
class KeepSpec:
    """The checkpoints that stay after a save; the others are removed."""

    last: Annotated[
        int,
        Integer(
            "Number of newest checkpoints that stay.", aka=("keep_latest_k", "save_total_limit")
        ),
    ]
    every: Annotated[
        int,
        Integer("Those at a multiple of this step stay, too; 0 adds none.", 0, 10**9),
    ] = 0


@section_dataclass
class CheckpointSpec:
    """Points at which the training state is saved."""

    at_end: Annotated[bool, Boolean("Save a checkpoint after the last step.")] = False
    every: Annotated[int, Integer("Steps between checkpoints; 0 disables them.", 0, 10**9)] = 0
    background: Annotated[
        bool,
        Boolean(
            "Copy the state to host memory and write it while training continues.",
            aka=("async_save", "async_mode", "enable_async"),
        ),
    ] = False
    keep: Annotated[
        KeepSpec | None,
        Section(
            KeepSpec,
            "Checkpoints that stay after a save. Default: all.",
            other_schemas=(
                {
                    "type": "integer",
                    "minimum": 1,
                    "maximum": 10**9,
                    "description": "Number of newest checkpoints that stay.",
                },
            ),
            accepts_null=True,
            alone=by_word("last"),
        ),
    ] = None


@section_dataclass
class Timeout:
    """Seconds until a silent rank counts as hung."""

    init: Annotated[
        float, Real("Timeout of the rendezvous, in seconds.", 0.0, 10**6, excludes_low=True)
    ] = 300.0
    step: Annotated[
        float, Real("Timeout of every later collective, in seconds.", 0.0, 10**6, excludes_low=True)
    ] = 120.0


@section_dataclass
class LogSpec:
    """Log lines, and trackers that receive the figures of a run in addition to its folder."""

    every: Annotated[int, Integer("Steps between log lines.", 1, 10**9)] = 10
    trackers: Annotated[
        tuple[str, ...],
        WordList(
            "Trackers to which rank 0 logs the spec, the predicted figures, the figures of each"
            " step and the verdict.",
            {
                "tensorboard": "event files in the run folder; needs the extra `tensorboard`",
                "wandb": "Weights & Biases, configured by its environment variables; needs the "
                "extra `wandb`",
                "mlflow": "MLflow, configured by its environment variables; needs the extra "
                "`mlflow`",
                "prometheus": "http://127.0.0.1:9464/metrics, or the port of PTRAIN_METRICS_PORT",
            },
            slips={"weights-and-biases": "wandb", "w&b": "wandb", "tb": "tensorboard"},
            aka=("report_to", "logger", "loggers", "use_wandb", "enable_wandb"),
            read=tuple,
        ),
    ] = ()
