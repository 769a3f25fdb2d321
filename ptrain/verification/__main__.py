"""The rank program `python -m ptrain.verification SPEC [a.b=c …]`. It verifies a spec under
torchrun, under `ptrain verify`, or as a single process."""

import sys

from ptrain.import_path import leave_current_folder

if __name__ == "__main__":
    leave_current_folder()

from ptrain.train.rank_start import begin  # `leave_current_folder` changes the import path

if __name__ == "__main__":
    begin()

from ptrain.train.rank_exit import live
from ptrain.verification.options import parse
from ptrain.verification.protocol import run

if __name__ == "__main__":
    live(lambda: run(parse(sys.argv[1:])))
