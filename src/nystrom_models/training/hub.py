# SPDX-License-Identifier: Apache-2.0
"""Upload of runs to the Hub. The repository is created before training, so that a wrong token is found at once."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import HfApi, ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError, HTTPError

# Models, tokenizer, code, card, results and plots are at the top level; checkpoints and logs are in folders. Hidden
# files are never uploaded.
IGNORED = ["*/*", ".*"]
# Files of a checkpoint that do not belong to its model, also those of FSDP and of DeepSpeed.
IGNORED_OF_CHECKPOINTS = [
    *IGNORED,
    *("optimizer*", "scaler*", "random_states_*", "manifest.json", "progress.json"),
    *("pytorch_model_fsdp*", "latest", "zero_to_fp32.py"),
]


@contextmanager
def _clear_errors(hub_model_id: str, what: str) -> Iterator[None]:
    """Turns errors of the Hub into errors that say what to do."""
    try:
        yield
    except HFValidationError as error:
        raise ValueError(f"--hub_model_id {hub_model_id!r} is not the name of a repository: {error}") from error
    # The client reports a large file that failed as a RuntimeError, with its reason as the cause.
    except (HTTPError, ConnectionError, RuntimeError) as error:
        reason = error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ else error
        status = getattr(getattr(reason, "response", None), "status_code", None)
        if status == 401:
            raise PermissionError(
                f"The Hub refused the token for {hub_model_id}: give one with write access, by HF_TOKEN or "
                f"`hf auth login`. {what}. ({reason})"
            ) from error
        if status == 403:
            raise PermissionError(
                f"This token may not write to {hub_model_id}: give --hub_model_id in your own namespace, or a token "
                f"with write access. {what}. ({reason})"
            ) from error
        raise ConnectionError(
            f"{what}. Try again later. The Hub did not accept {hub_model_id}: {type(reason).__name__}: {reason}"
        ) from error


def create_repository(hub_model_id: str, token: str | None = None, private: bool = False) -> str:
    """Makes sure that there is a repository to upload to, and returns its full name.

    Args:
        hub_model_id: "user/name", or "name" for the token's own user.
        token: a token with write access; if None, that of `HF_TOKEN` or of `hf auth login`.
        private: whether a new repository is private; if not, the Hub's default for the user applies.

    Raises:
        ValueError: if `hub_model_id` is not the name of a repository.
        PermissionError: if the Hub refuses the token.
        ConnectionError: if the Hub cannot be reached.
    """
    with _clear_errors(hub_model_id, "Nothing was uploaded"):
        return HfApi(token=token).create_repo(hub_model_id, private=private or None, exist_ok=True).repo_id


def check_metadata(language: str | None, license: str | None) -> None:
    """Asks the Hub whether it takes these values of a model card.

    Raises:
        ValueError: if it does not; the message names the flags.
    """
    given = {"language": language, "license": license}
    flags = " and ".join(f"--{name} {value!r}" for name, value in given.items() if value is not None)
    if not flags:
        return
    card = ModelCard(f"---\n{ModelCardData(**given).to_yaml()}\n---\n")  # type: ignore[arg-type]
    try:
        card.validate()
    except HTTPError:
        return  # a mirror of the Hub may not have this check
    except ValueError as error:
        raise ValueError(f"The Hub does not take {flags} for the model card: {error}") from error


def push(
    output_dir: str | os.PathLike,
    hub_model_id: str,
    token: str | None = None,
    private: bool = False,
    commit_message: str = "Upload of a finished run",
    ignore_patterns: list[str] | None = None,
) -> str:
    """Uploads the files of a run to a new or an existing repository. The local files do not change.

    Hidden files and files in sub-folders (checkpoints, logs) are not uploaded.

    Args:
        output_dir: the folder of a run that saved its model.
        hub_model_id, token, private: see [`create_repository`].
        commit_message: message of the commit.
        ignore_patterns: files that are not uploaded; `IGNORED` by default.

    Returns:
        The commit's address.

    Raises:
        FileNotFoundError: if `output_dir` has no saved model.
        ValueError: if `hub_model_id` is not the name of a repository, or the card's metadata are wrong.
        PermissionError: if the Hub refuses the token.
        ConnectionError: if the upload did not finish for another reason.
    """
    folder = Path(output_dir)
    for pattern in ("config.json", "*.safetensors"):
        if not any(folder.glob(pattern)):
            raise FileNotFoundError(f"--output_dir {folder} has no {pattern}: there is no saved model to push.")
    repo_id = create_repository(hub_model_id, token, private)
    failed = f"The upload of {folder} to {hub_model_id} did not finish: the folder is unchanged"
    with _clear_errors(hub_model_id, failed):
        try:
            commit = HfApi(token=token).upload_folder(
                repo_id=repo_id,
                folder_path=folder,
                ignore_patterns=ignore_patterns or list(IGNORED),
                commit_message=commit_message,
            )
        except ValueError as error:  # what the client says about the card
            again = f"nystrom_models.training.hub.push({str(folder)!r}, {hub_model_id!r})"
            raise ValueError(
                f"{failed}. {error} Correct the first lines of {folder / 'README.md'}, and upload it by {again}."
            ) from error
    return str(commit.commit_url)
