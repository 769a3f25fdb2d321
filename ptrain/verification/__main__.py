"""`python -m ptrain.verification SPEC [a.b=c …]`: one rank of a verification, under torchrun, under
`ptrain verify`, or alone."""

from __future__ import annotations

import sys

from ptrain.train.refusal import leave_without_torch

if __name__ == "__main__":
    leave_without_torch()  # what follows imports torch

    from ptrain.train.leaving import live
    from ptrain.verification.options import parse
    from ptrain.verification.session import run

    live(lambda: run(parse(sys.argv[1:])))
