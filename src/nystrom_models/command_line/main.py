# SPDX-License-Identifier: Apache-2.0
"""The command's parser, and how errors are shown."""

import argparse
import os
import shlex
import sys
from collections.abc import Sequence

from huggingface_hub.errors import StrictDataclassError

from .. import __version__
from .registry import COMMANDS

PROGRAM = "nystrom-models"
# Errors of a value, a file or a package, which the user can correct; any other error is a bug.
USER_ERRORS = (ValueError, OSError, ImportError, StrictDataclassError)


def make_parser() -> argparse.ArgumentParser:
    """The parser of all subcommands."""
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--traceback", action="store_true", help="Show the traceback of an error.")
    parser = argparse.ArgumentParser(PROGRAM, description="Linear-time attention for Hugging Face Transformers.")
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        text = (command.__doc__ or "").strip()
        subparser = subparsers.add_parser(
            name,
            help=text.partition("\n")[0],
            description=text,
            parents=[common],
            formatter_class=argparse.RawDescriptionHelpFormatter,
            # A flag that is added later must not change the meaning of an abbreviation.
            allow_abbrev=False,
        )
        command.add_arguments(subparser)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command, and returns its exit status: 0, 1 after an error, 130 after Ctrl-C.

    Raises SystemExit with status 2 for wrong usage, as argparse does.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    parsed = make_parser().parse_args(arguments)
    # For results that contain the command that made them.
    parsed.command_line = shlex.join([PROGRAM, *arguments])
    try:
        COMMANDS[parsed.command].run(parsed)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader, such as `head`, has closed the pipe. At exit, Python would flush again and print an error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        if parsed.traceback:
            raise
        return 130
    except USER_ERRORS as error:
        if parsed.traceback:
            raise
        # Messages of Transformers have several lines.
        print(f"{PROGRAM} {parsed.command}: {' '.join(str(error).split()) or repr(error)}", file=sys.stderr)
        return 1
    return 0
