"""`python -m specdistill` is the `specdistill` command."""

import sys

from specdistill.cli import main

sys.exit(main())
