"""The import path of a ptrain process.

`python -m` puts the current folder first on the path, where a file named like an installed module
would be imported instead of it. This module imports only modules that Python has loaded at
start-up: any other import could itself load such a file.
"""

import os
import sys

_INSTALLED = "-packages"  # site-packages, and Debian's dist-packages


def leave_current_folder() -> None:
    """Remove the current folder from `sys.path`, unless PYTHONPATH names it.

    The root of a ptrain checkout moves after the last site-packages folder, so that files next to
    the package hide no installed module.
    """
    here, segments = _current_folder(), _pythonpath_entries()
    # `-P` sets safe_path: then Python has not added the current folder.
    if not sys.flags.safe_path and sys.path[:1] in ([""], [here]):
        del sys.path[0]
    if "" in segments and here not in map(os.path.abspath, filter(None, segments)):
        sys.path[:] = [folder for folder in sys.path if folder != here]
    root = own_root()
    if not root.endswith(_INSTALLED):  # an installed package is in place already
        folders = [folder for folder in sys.path if folder != root]
        ends = [end for end, folder in enumerate(folders, 1) if folder.endswith(_INSTALLED)]
        place = max(ends, default=len(folders))
        sys.path[:] = [*folders[:place], root, *folders[place:]]


def own_root() -> str:
    """Return the folder that contains the package."""
    return os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def _current_folder() -> str:
    """Return the current folder, "" if it was removed."""
    try:
        return os.getcwd()
    except FileNotFoundError:  # a removed folder holds no modules
        return ""


def _pythonpath_entries() -> list[str]:
    """Return the entries of PYTHONPATH. An empty entry means the current folder."""
    text = os.environ.get("PYTHONPATH", "")
    return text.split(os.pathsep) if text else []
