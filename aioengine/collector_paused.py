"""Pauses Python's cycle collector when it is imported, for the imports that follow.

A module of its own, like `launched_by`, so that a rank can import it before torch: that makes
300,000 objects that stay, and the collector would look through them again and again (a tenth of
the time). Whoever imports this calls `resume` behind its imports. For a process that is ours alone.
"""

import gc

gc.disable()


def resume() -> None:
    """What exists by now is never looked at again."""
    gc.freeze()
    gc.enable()
