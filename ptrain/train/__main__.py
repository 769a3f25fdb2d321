"""`python -m ptrain.train SPEC [a.b=c …]`: one rank of a training, under torchrun, under our own
launcher, or alone."""

import sys

from ptrain.import_path import leave_current_folder

if __name__ == "__main__":
    leave_current_folder()

from ptrain.train.parent import die_with_agent  # once the path is right

if __name__ == "__main__":
    die_with_agent()  # before torch is imported: that takes seconds, in which it may be killed

from ptrain.train.leaving import live
from ptrain.train.options import parse
from ptrain.train.session import run

if __name__ == "__main__":
    live(lambda: run(parse(sys.argv[1:])))
