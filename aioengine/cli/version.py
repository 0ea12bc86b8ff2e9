"""Print the version of aioengine."""

import argparse
from importlib.metadata import version


def configure(parser: argparse.ArgumentParser) -> None:
    """It takes no arguments."""


def run(args: argparse.Namespace) -> int:
    print(f"aioengine {version('aioengine')}")
    return 0
