"""Build optimizers by the name of a rule, for training and for the single-device reference.

`TorchOptimizerFactory` implements `runtime.interface.OptimizerFactory` for torch tensors.

Some optimizers update with one operator at a time: torch's classes without a fused kernel, and this
project's Lion, Muon, and SGD for 16 bits on a CPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.optim.optimizer import ParamsT

from ptrain.internals.fakes import FakeTensor, detect_fake_mode
from ptrain.models.ledger import OperatorMode, has_tier, set_tier, storage_of
from ptrain.models.numerics import TORCH_DTYPES
from ptrain.optimizers.update import moment_shapes
from ptrain.runtime.interface import OptimizerLeaf
from ptrain.runtime.torch import cast, tag_like
from ptrain.spec.job import OPTIMIZERS, OptimizerSpec
from ptrain.spec.placement import Tier
from ptrain.spec.precision import DType

_READ = torch.ops.aten._local_scalar_dense.default
# any number for which no bias correction divides by 0: neither a step count nor a product of
# momenta
_ANY_NUMBER = 0.5


class _ScaledLossOptimizer(torch.optim.Optimizer):
    """An optimizer with the attributes of torch's fused optimizers for scaled losses.

    Attributes:
        grad_scale: The factor of the loss, by which `step` divides the gradients. None: 1.
        found_inf: 1 if the step is to be skipped, else 0. None: never skipped.
    """

    param_groups: list[dict[str, Any]]
    grad_scale: torch.Tensor | None = None
    found_inf: torch.Tensor | None = None


class ByOperator(_ScaledLossOptimizer):
    """A mixin before a torch optimizer class: `step` updates one tensor at a time.

    The host waits for `found_inf`, as it does for the scalars that torch's class reads.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Update every tensor that has a gradient, unless `found_inf` is set."""
        assert closure is None, "closures are not supported"
        is_fake = detect_fake_mode() is not None
        scale, found_inf = self.grad_scale, self.found_inf
        self.grad_scale = self.found_inf = None  # torch's Adafactor asserts it
        if found_inf is not None and not is_fake and found_inf.item():
            return
        # torch's `step` loops over this attribute. It is replaced for each tensor and restored at
        # the end.
        groups = self.param_groups
        try:
            for group in groups:
                for leaf in group["params"]:
                    if leaf.grad is None:
                        continue
                    if scale is not None:
                        # In place: the gradient is dropped after the update, and a copy would be
                        # another temporary.
                        leaf.grad.div_(scale)
                    # one tensor per call: torch's loop over all would keep the temporaries of one
                    # tensor while it allocates the next one's
                    self.param_groups = [{**group, "params": [leaf]}]
                    with _Temporaries(on_host=has_tier(storage_of(leaf))):
                        super().step()
        finally:
            self.param_groups = groups


