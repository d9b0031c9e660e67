"""``python -m lightning_thunder_strategy``."""

import sys

from lightning_thunder_strategy.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
