"""``python -m deepinfer_core``: the command line where the ``deepinfer`` script is not on the path."""

import sys

from deepinfer_core.cli.entry import main

if __name__ == "__main__":
    sys.exit(main())
