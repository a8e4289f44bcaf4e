"""vLLM in transformers' place, where it is installed beside a CUDA device: many answers in a fraction of the time.

It loads the base model itself and the adapter beside it. So it takes LoRA as PEFT defines it, over whole weights; what
was trained otherwise (QLoRA, DoRA, modules that were trained whole) is answered by transformers. It also takes most of
a device's memory for itself, as its own setting says (`gpu_memory_utilization`, 0.9 or so).
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from tunekit.errors import DependencyError, RunError, TunekitError
from tunekit.estimates.facts import is_thinker
from tunekit.estimates.memory.states import Dtype
from tunekit.inference.inference_model import (
    Answer,
    Device,
    Sampling,
    Trained,
    config_of,
    longest_of,
    room_of,
    tokenizer_of,
)
from tunekit.probe.model import model_folder
from tunekit.process.processes import VLLM_SERVE
from tunekit.recipe.sections.adapters import LoraAdapter, QloraAdapter

Backend = Literal["auto", "transformers", "vllm"]

RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks for which vLLM makes room."""

AT_ONCE = 512
"""Prompts that are given to vLLM together; what they are answered is told together, too."""


def takes_vllm(backend: Backend, found: Trained, device: Device) -> bool:
    """Return whether vLLM generates.

    Args:
        backend: What is asked for; `auto`: vLLM where it can.
        found: The model.
        device: Where it is to be.

    Raises:
        TunekitError: vLLM is asked for, and cannot.
    """
    if backend == "transformers":
        return False
    why = _why_not(found, device)
    if backend == "vllm" and why is not None:
        raise why
    return why is None


def missing() -> TunekitError | None:
    """Return the error for a missing vLLM; None where it is installed."""
    if find_spec("vllm") is not None:
        return None
    return DependencyError("vLLM is not installed", hint="install it with: pip install 'tunekit[vllm]'")


def _why_not(found: Trained, device: Device) -> TunekitError | None:
    """Return why vLLM cannot generate; None where it can."""
    why = missing()
    if why is not None:
        return why
    import torch

    other = "pass --backend transformers"
    if device == "cpu" or not torch.cuda.is_available() or torch.version.cuda is None:
        return RunError("vLLM is supported on CUDA devices only", hint=other)
    adapter = found.adapter
    if isinstance(adapter, QloraAdapter):
        return RunError(f"{found.name} was trained on a quantized base, which vLLM does not load", hint=other)
    if is_thinker((config_of(found).architectures or [""])[0]):
        return RunError(f"vLLM is unsupported for {found.name}, the thinker of a model that speaks", hint=other)
    if found.base.rope_scaling is not None:
        return RunError(f"vLLM loads the base of {found.name} without its rope_scaling", hint=other)
    if found.base.all_tokens:
        return RunError(f"vLLM loads the base of {found.name} without the tokens that were added to it", hint=other)
    if adapter is not None and (not isinstance(adapter, LoraAdapter) or _is_beyond(adapter)):
        return RunError(f"vLLM does not support the adapter of {found.name}", hint=other)
    return None


def _is_beyond(adapter: LoraAdapter) -> bool:
    """Return whether vLLM refuses an adapter for its kind, or would scale all modules by one rank and alpha."""
    others = (adapter.use_dora, adapter.lora_bias, adapter.modules_to_save, adapter.target_parameters)
    return (
        any((*others, adapter.trainable_token_indices, adapter.rank_pattern, adapter.alpha_pattern))
        or adapter.rank > RANKS[-1]
    )


