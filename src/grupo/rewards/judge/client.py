"""Requests to a judge: an OpenAI-compatible server, its retries and time-outs, and everything that it may answer."""

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
from grupo.rewards.judge.verdicts import JudgeVerdict, Kind, NoVerdict, VerdictCache, parse_verdict

logger = logging.getLogger("grupo")

FIRST_WAIT, LONGEST_WAIT = 0.5, 8.0
"""Seconds before the first retry, doubled for each further one."""

REMINDER = 'Reply with nothing but the JSON object, {"reason": ..., "score": ...}.'

SERVER_IS_GONE: frozenset[Kind] = frozenset({"timeout", "connection", "rate_limit", "server", "denied"})
_WORTH_A_RETRY: frozenset[Kind] = frozenset({"timeout", "connection", "rate_limit", "server", "malformed"})

Messages = list[dict[str, str]]


@dataclass
class _Batch:
    """What the requests of one call share."""

    client: Any
    gate: asyncio.Semaphore
    deadline: float
    """On the monotonic clock."""
    requests: int = 0


@dataclass
class Answers:
    """Of one call, by the keys of the questions."""

    verdicts: dict[str, JudgeVerdict] = field(default_factory=dict)
    failures: dict[str, NoVerdict] = field(default_factory=dict)
    requests: int = 0


