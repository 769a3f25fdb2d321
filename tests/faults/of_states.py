"""Violations of Theorem 4: different replicas, wrong shards, and states of another step."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ptrain.interpreter.program import Program
from ptrain.report.finding import Subject
from tests.faults.fault import Fault, Setting
from tests.faults.of_batches import DDP, ZERO2, ZERO3
from tests.faults.planting import (
    FAULTY_STEP,
    after_update_once,
    around_update,
    flip_bit,
    is_faulty,
    local_parameter,
    stored_tensors,
    units,
)

ZERO16 = Setting(mesh={"dp_shard": 2}, layout="zero16")
BF16 = Setting(mesh={"dp_shard": 2}, placement={"dp_shard": "zero3"}, layout="bf16")
ONE_TENSOR = "blocks.1.mlp.down.weight"


def _put_back(program: Program, kept: Callable[[], list[torch.Tensor]]) -> None:
    """Restore this rank's tensors once after an update."""

    def before(step: int) -> list[torch.Tensor]:
        return [tensor.clone() for tensor in kept()] if step == FAULTY_STEP else []

    def after(step: int, held: list[torch.Tensor]) -> None:
        if held:
            torch._foreach_copy_(kept(), held)

    around_update(program, before, after)


def stale_parameters(program: Program) -> None:
    """Keep the previous step's parameters on one rank."""
    if is_faulty(program):
        _put_back(program, lambda: _of_state(program, "parameters"))


def stale_shard(program: Program) -> None:
    """Keep the previous step's shard of one unit on one rank."""
    if is_faulty(program):
        _put_back(program, lambda: [local_parameter(program, ONE_TENSOR)])


def one_step_behind(program: Program) -> None:
    """Skip one update on one rank, so that its full state is one step behind."""
    if is_faulty(program):
        _put_back(program, lambda: stored_tensors(program))


def _of_state(program: Program, state: str) -> list[torch.Tensor]:
    return [tensor.detach() for each, tensor in program.storages() if each == state]


def not_gathered(program: Program) -> None:
    """Skip the gather of one unit after an update: a rank has new values of its shard and old ones
    of the others."""
    found = units(program)[0].parameters
    spread, calls = found.update_stored, iter(range(10**6))

    def kept(part, cut, missing, when):
        if next(calls) != FAULTY_STEP:
            spread(part, cut, missing, when)
            return
        found.cuts.put_part(found.stored, part, found.cut, cut)

    found.update_stored = kept


def stale_copies(program: Program) -> None:
    """Skip the refresh of the 16-bit parameters from their masters once."""
    for each in units(program):
        target = program.wrapped.targets()[units(program).index(each)][0]
        store, calls = target.store, iter(range(10**6))

        def kept(value, store=store, calls=calls):
            if next(calls) != FAULTY_STEP:
                store(value)

        target.store = kept


def flipped(bit: int, *, optimizer: bool = False) -> Callable[[Program], None]:
    def plant(program: Program) -> None:
        def act() -> None:
            if not is_faulty(program):
                return
            tensor = (
                next(tensors["exp_avg_sq"] for _, tensors in program.update.tensors())
                if optimizer
                else _of_state(program, "parameters")[3]
            )
            flip_bit(tensor, bit, index=7)

        after_update_once(program, act, step=0)

    return plant


def other_initial_values(program: Program) -> None:
    """Permute one rank's initial values of one tensor."""
    if is_faulty(program):
        held = local_parameter(program, ONE_TENSOR)
        with torch.no_grad():
            held.copy_(held.flip(0))


def _copied(program: Program) -> dict[str, dict[str, torch.Tensor]]:
    return {
        kind: {name: tensor.clone() for name, tensor in named.items()}
        for kind, named in program.state_dict().items()
    }


def _restore_previous(program: Program, kinds: tuple[str, ...]) -> None:
    """Restore these kinds of state to the step before FAULTY_STEP after its update."""
    held: list[dict[str, dict[str, torch.Tensor]]] = []

    def load() -> None:
        now = program.state_dict()
        program.load_state_dict({**now, **{kind: held[0][kind] for kind in kinds}})

    after_update_once(program, lambda: held.append(_copied(program)), step=FAULTY_STEP - 1)
    after_update_once(program, load)


