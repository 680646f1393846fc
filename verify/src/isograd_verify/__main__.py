"""`python -m isograd_verify` is the command `isograd-verify`."""

import sys

from isograd_verify.command import main

if __name__ == "__main__":
    sys.exit(main())
