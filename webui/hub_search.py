"""Models of the Hugging Face Hub by name, which a draft may train.

The hub is contacted when somebody searches, and never before. It is asked once: `list_models` tries for half a minute.
"""

from dataclasses import dataclass

import tunekit
from tunekit import frontend

NUM_MODELS = 20
"""Models in an answer, those with the most downloads."""

LIMIT_SECONDS = 10.0


@dataclass(frozen=True)
class HubModel:
    """A model of the hub, with its downloads of the last 30 days."""

    name: str
    downloads: int


def search_models(text: str) -> list[HubModel]:
    """Return models of the hub whose names match a text, the most downloaded first.

    Raises:
        TunekitError: The hub cannot be reached.
    """
    # Most visitors search for nothing, and its client takes a while to import.
    import httpx2
    from huggingface_hub import constants, get_session
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status  # type: ignore[attr-defined]

    query: dict[str, str | int] = {"search": text, "sort": "downloads", "limit": NUM_MODELS}
    url = f"{constants.ENDPOINT}/api/models"
    try:
        response = get_session().get(url, params=query, headers=build_hf_headers(), timeout=LIMIT_SECONDS)
        hf_raise_for_status(response)
    except (OSError, httpx2.HTTPError) as error:
        reason = frontend.redacted(str(error).strip().partition("\n")[0]) or "no answer"
        hint = "use pico, a folder of the workspace, or a finished run; or connect this machine to the network"
        raise tunekit.TunekitError(f"the Hub cannot be reached: {reason}", hint=hint) from error
    return [HubModel(str(model["id"]), int(model.get("downloads") or 0)) for model in response.json()]
