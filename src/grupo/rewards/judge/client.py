"""Requests to a judge behind an OpenAI-compatible server: concurrency, time-outs, retries and replies."""

from __future__ import annotations

import asyncio
import email.utils
import importlib
import json
import logging
import math
import os
import random
import re
import time
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from grupo.errors import ConfigError
from grupo.rewards.judge.verdicts import ErrorKind, JudgeError, JudgeVerdict, VerdictCache, parse_verdict

logger = logging.getLogger("grupo")

MIN_BACKOFF, MAX_BACKOFF = 0.5, 8.0
"""Seconds before the first retry, doubled for each further one, and their limit."""

REMINDER = 'Reply with nothing but the JSON object, {"reason": ..., "score": ...}.'

SERVER_UNAVAILABLE: frozenset[ErrorKind] = frozenset({"timeout", "connection", "rate_limit", "server", "denied"})
_RETRIED: frozenset[ErrorKind] = frozenset({"timeout", "connection", "rate_limit", "server", "malformed"})

Messages = list[dict[str, str]]


@dataclass
class _Batch:
    """State shared by the requests of one call."""

    client: Any
    semaphore: asyncio.Semaphore
    deadline: float
    """Time on the monotonic clock."""
    requests: int = 0


@dataclass
class JudgeResults:
    """Results of one call, by the keys of its questions."""

    verdicts: dict[str, JudgeVerdict] = field(default_factory=dict)
    errors: dict[str, JudgeError] = field(default_factory=dict)
    requests: int = 0


