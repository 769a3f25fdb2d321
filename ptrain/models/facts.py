"""Read the facts that a prediction needs from a custom model, including its MoE layers.

A module of experts stacks all experts of a layer along the first dimension of each tensor and
defines `forward(rows [N, D], experts [N, K], weights [N, K]) -> [N, D]`, as in transformers. With
tensors of fewer experts it must compute only their share. If it has an attribute `num_experts`, the
attribute is the number of experts in its tensors.

Attention of such a model is recognized by calls of torch's scaled_dot_product_attention. They show
which modules compute attention and with which arguments, and another function can replace them. The
code must call `torch.nn.functional.scaled_dot_product_attention` by this name, or look it up when
it runs, as transformers and nn.MultiheadAttention do.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import starmap
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ptrain.errors import Fault, SpecError, input_error
from ptrain.facts.model import (
    AttendingModule,
    AttentionFacts,
    AttentionHeads,
    ExpertLayers,
    ModelFacts,
    TensorFacts,
    UnitFacts,
)
from ptrain.facts.parameters import expert_modules
from ptrain.internals.part import replace_attributes
from ptrain.models.boundary import convert_exceptions, describe_error
from ptrain.models.chain import TOKENS, chain_of_module, sample_tokens
from ptrain.models.contract import OnePass, forward_of, logits_of, require_logits
from ptrain.models.external import named_in_spec
from ptrain.models.ledger import storage_of, watch_modules
from ptrain.models.modes import (
    DropoutCall,
    copied_buffers,
    dropout_by,
    drops_out,
    fork_generators,
    in_mode,
)
from ptrain.models.moe import NUMBER
from ptrain.models.objective import can_fuse, sample_bytes
from ptrain.models.pretrained import ignored_fields
from ptrain.models.quantized import quantized_linear
from ptrain.models.roles import module_roles, names_of_experts
from ptrain.models.transformer import Transformer
from ptrain.models.units import ROOT, blocks_of, named_units, unit_modules
from ptrain.spec.model import HuggingFaceModel, ModelShape
from ptrain.spec.placement import EXPERT_AXES
from ptrain.spec.spec import Spec

_NAME = "torch.nn.functional.scaled_dot_product_attention"
POSITIONS = ("position_ids", "positions")  # argument names
_NO_CP = "or use `mesh.cp=1`."
_KINDS = 29  # number of different tokens; every vocabulary must have as many
_OF_HEADS = 4  # dimensions: samples, heads, tokens, features
# By the name of a config's field: attention to fewer tokens than all before, which transformers
# writes as a mask only where a pass has as many tokens or more.
_WINDOWS = ("sliding_window", "attention_chunk_size")
_BY_LENGTH = ("dynamic", "longrope")  # rotations that depend on the last position of a pass


@dataclass(frozen=True, slots=True)
class AttendingCall:
    """The arguments of one attention call; heads are [B, H, T, D]."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    dropout: float
    is_causal: bool
    scale: float | None
    is_grouped: bool

    @property
    def fault(self) -> str:
        """The reason why the call is not plain causal self-attention; "" if it is."""
        shapes = [tuple(x.shape) for x in (self.query, self.key, self.value)]
        (*samples, length, features), key, value = shapes
        if self.mask is not None:
            return "uses a mask"
        if not self.is_causal:
            return "is not causal"
        if self.dropout:
            return f"uses dropout {self.dropout:g}"
        if len(shapes[0]) != _OF_HEADS:
            return f"has queries with {len(shapes[0])} dimensions instead of [B, H, T, D]"
        if key != value or (key[0], *key[2:]) != (samples[0], length, features):
            return f"has queries {[*shapes[0]]}, keys {[*key]} and values {[*value]}"
        return ""

    @property
    def heads(self) -> AttentionHeads:
        """The numbers of query and key heads, and the width of a head."""
        return AttentionHeads(
            heads=self.query.shape[1],
            kv_heads=self.key.shape[1],
            head_dim=self.query.shape[-1],
        )

    def by_torch(self, attend: Callable[..., Tensor], *heads: Tensor) -> Tensor:
        """Return the result of torch's function `attend` for this call, or for other query, key and
        value.

        Args:
            attend: A function with the signature of torch's scaled_dot_product_attention.
            heads: Query, key and value [B, H, T, D] that replace the call's; none: the call's.
        """
        return attend(
            *(heads or (self.query, self.key, self.value)),
            attn_mask=self.mask,
            dropout_p=self.dropout,
            is_causal=self.is_causal,
            scale=self.scale,
            enable_gqa=self.is_grouped,
        )


