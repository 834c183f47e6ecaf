"""The command line: python -m cluster doctor."""

from __future__ import annotations

import argparse
import sys


def main() -> int:
    """Run one command and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m cluster")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    commands.add_parser("doctor", help="what this machine has, what is missing and what to do about it")
    parser.parse_args()

    from cluster import doctor

    return doctor.main()


if __name__ == "__main__":
    sys.exit(main())
