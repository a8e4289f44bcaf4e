"""An export on its way to a repository of the Hugging Face hub.

Who may write where is asked before anything is computed; nothing is sent before the export was seen to be right. What a
repository holds already is not touched unless that was asked for, and even then its history keeps it.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunekit.errors import RunError, TunekitError

UNTOUCHED = (".gitattributes",)
"""Files of a repository that was just made: it counts as empty."""


@dataclass(frozen=True)
class Target:
    """A repository to which an export may be sent.

    Attributes:
        repo: Its name, `owner/name`.
        parent: The commit on which the new one is to stand; None where the repository is yet to be made.
        private: Whether it is made as one that only its owners see.
        has_files: Whether it holds something that is to be replaced.
    """

    repo: str
    parent: str | None
    private: bool
    has_files: bool


def check_target(repo: str, *, private: bool, replace: bool) -> Target:
    """See that a repository can be written to, and that nothing in it would be lost.

    Args:
        repo: Its name, `owner/name`.
        private: Whether only its owners may see it.
        replace: Whether what it holds may be replaced.

    Raises:
        RunError: There is no login, the name is none, it belongs to somebody else, or it holds something already.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise RunError(f"--push {repo}: {_first_line(error)}", hint="write it as OWNER/NAME") from error
    owner, slash, _ = repo.partition("/")
    if not slash:
        raise RunError(f"--push {repo}: no owner", hint=f"write it as OWNER/{repo}")
    api = HfApi()
    with _hub_errors(repo):
        _check_owner(api.whoami(), owner, repo)
    with _hub_errors(repo):
        try:
            info = api.model_info(repo)
        except RepositoryNotFoundError:
            return Target(repo, None, private, has_files=False)
    if private and not info.private:
        problem = f"--private: the repository {repo} already exists and is public"
        raise RunError(problem, hint="make it private in its settings on the Hub, or pass another one")
    files = [file.rfilename for file in info.siblings or [] if file.rfilename not in UNTOUCHED]
    if files and not replace:
        raise RunError(
            f"--push: the repository {repo} is not empty: it has {files[0]}"
            + (f" and {len(files) - 1} more files" if len(files) > 1 else ""),
            hint="pass another one, or --replace: its history keeps the current files",
        )
    return Target(repo, info.sha, private, has_files=bool(files))


def push(target: Target, folder: Path, *, message: str) -> str:
    """Send an export to its repository as one commit, and return where it is.

    Args:
        target: The repository.
        folder: The export.
        message: What the commit says.

    Raises:
        RunError: The hub does not take it, or the repository changed during the export.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    hint = f"the export is in {folder}; upload it with: hf upload {target.repo} {folder}"
    with _hub_errors(target.repo, hint):
        if target.parent is None:
            api.create_repo(target.repo, private=target.private)
        api.upload_folder(
            repo_id=target.repo,
            folder_path=folder,
            commit_message=message,
            parent_commit=target.parent,
            delete_patterns="*" if target.has_files else None,
        )
    return f"{api.endpoint}/{target.repo}"


def _check_owner(who: dict[str, Any], owner: str, repo: str) -> None:
    names = [who["name"], *(organization["name"] for organization in who.get("orgs", []))]
    if owner.lower() not in (name.lower() for name in names):
        hint = f"use {who['name']}/{repo.partition('/')[2]}, or log in as another user with `hf auth login`"
        raise RunError(f"--push {repo}: you are logged in as {who['name']}, without write access to {owner}", hint=hint)
    token = who.get("auth", {}).get("accessToken", {})
    if token.get("role") == "read":
        hint = "create a write token at https://huggingface.co/settings/tokens, and log in with `hf auth login`"
        raise RunError(f"--push {repo}: your token is read-only", hint=hint)


@contextlib.contextmanager
def _hub_errors(repo: str, hint: str | None = None) -> Iterator[None]:
    """Turns what the hub, or the way to it, has against a request into words."""
    import httpx2
    from huggingface_hub import constants, errors

    try:
        yield
    except (TunekitError, errors.RepositoryNotFoundError):
        raise
    except errors.OfflineModeIsEnabled as error:
        raise RunError(f"--push {repo}: HF_HUB_OFFLINE is set", hint=hint or "unset it, or remove --push") from error
    except errors.LocalTokenNotFoundError as error:
        raise RunError(f"--push {repo}: you are not logged in to the Hub", hint="run `hf auth login`") from error
    except errors.HfHubHTTPError as error:
        raise _refused(error.response.status_code, _first_line(error), repo, hint) from error
    except (httpx2.HTTPError, OSError) as error:
        problem = f"--push {repo}: cannot reach the Hub at {constants.ENDPOINT}"
        raise RunError(problem, hint=hint or "check the network") from error


def _refused(status: int, said: str, repo: str, hint: str | None) -> RunError:
    changed = ("the repository changed during the export", "try again")
    remedies = {
        401: ("the Hub rejects the token", "run `hf auth login`"),
        403: ("the Hub denies write access", "pass another repository"),
        409: changed,
        412: changed,
    }
    what, remedy = remedies.get(status, (f"the Hub responded with {status}: {said}", "try again later"))
    return RunError(f"--push {repo}: {what}", hint=hint or remedy)


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