@contextmanager
def attention_by(attend: Callable[[AttendingCall], Tensor]) -> Iterator[None]:
    """Temporarily replace torch's scaled_dot_product_attention by `attend`.

    Args:
        attend: Receives each call, and returns the output [B, H, T, D].
    """

    def attended(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        return attend(
            AttendingCall(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        )

    with replace_attributes(F, scaled_dot_product_attention=attended):
        yield


class AttentionWatch:
    """The hooks that pass each attention call of a model to `attend`, with the calling module's
    name."""

    def __init__(self, model: nn.Module, attend: Callable[[str, AttendingCall], Tensor]) -> None:
        self._model, self._attend = model, attend
        self._running: list[str] = []

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Temporarily redirect the model's attention calls."""
        modules = self._model.named_modules()
        with watch_modules(modules) as self._running, attention_by(self._attend_call):
            yield

    @property
    def running_module(self) -> str:
        """The name of the innermost module that is running; "" for the model."""
        return self._running[-1] if self._running else ""

    def _attend_call(self, call: AttendingCall) -> Tensor:
        return self._attend(self.running_module, call)


def attending_of(model: nn.Module, spec: Spec) -> AttentionFacts | None:
    """Return the attention facts that token shards need; None without cp or for a built-in model.

    Runs the model forward on a few tokens.

    Raises:
        SpecError: Attention is not plainly causal, a module calls it twice, or no module calls it.
    """
    if not spec.has_token_slices or isinstance(model, Transformer):
        return None
    place, name = named_in_spec(model, spec)
    _require_all_before(getattr(model, "config", None), place, name, spec)
    torchs: Callable[..., Tensor] = F.scaled_dot_product_attention
    known: dict[str, AttentionHeads] = {}

    def note(module: str, call: AttendingCall) -> Tensor:
        if call.fault:
            raise not_plain(place, module or name, call)
        if module in known:
            raise input_error(
                place,
                f"{module or name} calls attention twice per forward pass",
                f"Use a separate module for each call, {_NO_CP}",
            )
        known[module] = call.heads
        return call.by_torch(torchs)

    dropping: dict[str, None] = {}

    def note_dropout(call: DropoutCall) -> Tensor:
        dropping[watch.running_module] = None
        return call.by_before()

    watch = AttentionWatch(model, note)
    count, argument = min(TOKENS, spec.batch.sequence), _positions_argument(model)
    positions = torch.arange(count, device=next(model.parameters()).device).unsqueeze(0)
    with (
        # Training mode shows dropout. The copies and forks keep the model and the run's random
        # numbers as they were.
        in_mode(model, training=True), copied_buffers(model), fork_generators(),
        watch.watch(), dropout_by(note_dropout),
    ):  # fmt: skip
        logits_at(model, positions, argument, spec)
    if not known:
        raise input_error(
            place,
            f"no module of {name} calls {_NAME}, which cp replaces to reach the tokens "
            "of other ranks",
            f"Call this function in its attention, {_NO_CP}",
        )
    modules = tuple(AttendingModule(name=module, heads=heads) for module, heads in known.items())
    return AttentionFacts(modules=modules, positions=argument, dropping=tuple(dropping))


def logits_at(model: nn.Module, positions: Tensor, argument: str, spec: Spec) -> Tensor:
    """Return the logits of `model` for arbitrary tokens at these positions.

    Args:
        model: The model.
        positions: Positions of the tokens, int64 [1, T].
        argument: Name of the model's argument for positions; "" if it has none.
        spec: Names the model in messages.

    Raises:
        SpecError: See `logits_of`.
    """
    # From 1 on, because 0 is often the padding token, which some models mask.
    tokens = 1 + positions % _KINDS
    with forward_of(model, tokens, spec), torch.enable_grad():  # `require_logits` needs a graph
        output = model(tokens, **({argument: positions} if argument else {}))
    return require_logits(output, model, tokens, spec)


def _positions_argument(model: nn.Module) -> str:
    """Return the name of the model's argument for positions, or ""."""
    try:
        known = inspect.signature(model.forward).parameters
    except ValueError:  # a builtin may have no signature
        return ""
    return next((name for name in POSITIONS if name in known), "")


def not_plain(place: str, module: str, call: AttendingCall) -> SpecError:
    """Return the error for an attention call of this module that is not plain causal attention.

    Args:
        place: The key of the spec that names the model.
        module: The dotted name of the module.
        call: The call, whose `fault` is not empty.
    """
    finding = f"the attention of {module} {call.fault}, but cp supports plain causal "
    finding += "attention only"
    remedy = f"Call `{_NAME}(…, is_causal=True)` without other options"
    if call.dropout and call.is_causal:
        remedy = "Disable attention dropout (in a Transformers config `attention_dropout: 0` or "
        remedy += "`attn_pdrop: 0`)"
    return input_error(place, finding, f"{remedy}, {_NO_CP}")


def _require_all_before(config: Any, place: str, name: str, spec: Spec) -> None:
    """Raise SpecError if the config makes attention or positions depend on the tokens of a pass.

    Under cp a pass has only a shard of the tokens. Affected are sliding windows, chunked attention
    and rotary embeddings that scale with the length.
    """
    at = place if place != "model.hf" else "model.config"
    for field in _WINDOWS:
        size = getattr(config, field, None)
        if isinstance(size, int) and 0 < size <= spec.batch.sequence:
            finding = f"{field} of {name} is {size}, but a sample has {spec.batch.sequence} tokens"
            finding += ": cp supports attention to all previous tokens only"
            raise input_error(
                at, finding, f"Set `{field}` to null or {spec.batch.sequence + 1}, {_NO_CP}"
            )
    for kind, original in _rotary_types(getattr(config, "rope_parameters", None)):
        original = original or getattr(config, "max_position_embeddings", 0)
        if kind in _BY_LENGTH and original < spec.batch.sequence:
            finding = (
                f"the rotary embeddings of {name} ({kind}) depend on the number of "
                "tokens of a pass, "
            )
            finding += (
                f"above {original}, but a cp rank computes only a shard of {spec.batch.sequence}"
            )
            raise input_error(
                at, finding, f"Use another `rope_type`, at most {original} tokens, {_NO_CP}"
            )


def _rotary_types(parameters: object) -> Iterator[tuple[str, int]]:
    """Yield type and original length of the config's rotary embeddings, which layer kinds may
    nest."""
    if not isinstance(parameters, Mapping):
        return
    if "rope_type" in parameters:
        yield parameters["rope_type"], parameters.get("original_max_position_embeddings", 0)
        return
    for inner in parameters.values():
        yield from _rotary_types(inner)


Made = dict[str, tuple[Tensor, int]]  # by module: its output, and the output's version counter


def head_of(model: nn.Module, spec: Spec) -> str:
    """Return the name of the linear layer that computes the logits.

    A built-in model has a method for its head, so the root's name is returned. Another model runs
    forward once.

    Args:
        model: The model.
        spec: The spec, whose loss replaces the head.

    Raises:
        SpecError: The model changes the output of its head, or torch lacks the fused operator.
    """
    if spec.loss.fused and not can_fuse():
        finding = f"torch {torch.__version__} has no linear_cross_entropy that works in chunks"
        raise input_error(
            "loss.fused",
            finding,
            "Remove `loss.fused`, which chunks do not need, or install torch 2.13.",
        )
    if isinstance(model, Transformer):
        return ROOT
    outputs: Made = {}
    tokens = sample_tokens(model, spec)

    def note(name: str, _: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        if inputs and inputs[0].shape[:-1] == tokens.shape:
            outputs[name] = output, output._version

    linears = (known for known in model.named_modules() if isinstance(known[1], nn.Linear))
    with torch.no_grad(), torch.random.fork_rng(devices=[]), watch_modules(linears, after=note):
        logits = logits_of(model, tokens, spec)
    for name, (output, version) in outputs.items():
        if _is_output(logits, output, version):
            return name
    _, model_name = named_in_spec(model, spec)
    finding = f"{model_name} does not return the output of one of its nn.Linear for all tokens: "
    finding += "other operators follow it or replace it"
    raise input_error(
        "loss", finding, "Remove `loss` to compute full logits, or end the model with an nn.Linear."
    )


def _is_output(logits: Tensor, output: Tensor, version: int) -> bool:
    """Return True if the logits are the unmodified output, or equal to it in another dtype."""
    # A later in-place operator changes the version: the logits then differ from the output.
    if output.shape != logits.shape or output._version != version:
        return False
    if output.dtype != logits.dtype:
        return torch.equal(output.double(), logits.double())
    return storage_of(output)._cdata == storage_of(logits)._cdata


_FORM = "forward(rows [N, D], experts [N, K], weights [N, K]) -> [N, D]"
_REMEDY = (
    "Use one module per MoE layer that stacks all experts along the first dimension of every "
    f"tensor, with `{_FORM}`. Or use `dp_shard` instead of `ep`."
)


@dataclass(frozen=True, slots=True)
class _Call:
    """The inputs of a layer's experts for one sample: `rows` with `features` elements each, and the
    number of experts `chosen` per row."""

    rows: int
    features: int
    chosen: int


def expert_layers_of(module: nn.Module, spec: Spec) -> ExpertLayers | None:
    """Return the MoE layers of a model; None if no axis shards experts or the model is built in.

    Runs the model forward on one sample, with its experts replaced by zeros.

    Raises:
        SpecError: No plan names the experts, or the modules do not have the required form.
    """
    if not spec.is_cut_over(EXPERT_AXES) or isinstance(spec.model, ModelShape):
        return None
    place, names = names_of_experts(module, spec)
    numbers = [_count_experts(module.get_submodule(name), name, place) for name in names]
    calls = _record_expert_calls(module, names, place, spec)
    sizes = [(n, call.chosen, call.features) for n, call in zip(numbers, calls, strict=True)]
    _require_alike(place, sizes)
    number, chosen, features = sizes[0]
    return ExpertLayers(modules=tuple(names), number=number, chosen=chosen, features=features)


def _count_experts(experts: nn.Module, name: str, place: str) -> int:
    """Return the number of experts that a module stacks along dimension 0."""
    sizes = {path: tuple(tensor.shape) for path, tensor in experts.named_parameters()}
    firsts = {shape[:1] for shape in sizes.values()}
    if len(firsts) != 1 or firsts == {()}:
        shown = ", ".join(f"{path} {list(shape)}" for path, shape in [*sizes.items()][:3])
        raise input_error(
            place,
            f"{name} does not stack all experts of a layer along the first dimension: "
            f"it has {shown}",
            _REMEDY,
        )
    ((number,),) = firsts
    own = getattr(experts, NUMBER, number)
    if own != number:
        raise input_error(
            place,
            f"{name}.{NUMBER} is {own}, but the first dimension of its tensors is {number}",
            _REMEDY,
        )
    return number


def _require_alike(place: str, layers: Sequence[tuple[int, int, int]]) -> None:
    """Raise SpecError if MoE layers differ in experts, experts per token or features."""
    if len({*layers}) > 1:
        kinds = dict.fromkeys(layers)
        shown = " and ".join(f"{n} experts, {k} per token, {d} features" for n, k, d in kinds)
        raise input_error(
            place,
            f"not supported yet: MoE layers that differ: {shown}",
            "Use `dp_shard` instead of `ep`.",
        )


def _record_expert_calls(
    module: nn.Module, names: Sequence[str], place: str, spec: Spec
) -> list[_Call]:
    """Return the inputs of each layer's experts for one sample."""
    once, calls = OnePass(module, spec), {name: list[_Call]() for name in names}
    given, called = named_in_spec(module, spec)

    def fault(error: BaseException) -> Fault:
        return Fault(
            place=given,
            finding=f"{called}, run without its experts, raised {describe_error(error)}",
            remedy=_REMEDY,
        )

    with (
        torch.no_grad(),
        torch.random.fork_rng(devices=[]),
        _replace_experts(module, calls, place),
        convert_exceptions(fault),
        once.prepare() as run,
    ):
        run()
    return [_one_call(name, of_layer, place, spec) for name, of_layer in calls.items()]


@contextmanager
def _replace_experts(
    module: nn.Module, calls: dict[str, list[_Call]], place: str
) -> Iterator[None]:
    """Temporarily replace experts by functions that record their inputs and return zeros."""

    def note(name: str, *args: Any, **named: Any) -> Tensor:
        sizes = [tuple(x.shape) for x in (*args, *named.values()) if isinstance(x, Tensor)]
        is_one = len(args) == 3 == len(sizes) and not named
        if not is_one or len(sizes[0]) != 2 or sizes[1] != (len(args[0]), *sizes[2][1:]):
            shown = ", ".join(str(list(size)) for size in sizes) or "no tensors"
            finding = f"{name} receives {shown}; it must define "
            raise input_error(place, f"{finding}{_FORM}", _REMEDY)
        (rows, features), (_, chosen) = sizes[:2]
        calls[name].append(_Call(rows, features, chosen))
        return torch.zeros_like(args[0])

    modules = {name: module.get_submodule(name) for name in calls}
    for name, experts in modules.items():
        vars(experts)["forward"] = partial(
            note, name
        )  # an instance attribute takes precedence over the class
    try:
        yield
    finally:
        for experts in modules.values():
            del vars(experts)["forward"]


def _one_call(name: str, calls: Sequence[_Call], place: str, spec: Spec) -> _Call:
    """Return the only call of a layer's experts, which must have one row per token of the
    sample."""
    tokens = spec.batch.sequence
    if len(calls) != 1 or calls[0].rows != tokens:
        rows = " and ".join(str(call.rows) for call in calls) or "no"
        finding = f"{name} receives {rows} rows for a sample of {tokens} tokens; "
        finding += "the predicted traffic assumes one row per token, in one call"
        raise input_error(place, finding, "Use `dp_shard` instead of `ep`.")
    return calls[0]


_WIDE_BYTES = 4  # floating-point buffers are fp32, or fp64 in fp64 models


def untraced_facts(model: nn.Module, spec: Spec) -> ModelFacts:
    """Return the facts of a model that need no trace of its memory."""
    roles, fusions = module_roles(model, spec)
    experts = expert_layers_of(model, spec)
    apart = experts.modules if experts else expert_modules(spec)
    units = unit_modules(model, spec.unit, spec.model.blocks, apart)
    return ModelFacts(
        units=tuple(starmap(partial(_unit_facts, model), named_units(model, units))),
        buffers=tuple((name, _stored_bytes(buffer)) for name, buffer in model.named_buffers()),
        roles=roles,
        fusions=fusions,
        chain=chain_of_module(model, spec),
        blocks=tuple(blocks_of(model, spec.model.blocks)),
        draws=drops_out(model),
        attending=attending_of(model, spec),
        experts=experts,
        sample_bytes=sample_bytes(spec),
        ignored=ignored_fields(spec.model) if isinstance(spec.model, HuggingFaceModel) else (),
    )


def _unit_facts(
    model: nn.Module, modules: tuple[str, ...], named: Iterable[tuple[str, nn.Parameter]]
) -> UnitFacts:
    """Return the facts of a unit of `model` with these parameters."""
    tensors = (
        TensorFacts(
            name=name,
            shape=tuple(parameter.shape),
            is_frozen=not parameter.requires_grad,
            num_quantized=_num_quantized(model, name, parameter),
        )
        for name, parameter in named
    )
    return UnitFacts(modules=modules, tensors=tuple(tensors))


def _num_quantized(model: nn.Module, name: str, parameter: nn.Parameter) -> int:
    """Return the elements of a quantized weight; 0 for another parameter."""
    linear = None if parameter.is_floating_point() else quantized_linear(model, name)
    return linear.in_features * linear.out_features if linear else 0


def _stored_bytes(buffer: torch.Tensor) -> int:
    """Return the bytes of a buffer as stored next to parameters of at most fp32."""
    itemsize = _WIDE_BYTES if buffer.is_floating_point() else buffer.itemsize
    return buffer.numel() * itemsize
