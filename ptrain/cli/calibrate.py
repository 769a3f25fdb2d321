"""`ptrain calibrate [CLUSTER] [--ranks 1,2,4] [--out FILE]`: measure this machine's rates, and
write a cluster's file that has them.

Like the parent of a training, this process stays free of torch and starts the ranks itself; under
a launcher it becomes a rank.
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace

from ptrain.calibration import write
from ptrain.calibration.write import calibrate
from ptrain.installed import require_torch
from ptrain.train import environment


def run(args: Namespace) -> int:
    choices = write.from_arguments(args)
    require_torch()
    if environment.launched():
        sys.stdout.flush()
        words = [sys.executable, "-P", "-m", "ptrain.calibration", *write.to_argv(choices)]
        os.execve(sys.executable, words, environment.of_ptrain())
    return calibrate(choices)
