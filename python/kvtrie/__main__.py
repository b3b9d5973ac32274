"""`python -m kvtrie`: the command line, if its script is not on the path."""

import sys

from kvtrie.cli import main

sys.exit(main())
