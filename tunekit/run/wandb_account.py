"""What Weights & Biases would do here, by its own settings: prints as JSON its mode, its server, and whether there is a
login. `python -m tunekit.run.wandb_account`; nothing is sent, and nobody is asked.
"""

import json
import os

from pydantic import ValidationError

from tunekit.redact import redacted
from tunekit.run.silence import send_nothing


def main() -> None:
    """Print it."""
    send_nothing()
    import wandb
    from wandb.sdk.lib.wbauth import read_netrc_auth

    try:
        settings = wandb.setup().settings
    except ValidationError as error:
        first = error.errors()[0]
        print(json.dumps({"problem": redacted(f"{'.'.join(map(str, first['loc']))}: {first['msg']}")}))
        return
    has_login = bool(
        settings.api_key or os.environ.get("WANDB_IDENTITY_TOKEN_FILE") or read_netrc_auth(host=settings.base_url)
    )
    print(json.dumps({"mode": settings.mode, "server": settings.base_url, "has_login": has_login}))
    wandb.teardown()


if __name__ == "__main__":
    main()
