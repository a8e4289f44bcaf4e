"""The application that answers OpenAI's clients: transformers' own server, over the one model that is held here.

`transformers serve` loads models by name from the hub or a folder. It knows no adapter beside a base that is quantised,
and no run's name; it also loads whatever a request names. So the model is loaded as everywhere in tunekit, and given to
the same handlers and routes by a manager that has this model and no other. What those would pass over in silence
(several answers, a prompt that is too long, pictures for a model of text) is refused here, and so are addresses of
pictures: they come as data URLs.
"""

import hmac
import time
from collections.abc import Mapping
from threading import Event
from typing import Any
from urllib.parse import urlsplit

from fastapi import FastAPI, HTTPException
from jinja2 import TemplateError
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from torch.nn import Module
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.response import ResponseHandler
from transformers.cli.serving.server import build_server
from transformers.cli.serving.systemone import SystemOneHandler
from transformers.cli.serving.transcription import TranscriptionHandler
from transformers.cli.serving.utils import GenerationState, Modality

from tunekit.errors import DataError, RunError
from tunekit.inference.conversations import has_other_parts, inputs_of
from tunekit.inference.inference_model import Loaded, end_tokens, longest_of
from tunekit.inference.prompts import prompt_ids

ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/models", "/health")
"""Routes of the server that are exposed: others load models, or unload the one that is held."""

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
"""Names of this machine in addresses that only it can reach."""

NUM_TOKENS = 1024
"""Longest answer where a request names none, as in transformers' server."""

REFUSED: Mapping[str, tuple[object, ...]] = {
    "n": (None, 1),
    "best_of": (None, 1),
    "echo": (None, False),
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
    "presence_penalty": (None, 0),
    "response_format": (None, {"type": "text"}),
    "generation_config": (None,),
}
"""Fields that the server does not honour, with the values that ask for nothing."""

NUMBERS = ("temperature", "top_p", "frequency_penalty", "seed")


def make_app(loaded: Loaded, name: str, ended: Event) -> FastAPI:
    """The application that serves a model.

    Args:
        loaded: The model. Its generation configuration becomes that of OpenAI's endpoint: answers are drawn at
            temperature 1, unless the model or the request says otherwise, and end as in tunekit.
        name: What it is called in requests.
        ended: Once it is set, answers that are being given fail at their next token. A process that ended while its
            other thread still computes would be aborted.
    """

    def stop(module: Module, given: tuple[object, ...]) -> None:
        if ended.is_set():
            raise RuntimeError("the server has stopped")

    loaded.model.get_input_embeddings().register_forward_pre_hook(stop)
    config = loaded.model.generation_config
    config.eos_token_id = end_tokens(loaded.model, loaded.tokenizer) or None
    config.pad_token_id = loaded.tokenizer.pad_token_id or loaded.tokenizer.eos_token_id
    config.do_sample = True
    config.temperature = 1.0 if config.temperature is None else config.temperature
    config.top_k = 0 if config.top_k is None else config.top_k
    manager, state = _Manager(loaded, name), GenerationState()
    app: FastAPI = build_server(
        manager,
        _Chat(manager, state),
        completion_handler=_Completion(manager, state),
        response_handler=ResponseHandler(manager, state),
        transcription_handler=TranscriptionHandler(manager, state),
        systemone_handler=SystemOneHandler(manager, state),
        generation_state=state,
    )
    app.add_exception_handler(HTTPException, _refused)
    paths = [path for path in ROUTES if path != "/v1/chat/completions" or talks(loaded)]
    app.router.routes[:] = [route for route in app.router.routes if vars(route).get("path") in paths]
    return app


def talks(loaded: Loaded) -> bool:
    """Return whether a model takes conversations rather than texts to complete."""
    return loaded.found.is_chat and loaded.tokenizer.chat_template is not None


class _Manager(ModelManager):  # type: ignore[misc]
    """A manager of models that has one, and keeps it."""

    def __init__(self, loaded: Loaded, name: str) -> None:
        super().__init__(device=loaded.device)
        self.loaded, self.force_model = loaded, name
        self.longest = longest_of(loaded.found)
        self.started = int(time.time())

    @staticmethod
    def process_model_name(model_id: str) -> str:
        """The name in answers: that of the request, without a revision."""
        return model_id

    def load_model_and_processor(self, model_id_and_revision: str, **options: Any) -> tuple[Any, Any]:
        """The model and its tokenizer. What was asked for was compared with its name before."""
        return self.loaded.model, self.loaded.tokenizer

    def get_gen_models(self) -> list[dict[str, object]]:
        """Return the models as OpenAI lists them."""
        return [{"id": self.force_model, "object": "model", "created": self.started, "owned_by": "tunekit"}]

    def limit(self, body: dict[str, Any], num_tokens: int) -> None:
        """Hold a request to what the model takes, and refuse what would not be honoured."""
        for field, silent in REFUSED.items():
            if body.get(field) not in silent:
                raise HTTPException(400, f"{field}={body[field]!r} is unsupported; remove it")
        for field in NUMBERS:
            if not isinstance(body.get(field), float | int | None):
                raise HTTPException(400, f"{field}={body[field]!r} is not a number")
        limit_asked = body.pop("max_completion_tokens", None) or body.get("max_tokens") or NUM_TOKENS
        if not isinstance(limit_asked, int) or limit_asked < 1:
            raise HTTPException(400, f"max_tokens={limit_asked!r} is not a number of tokens")
        if self.longest is not None and num_tokens >= self.longest:
            accepts = f"{self.force_model} accepts {self.longest:,} including the answer"
            raise HTTPException(400, f"the prompt has {num_tokens:,} tokens; {accepts}")
        body["max_tokens"] = limit_asked if self.longest is None else min(limit_asked, self.longest - num_tokens)


