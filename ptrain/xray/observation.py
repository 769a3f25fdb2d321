"""The observation of a rank: the JSON file that each watched process writes.

A rank writes `rank-N.json` into the folder of the X-ray; `encode(observation)` is its content. All
numbers are facts of this rank. Inference across ranks (`xray.infer`) reads these files only, so an
observation may also be written by hand or by fake ranks.

Rules of the format:

- Bytes are integers, seconds are floats, ranks are global ranks, dtypes are torch's names
  (`float32`). Names of states, phases and collectives are as in a result record.
- Keys are added, never renamed. A missing key has its default.
- A group is identified by its ranks. Groups of one rank are left out.
- A fact that was not measured is missing or None, and `unknown` has the reason.

    {"version": 1, "rank": 0, "world_size": 2, "device": "cpu", "backend": "gloo",
     "groups": [{"ranks": [0, 1], "axis": ""}],
     "tensors": [{"state": "parameters", "name": "layers.0.weight", "key": "", "shape": [8, 4],
                  "dtype": "float32", "nbytes": 128, "digest": "9c1f…"}],
     "calls": [{"ranks": [0, 1], "collective": "all_reduce", "state": "gradients",
                "phase": "backward", "dtype": "float32", "calls": 1, "payload_bytes": 128,
                "sent_bytes": 128, "micro_batch": 0}],
     "forwards": 1, "backwards": 1}

`ptrain xray --json` prints the result of the inference (`xray.infer.XRay`).
"""

from __future__ import annotations

from dataclasses import dataclass

from ptrain.cost import Collective, Footprint, Peak, Phase, State

VERSION = 1
DDP, FSDP1, FSDP2 = "DDP", "FSDP1", "FSDP2"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFact:
    """A process group of this rank with at least two ranks.

    Attributes:
        ranks: The global ranks of the group, ascending.
        axis: The name of the mesh dimension, "" for a group without a mesh.
    """

    ranks: tuple[int, ...]
    axis: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFact:
    """A tensor of the training state that this rank holds.

    Attributes:
        state: PARAMETERS, GRADIENTS, OPTIMIZER, or OTHER for buffers.
        name: The parameter's path in its module. A parameter of an optimizer that no module has (a
            flat shard, a master copy) is `optimizer.GROUP.INDEX`.
        key: The key of the optimizer state (`exp_avg`); `master` for a parameter that only an
            optimizer has.
        shape: The local shape.
        dtype: The dtype.
        nbytes: Bytes of the local elements.
        digest: A digest of the local bytes; "" for a tensor without information: at most one
            element, or all elements equal.
        placements: Per mesh dimension of a DTensor, `R`, `S` or `P` (a pending sum).
        mesh: Per mesh dimension of a DTensor, the ranks of this rank's group.
        flat: Ranks over which the wrapper shards this flat tensor; empty if it is not flat.
        on_host: The tensor is offloaded to host memory.
        is_trained: The parameter requires a gradient.
        is_updated: The parameter, or a master copy of it, is in an optimizer of this rank.
    """

    state: State
    name: str
    key: str = ""
    shape: tuple[int, ...] = ()
    dtype: str = "float32"
    nbytes: int = 0
    digest: str = ""
    placements: tuple[str, ...] = ()
    mesh: tuple[tuple[int, ...], ...] = ()
    flat: tuple[int, ...] = ()
    on_host: bool = False
    is_trained: bool = True
    is_updated: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFact:
    """Equal collectives of one step: the same group, kind, state, phase, dtype and micro-batch.

    Attributes:
        ranks: The global ranks of the group, ascending.
        collective: The collective.
        state: The state that it moves, found by following copies from parameters and gradients.
            Tensors of modules are ACTIVATIONS; OTHER is everything else, such as a norm.
        phase: The phase of the step.
        dtype: The dtype of the payload.
        calls: Number of calls.
        payload_bytes: Bytes of the full tensors.
        sent_bytes: Bytes that this rank sends under the ring model.
        micro_batch: Index of the backward pass that runs or comes next, from 0.
    """

    ranks: tuple[int, ...]
    collective: Collective
    state: State
    phase: Phase
    dtype: str = "float32"
    calls: int = 1
    payload_bytes: int = 0
    sent_bytes: int = 0
    micro_batch: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WrapperFact:
    """A module that a framework wraps: one wrap unit.

    Attributes:
        kind: `DDP`, `FSDP1` or `FSDP2`.
        path: The path of the module, "" for a root.
        ranks: Ranks over which the unit is sharded, or replicated by DDP.
        nbytes: Bytes of the parameters that this rank stores.
        reshards: FSDP2: the unit is freed after its forward pass; None if unknown.
        is_offloaded: Shards are in host memory.
    """

    kind: str
    path: str = ""
    ranks: tuple[int, ...] = ()
    nbytes: int = 0
    reshards: bool | None = None
    is_offloaded: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleFact:
    """Memory of a module's forward passes.

    Attributes:
        path: The path of the module.
        peak_bytes: The most live bytes of the rank while the module ran.
        kept_bytes: Live bytes that its first forward pass added and kept for backward.
        recomputations: Number of forward passes within a backward pass.
    """

    path: str
    peak_bytes: int = 0
    kept_bytes: int = 0
    recomputations: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitFact:
    """Seconds of a step in which the rank's main thread waits for a group."""

    ranks: tuple[int, ...]
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """The facts of one rank.

    Attributes:
        rank: The global rank, 0 without process groups.
        world_size: Number of ranks.
        device: Device type of the parameters.
        backend: Backend of the default group, "" without one.
        steps: First and last watched step, counted from 1.
        seconds: Seconds of a step without meters.
        watched_seconds: Seconds of each watched step.
        groups: All process groups of this rank.
        tensors: The training state after a step; gradients as the optimizer receives them.
        calls: The collectives of one step.
        wrappers: Wrap units of frameworks.
        modules: Memory by module.
        memory: Bytes by state at the moments that `MemoryMeter` defines.
        peaks: Highest live bytes by phase.
        waits: Waiting time by group.
        forwards: Forward passes of the outermost trained modules, without recomputation.
        backwards: Backward passes that a step calls.
        inputs: Digests of the tensors that the outermost modules receive first in a step.
        host_share: Share of a step in which the device waits for the host, None if unknown.
        unknown: Reasons for facts that are missing, by name of the attribute.
    """

    version: int = VERSION
    rank: int = 0
    world_size: int = 1
    device: str = "cpu"
    backend: str = ""
    steps: tuple[int, ...] = ()
    seconds: float | None = None
    watched_seconds: tuple[float, ...] = ()
    groups: tuple[GroupFact, ...] = ()
    tensors: tuple[TensorFact, ...] = ()
    calls: tuple[CallFact, ...] = ()
    wrappers: tuple[WrapperFact, ...] = ()
    modules: tuple[ModuleFact, ...] = ()
    memory: tuple[Footprint, ...] = ()
    peaks: tuple[Peak, ...] = ()
    waits: tuple[WaitFact, ...] = ()
    forwards: int | None = None
    backwards: int | None = None
    inputs: tuple[str, ...] = ()
    host_share: float | None = None
    unknown: dict[str, str] | None = None
