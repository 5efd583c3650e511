# SPDX-License-Identifier: Apache-2.0
"""Print a shell script that completes this command.

For bash, once: nystrom-models completion bash > ~/.local/share/bash-completion/completions/nystrom-models
For zsh, in a folder of $fpath: nystrom-models completion zsh > FOLDER/_nystrom-models
"""

import argparse

SHELLS = ("bash", "zsh", "tcsh")

# The arguments of all commands that are, or may be, files or folders.
PATHS = ("source", "out", "checkpoint", "output_dir", "sample_file", "text_file", "tokenizer_name")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, help="The shell.")


def run(arguments: argparse.Namespace) -> None:
    try:
        # A script completes without delay; a call of the program would import PyTorch at each Tab.
        import shtab
    except ImportError as error:
        raise ImportError("completion needs shtab: pip install '.[cli]' in the repository.") from error

    from .main import make_parser

    parser = make_parser()
    (commands,) = (action.choices for action in parser._actions if action.dest == "command")
    for command in dict(commands or ()).values():
        for action in command._actions:
            if action.dest in PATHS:
                action.complete = shtab.FILE  # without it, zsh completes nothing here
    print(shtab.complete(parser, arguments.shell))
