# SPDX-License-Identifier: Apache-2.0
import sys

from benchmarks.cli import main

sys.exit(main())
