"""The entry point of `python -m ptrain`, which is the command `ptrain`."""

import sys

from ptrain.import_path import leave_current_folder

leave_current_folder()

from ptrain.cli.main import main  # noqa: E402, imported once the current folder is off the path

sys.exit(main())
