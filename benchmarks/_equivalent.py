"""Mutants that no test can tell from the code, each with the reason: by file, function, what was
there and what is there now. A mutant that is not listed here counts as one that a test could kill.
"""

from __future__ import annotations

EQUIVALENT: dict[tuple[str, str, str, str], str] = {}
