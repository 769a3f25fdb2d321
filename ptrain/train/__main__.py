"""`python -m ptrain.train SPEC [a.b=c …]`: one rank of a training, under torchrun, under our own
launcher, or alone."""

import sys

from ptrain.import_path import leave_current_folder

if __name__ == "__main__":
    leave_current_folder()

from ptrain.train.rank_start import begin  # once the path is right

if __name__ == "__main__":
    begin()

from ptrain.train.options import parse
from ptrain.train.rank_exit import live
from ptrain.train.session import run

if __name__ == "__main__":
    live(lambda: run(parse(sys.argv[1:])))
