"""Under which licence a base model stands, from the card that its makers gave it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunekit.probe.model import HUB_SECONDS, model_folder
from tunekit.recipe.sections.model import ModelSection


@dataclass(frozen=True)
class Licence:
    """A licence, in the hub's words.

    Attributes:
        id: Its name in the hub's list, such as `apache-2.0`; `other` where it is in none.
        name: Its own name, where it is in no list.
        link: Where its text is, where that was said.
    """

    id: str
    name: str | None = None
    link: str | None = None

    def __str__(self) -> str:
        name = self.id if self.name is None else self.name
        return name if self.link is None else f"{name} ({self.link})"


def licence_of(base: ModelSection, *, asks_hub: bool) -> Licence | None:
    """The licence of a model; None where its card does not tell, or there is none.

    Args:
        base: The model.
        asks_hub: Whether a card that is not on this machine may be fetched.
    """
    from huggingface_hub import metadata_load
    from yaml import YAMLError

    card = _card_of(base, asks_hub=asks_hub)
    if card is None or not card.is_file():
        return None
    try:
        data: dict[str, Any] = metadata_load(card) or {}
    except (OSError, ValueError, YAMLError):
        return None
    licence = data.get("license")
    licence = licence[0] if isinstance(licence, list) and licence else licence
    if not isinstance(licence, str):
        return None
    name, link = (data.get(key) if isinstance(data.get(key), str) else None for key in ("license_name", "license_link"))
    return Licence(licence, name, link)


def _card_of(base: ModelSection, *, asks_hub: bool) -> Path | None:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    folder = Path(model_folder(base))
    if folder.is_dir():
        return folder / "README.md"
    try:
        path = hf_hub_download(
            base.path,
            "README.md",
            revision=base.revision,
            local_files_only=not asks_hub,
            etag_timeout=HUB_SECONDS,
        )
    except (HfHubHTTPError, HFValidationError, OSError):
        return None
    return Path(path)