class JudgeServer:
    """Asks for verdicts, many at a time. What it has got it keeps in its cache."""

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
                f"concurrency={concurrency}: seconds are above 0, retries from 0 on, requests at a time from 1 on."
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
        self.has_answered = False
        self._takes_schema: bool | None = None
        """Whether the server honours a JSON schema; None: not known yet."""
        # The back-off must neither depend on nor disturb the random numbers of a run.
        self._jitter = random.Random()
        self._key()

    async def ask(self, questions: Mapping[str, Messages]) -> Answers:
        """What the judge says to each question."""
        outcome = Answers()
        if not questions:
            return outcome
        http = _http()
        # Time-outs are ours: those of the client start anew with every byte.
        limits = http.Limits(max_connections=self.concurrency)
        async with http.AsyncClient(timeout=None, limits=limits) as client:
            batch = _Batch(client, asyncio.Semaphore(self.concurrency), time.monotonic() + self.batch_timeout)
            tasks = {
                key: asyncio.ensure_future(self._judge(batch, key, question)) for key, question in questions.items()
            }
            try:
                await asyncio.wait(tasks.values(), timeout=self.batch_timeout)
            finally:
                for task in tasks.values():
                    task.cancel()
                results = await asyncio.gather(*tasks.values(), return_exceptions=True)
        outcome.requests = batch.requests
        for key, result in zip(tasks, results, strict=True):
            if isinstance(result, JudgeVerdict):
                outcome.verdicts[key] = result
            elif isinstance(result, NoVerdict):
                outcome.failures[key] = result
            elif isinstance(result, asyncio.CancelledError):
                outcome.failures[key] = NoVerdict("timeout", f"the batch was not done within {self.batch_timeout:g} s")
            else:
                assert isinstance(result, BaseException)
                raise result
        return outcome

    async def _judge(self, batch: _Batch, key: str, question: Messages) -> JudgeVerdict:
        """One verdict, with retries; it goes into the cache at once, as the batch may run out of time.

        Raises:
            NoVerdict: the last reason.
        """
        async with batch.gate:
            attempt = 0
            while True:
                try:
                    verdict = await self._ask(batch, question)
                except NoVerdict as failure:
                    if failure.kind not in _WORTH_A_RETRY or attempt == self.retries:
                        raise
                    wait = self._wait(failure, attempt)
                    if time.monotonic() + wait >= batch.deadline:
                        raise
                    if failure.kind == "malformed":
                        if question[-1]["content"].endswith(REMINDER):
                            raise  # at temperature 0 it would say the same again
                        *before, last = question
                        question = [*before, {**last, "content": f"{last['content']}\n\n{REMINDER}"}]
                    attempt += 1
                    # The place at the gate is kept: a server that is out of breath gets fewer requests.
                    await asyncio.sleep(wait)
                else:
                    self.cache.put(key, verdict)
                    return verdict

    def _wait(self, failure: NoVerdict, attempt: int) -> float:
        if failure.kind == "malformed":
            return 0.0
        if failure.wait is not None:
            return failure.wait
        return min(FIRST_WAIT * 2.0**attempt, LONGEST_WAIT) * self._jitter.uniform(0.75, 1.25)

    async def _ask(self, batch: _Batch, messages: Messages) -> JudgeVerdict:
        """One request, or two where it turns out that the server knows no JSON schema."""
        fields = {"model": self.model, "messages": messages, **self.request}
        body = {name: value for name, value in fields.items() if value is not None}
        if self._takes_schema is False:
            return self._verdict(await self._post(batch, body))
        response = await self._post(batch, {**body, "response_format": self._response_format()})
        if response.status_code in (400, 422, 501) and self._takes_schema is None:
            without = await self._post(batch, body)
            if without.status_code == 200 and self._takes_schema is None:
                self._takes_schema = False
                logger.info(
                    "%s: the server at %s refuses response_format, so replies are parsed as they come.",
                    self.name, self.url,
                )  # fmt: skip
            return self._verdict(without)
        if response.status_code == 200:
            self._takes_schema = True
        return self._verdict(response)

    async def _post(self, batch: _Batch, body: Mapping[str, Any]) -> Any:
        http = _http()
        batch.requests += 1
        key = self._key()
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        try:
            return await asyncio.wait_for(batch.client.post(self.url, json=body, headers=headers), self.timeout)
        except asyncio.TimeoutError:
            raise NoVerdict("timeout", f"no reply within {self.timeout:g} s") from None
        except http.HTTPError as error:
            raise NoVerdict("connection", f"{type(error).__name__}: {error}".removesuffix(": ")) from None

    def _verdict(self, response: Any) -> JudgeVerdict:
        """Raises `NoVerdict` for everything but a reply with a grade on the scale."""
        status = response.status_code
        if status != 200:
            said = f"status {status}: {self._without_key(response.text).strip()[:200]}".removesuffix(": ")
            if status == 429:
                raise NoVerdict("rate_limit", said, _retry_after(response.headers))
            if status >= 500 or status in (408, 409, 425):
                raise NoVerdict("server", said, _retry_after(response.headers))
            raise NoVerdict("denied" if status in (401, 403, 404) else "rejected", said)
        self.has_answered = True
        try:
            choice = json.loads(response.content)["choices"][0]
            text = choice["message"]["content"]
        except (ValueError, LookupError, TypeError, RecursionError):
            raise NoVerdict("malformed", "the reply is no chat completion") from None
        verdict = parse_verdict(text, self.scale) if isinstance(text, str) else None
        if verdict is None:
            cut = " (cut at max_tokens)" if choice.get("finish_reason") == "length" else ""
            raise NoVerdict("malformed", f"no grade from {self.scale[0]} to {self.scale[1]} in {text!r:.120}{cut}")
        return verdict

    def _response_format(self) -> dict[str, Any]:
        low, high = self.scale
        # An enumeration is what every server with schemas takes; bounds are not.
        grades = {"enum": list(range(low, high + 1))} if high - low <= 100 else {"minimum": low, "maximum": high}
        schema = {
            "type": "object",
            "properties": {"reason": {"type": "string"}, "score": {"type": "integer", **grades}},
            "required": ["reason", "score"],
            "additionalProperties": False,
        }
        return {"type": "json_schema", "json_schema": {"name": "verdict", "strict": True, "schema": schema}}

    def _key(self) -> str | None:
        """The API key, read anew each time: it is in no attribute, pickle or recipe."""
        if self.api_key_env is None:
            return None
        key = os.environ.get(self.api_key_env)
        if not key:
            # What stands there may be the key itself, which must not get into a log.
            named = f"{self.api_key_env!r} " if re.fullmatch(r"[A-Z][A-Z0-9_]*", self.api_key_env) else ""
            raise ConfigError(
                f"{self.name}: api_key_env is the name of an environment variable, and the one it names {named}is "
                "not set. Export the key under that name, or leave api_key_env out for a server without keys."
            )
        return key

    def _without_key(self, text: str) -> str:
        key = self._key()
        return text if key is None else text.replace(key, "***")


def _http() -> Any:
    """The HTTP client that huggingface_hub brings: httpx2, or httpx with its older versions."""
    for name in ("httpx2", "httpx"):
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    raise ConfigError("llm_judge needs an HTTP client: pip install httpx.")


def _completions_url(base_url: str) -> str:
    parts = urllib.parse.urlsplit(base_url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"base_url={base_url!r} is no address of a server, as http://localhost:8000/v1 is.")
    if parts.username or parts.password or parts.query:
        raise ConfigError(
            "base_url holds a user, a password or a query, which would be written into logs and recipes. Put the key "
            "into an environment variable and name that by api_key_env."
        )
    return base_url.rstrip("/").removesuffix("/chat/completions") + "/chat/completions"


def _retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds of a Retry-After header, which holds a number or a date."""
    value = headers.get("retry-after", "")
    if re.fullmatch(r"[0-9]+(?:\.[0-9]+)?", value):
        return float(value)
    try:
        return max(email.utils.parsedate_to_datetime(value).timestamp() - time.time(), 0.0)
    except (TypeError, ValueError):
        return None
