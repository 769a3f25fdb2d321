"""The import path of a process that is ptrain: `python -m` puts the current folder first, where a
file named like an installed module would run in its place.

What this imports Python has loaded when it starts: anything else might itself be such a file.
"""

import os
import sys

_INSTALLED = "-packages"  # site-packages, and Debian's dist-packages


def leave_current_folder() -> None:
    """Takes the current folder off the path, unless PYTHONPATH names it. ptrain's own folder, where
    it is a checkout, comes after what is installed: files beside the package hide none of it."""
    here, segments = _here(), _segments()
    if not sys.flags.safe_path and sys.path[:1] in ([""], [here]):
        del sys.path[0]
    if "" in segments and here not in map(os.path.abspath, filter(None, segments)):
        sys.path[:] = [folder for folder in sys.path if folder != here]
    root = own_root()
    if not root.endswith(_INSTALLED):  # else it stands where it belongs
        folders = [folder for folder in sys.path if folder != root]
        ends = [end for end, folder in enumerate(folders, 1) if folder.endswith(_INSTALLED)]
        place = max(ends, default=len(folders))
        sys.path[:] = [*folders[:place], root, *folders[place:]]


def own_root() -> str:
    """The folder that holds the package."""
    return os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def _here() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:  # it was removed, and nothing is in it
        return ""


def _segments() -> list[str]:
    """Those of PYTHONPATH; an empty one means the current folder."""
    text = os.environ.get("PYTHONPATH", "")
    return text.split(os.pathsep) if text else []