class _Temporaries(OperatorMode):
    """The mode that tags the temporaries of an update on the host as host tensors.

    Fake tensors have no values; a read of one returns an arbitrary number.
    """

    def __init__(self, *, on_host: bool) -> None:
        super().__init__()
        self.on_host = on_host

    def run_operator(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if function is _READ and isinstance(args[0], FakeTensor):
            return _ANY_NUMBER
        result = function(*args, **kwargs)
        if self.on_host and isinstance(result, torch.Tensor) and not has_tier(storage_of(result)):
            set_tier(result, Tier.HOST)
        return result


class NAdam(ByOperator, torch.optim.NAdam):
    """torch's NAdam with decoupled weight decay and without `foreach`.

    `foreach` would have the temporaries of all tensors live at once.
    """

    def __init__(self, leaves: Any, **settings: Any) -> None:
        super().__init__(leaves, **settings, decoupled_weight_decay=True, foreach=False)


class Adafactor(ByOperator, torch.optim.Adafactor):
    """torch's Adafactor with support for scaled losses and for parameters on any tier."""


class _PerTensorOptimizer(_ScaledLossOptimizer):
    """An optimizer that updates one tensor after the other by `_update_tensor`."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Update every tensor that has a gradient."""
        assert closure is None, "closures are not supported"
        for options in self.param_groups:
            for leaf in options["params"]:
                if leaf.grad is not None:
                    self._update_tensor(leaf, leaf.grad, options)

    def _update_tensor(
        self, leaf: torch.Tensor, gradient: torch.Tensor, options: dict[str, Any]
    ) -> None:
        """Update one tensor in place."""
        raise NotImplementedError

    def _moment_of(self, leaf: torch.Tensor, name: str = "momentum_buffer") -> torch.Tensor:
        """Return a tensor's moment, zeros at its first update."""
        if not (state := self.state[leaf]):
            state[name] = torch.zeros_like(leaf)
        moment: torch.Tensor = state[name]
        return moment


class PlainLion(_PerTensorOptimizer):
    """Lion, which torch lacks: update by the sign of an interpolated momentum.

    Chen et al. 2023, "Symbolic discovery of optimization algorithms", arXiv:2302.06675, algorithm
    2. It runs one operator at a time, with one temporary of the size of the tensor.
    """

    def __init__(self, leaves: Any, **settings: Any) -> None:
        super().__init__(leaves, settings)

    def _update_tensor(
        self, leaf: torch.Tensor, gradient: torch.Tensor, options: dict[str, Any]
    ) -> None:
        momentum, lr, (beta1, beta2) = (
            self._moment_of(leaf, "exp_avg"),
            options["lr"],
            options["betas"],
        )
        direction = momentum.lerp(gradient, 1 - beta1).sign_()
        # Decoupled decay: it uses the value before the step, so it comes first.
        leaf.mul_(1 - lr * options["weight_decay"]).add_(direction, alpha=-lr)
        momentum.lerp_(gradient, 1 - beta2)


class Lion(ByOperator, PlainLion):
    """Lion with support for scaled losses and for parameters on any tier."""


class LionByFormula(PlainLion):
    """Lion by the paper's formulas in fp64: the reference of runs in fp64.

    In lower precision, another order of operators would flip signs.
    """

    def _update_tensor(
        self, leaf: torch.Tensor, gradient: torch.Tensor, options: dict[str, Any]
    ) -> None:
        momentum, lr, (beta1, beta2) = (
            self._moment_of(leaf, "exp_avg"),
            options["lr"],
            options["betas"],
        )
        theta, m, g = leaf.double(), momentum.double(), gradient.double()
        c = beta1 * m + (1 - beta1) * g
        leaf.copy_(theta - lr * (c.sign() + options["weight_decay"] * theta))
        momentum.copy_(beta2 * m + (1 - beta2) * g)


class SGD(_PerTensorOptimizer):
    """SGD with torch's arithmetic, one operator at a time, with scalars as temporaries.

    It is for 16-bit parameters on a CPU, where torch's fused kernel (up to 2.13) reads momenta
    wrongly and leaves all but a tensor's last few elements unchanged (pytorch/pytorch#191763).
    """

    def __init__(self, leaves: ParamsT, *, lr: float, momentum: float, weight_decay: float) -> None:
        super().__init__(leaves, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    def _update_tensor(
        self, leaf: torch.Tensor, gradient: torch.Tensor, options: dict[str, Any]
    ) -> None:
        lr, momentum, decay = (options[key] for key in ("lr", "momentum", "weight_decay"))
        if self.grad_scale is not None:
            gradient.div_(self.grad_scale)
        if self.found_inf is None:
            taken = tag_like(leaf.new_ones((), dtype=torch.float32), leaf)
        else:
            # a factor of 0 leaves parameter and momentum unchanged, without a read on the host
            taken = tag_like(1 - self.found_inf, leaf)
            gradient.nan_to_num_(0.0, 0.0, 0.0)  # inf * 0 would be nan
        if not momentum:
            leaf.addcmul_(leaf, taken, value=-lr * decay)
            leaf.addcmul_(gradient, taken, value=-lr)
            return
        buffer = self._moment_of(leaf)
        # `momentum` if the step is taken, else 1
        buffer.mul_(1 - taken * (1 - momentum))
        buffer.addcmul_(gradient, taken)
        buffer.addcmul_(leaf, taken, value=decay)
        leaf.addcmul_(buffer, taken, value=-lr)


# The quintic iteration X <- aX + (bA + cA^2) X with A = X X^T. The coefficients maximize its slope
# at 0 while singular values stay near 1 (K. Jordan 2024).
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
# DEFAULT_NS_STEPS and EPS of torch.optim.Muon (torch/optim/_muon.py, 2.13). Singular values do not
# converge to 1 but stay in a band around it, so more iterations gain nothing.
ITERATIONS = 5
SMALLEST_NORM = 1e-7
# root mean square of AdamW's updates in units of lr; an orthogonal A x B has 1 / sqrt(max(A, B))
ADAMW_RMS = 0.2


class Muon(_PerTensorOptimizer):
    """Muon for 2-d tensors: momentum, orthogonalized by a Newton-Schulz iteration.

    The arithmetic equals torch.optim.Muon's with Nesterov momentum, decoupled weight decay and
    the learning rate adjusted to the root mean square of AdamW's updates (Liu et al. 2025, "Muon is
    scalable for LLM training"). It differs from torch's class in two ways: fp64 matrices are
    orthogonalized in fp64, not in bf16, so that fp64 runs can be compared; and `found_inf` skips an
    update without reading a value on the host.
    """

    def __init__(
        self,
        matrices: Iterable[torch.Tensor],
        *,
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.1,
    ) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    def _update_tensor(
        self, leaf: torch.Tensor, gradient: torch.Tensor, options: dict[str, Any]
    ) -> None:
        momentum, lr = options["momentum"], options["lr"]
        assert leaf.dim() == 2, "Muon updates matrices only"
        if self.grad_scale is not None:
            gradient = tag_like(gradient / self.grad_scale, leaf)
        buffer = self._moment_of(leaf)
        if self.found_inf is None:
            ahead, kept = buffer.lerp_(gradient, 1 - momentum), leaf
        else:
            ahead = tag_like(buffer.lerp(gradient, 1 - momentum), leaf)
            kept = tag_like(leaf.clone(), leaf)
        direction = orthogonalize(tag_like(gradient.lerp(ahead, momentum), leaf))
        kept.mul_(1 - lr * options["weight_decay"])
        kept.add_(direction, alpha=-lr * ADAMW_RMS * math.sqrt(max(leaf.shape)))
        if self.found_inf is not None:
            # both outcomes are computed and selected on the device, without a read on the host
            skipped = tag_like(self.found_inf != 0, leaf)
            torch.where(skipped, buffer, ahead, out=buffer)
            torch.where(skipped, leaf, kept, out=leaf)


def orthogonalize(matrix: torch.Tensor) -> torch.Tensor:
    """Return an approximation of U V^T of the matrix's singular value decomposition.

    Its singular values are between 0.7 and 1.2. The iteration runs in the dtype of the result.

    Args:
        matrix: A matrix [rows, columns] of any dtype.

    Returns:
        A matrix of the same shape in bf16, or in fp64 for an fp64 matrix.
    """
    x = cast(matrix, torch.float64 if matrix.dtype == torch.float64 else torch.bfloat16)
    is_tall = x.shape[0] > x.shape[1]
    # iterate on the wide form, whose Gram matrix X X^T is the smaller one
    x = x.T if is_tall else x
    # The iteration needs singular values of at most 1, and the Frobenius norm bounds the largest
    # one. The clamp keeps a zero gradient at zero.
    x = tag_like(x / x.norm().clamp(min=SMALLEST_NORM), matrix)
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram = tag_like(x @ x.T, matrix)
        # An odd polynomial of X = U S V^T is U p(S) V^T, so only singular values change: p(s) = as
        # + bs^3 + cs^5.
        polynomial = partial(torch.addmm, gram, gram, gram, beta=b, alpha=c)
        x = tag_like(torch.addmm(x, tag_like(polynomial(), matrix), x, beta=a), matrix)
    return x.T if is_tall else x


class ExactMuon(_PerTensorOptimizer, torch.optim.Muon):
    """torch's Muon without its rounding to bf16: the single-device reference in fp64.

    The iteration changes singular values only, so it is applied to the values of a singular value
    decomposition.
    """

    def _update_tensor(
        self, leaf: torch.Tensor, gradient: torch.Tensor, options: dict[str, Any]
    ) -> None:
        momentum, buffer = options["momentum"], self._moment_of(leaf)
        buffer.mul_(momentum).add_(gradient, alpha=1 - momentum)
        ahead = momentum * buffer + (1 - momentum) * gradient
        leaf.mul_(1 - options["lr"] * options["weight_decay"])
        # `match_rms_adamw` of torch.optim.Muon (torch/optim/_muon.py: _adjust_lr)
        rms = 0.2 * math.sqrt(max(leaf.shape))
        leaf.sub_(_exactly_orthogonalized(ahead, options), alpha=options["lr"] * rms)


def _exactly_orthogonalized(matrix: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
    """Orthogonalize a matrix by singular value decomposition, with torch's coefficients."""
    a, b, c = group["ns_coefficients"]
    left, sizes, right = torch.linalg.svd(matrix, full_matrices=False)
    sizes = sizes / max(float(sizes.square().sum().sqrt()), group["eps"])
    for _ in range(int(group["ns_steps"])):
        sizes = a * sizes + b * sizes**3 + c * sizes**5
    return left @ torch.diag(sizes) @ right


Build: TypeAlias = Callable[..., torch.optim.Optimizer]
Leaves = Sequence[torch.Tensor] | Sequence[dict[str, list[torch.Tensor]]]


class TorchRow(NamedTuple):
    """The optimizer classes of one rule.

    Each takes parameters, `lr`, `weight_decay` and the keys of the rule's row in `OPTIMIZERS`.

    Attributes:
        build: The optimizer that trains.
        reference: Returns the optimizer that updates full tensors of a dtype on a single device.
        in_16_bits: The optimizer for 16-bit parameters on a CPU, if `build` is wrong for them.
    """

    build: Build
    reference: Callable[[DType], Build]
    in_16_bits: Build | None = None


def _reference_adamw(dtype: DType) -> Build:
    """Return the reference AdamW: one tensor and one operator at a time.

    In 16 bits it is fused as in training: unfused, every operator would round its result, while the
    fused kernel rounds once.
    """
    form = {"fused": True} if dtype.itemsize == 2 else {"foreach": False}
    return partial(torch.optim.AdamW, **form)


def _reference_muon(dtype: DType) -> Build:
    """Return the reference Muon: torch's class, or an exact one in fp64 where torch's uses bf16."""
    kind = ExactMuon if dtype is DType.FP64 else torch.optim.Muon
    return partial(kind, adjust_lr_fn="match_rms_adamw")


def _build_adafactor(
    kind: Build, leaves: Any, *, eps1: float | None, eps2: float, **settings: Any
) -> torch.optim.Optimizer:
    """Return an Adafactor of a class; torch takes the two epsilons as one argument."""
    return kind(leaves, eps=(eps1, eps2), foreach=False, **settings)


ROWS: Mapping[str, TorchRow] = {
    "adamw": TorchRow(partial(torch.optim.AdamW, fused=True), _reference_adamw),
    "sgd": TorchRow(
        partial(torch.optim.SGD, fused=True),
        # torch's fused SGD is wrong for 16-bit CPU tensors (pytorch/pytorch#191763)
        lambda _: partial(torch.optim.SGD, foreach=False),
        in_16_bits=SGD,
    ),
    "nadam": TorchRow(
        NAdam, lambda _: partial(torch.optim.NAdam, decoupled_weight_decay=True, foreach=False)
    ),
    "lion": TorchRow(Lion, lambda dtype: LionByFormula if dtype is DType.FP64 else PlainLion),
    "muon": TorchRow(Muon, _reference_muon),
    "adafactor": TorchRow(
        partial(_build_adafactor, Adafactor),
        lambda _: partial(_build_adafactor, torch.optim.Adafactor),
    ),
}


def _constructor_arguments(rule: str, spec: OptimizerSpec) -> dict[str, Any]:
    """Return the constructor arguments of a rule's optimizer from the spec."""
    return {key: getattr(spec, key) for key in ("lr", "weight_decay", *OPTIMIZERS[rule].keys)}


def _flat_tensors(leaves: Leaves) -> Iterator[torch.Tensor]:
    """Yield the tensors of a list of tensors or of parameter groups."""
    for leaf in leaves:
        yield from leaf["params"] if isinstance(leaf, dict) else (leaf,)


def build_optimizer(
    rule: str, leaves: Leaves, spec: OptimizerSpec, *, stands_in: bool = False
) -> torch.optim.Optimizer:
    """Build the training optimizer of a rule.

    Args:
        rule: Name of the rule, a key of `ROWS`.
        leaves: Tensors, or parameter groups of them.
        spec: The hyperparameters.
        stands_in: The tensors are CPU tensors that represent GPU tensors, so the GPU's class is
            used.
    """
    build, _, in_16_bits = ROWS[rule]
    on_cpu = [leaf for leaf in _flat_tensors(leaves) if leaf.is_cpu and not stands_in]
    if in_16_bits is not None and any(leaf.itemsize == 2 for leaf in on_cpu):
        build = in_16_bits
    return build(leaves, **_constructor_arguments(rule, spec))


def reference_optimizer(
    rule: str, tensors: Sequence[torch.Tensor], spec: OptimizerSpec, dtype: DType
) -> torch.optim.Optimizer:
    """Build the single-device reference of a rule, for full tensors of a dtype.

    Args:
        rule: Name of the rule, a key of `ROWS`.
        tensors: Full tensors.
        spec: The hyperparameters.
        dtype: The dtype of the update.
    """
    return ROWS[rule].reference(dtype)(tensors, **_constructor_arguments(rule, spec))


def initial_state(
    rule: str, spec: OptimizerSpec, tensor: torch.Tensor, device: torch.device | None = None
) -> dict[str, torch.Tensor]:
    """Return the state that torch's optimizers create for a tensor before its first step.

    Args:
        rule: Name of the rule.
        spec: Decides the moments of the rule.
        tensor: The parameter.
        device: The device of the state, by default the tensor's.

    Returns:
        Moments as zeros like the tensor, and numbers as 0-d fp32 tensors, by torch's names.
    """
    place = tensor.device if device is None else device
    moments = {
        name: torch.zeros_like(tensor, device=place)
        if shape == tuple(tensor.shape)
        else tensor.new_zeros(shape, device=place)
        for name, shape in moment_shapes(rule, spec, tuple(tensor.shape)).items()
    }
    numbers = OPTIMIZERS[rule].numbers.items()
    return moments | {
        name: torch.tensor(initial, dtype=torch.float32, device=place) for name, initial in numbers
    }


class TorchLeaf:
    """A parameter of a torch optimizer with its value, gradient and state.

    It is the model's parameter itself, or a tensor that is empty between updates and gets a value
    for each update.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.optimizer: torch.optim.Optimizer | None = None

    @property
    def value(self) -> torch.Tensor:
        return self.tensor.detach()

    @value.setter
    def value(self, value: torch.Tensor) -> None:
        self.tensor.data = value

    @property
    def gradient(self) -> torch.Tensor | None:
        return self.tensor.grad

    @gradient.setter
    def gradient(self, gradient: torch.Tensor | None) -> None:
        self.tensor.grad = gradient

    @property
    def state(self) -> dict[str, torch.Tensor]:
        assert self.optimizer is not None, "the leaf has no optimizer"
        state: dict[str, torch.Tensor] = self.optimizer.state[self.tensor]
        return state


class TorchOptimizer:
    """A torch optimizer on its leaves."""

    def __init__(
        self,
        rule: str,
        leaves: Sequence[OptimizerLeaf[torch.Tensor]],
        spec: OptimizerSpec,
        *,
        stands_in: bool,
    ) -> None:
        tensors = [tensor_of(leaf) for leaf in leaves]
        self.optimizer = build_optimizer(rule, tensors, spec, stands_in=stands_in)
        for leaf in leaves:
            assert isinstance(leaf, TorchLeaf), "the leaf is not a TorchLeaf"
            leaf.optimizer = self.optimizer

    def step(self, lr: float, scalars: tuple[torch.Tensor | None, torch.Tensor] | None) -> None:
        """Update all leaves that have a gradient.

        Args:
            lr: The learning rate of this step.
            scalars: The loss scale that gradients are divided by (None: unscaled), and the skip
                flag; both 0-d on the leaves' device. None: the update always happens.
        """
        for options in self.optimizer.param_groups:
            options["lr"] = lr
        # torch's fused optimizers read these attributes, which torch.amp.GradScaler sets
        self.optimizer.grad_scale, self.optimizer.found_inf = scalars or (None, None)
        self.optimizer.step()


class TorchOptimizerFactory:
    """The factory of torch optimizers by rule; see `build_optimizer` for `stands_in`."""

    def __init__(self, *, stands_in: bool = False) -> None:
        self.stands_in = stands_in

    def create_leaf(self, like: torch.Tensor, dtype: DType) -> TorchLeaf:
        # Empty between updates: `value` gives it memory through `.data`, and the optimizer's state
        # keeps its key, the tensor.
        return TorchLeaf(like.new_empty(0, dtype=TORCH_DTYPES[dtype]))

    def wrap_leaf(self, tensor: torch.Tensor) -> TorchLeaf:
        return TorchLeaf(tensor)

    def create_optimizer(
        self, rule: str, leaves: Sequence[OptimizerLeaf[torch.Tensor]], spec: OptimizerSpec
    ) -> TorchOptimizer:
        return TorchOptimizer(rule, leaves, spec, stands_in=self.stands_in)


def tensor_of(leaf: OptimizerLeaf[torch.Tensor]) -> torch.Tensor:
    """Return the parameter of torch's optimizer that a leaf wraps."""
    assert isinstance(leaf, TorchLeaf), "the leaf is not a TorchLeaf"
    return leaf.tensor
