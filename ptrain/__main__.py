"""`python -m ptrain` is the command `ptrain`."""

import sys

from ptrain.import_path import leave_current_folder

leave_current_folder()

from ptrain.cli.main import main  # noqa: E402, the path is put right first

sys.exit(main())
