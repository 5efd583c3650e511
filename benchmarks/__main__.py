# SPDX-License-Identifier: Apache-2.0
import sys

from benchmarks.cli import main

# The processes of contenders also import this file.
if __name__ == "__main__":
    sys.exit(main())
