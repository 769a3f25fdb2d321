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

from ptrain.calibration.session import run
from ptrain.calibration.write import parse
from ptrain.train.rank_exit import run_rank

if __name__ == "__main__":
    run_rank(lambda: run(parse(sys.argv[1:])))
