"""`python -m ptrain.train SPEC [a.b=c …]`: one rank of a training, under torchrun, under our own
launcher, or alone."""

from __future__ import annotations

import sys

from ptrain.train.refusal import leave_without_torch

if __name__ == "__main__":
    leave_without_torch()  # what follows imports torch

    from ptrain.train.leaving import live
    from ptrain.train.options import parse
    from ptrain.train.session import run

    live(lambda: run(parse(sys.argv[1:])))
