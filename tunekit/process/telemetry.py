"""Nothing is sent anywhere: the libraries' reports of what they are used for are switched off.

TRL reports every trainer that is made, Ray every cluster and vLLM every engine, unless they are told not to.
"""

import os

SILENT = {
    "DO_NOT_TRACK": "1",
    "GRADIO_ANALYTICS_ENABLED": "0",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "RAY_USAGE_STATS_ENABLED": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "WANDB_ERROR_REPORTING": "false",
}
"""Variables by which the libraries are told, whatever they were before."""


def send_nothing() -> None:
    """Switch the reports off, in this process and those that it starts. Call it before the libraries are imported."""
    os.environ.update(SILENT)


def send_nothing_at_all() -> None:
    """The same where the libraries may have been imported before: a notebook's own cells do that."""
    send_nothing()
    from huggingface_hub import constants

    # The variable is read once, when this is imported.
    assert "HF_HUB_DISABLE_TELEMETRY" in vars(constants)
    constants.HF_HUB_DISABLE_TELEMETRY = True