class _Chat(ChatCompletionHandler):  # type: ignore[misc]
    """Answers conversations."""

    async def handle_request(self, body: dict[str, Any], request_id: str) -> Any:
        """Answer one that the model can answer."""
        loaded, messages = self.model_manager.loaded, body.get("messages")
        try:
            if isinstance(messages, list) and has_other_parts(messages):
                return await self._answer_pictures(body, request_id)
            inputs = self.get_processor_inputs_from_messages(body["messages"], Modality.LLM)
            if not inputs:
                raise HTTPException(400, "messages is empty")
            ids = prompt_ids(loaded.found, loaded.tokenizer, inputs, body.get("tools"))
        except (DataError, RunError) as error:
            raise HTTPException(400, str(error)) from error
        except (KeyError, TypeError, ValueError, TemplateError) as error:
            raise HTTPException(400, f"messages are not in OpenAI's format: {error!r}") from error
        self.model_manager.limit(body, len(ids))
        return await super().handle_request(body, request_id)

    async def _answer_pictures(self, body: dict[str, Any], request_id: str) -> Any:
        """Answer a conversation with pictures, which transformers' server would fetch from wherever they are."""
        self._validate_request(body)
        name, model, tokenizer = self._resolve_model(body)
        manager = self.generation_state.get_manager(name)
        tools = body.get("tools")
        # One after the other, as answers are: a tokenizer is not for several threads.
        inputs = await manager.async_submit(inputs_of, self.model_manager.loaded, body["messages"], tools)
        self.model_manager.limit(body, inputs["input_ids"].shape[1])
        config = self._build_generation_config(body, model.generation_config)
        answer = self._streaming if body.get("stream") else self._non_streaming
        response = answer(request_id, model, tokenizer, name, inputs, config, gen_manager=manager, tools=tools)
        return response if body.get("stream") else await response


class _Completion(CompletionHandler):  # type: ignore[misc]
    """Goes on with texts."""

    async def handle_request(self, body: dict[str, Any], request_id: str) -> Any:
        """Go on with one that leaves room for it."""
        prompt = body.get("prompt")
        if not isinstance(prompt, str) or not prompt:
            raise HTTPException(400, "prompt must be non-empty text")
        self.model_manager.limit(body, len(self.model_manager.loaded.tokenizer(prompt)["input_ids"]))
        return await super().handle_request(body, request_id)


class Gate:
    """An application that answers programs of this machine, or those that know the key.

    A page of another site can send requests to this machine from its visitor's browser; browsers say where such a
    request comes from. A name that somebody else lets point to this machine (DNS rebinding) is none of its own.

    Args:
        app: What answers those that pass.
        api_key: What others must know, if anything.
    """

    def __init__(self, app: ASGIApp, api_key: str | None) -> None:
        self._app, self._key = app, api_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or have it answered."""
        refusal = self._refusal(Headers(scope=scope)) if scope["type"] == "http" else None
        await (self._app if refusal is None else refusal)(scope, receive, send)

    def _refusal(self, headers: Headers) -> JSONResponse | None:
        if self._key is not None:
            credentials = headers.get("authorization", "").removeprefix("Bearer ")
            is_key = hmac.compare_digest(credentials.encode(), self._key.encode())
            return None if is_key else _error(401, "invalid API key")
        host, origin = headers.get("host", ""), headers.get("origin")
        if urlsplit(f"//{host}").hostname not in LOOPBACK_NAMES:
            return _error(421, f"this server is not {host!r}; use http://127.0.0.1")
        if origin is not None and urlsplit(origin).netloc != host:
            return _error(403, "cross-origin requests are refused")
        return None


async def _refused(request: Request, error: Exception) -> JSONResponse:
    """Build the response to a request that a handler refused."""
    assert isinstance(error, HTTPException)
    return _error(error.status_code, str(error.detail))


def _error(status: int, message: str) -> JSONResponse:
    """Build an error response as OpenAI's clients read it."""
    return JSONResponse({"error": {"message": message, "type": "invalid_request_error", "code": status}}, status)
