"""`python -m aioengine.cli` is the `aioengine` command."""

import sys

from aioengine.cli.main import main

sys.exit(main())
