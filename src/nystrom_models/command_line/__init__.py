# SPDX-License-Identifier: Apache-2.0
"""The command `nystrom-models`, also `python -m nystrom_models`: one module a subcommand.

A subcommand's module has a docstring, whose first line is its help; `add_arguments(parser)`, which declares its flags;
and `run(arguments)`, which does it and prints. `registry.py` lists them. What takes long to import, `run` imports.
"""
