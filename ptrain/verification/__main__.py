"""The rank program `python -m ptrain.verification SPEC [a.b=c …]`. It verifies a spec under
torchrun, under `ptrain verify`, or as a single process."""

import sys

from ptrain.import_path import leave_current_folder

if __name__ == "__main__":
    leave_current_folder()

from ptrain.train.rank_start import begin_rank  # `leave_current_folder` changes the import path

if __name__ == "__main__":
    begin_rank()

from ptrain.train.rank_exit import run_and_exit
from ptrain.verification.options import parse_options
from ptrain.verification.protocol import verify_on_rank

if __name__ == "__main__":
    run_and_exit(lambda: verify_on_rank(parse_options(sys.argv[1:])))
