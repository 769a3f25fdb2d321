"""The command `ptrain cache`: show or clear the traces that predictions left in the cache
folder.
"""

from __future__ import annotations

from argparse import Namespace

from ptrain.cli.arguments import print_json
from ptrain.errors import PtrainError
from ptrain.facts import cache
from ptrain.units import format_bytes


def run(args: Namespace) -> int:
    """Print the folder, the number and the size of traces; with `--clear`, remove them.

    Raises:
        PtrainError: If the folder cannot be read or cleared, or another process clears it.
    """
    if cache.is_off():
        if args.json:
            print_json({"folder": None, "traces": 0, "bytes": 0, "cleared": False})
        else:
            print("The cache is off (PTRAIN_CACHE=off).")
        return 0
    files = cache.cached_files()
    try:
        size = sum(path.stat().st_size for path in files)
        for path in files if args.clear else ():
            path.unlink()
    except FileNotFoundError as error:  # removed between listing and stat or unlink
        raise PtrainError(f"error: another process clears the cache: {error}") from error
    except OSError as error:
        raise PtrainError(f"error: the cache cannot be read or cleared: {error}") from error
    if args.json:
        print_json(
            {
                "folder": str(cache.cache_folder()),
                "traces": len(files),
                "bytes": size,
                "cleared": args.clear,
            }
        )
    else:
        what = "removed" if args.clear else "kept"
        number = f"{len(files)} trace{'s' * (len(files) != 1)}"
        print(f"{cache.cache_folder()}: {number}, {format_bytes(size)}, {what}")
    return 0
