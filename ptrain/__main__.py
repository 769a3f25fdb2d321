"""`python -m ptrain` is the command `ptrain`."""

from __future__ import annotations

import sys

from ptrain.cli.main import main

sys.exit(main())
