# SPDX-License-Identifier: Apache-2.0
import sys

from benchmarks.cli import main

# Processes of contenders import this file, too.
if __name__ == "__main__":
    sys.exit(main())
