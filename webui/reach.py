"""Drafts reach no further than the workspace: not for rows, not for models and their code, and not for where runs go.

A recipe comes from a browser, and whoever can open the page could otherwise have any file of this machine read. So a
name is one of the workspace, of the hub, a shipped one, or a URL of another machine.
"""

import glob
from collections.abc import Sequence
from pathlib import Path

import tunekit
from tunekit import frontend
from webui.site import Site

REMOTE = ("http", "https", "s3", "s3a", "gs", "gcs", "az", "abfs", "hf", "sftp")
"""Protocols of other machines. Others of fsspec's read what is on this one."""


def check_reach(site: Site, recipe: tunekit.Recipe) -> None:
    """Refuse a recipe that leads out of the workspace, or whose run would not be among those of the workspace.

    Raises:
        TunekitError: It does.
    """
    if '"trust_remote_code":true' in recipe.model_dump_json():
        raise tunekit.TunekitError(
            "trust_remote_code: code that ships with a model does not run from the web UI",
            hint="read the code, and use `tunekit train` in a terminal",
        )
    for key, text in frontend.named_paths(recipe):
        _check(site, key, text)
    folder = recipe.output.dir
    if folder is not None and site.inside(folder).parent != site.root.resolve() / "runs":
        raise tunekit.TunekitError(
            f"output.dir: {folder!r} is not in the workspace's runs", hint="unset it, or use runs/NAME"
        )


def check_edits(site: Site, run: tunekit.Run, edits: Sequence[str]) -> None:
    """Refuse edits of a run that lead out of the workspace; what the run names already, it may go on with.

    Raises:
        TunekitError: They do. What else is wrong with them, the run itself says.
    """
    edited, _ = tunekit.check_text((run.path / "recipe.yaml").read_text(encoding="utf-8"), edits, find_functions=False)
    there = set(frontend.named_paths(run.recipe))
    for key, text in [] if edited is None else frontend.named_paths(edited):
        if (key, text) not in there:
            _check(site, key, text)


def check_machine(site: Site, name: str) -> None:
    """Refuse a machine that is described in a file outside the workspace.

    Raises:
        TunekitError: It is.
    """
    if Path(name).suffix.lower() in (".yaml", ".yml"):
        site.inside(name)


def _check(site: Site, key: str, text: str) -> None:
    protocol, is_url, _ = text.partition("://")
    if is_url and "\n" not in text:
        if protocol.lower() not in REMOTE or "::" in text:
            raise tunekit.TunekitError(
                f"{key}: {text.partition('?')[0]!r} uses a protocol that could read this machine's files",
                hint=f"use one of {', '.join(REMOTE)}, or a file of the workspace",
            )
        return
    if "\n" in text:  # A chat template.
        return
    if text.startswith("~"):
        raise tunekit.TunekitError(f"{key}: {text!r} is outside the workspace", hint="use a file of the workspace")
    try:
        for path in paths_of(site, text):
            site.inside(str(path))
    except tunekit.TunekitError as error:
        raise tunekit.TunekitError(f"{key}: {text!r} is outside the workspace", hint=error.hint) from error
    except OSError as error:
        raise tunekit.TunekitError(f"{key}: {text!r} cannot be resolved: {error.strerror}") from error


def paths_of(site: Site, text: str) -> list[Path]:
    """Return the paths that a text of a recipe names: a file, a folder with its files, or all that match a pattern.

    A URL, and a text of several lines, such as a chat template, names none.

    Raises:
        OSError: They cannot be resolved.
    """
    if "://" in text or "\n" in text:
        return []
    path = site.root / text
    if path.is_dir():
        return [path, *path.iterdir()]
    if path.exists() or not any(sign in str(path) for sign in "*?["):
        return [path]
    # Path.glob raises for patterns such as a**b.
    return [Path(match) for match in glob.glob(str(path), recursive=True)]  # noqa: PTH207
