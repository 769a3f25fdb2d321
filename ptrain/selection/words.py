"""What to write for a candidate: overrides of a spec that give exactly it."""

from __future__ import annotations

from collections.abc import Iterator

from ptrain.selection.job import SearchedJob, is_model, said_in
from ptrain.selection.written import OF_CANDIDATES
from ptrain.spec.load import load
from ptrain.spec.names import names
from ptrain.spec.spec import Spec
from ptrain.spec.text import flow


def words_of(job: SearchedJob, spec: Spec) -> tuple[str, ...]:
    """Return the name or file of a spec, and the overrides that make a candidate of it; of a model
    the default spec's. `spec` has the mapping that loads to it."""
    if is_model(job.source):
        source, said = names().default, said_in(None)
        return (source, *_changes(load(None).spec.resolved, spec.resolved, said))
    said = said_in(job.source, job.overrides)
    return (job.source, *job.overrides, *_changes(job.base.resolved, spec.resolved, said))


def _changes(
    before: dict[str, object], after: dict[str, object], said: dict[str, object]
) -> Iterator[str]:
    """Sections that differ, and those that candidates say and the file says otherwise."""
    of_candidates = {place.partition(".")[0] for place in OF_CANDIDATES}
    for key, value in after.items():
        is_said = key in of_candidates and said.get(key) not in (None, value)
        if before.get(key) != value or is_said:
            yield f"{key}={flow(value)}"
    yield from (
        f"{key}={_UNSAID.get(key, '{}')}"
        for key in of_candidates
        if key in said and key not in after
    )


_UNSAID = {
    "activations": "R",
    "recompute": "none",
    # as the wrapper does by itself
    **dict.fromkeys(("unit", "overlap", "prefetch", "gather_after_update"), "null"),
}
