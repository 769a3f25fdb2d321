"""`python -m ptrain.calibration …`: one rank of a calibration, under torchrun, under our own
launcher, or alone."""

import sys

from ptrain.import_path import leave_current_folder

if __name__ == "__main__":
    leave_current_folder()

from ptrain.train.rank_start import begin  # once the path is right

if __name__ == "__main__":
    begin()

from ptrain.calibration.session import run
from ptrain.calibration.write import parse
from ptrain.train.rank_exit import live

if __name__ == "__main__":
    live(lambda: run(parse(sys.argv[1:])))
