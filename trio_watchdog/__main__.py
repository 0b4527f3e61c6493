"""``python -m trio_watchdog``: the command, where no script is on the path."""

import sys

from ._cli import main

if __name__ == "__main__":
    sys.exit(main())
