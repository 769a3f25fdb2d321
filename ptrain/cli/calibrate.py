"""The command `ptrain calibrate [CLUSTER]`: measure this machine's rates and write a cluster file.

Like the parent of a training, this process does not import torch, and starts the ranks itself.
Under a launcher it becomes a rank.
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
    """Calibrate this machine, or become a rank of a calibration; return the exit code."""
    choices = write.from_arguments(args)
    require_torch()
    if environment.is_launched():
        sys.stdout.flush()
        words = [sys.executable, "-P", "-m", "ptrain.calibration", *write.to_argv(choices)]
        os.execve(sys.executable, words, environment.ptrain_environment())
    return calibrate(choices)
