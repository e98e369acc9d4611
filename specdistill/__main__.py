"""`python -m specdistill` is the `specdistill` command."""

import sys

from specdistill.cli.main import main

sys.exit(main())
