# SPDX-License-Identifier: Apache-2.0
"""The subcommands by name."""

import argparse
from typing import Protocol

from . import completion, convert, env, export, inspect


class Command(Protocol):
    """What the module of a subcommand contains. Its docstring is the help: the first line in lists, all of it with
    `--help`."""

    __doc__: str | None

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declares the flags."""

    def run(self, arguments: argparse.Namespace) -> None:
        """Executes it. ValueError, OSError and ImportError are errors that the user can correct, shown in one line."""


COMMANDS: dict[str, Command] = {
    "inspect": inspect,
    "convert": convert,
    "export": export,
    "env": env,
    "completion": completion,
}