class JudgeClient:
    """Requests verdicts, many at a time, and keeps them in its cache."""

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        name: str,
        scale: tuple[int, int],
        api_key_env: str | None,
        timeout: float,
        batch_timeout: float,
        retries: int,
        concurrency: int,
        request: Mapping[str, Any],
        cache: VerdictCache,
    ) -> None:
        if retries < 0 or concurrency < 1 or not (0 < timeout < math.inf and 0 < batch_timeout < math.inf):
            raise ConfigError(
                f"{name} cannot work with timeout={timeout}, batch_timeout={batch_timeout}, retries={retries}, "
                f"concurrency={concurrency}: set both times, in seconds, above 0, retries to 0 or more and concurrency "
                "to 1 or more."
            )
        self.url = _completions_url(base_url)
        self.model = model
        self.name = name
        self.scale = scale
        self.api_key_env = api_key_env
        self.timeout = timeout
        self.batch_timeout = batch_timeout
        self.retries = retries
        self.concurrency = concurrency
        self.request = request
        self.cache = cache
        self.has_replied = False
        self._accepts_schema: bool | None = None
        """Whether the server accepts a JSON schema; None until known."""
        # Back-off must neither depend on nor disturb the random numbers of a run.
        self._jitter = random.Random()
        self._api_key()

    async def grade(self, questions: Mapping[str, Messages]) -> JudgeResults:
        """A verdict or an error for each question."""
        results = JudgeResults()
        if not questions:
            return results
        http = _http()
        # No time-out of the client: it restarts with every byte that arrives.
        limits = http.Limits(max_connections=self.concurrency)
        async with http.AsyncClient(timeout=None, limits=limits) as client:
            batch = _Batch(client, asyncio.Semaphore(self.concurrency), time.monotonic() + self.batch_timeout)
            tasks = {
                key: asyncio.ensure_future(self._grade_with_retries(batch, key, question))
                for key, question in questions.items()
            }
            try:
                await asyncio.wait(tasks.values(), timeout=self.batch_timeout)
            finally:
                for task in tasks.values():
                    task.cancel()
                finished = await asyncio.gather(*tasks.values(), return_exceptions=True)
        results.requests = batch.requests
        for key, result in zip(tasks, finished, strict=True):
            if isinstance(result, JudgeVerdict):
                results.verdicts[key] = result
            elif isinstance(result, JudgeError):
                results.errors[key] = result
            elif isinstance(result, asyncio.CancelledError):
                results.errors[key] = JudgeError("timeout", f"the batch did not finish within {self.batch_timeout:g} s")
            else:
                assert isinstance(result, BaseException)
                raise result
        return results

    async def _grade_with_retries(self, batch: _Batch, key: str, question: Messages) -> JudgeVerdict:
        """One verdict, with retries; it is cached at once, as the batch may run out of time.

        Raises:
            JudgeError: the error of the last attempt.
        """
        async with batch.semaphore:
            attempt = 0
            while True:
                try:
                    verdict = await self._grade(batch, question)
                except JudgeError as error:
                    if error.kind not in _RETRIED or attempt == self.retries:
                        raise
                    wait = self._backoff(error, attempt)
                    if time.monotonic() + wait >= batch.deadline:
                        raise
                    if error.kind == "malformed":
                        if question[-1]["content"].endswith(REMINDER):
                            raise  # at temperature 0 it would reply the same again
                        *before, last = question
                        question = [*before, {**last, "content": f"{last['content']}\n\n{REMINDER}"}]
                    attempt += 1
                    # The semaphore is held while waiting, so that an overloaded server gets fewer requests.
                    await asyncio.sleep(wait)
                else:
                    self.cache.put(key, verdict)
                    return verdict

    def _backoff(self, error: JudgeError, attempt: int) -> float:
        """Seconds before the next attempt."""
        if error.kind == "malformed":
            return 0.0
        if error.retry_after is not None:
            return error.retry_after
        return min(MIN_BACKOFF * 2.0**attempt, MAX_BACKOFF) * self._jitter.uniform(0.75, 1.25)

    async def _grade(self, batch: _Batch, messages: Messages) -> JudgeVerdict:
        """One request, or two if the server turns out not to accept a JSON schema."""
        fields = {"model": self.model, "messages": messages, **self.request}
        body = {name: value for name, value in fields.items() if value is not None}
        if self._accepts_schema is False:
            return self._parse_response(await self._post(batch, body))
        response = await self._post(batch, {**body, "response_format": self._response_format()})
        if response.status_code in (400, 422, 501) and self._accepts_schema is None:
            without = await self._post(batch, body)
            if without.status_code == 200 and self._accepts_schema is None:
                self._accepts_schema = False
                logger.info(
                    "%s: the server at %s refuses response_format, so replies are parsed without a schema.",
                    self.name, self.url,
                )  # fmt: skip
            return self._parse_response(without)
        if response.status_code == 200:
            self._accepts_schema = True
        return self._parse_response(response)

    async def _post(self, batch: _Batch, body: Mapping[str, Any]) -> Any:
        http = _http()
        batch.requests += 1
        key = self._api_key()
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        try:
            return await asyncio.wait_for(batch.client.post(self.url, json=body, headers=headers), self.timeout)
        except asyncio.TimeoutError:
            raise JudgeError("timeout", f"no reply within {self.timeout:g} s") from None
        except http.HTTPError as error:
            raise JudgeError("connection", f"{type(error).__name__}: {error}".removesuffix(": ")) from None

    def _parse_response(self, response: Any) -> JudgeVerdict:
        """The verdict of a response; raises `JudgeError` unless it holds a grade on the scale."""
        status = response.status_code
        if status != 200:
            message = f"status {status}: {self._redact_key(response.text).strip()[:200]}".removesuffix(": ")
            if status == 429:
                raise JudgeError("rate_limit", message, _retry_after(response.headers))
            if status >= 500 or status in (408, 409, 425):
                raise JudgeError("server", message, _retry_after(response.headers))
            raise JudgeError("denied" if status in (401, 403, 404) else "rejected", message)
        self.has_replied = True
        try:
            choice = json.loads(response.content)["choices"][0]
            text = choice["message"]["content"]
        except (ValueError, LookupError, TypeError, RecursionError):
            raise JudgeError("malformed", "the reply is not a chat completion") from None
        verdict = parse_verdict(text, self.scale) if isinstance(text, str) else None
        if verdict is None:
            cut = " (cut at max_tokens)" if choice.get("finish_reason") == "length" else ""
            raise JudgeError("malformed", f"no grade from {self.scale[0]} to {self.scale[1]} in {text!r:.120}{cut}")
        return verdict

    def _response_format(self) -> dict[str, Any]:
        low, high = self.scale
        # Every server with schemas accepts an enumeration, but not bounds.
        grades = {"enum": list(range(low, high + 1))} if high - low <= 100 else {"minimum": low, "maximum": high}
        schema = {
            "type": "object",
            "properties": {"reason": {"type": "string"}, "score": {"type": "integer", **grades}},
            "required": ["reason", "score"],
            "additionalProperties": False,
        }
        return {"type": "json_schema", "json_schema": {"name": "verdict", "strict": True, "schema": schema}}

    def _api_key(self) -> str | None:
        """The API key, read each time, so that it is in no attribute, pickle or recipe."""
        if self.api_key_env is None:
            return None
        key = os.environ.get(self.api_key_env)
        if not key:
            # api_key_env may hold the key itself by mistake, which must not get into a log.
            named = f"{self.api_key_env!r} " if re.fullmatch(r"[A-Z][A-Z0-9_]*", self.api_key_env) else ""
            raise ConfigError(
                f"{self.name}: api_key_env names an environment variable, and that variable {named}is not set. Export "
                "the key under that name, or leave api_key_env out for a server without keys."
            )
        return key

    def _redact_key(self, text: str) -> str:
        key = self._api_key()
        return text if key is None else text.replace(key, "***")


def _http() -> Any:
    """The HTTP library that huggingface_hub depends on: httpx2, or httpx in its older versions."""
    for name in ("httpx2", "httpx"):
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    raise ConfigError("llm_judge needs an HTTP client: pip install httpx.")


def _completions_url(base_url: str) -> str:
    parts = urllib.parse.urlsplit(base_url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"base_url={base_url!r} is not the address of a server, such as http://localhost:8000/v1.")
    if parts.username or parts.password or parts.query:
        raise ConfigError(
            "base_url holds a user, a password or a query, which would be written to logs and recipes. Put the key "
            "into an environment variable and set api_key_env to its name."
        )
    return base_url.rstrip("/").removesuffix("/chat/completions") + "/chat/completions"


def _retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds in a Retry-After header, which holds a number or a date."""
    value = headers.get("retry-after", "")
    if re.fullmatch(r"[0-9]+(?:\.[0-9]+)?", value):
        return float(value)
    try:
        return max(email.utils.parsedate_to_datetime(value).timestamp() - time.time(), 0.0)
    except (TypeError, ValueError):
        return None
