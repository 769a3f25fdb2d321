"""What a job reads, how it updates, how long it runs, and what it writes down."""

from dataclasses import field
from typing import Annotated

from ptrain.spec.activations import Words
from ptrain.spec.function import ARGUMENTS, FOLDER, FORM, PATH, UserFunction
from ptrain.spec.leaf import Choice, Numbers, Real, Text, Truth, Whole
from ptrain.spec.optimizers import OPTIMIZERS, OptimizerRow, readers
from ptrain.spec.section import Section, section
from ptrain.spec.text import DataSource, Sources


@section
class ScheduleSpec:
    """The learning rate over the steps: linear warm-up, then constant or cosine."""

    warmup: Annotated[
        int, Whole("steps of linear warm-up", 0, 10**9, aka=("warmup_steps", "warmup_iters"))
    ] = 0
    decay_steps: Annotated[
        int, Whole("the step at which the cosine ends; 0: constant after warm-up", 0, 10**9)
    ] = 0
    min_lr_ratio: Annotated[float, Real("where the cosine ends, as a part of lr", 0.0, 1.0)] = 0.1


@section
class OptimizerSpec:
    """The update of the parameters."""

    name: Annotated[
        str,
        Choice(
            "which optimizer",
            {name: row.about for name, row in OPTIMIZERS.items()},
        ),
    ] = "adamw"
    lr: Annotated[
        float, Real("the highest learning rate", 0.0, 1e6, open=True, aka=("learning_rate",))
    ] = 3e-4
    betas: Annotated[
        tuple[float, ...],
        Numbers(
            f"two decay rates, of {readers('betas')}",
            0.0,
            0.999999,
            count=2,
            follows=True,
            aka=("beta1", "beta2"),
        ),
    ] = (0.9, 0.95)
    eps: Annotated[float, Real(f"epsilon, of {readers('eps')}", 0.0, 1.0, open=True)] = 1e-8
    weight_decay: Annotated[float, Real("decoupled weight decay", 0.0, 1e3, aka=("wd",))] = 0.1
    momentum: Annotated[
        float,
        Real(f"of {readers('momentum')}", 0.0, 0.999999, follows=True),
    ] = 0.0
    schedule: Annotated[ScheduleSpec, Section(ScheduleSpec, "the learning rate over the steps")] = (
        field(default_factory=ScheduleSpec)
    )
    clip: Annotated[
        float | None,
        Real(
            "the largest global gradient norm; null: no clipping",
            0.0,
            1e9,
            open=True,
            null=True,
            aka=("max_grad_norm", "grad_clip", "clip_grad", "gradient_clipping", "max_norm"),
        ),
    ] = 1.0

    @property
    def row(self) -> OptimizerRow:
        """What is known of the optimizer of this name."""
        return OPTIMIZERS[self.name]


@section
class DataSpec:
    """What is read: a built-in corpus, a file of tokens or several, or samples of the user's own.
    Of `corpus`, `path`, `sources` and `target` all but one are None."""

    corpus: Annotated[
        str | None,
        Choice(
            "a corpus that needs no network",
            {
                "python-docs": "the reference text that every CPython ships",
                "synthetic": "seeded tokens, equal on every machine",
            },
        ),
    ] = "python-docs"
    path: Annotated[str | None, Text("a memory-mapped token file of your own", null=True)] = None
    sources: Annotated[
        tuple[DataSource, ...] | None,
        Sources(
            "token files in place of path, with the share of samples that each has: [{path: a.npy, "
            "weight: 3}, {path: b.npy, weight: 1}]",
            aka=("datasets", "mixture", "blend", "data_blend", "train_data_path", "mix"),
        ),
    ] = None
    loss_mask: Annotated[
        str | None,
        Text(
            "a file beside path, a boolean for each of its tokens: false where it is no target, "
            "as in a prompt",
            null=True,
            aka=("mask", "labels_mask", "train_on_input"),
        ),
    ] = None
    ignored: Annotated[
        tuple[int, ...] | None,
        Numbers(
            "tokens that are inputs and no targets, like padding",
            0,
            10**9,
            whole=True,
            aka=("ignore_index", "ignored_tokens", "ignore", "pad_token_id", "eod_mask_loss"),
        ),
    ] = None
    tokenizer: Annotated[
        str, Choice("how text becomes tokens", {"bytes": "256 bytes and 3 specials, vocab 259"})
    ] = "bytes"
    target: Annotated[
        str | None,
        Text(
            "a function that returns a map-style dataset, of any samples; runs with "
            "--allow-import only",
            PATH,
            FORM,
        ),
    ] = None
    arguments: Annotated[dict[str, object] | None, ARGUMENTS] = None
    folder: Annotated[str | None, FOLDER] = field(default=None, compare=False)

    @property
    def ignores_targets(self) -> bool:
        """Whether it says of targets that they count for nothing."""
        return self.ignored is not None or self.is_masked

    @property
    def is_masked(self) -> bool:
        """Whether a file says it of some of its tokens."""
        masks = [self.loss_mask, *(source.loss_mask for source in self.sources or ())]
        return any(mask is not None for mask in masks)

    @property
    def is_of_files(self) -> bool:
        """Whether it is tokens of a file of the user's own, or of several."""
        return self.path is not None or self.sources is not None

    @property
    def function(self) -> UserFunction | None:
        """Return what gives the dataset; None where tokens are read."""
        if self.target is None:
            return None
        return UserFunction(
            section="data",
            target=self.target,
            arguments=self.arguments or {},
            folder=self.folder,
        )


@section
class TrainSpec:
    """How long, and from which seed."""

    steps: Annotated[
        int,
        Whole("updates of the parameters", 1, 10**9, aka=("max_steps", "num_steps", "train_iters")),
    ] = 50
    seed: Annotated[int, Whole("of weights, samples and dropout", 0, 2**63 - 1)] = 0


@section
class EvalSpec:
    """The mean loss of text that is never trained on."""

    every: Annotated[int, Whole("steps between two; 0: never", 0, 10**9)] = 0
    batches: Annotated[int, Whole("global batches each time", 1, 10**6, aka=("eval_iters",))] = 4


@section
class CheckpointSpec:
    """When the state is saved."""

    at_end: Annotated[bool, Truth("once, when the training is done")] = False
    every: Annotated[int, Whole("steps between two; 0: never", 0, 10**9)] = 0


@section
class Timeout:
    """Seconds until a silent rank counts as hung."""

    init: Annotated[float, Real("for the meeting of the ranks", 0.0, 10**6, open=True)] = 300.0
    step: Annotated[float, Real("for every collective after it", 0.0, 10**6, open=True)] = 120.0


@section
class LogSpec:
    """What is printed, and where the figures of a training go beside its run folder."""

    every: Annotated[int, Whole("steps between two lines", 1, 10**9)] = 10
    trackers: Annotated[
        tuple[str, ...],
        Words(
            "trackers to which rank 0 gives spec, predicted figures, those of every step and the "
            "verdict: a list, or one",
            {
                "tensorboard": "events in the run folder (the extra tensorboard)",
                "wandb": "Weights & Biases, by its own variables (the extra wandb)",
                "mlflow": "MLflow, by its own variables (the extra mlflow)",
            },
            slips={"weights-and-biases": "wandb", "w&b": "wandb", "tb": "tensorboard"},
            aka=("report_to", "logger", "loggers", "use_wandb", "enable_wandb"),
            read=tuple,
        ),
    ] = ()
