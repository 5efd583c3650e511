# SPDX-License-Identifier: Apache-2.0
"""The command `nystrom-models`, also `python -m nystrom_models`: one module for each subcommand.

The module of a subcommand has a docstring, whose first line is its help; `add_arguments(parser)`, which declares its
flags; and `run(arguments)`, which executes it and prints. `registry.py` lists them. Modules that take long to import
are imported inside `run`.
"""
