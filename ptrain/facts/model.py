"""What derivation must know of a model: its tensors by unit, in order, and nothing of torch.

Built-in families state theirs as formulas (`facts.parameters`); for any other model the same
facts are read off the module and by tracing one step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import accumulate

from ptrain.facts.attention import Attending
from ptrain.facts.experts import ExpertLayers
from ptrain.facts.operators import WorkByKind
from ptrain.facts.passes import Passes, RowsPasses
from ptrain.facts.rows_timeline import RowsTimeline
from ptrain.facts.stages import Chain
from ptrain.spec.axis import Axis
from ptrain.spec.model import ModelSpec
from ptrain.spec.role import Fusions, Roles
from ptrain.timeline import Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFacts:
    """A parameter or buffer: canonical dotted name and shape in elements. `cut_over`: it is one
    rank's slice of it along these axes; `is_copy`: a stage's own copy of what another stage has;
    `is_frozen`: it is trained by nobody, so that it has neither a gradient nor optimizer state."""

    name: str
    shape: tuple[int, ...]
    cut_over: tuple[Axis, ...] = ()
    is_copy: bool = False
    is_frozen: bool = False

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def is_cut(self) -> bool:
        """Whether it is one rank's slice."""
        return bool(self.cut_over)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitFacts:
    """What is gathered, reduced and freed together: a block, or the root with all that is left.
    `modules` are dotted names, "" for the root. Tied tensors appear once, in the root. `trained`
    are those of its tensors that are not frozen."""

    modules: tuple[str, ...]
    tensors: tuple[TensorFacts, ...]
    # of the tensors, once: they are read often
    shapes: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)
    numel: int = field(init=False, repr=False, compare=False)
    trained: tuple[TensorFacts, ...] = field(init=False, repr=False, compare=False)
    trained_shapes: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        shapes = tuple([tensor.shape for tensor in self.tensors])
        object.__setattr__(self, "shapes", shapes)
        object.__setattr__(self, "numel", sum(map(math.prod, shapes)))
        trained = tuple([tensor for tensor in self.tensors if not tensor.is_frozen])
        object.__setattr__(self, "trained", trained)
        object.__setattr__(self, "trained_shapes", tuple([tensor.shape for tensor in trained]))

    @property
    def trained_numel(self) -> int:
        """Elements of what has gradients and optimizer state."""
        return sum(map(math.prod, self.trained_shapes))

    @property
    def frozen(self) -> tuple[TensorFacts, ...]:
        """Its tensors that nobody trains."""
        return tuple([tensor for tensor in self.tensors if tensor.is_frozen])

    @property
    def name(self) -> str:
        """What the unit is called; "" for the root."""
        first, *others = self.modules
        return f"{first} … {others[-1]}" if others else first

    @property
    def is_root(self) -> bool:
        """Whether it is what no other unit has."""
        return self.modules == ("",)

    def is_hidden(self, tensor: TensorFacts) -> bool:
        """Return whether one of its tensors is a matrix within the model: no embedding, no head."""
        return len(tensor.shape) == 2 and not self.is_root


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """`units` in the order in which fully_shard wraps them: blocks first to last, then the root.
    `buffers` are (name, bytes). `gradient_order` names the parameters in the order in which their
    gradients are complete in a backward pass (it decides DDP's buckets). `timeline` is one
    micro-batch traced at the spec's shape and dtypes; None where a committed table gives it. Of a
    model that is not built in, `roles` are those on the tensor axis and `fusions` the lengths in
    its fused projections, `part_timelines` those of each of its ranks, first to last; `chain` is
    what the pipeline axis cuts, and `stage_passes` what was traced of each stage, by the places of
    ranks along tp; `part_rows` are the timelines of its ranks as formulas of where tokens go, first
    to last, empty where that changes no size or there is no formula, `stage_rows` those of its
    stages, and `micro_batches` those of a rank whose micro-batches differ; `work` is what that
    micro-batch computes and `part_works` what it does on the ranks at each place along tp, of
    all their stages together; `blocks` are the names of what repeats, first to last. `draws`:
    it draws random numbers in forward, as dropout does; `sample_bytes` are those of a sample
    that is not tokens; `ignored` are fields of a config that have no influence, each with the
    reason; `vocabulary` is how many logits a token has, where it has run. `untraced` says why
    there is no trace of a model that should have one, `unknown_attention` of what attention
    nobody knows what the spec's GPUs would keep. `by_data` says what selects by data, as a
    router does, so that sizes depend on it: then the traces are those of one extent of what is
    selected, and `others` are the facts at other extents; figures lie between the least and the
    largest of all. `attending` is what slices of the tokens over cp need of a model that is not
    built in, `experts` its layers with experts where ranks have some each. `unvisited` are
    parameters that have no gradient where nothing is selected for them. `built_whole` says
    why each rank builds the full model before it keeps its part; it is empty where a rank draws or
    reads its part alone. `stops` are
    modules whose inputs have no gradient, for nothing trained comes before them. `model` is there
    where they are of another one than the spec's.
    """

    units: tuple[UnitFacts, ...]
    buffers: tuple[tuple[str, int], ...] = ()
    gradient_order: tuple[str, ...] = ()
    timeline: Timeline | None = None
    roles: Roles = ()
    fusions: Fusions = ()
    part_timelines: tuple[Timeline, ...] = ()
    part_rows: tuple[RowsTimeline, ...] = ()
    micro_batches: tuple[Timeline, ...] = ()
    chain: Chain | None = None
    blocks: tuple[str, ...] = ()
    stage_passes: tuple[tuple[Passes, ...], ...] = field(default=(), hash=False)
    stage_rows: tuple[tuple[RowsPasses, ...], ...] = field(default=(), hash=False)
    work: WorkByKind | None = field(default=None, compare=False)
    part_works: tuple[WorkByKind, ...] = field(default=(), compare=False)
    draws: bool = False
    sample_bytes: int | None = None
    ignored: tuple[str, ...] = field(default=(), compare=False)
    vocabulary: int | None = field(default=None, compare=False)
    untraced: str = field(default="", compare=False)
    unknown_attention: str = ""
    model: ModelSpec | None = field(default=None, compare=False)
    by_data: str = ""
    attending: Attending | None = None
    experts: ExpertLayers | None = None
    others: tuple[ModelFacts, ...] = field(default=(), hash=False)
    unvisited: tuple[str, ...] = ()
    stops: tuple[str, ...] = ()
    built_whole: str = field(default="", compare=False)

    def __hash__(self) -> int:
        """Of little: what is equal has units of equal sizes, and to go through all their tensors
        costs milliseconds."""
        return hash((tuple(unit.numel for unit in self.units), self.buffers, self.chain is None))

    def as_one_unit(self) -> ModelFacts:
        """Return the same model with its root for its only unit; its trace knows others."""
        units = (UnitFacts(modules=("",), tensors=self.tensors),)
        return replace(
            self, units=units, timeline=None, part_timelines=(), part_rows=(), stage_passes=()
        )

    @property
    def tensors(self) -> tuple[TensorFacts, ...]:
        return tuple(tensor for unit in self.units for tensor in unit.tensors)

    @property
    def trained(self) -> tuple[TensorFacts, ...]:
        """The tensors that are not frozen, unit by unit."""
        return tuple(tensor for unit in self.units for tensor in unit.trained)

    @property
    def trained_numel(self) -> int:
        """Elements of what has gradients and optimizer state: P where nothing is frozen."""
        return sum(unit.trained_numel for unit in self.units)

    def is_passed_by(self, unit: UnitFacts) -> bool:
        """Return whether no gradient comes to what a unit gives; what is trained is within the
        root."""
        is_idle = bool(unit.tensors) and not unit.trained and not unit.is_root
        return is_idle and unit.modules[0] in self.stops

    @property
    def unit_modules(self) -> tuple[tuple[str, ...], ...]:
        """The modules of each unit, as a plan lists them."""
        return tuple(unit.modules for unit in self.units)

    @property
    def numel(self) -> int:
        """P, the number of parameters."""
        return sum(unit.numel for unit in self.units)


def prefixes(name: str) -> Iterator[str]:
    """The dotted names of the modules around a name, and itself, outermost first."""
    parts = name.split(".")
    return accumulate(parts, "{}.{}".format)
