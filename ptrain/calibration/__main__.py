"""Entry point of one calibration rank: `python -m ptrain.calibration …`.

It runs under torchrun, under ptrain's launcher, or alone.
"""

import sys

from ptrain.import_path import leave_current_folder

if __name__ == "__main__":
    leave_current_folder()

# imported after the import path is set, since it may load the user's modules
from ptrain.train.rank_start import begin_rank

if __name__ == "__main__":
    begin_rank()

from ptrain.calibration.session import run_rank
from ptrain.calibration.write import parse_options
from ptrain.train.rank_exit import run_and_exit

if __name__ == "__main__":
    run_and_exit(lambda: run_rank(parse_options(sys.argv[1:])))
