"""aioengine: every rank is one process that the launcher started."""
