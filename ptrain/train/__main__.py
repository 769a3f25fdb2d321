"""The entry point of one rank: `python -m ptrain.train SPEC [a.b=c …]`.

It runs under torchrun, under ptrain's launcher, or alone.
"""

import sys

from ptrain.import_path import leave_current_folder

if __name__ == "__main__":
    leave_current_folder()

from ptrain.train.rank_start import begin_rank  # imported once the current folder is off the path

if __name__ == "__main__":
    begin_rank()

# These import torch, so `begin_rank` comes first: it reports a missing or unsupported torch.
from ptrain.train.options import parse_options
from ptrain.train.rank_exit import run_and_exit
from ptrain.train.session import train_rank

if __name__ == "__main__":
    run_and_exit(lambda: train_rank(parse_options(sys.argv[1:])))
