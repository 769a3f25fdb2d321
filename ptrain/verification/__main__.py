"""`python -m ptrain.verification SPEC [a.b=c …]`: one rank of a verification, under torchrun, under
`ptrain verify`, or alone."""

import sys

from ptrain.import_path import leave_current_folder

if __name__ == "__main__":
    leave_current_folder()

from ptrain.train.parent import die_with_agent  # once the path is right
from ptrain.train.refusal import leave_without_torch

if __name__ == "__main__":
    die_with_agent()  # importing torch takes seconds, in which the agent may be killed
    leave_without_torch()

from ptrain.train.rank_exit import live
from ptrain.verification.options import parse
from ptrain.verification.protocol import run

if __name__ == "__main__":
    live(lambda: run(parse(sys.argv[1:])))
