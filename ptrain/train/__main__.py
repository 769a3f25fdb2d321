"""`python -m ptrain.train SPEC [a.b=c …]`: one rank of a training, under torchrun, under our own
launcher, or alone."""

from __future__ import annotations

import sys

from ptrain.train.leaving import live
from ptrain.train.options import parse
from ptrain.train.session import run

if __name__ == "__main__":
    live(lambda: run(parse(sys.argv[1:])))