def resumed_from_another_step(program: Program) -> None:
    """Resume every rank from the previous checkpoint, and continue with the next step."""
    _restore_previous(program, ("model", "optimizer"))


def resumed_without_optimizer(program: Program) -> None:
    """Resume with the optimizer state of another checkpoint."""
    _restore_previous(program, ("optimizer",))


_BITS = ((0, "lowest bit"), (30, "bit 30"), (-2, "highest bit of the exponent"), (-1, "sign"))

FAULTS = (
    Fault(
        name="stale parameters after an update",
        setting=DDP,
        plant=stale_parameters,
        subjects=(Subject.PARAMETERS,),
        axis="dp_replicate",
        factor="differs after",
    ),
    Fault(
        name="stale shard after an update",
        setting=ZERO3,
        plant=stale_shard,
        subjects=(Subject.PARAMETERS,),
        axis="dp_shard",
        factor="differs after",
        place=ONE_TENSOR,
    ),
    Fault(
        name="updated shards not gathered",
        setting=ZERO2,
        plant=not_gathered,
        subjects=(Subject.PARAMETERS,),
        factor="stale|gather",
    ),
    Fault(
        name="stale 16-bit copy of a master",
        setting=ZERO16,
        plant=stale_copies,
        subjects=(Subject.PARAMETERS,),
        factor="differs after",
    ),
    *(
        Fault(
            name=f"a flipped bit in replicated parameters: {words}",
            setting=DDP,
            plant=flipped(bit),
            subjects=(Subject.PARAMETERS,),
            axis="dp_replicate",
            factor="replicas|differs after",
        )
        for bit, words in _BITS
    ),
    Fault(
        name="a flipped bit in replicated optimizer state: lowest bit",
        setting=DDP,
        plant=flipped(0, optimizer=True),
        subjects=(Subject.OPTIMIZER,),
        axis="dp_replicate",
        factor="replicas|differs after",
    ),
    Fault(
        name="a flipped bit in sharded parameters: exponent",
        setting=ZERO3,
        plant=flipped(-4),
        subjects=(Subject.PARAMETERS,),
        factor="differs after",
    ),
    Fault(
        name="a flipped bit in sharded optimizer state: exponent",
        setting=ZERO3,
        plant=flipped(-4, optimizer=True),
        subjects=(Subject.OPTIMIZER,),
        factor="differs after",
    ),
    Fault(
        name="a flipped bit in sharded parameters: lowest bit, bf16",
        setting=BF16,
        plant=flipped(0),
        subjects=(Subject.PARAMETERS,),
        undetectable=(
            "one unit in the last place of one element is less than what the layout's own "
            "rounding does to every element in every step, and no other rank has a copy of it"
        ),
    ),
    Fault(
        name="a flipped bit in sharded parameters: lowest bit, fp32",
        setting=ZERO3,
        plant=flipped(0),
        subjects=(Subject.PARAMETERS,),
        undetectable=(
            "one unit in the last place of one element is what another order of summation does to "
            "each element, in fp64 too, and no other rank has a copy of it"
        ),
    ),
    Fault(
        name="one rank one step behind",
        setting=DDP,
        plant=one_step_behind,
        subjects=(Subject.PARAMETERS, Subject.OPTIMIZER, Subject.COUNTER),
        axis="dp_replicate",
        factor="stale|behind|step",
    ),
    Fault(
        name="one rank begins with other values",
        setting=DDP,
        plant=other_initial_values,
        subjects=(Subject.PARAMETERS,),
        axis="dp_replicate",
        factor="order",
        place=ONE_TENSOR,
    ),
    Fault(
        name="checkpoint of another step resumed",
        setting=ZERO3,
        plant=resumed_from_another_step,
        subjects=(Subject.PARAMETERS, Subject.OPTIMIZER, Subject.COUNTER),
        factor="stale|step",
    ),
    Fault(
        name="optimizer state of another checkpoint",
        setting=ZERO2,
        plant=resumed_without_optimizer,
        subjects=(Subject.OPTIMIZER, Subject.COUNTER),
        factor="stale|step|differs after",
    ),
)
