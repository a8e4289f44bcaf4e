"""Account of Weights & Biases by its own settings: prints as JSON its mode, its server, and whether there is a login.
`python -m tunekit.tracking.wandb_account`; nothing is sent, and nobody is asked.
"""

import contextlib
import json
import os
from netrc import NetrcParseError, netrc
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import ValidationError

from tunekit.process.log_capture import send_nothing
from tunekit.redact import redacted


def is_in_netrc(server: str) -> bool:
    """Return whether the file in which `wandb login` stores its key names a server."""
    netrc_path = os.environ.get("NETRC")
    for path in [Path(netrc_path)] if netrc_path else [Path.home() / ".netrc", Path.home() / "_netrc"]:
        with contextlib.suppress(OSError, NetrcParseError):
            if netrc(path).authenticators(urlsplit(server).netloc) is not None:
                return True
    return False


def main() -> None:
    """Print it."""
    send_nothing()
    import wandb

    try:
        settings = wandb.setup().settings
    except ValidationError as error:
        first = error.errors()[0]
        print(json.dumps({"problem": redacted(f"{'.'.join(map(str, first['loc']))}: {first['msg']}")}))
        return
    credential = settings.api_key or os.environ.get("WANDB_IDENTITY_TOKEN_FILE")
    has_login = bool(credential) or is_in_netrc(settings.base_url)
    print(json.dumps({"mode": settings.mode, "server": settings.base_url, "has_login": has_login}))
    wandb.teardown()


if __name__ == "__main__":
    main()
