# SPDX-License-Identifier: Apache-2.0
"""The command in its own process: its output, its errors and its exit status."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from importlib.metadata import distribution

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError

from nystrom_models import __version__
from nystrom_models.command_line import env
from nystrom_models.command_line import main as command
from tests.packaging.floors import ROOT

COMMAND = (sys.executable, "-m", "nystrom_models")


def run(*arguments, **options):
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=120, **options)


def test_env_says_what_a_bug_report_needs_and_where_nothing_lies():
    done = run("env", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["nystrom_models"] == __version__
    assert found["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert found["python"].startswith("{}.{}.{} ".format(*sys.version_info))
    assert {"transformers", "triton", "system", "processor", "kernels"} <= found.keys()
    for place in (str(ROOT), sys.prefix, os.path.expanduser("~"), os.uname().nodename):
        assert place not in done.stdout
    if not torch.cuda.is_available():
        assert found["gpu"] == "none that PyTorch finds" and "CUDA device" in found["kernels"]


def test_wrong_usage_exits_with_2_and_says_what_there_is(capsys):
    for arguments, expected in ((["nothing"], "'env'"), ([], "COMMAND"), (["env", "--unknown"], "--unknown")):
        with pytest.raises(SystemExit) as exit_:
            command.main(arguments)
        assert exit_.value.code == 2
        assert expected in capsys.readouterr().err


def test_an_error_of_the_user_is_one_line_and_a_fault_of_the_program_is_not(monkeypatch, capsys):
    def fail(arguments):
        raise error

    monkeypatch.setattr(command.COMMANDS["env"], "run", fail)
    error = OSError("No file.\n\n  Look\tagain.")
    assert command.main(["env"]) == 1
    assert capsys.readouterr().err == "nystrom-models env: No file. Look again.\n"
    with pytest.raises(OSError, match="No file"):
        command.main(["env", "--traceback"])
    error = KeyError("a fault")
    with pytest.raises(KeyError):
        command.main(["env"])


@pytest.mark.parametrize(
    "error", [ValueError(), StrictDataclassError("Wrong\nfield.")], ids=["empty", "several lines"]
)
def test_an_error_is_never_shown_as_an_empty_line(error, monkeypatch, capsys):
    def fail(arguments):
        raise error

    monkeypatch.setattr(command.COMMANDS["env"], "run", fail)
    assert command.main(["env"]) == 1
    shown = "Wrong field." if str(error) else "ValueError()"
    assert capsys.readouterr().err == f"nystrom-models env: {shown}\n"


def test_ctrl_c_ends_without_a_traceback_unless_it_is_asked_for(monkeypatch, capsys):
    def interrupt(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(command.COMMANDS["env"], "run", interrupt)
    assert command.main(["env"]) == 130  # as shells report a program that Ctrl-C ended
    assert capsys.readouterr().err == ""
    with pytest.raises(KeyboardInterrupt):
        command.main(["env", "--traceback"])


def test_results_name_the_command_as_a_shell_reads_it(monkeypatch):
    found = []
    monkeypatch.setattr(command.COMMANDS["export"], "run", lambda arguments: found.append(arguments.command_line))
    given = ["export", "my model", "it's", "--task", "fill-mask"]
    assert command.main(given) == 0
    assert shlex.split(found[0]) == ["nystrom-models", *given]


def test_flags_are_not_abbreviated():
    """A flag that is added later would change what an abbreviation means."""
    with pytest.raises(SystemExit) as exit_:
        command.main(["env", "--js"])
    assert exit_.value.code == 2


def test_env_prints_lines_for_people(monkeypatch, capsys):
    monkeypatch.setattr(env, "environment", lambda: {"torch": "2.0", "transformers": "5.0"})
    assert command.main(["env"]) == 0
    assert capsys.readouterr().out == "torch:        2.0\ntransformers: 5.0\n"


@pytest.mark.slow
def test_a_reader_that_has_seen_enough_is_no_error():
    done = subprocess.run(
        ["sh", "-c", f"{sys.executable} -m nystrom_models env | true"], capture_output=True, text=True, timeout=120
    )
    assert done.stderr == ""


def test_the_console_script_is_the_same_command():
    scripts = [point for point in distribution("nystrom-models").entry_points if point.group == "console_scripts"]
    assert [point.name for point in scripts] == [command.PROGRAM]
    assert scripts[0].load() is command.main


def completed_by_bash(script, words, folder=None):
    """What bash offers for the last of the words after the command, in a folder."""
    shell = shutil.which("bash")
    if shell is None:
        pytest.skip("no bash")
    words = ["nystrom-models", *words.split()]
    ask = f"COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; _shtab_nystrom_models; "
    ask += "echo ${COMPREPLY[@]}"
    done = subprocess.run([shell, "-c", f"{script}\n{ask}"], capture_output=True, text=True, timeout=60, cwd=folder)
    assert done.stdout, done.stderr
    return done.stdout.split()


@pytest.mark.slow
def test_a_shell_completes_subcommands_and_flags():
    pytest.importorskip("shtab")
    done = run("completion", "bash")
    assert done.returncode == 0, done.stderr
    assert completed_by_bash(done.stdout, "en") == ["env"]


def test_zsh_completes_files_and_folders(capsys):
    pytest.importorskip("shtab")
    assert command.main(["completion", "zsh"]) == 0
    found = capsys.readouterr().out
    # SOURCE, OUT and --sample_file of convert; CHECKPOINT, --tokenizer_name, folder and text of inspect; and of export
    assert found.count(":_files") == 3 + 4 + 3


def test_bash_completes_files_and_folders(tmp_path, capsys):
    pytest.importorskip("shtab")
    assert command.main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    (tmp_path / "a-model").mkdir()
    (tmp_path / "a-text.txt").touch()
    for words in ("convert a-m", "convert --sample_file a-t", "export a-m", "inspect a-model --text_file a-t"):
        expected = "a-model" if words.endswith("a-m") else "a-text.txt"
        assert completed_by_bash(script, words, tmp_path) == [expected], words


def test_completion_without_its_package_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert command.main(["completion", "bash"]) == 1
    assert capsys.readouterr().err == (
        "nystrom-models completion: completion needs shtab: pip install '.[cli]' in the repository.\n"
    )
