# SPDX-License-Identifier: Apache-2.0
"""`python -m nystrom_models` is the command `nystrom-models`."""

import sys

from .command_line.main import main

sys.exit(main())
