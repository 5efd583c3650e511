# SPDX-License-Identifier: Apache-2.0
"""Upload of a finished run to the Hub."""

import os
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import HFValidationError, HTTPError

# Models, tokenizer, code, card, results and plots lie at the top; checkpoints and logs in folders. Hidden files are
# nobody's to publish.
IGNORED = ["*/*", ".*"]


def push(output_dir: str | os.PathLike, hub_model_id: str, token: str | None = None, private: bool = False) -> str:
    """Uploads the files of a finished run, which are left as they are; a repository that exists is added to.

    Files in sub-folders, which are checkpoints and logs, and hidden ones stay.

    Args:
        output_dir: of a run that saved its model.
        hub_model_id: the repository, "user/name", or "name" of the token's user.
        token: with write access; if None, that of `HF_TOKEN` or of `hf auth login`.
        private: whether a new repository is private; if not, the Hub's default for the user holds.

    Returns:
        The commit's address.

    Raises:
        FileNotFoundError: if `output_dir` holds no saved model.
        ValueError: if `hub_model_id` is no name of a repository, or the card's metadata are wrong.
        PermissionError: if the Hub refuses the token.
        ConnectionError: if the upload did not finish for another reason.
    """
    folder = Path(output_dir)
    for pattern in ("config.json", "*.safetensors"):
        if not any(folder.glob(pattern)):
            raise FileNotFoundError(f"--output_dir {folder} holds no {pattern}: there is no saved model to push.")
    api = HfApi(token=token)
    try:
        repo_id = api.create_repo(hub_model_id, private=private or None, exist_ok=True).repo_id
        commit = api.upload_folder(
            repo_id=repo_id,
            folder_path=folder,
            ignore_patterns=list(IGNORED),
            commit_message="Upload of a finished run",
        )
    except HFValidationError as error:
        raise ValueError(f"--hub_model_id {hub_model_id!r} is no name of a repository: {error}") from error
    # The client reports a large file that failed as a RuntimeError, with its reason as the cause.
    except (HTTPError, ConnectionError, RuntimeError) as error:
        reason = error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ else error
        status = getattr(getattr(reason, "response", None), "status_code", None)
        if status == 401:
            raise PermissionError(
                f"The Hub refused the token for {hub_model_id}: give one with write access, by HF_TOKEN or "
                f"`hf auth login`. {folder} is unchanged. ({reason})"
            ) from error
        if status == 403:
            raise PermissionError(
                f"This token may not write to {hub_model_id}: give --hub_model_id a namespace of yours, or a token "
                f"with write access. {folder} is unchanged. ({reason})"
            ) from error
        raise ConnectionError(
            f"The upload of {folder} to {hub_model_id} did not finish, and may be repeated: the folder is unchanged. "
            f"({type(reason).__name__}: {reason})"
        ) from error
    return str(commit.commit_url)
