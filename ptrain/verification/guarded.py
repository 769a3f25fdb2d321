"""The rank program `python -m ptrain.verification.guarded SPEC [a.b=c …]`: a training with a
single-device reference next to it (`verify_every`). It runs under torchrun, under `ptrain train`,
or alone."""

import sys

from ptrain.import_path import leave_current_folder

if __name__ == "__main__":
    leave_current_folder()

from ptrain.train.rank_start import begin_rank  # `leave_current_folder` changes the import path

if __name__ == "__main__":
    begin_rank()

from ptrain.train.options import parse_options
from ptrain.train.rank_exit import run_and_exit
from ptrain.train.session import train_rank
from ptrain.verification.trajectory import ReferenceGuard

if __name__ == "__main__":
    run_and_exit(lambda: train_rank(parse_options(sys.argv[1:]), ReferenceGuard))
