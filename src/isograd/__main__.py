"""`python -m isograd` is the command `isograd`."""

import sys

from isograd.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
