"""OpenMP's threads sleep while they wait, unless the user chose otherwise. Imported before torch,
whose OpenMP reads the environment when it is loaded.

By default they spin for milliseconds after each operation of torch, on cores that the threads of
our own kernels, other ranks and the event loop need: beside one busy process an operation of 0.2 ms
then takes 32.
"""

import os
from typing import Final

CHOICES: Final = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""Variables by which users say how OpenMP waits, in GNU's, LLVM's and Intel's."""

if not any(name in os.environ for name in CHOICES):
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
