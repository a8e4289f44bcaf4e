"""Modules of a model that tunekit's kernels serve, from its configuration alone."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tunekit.errors import ModelError
from tunekit.models.fusion.fuse import Report, fuse
from tunekit.probe.model import model_folder
from tunekit.recipe.sections.model import ModelSection


def coverage(section: ModelSection) -> Report:
    """Report which modules of a model would be fused, without its weights: it is built on `meta`.

    Raises:
        ModelError: Its configuration cannot be read, or is not one of a language model.
    """
    try:
        config = AutoConfig.from_pretrained(
            model_folder(section), revision=section.revision, trust_remote_code=section.trust_remote_code
        )
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=section.trust_remote_code)
    except (OSError, ValueError, KeyError, ImportError) as error:
        first_line = str(error).strip().partition("\n")[0]
        raise ModelError(
            f"the configuration of {section.path!r} cannot be read: {first_line}",
            hint="name a folder with a config.json, or a model on the hub",
        ) from error
    return fuse(model)
