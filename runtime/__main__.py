"""`python -m outrider`: the command line of `generate`."""

import sys

from .generate import main

if __name__ == "__main__":
    sys.exit(main())
