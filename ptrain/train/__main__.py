"""The entry point of one rank: `python -m ptrain.train SPEC [a.b=c …]`.

It runs under torchrun, under ptrain's launcher, or alone.
"""

import sys

from ptrain.import_path import leave_current_folder

if __name__ == "__main__":
    leave_current_folder()

from ptrain.train.rank_start import begin  # imported once the current folder is off the path

if __name__ == "__main__":
    begin()

# These import torch, so `begin` comes first: it reports a missing or unsupported torch.
from ptrain.train.options import parse
from ptrain.train.rank_exit import live
from ptrain.train.session import run

if __name__ == "__main__":
    live(lambda: run(parse(sys.argv[1:])))
