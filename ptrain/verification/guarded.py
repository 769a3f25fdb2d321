"""The rank program `python -m ptrain.verification.guarded SPEC [a.b=c …]`: a training with a
single-device reference next to it (`verify_every`). It runs under torchrun, under `ptrain train`,
or alone."""

import sys

from ptrain.import_path import leave_current_folder

if __name__ == "__main__":
    leave_current_folder()

from ptrain.train.rank_start import begin  # `leave_current_folder` changes the import path

if __name__ == "__main__":
    begin()

from ptrain.train.options import parse
from ptrain.train.rank_exit import live
from ptrain.train.session import run
from ptrain.verification.trajectory import BesideOneDevice

if __name__ == "__main__":
    live(lambda: run(parse(sys.argv[1:]), BesideOneDevice))
