"""Which process started this one.

A module of its own, so that a rank can read it before it imports what takes seconds: once the
launcher has died, the kernel names whoever adopted its children.
"""

import os
from typing import Final

PID: Final = os.getppid()
"""0: not in this container."""