class VllmModel:
    """A model in vLLM, in this process.

    Args:
        found: Which.
        dtype: Type of its weights.
    """

    def __init__(self, found: Trained, dtype: Dtype) -> None:
        from vllm import LLM
        from vllm.lora.request import LoRARequest

        self._tokenizer, self._longest = tokenizer_of(found), longest_of(found)
        self._lora: Any = None
        options: dict[str, Any] = {}
        if isinstance(found.adapter, LoraAdapter):
            self._lora = LoRARequest("tuned", 1, found.folder)
            options = {"enable_lora": True, "max_loras": 1, "max_lora_rank": _rank_for(found.adapter.rank)}
        self._llm: Any = LLM(
            model=model_folder(found.base),
            revision=found.base.revision,
            tokenizer=found.folder if found.run is not None else None,
            trust_remote_code=found.base.trust_remote_code,
            dtype=dtype,
            **options,
        )

    def answer(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> Iterator[tuple[int, tuple[Answer, ...]]]:
        """Yield the number of each prompt with its answers, as `tunekit.inference.inference_model.answer` does."""
        from vllm import TokensPrompt

        for start in range(0, len(prompts), AT_ONCE):
            batch = prompts[start : start + AT_ONCE]
            outputs = self._llm.generate(
                [TokensPrompt(prompt_token_ids=list(ids)) for ids in batch],
                [self._params(sampling, room_of(len(ids), sampling, self._longest)) for ids in batch],
                lora_request=self._lora,
                use_tqdm=False,
            )
            for index, output in enumerate(outputs, start=start):
                yield index, tuple(self._answer(completion) for completion in output.outputs)

    def stream(
        self, ids: Sequence[int], sampling: Sampling, *, base: bool, is_stopped: Callable[[], bool]
    ) -> Iterator[tuple[str, int, str | None]]:
        """One answer as it is given: pieces of text, tokens of each, and at the end why it ended.

        Args:
            ids: The prompt.
            sampling: How to draw; its longest answer fits.
            base: Whether the model answers without its adapter.
            is_stopped: Whether the answer is to end where it is.
        """
        from vllm import TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        engine = self._llm.llm_engine
        params = self._params(sampling, sampling.max_new_tokens, output_kind=RequestOutputKind.DELTA)
        lora = None if base else self._lora
        engine.add_request("talk", TokensPrompt(prompt_token_ids=list(ids)), params, lora_request=lora)
        while engine.has_unfinished_requests():
            for output in engine.step():
                completion = output.outputs[0]
                yield completion.text, len(completion.token_ids), completion.finish_reason
            if is_stopped():
                engine.abort_request(["talk"])

    def _params(self, sampling: Sampling, room: int, **options: Any) -> Any:
        from vllm import SamplingParams

        end = self._tokenizer.eos_token_id
        return SamplingParams(
            n=sampling.num_samples,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            max_tokens=room,
            seed=sampling.seed,
            stop_token_ids=None if end is None else [end],
            **options,
        )

    def _answer(self, output: Any) -> Answer:
        """Convert vLLM's output to an answer."""
        ids = list(output.token_ids)
        text = self._tokenizer.decode(ids, skip_special_tokens=True)
        return Answer(text, tuple(ids), "length" if output.finish_reason == "length" else "end")


def serve_command(found: Trained, name: str, *, host: str, port: int, dtype: Dtype | Literal["auto"]) -> list[str]:
    """The command that serves a model with vLLM's own server.

    An adapter gets the name that is asked for. vLLM serves the model below it too, under the name with `-base`.
    """
    has_adapter = found.adapter is not None
    words = [*VLLM_SERVE, model_folder(found.base), "--host", host, "--port", str(port), "--dtype", dtype]
    words += ["--served-model-name", f"{name}-base" if has_adapter else name]
    if found.base.revision is not None:
        words += ["--revision", found.base.revision]
    if found.run is not None:
        words += ["--tokenizer", found.folder]
        template = Path(found.folder) / "chat_template.jinja"
        words += ["--chat-template", str(template)] if template.is_file() else []
    if found.base.trust_remote_code:
        words.append("--trust-remote-code")
    if isinstance(found.adapter, LoraAdapter):
        words += ["--enable-lora", "--max-lora-rank", str(_rank_for(found.adapter.rank))]
        words += ["--lora-modules", f"{name}={found.folder}"]
    # Pages of other sites are to get nothing.
    return [sys.executable, *words, "--allowed-origins", "[]"]


def run_server(command: list[str], api_key: str | None) -> None:
    """Run vLLM's server until it ends, as Ctrl-C and SIGTERM make it.

    Raises:
        RunError: It failed.
    """
    # In the environment, where a list of processes does not show it.
    environment = os.environ if api_key is None else os.environ | {"VLLM_API_KEY": api_key}
    process = subprocess.Popen(command, env=environment)
    before = signal.signal(signal.SIGTERM, lambda number, frame: process.terminate())
    try:
        code = process.wait()
    except KeyboardInterrupt:
        # A terminal has told that process, too.
        code = process.wait()
    finally:
        signal.signal(signal.SIGTERM, before)
    if code > 0:
        raise RunError(f"vLLM's server exited with code {code}", hint="see above, or pass --backend transformers")


def _rank_for(rank: int) -> int:
    return next(room for room in RANKS if rank <= room)
