"""Private torch APIs are used only in `internals`, by torch component, with the supported
versions."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.source_tree import SourceTree

SOURCES = SourceTree(Path(__file__).parents[2])
MODULES, tree = SOURCES.modules, SOURCES.parsed

# Private in name only: torch's documentation and other projects use them.
KNOWN_TO_ALL = {"torch.utils._pytree", "torch.utils._python_dispatch"}
# Modules outside of `internals` that use private torch APIs. This list only shrinks.
TOUCHES_PRIVATE = {
    "ptrain.axes.tensor.run.styles",  # overrides ColwiseParallel._prepare_output_fn
}


def private_names() -> set[str]:
    """Return the private names that `internals` lists as members of torch."""
    return {
        node.value
        for module, path in MODULES.items()
        if module.startswith("ptrain.internals.")
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and re.fullmatch(r"_[a-zA-Z]\w+", node.value)
    }


def touches_private(path: Path, names: set[str]) -> bool:
    """Return True if a module imports a private torch module or reads a private member."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ImportFrom):
            module, imported = node.module or "", {alias.name for alias in node.names}
            is_torchs = module.split(".")[0] == "torch" and module not in KNOWN_TO_ALL
            if (is_torchs and re.search(r"\._", module)) or (
                module == "torch" and "_C" in imported
            ):
                return True
            if module in KNOWN_TO_ALL and imported & names:
                return True
        if isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value)
            if node.attr in names and owner not in ("self", "cls"):
                return True
            if owner == "torch" and node.attr == "_C":
                return True
    return False


def test_private_torch_apis_are_wrapped_in_internals():
    names = private_names()
    assert {"_get_fsdp_state", "_disable_current_modes", "_resolve_process_group"} <= names
    touching = {
        module
        for module, path in MODULES.items()
        if not module.startswith("ptrain.internals.") and touches_private(path, names)
    }
    unlisted = touching - TOUCHES_PRIVATE
    assert not unlisted, f"what is private in torch stands in ptrain/internals: {sorted(unlisted)}"
    assert touching == TOUCHES_PRIVATE, "modules that touch nothing private: take them off the list"
