"""ptrain: distributed training from a placement spec, predicted to the byte and measured.

`load`, `expand`, `resolve_auto`, `derive`, `lower` and `select` need no torch; `interpret`,
`measure`, `compare`, `run` and `verify` do. Each name is imported on first use, so `import ptrain`
itself is cheap. The returned objects print as the command line prints them
(`report/printed.py`).

Example:
    >>> import ptrain
    >>> spec = ptrain.load("zero3", ["mesh.dp_shard=4"]).spec
    >>> print(ptrain.derive(spec))  # doctest: +SKIP
"""

from importlib import import_module

from ptrain.version import VERSION as __version__

# Not typing.TYPE_CHECKING: under `python -m ptrain` this module runs before the current folder is
# off sys.path, where a local `typing.py` would be imported.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from ptrain.derivation.estimate import derive as derive
    from ptrain.interpreter.program import interpret as interpret
    from ptrain.meters.measure import measure as measure
    from ptrain.plan.lower import lower as lower
    from ptrain.selection.choose import select as select
    from ptrain.selection.recompute import resolve_auto as resolve_auto
    from ptrain.spec.load import expand as expand
    from ptrain.spec.load import load as load
    from ptrain.traces.facts import read_facts as read_facts
    from ptrain.train.comparison import compare as compare
    from ptrain.train.notebook import run as run
    from ptrain.verification.jobs.job import Job as Job
    from ptrain.verification.jobs.job import Terms as Terms
    from ptrain.verification.user_loop import share_of as share_of
    from ptrain.verification.user_loop import verify as verify

_MODULE_OF = {
    "load": "ptrain.spec.load",
    "expand": "ptrain.spec.load",
    "compare": "ptrain.train.comparison",
    "derive": "ptrain.derivation.estimate",
    "lower": "ptrain.plan.lower",
    "interpret": "ptrain.interpreter.program",
    "measure": "ptrain.meters.measure",
    "read_facts": "ptrain.traces.facts",
    "run": "ptrain.train.notebook",
    "select": "ptrain.selection.choose",
    "resolve_auto": "ptrain.selection.recompute",
    "share_of": "ptrain.verification.user_loop",
    "verify": "ptrain.verification.user_loop",
    "Job": "ptrain.verification.jobs.job",
    "Terms": "ptrain.verification.jobs.job",
}
# Names whose modules import torch: a missing or unsupported torch is reported first.
_NEEDS_TORCH = {
    "compare",
    "interpret",
    "measure",
    "read_facts",
    "share_of",
    "verify",
    "Job",
    "Terms",
}
__all__ = [
    "Job",
    "Terms",
    "__version__",
    "compare",
    "derive",
    "expand",
    "interpret",
    "load",
    "lower",
    "measure",
    "read_facts",
    "resolve_auto",
    "run",
    "select",
    "share_of",
    "verify",
]


def __getattr__(name: str) -> object:
    """Import an exported name on first access (PEP 562).

    Raises:
        AttributeError: ptrain exports no such name.
        SpecError: The name needs torch, and no supported torch is installed.
    """
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'ptrain' has no attribute {name!r}")
    if name in _NEEDS_TORCH:
        from ptrain.installed import require_torch

        require_torch()
    import_module("ptrain.report.printed")  # registers the text of every returned object
    return getattr(import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return __all__
