"""`ptrain cache`: the traces that predictions have left in the user's folder of caches."""

from __future__ import annotations

from argparse import Namespace

from ptrain.cli.arguments import print_json
from ptrain.errors import PtrainError
from ptrain.facts import cache
from ptrain.units import format_bytes


def run(args: Namespace) -> int:
    """Print where the traces are, how many and how large; with --clear remove them."""
    if cache.is_off():
        if args.json:
            print_json({"folder": None, "traces": 0, "bytes": 0, "cleared": False})
        else:
            print("The cache is off (PTRAIN_CACHE=off).")
        return 0
    files = cache.files()
    try:
        size = sum(path.stat().st_size for path in files)
        for path in files if args.clear else ():
            path.unlink()
    except FileNotFoundError as error:
        raise PtrainError(f"error: another process clears the cache: {error}") from error
    except OSError as error:
        raise PtrainError(f"error: the cache cannot be read or cleared: {error}") from error
    if args.json:
        print_json(
            {
                "folder": str(cache.folder()),
                "traces": len(files),
                "bytes": size,
                "cleared": args.clear,
            }
        )
    else:
        what = "removed" if args.clear else "kept"
        number = f"{len(files)} trace{'s' * (len(files) != 1)}"
        print(f"{cache.folder()}: {number}, {format_bytes(size)}, {what}")
    return 0
