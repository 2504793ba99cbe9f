"""From a request of the protocol to jobs of the engine, and back to its pieces."""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from stree_jax.arguments import encode_prompts
from stree_jax.checkpoints.load import Model
from stree_jax.convert.tokenizer import check_text_ids, encoding
from stree_jax.sampling.continuation import continuation
from stree_jax.sampling.stop_strings import token_bytes
from stree_jax.server.answers import empty_answer
from stree_jax.server.batch import Asked
from stree_jax.server.engine import Closed, Engine, Failed, Job, QueueFull
from stree_jax.server.errors import ApiError, invalid
from stree_jax.server.metrics import Metrics
from stree_jax.server.protocol import Request, Turn
from stree_jax.server.texts import Piece, Reader, Writer

Spell = Callable[[Sequence[dict[str, str]], Turn], list[int]]
NO_TOKENIZER = "this model has no tokenizer.json, so it cannot read text"
RETRY_S = 1  # what a client is told to wait where the queue is full


@dataclass(frozen=True)
class Limits:
    """Of what a request may ask.

    Attributes:
      body_bytes: of its JSON.
      timeout_s: until the last byte of its answer has left.
    """

    body_bytes: int = 1 << 20
    timeout_s: float = 600.0


@dataclass(frozen=True)
class Service:
    """All that answers need.

    Attributes:
      name: of the model, for clients.
      spell: returns the tokens of a conversation, up to the answer. If None, the
        model has no chat template.
      keys: who has one of these may ask; none: everybody may.
      created: seconds since 1970, when the server was started.
    """

    engine: Engine
    model: Model
    name: str
    reader: Reader
    metrics: Metrics
    limits: Limits = Limits()
    spell: Spell | None = None
    keys: tuple[bytes, ...] = ()
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def context(self) -> int:
        return self.engine.batch.sizes.context


def reader_of(model: Model) -> Reader:
    """How a model's tokens are read; raises ValueError without a tokenizer."""
    if model.tokenizer is None:
        raise ValueError(NO_TOKENIZER)
    try:
        return Reader(model.tokenizer, token_bytes(model.tokenizer))
    except ValueError:  # a kind that only stop strings want to know more of
        return Reader(model.tokenizer, None)


def prompt_ids(service: Service, request: Request) -> list[list[int]]:
    """Encodes the prompts; it may take a while, and touches no device.

    Raises:
      ApiError: invalid text, ids outside the vocabulary, no chat template.
    """
    chat = request.kind == "chat"
    if chat and service.spell is None:
        raise invalid(
            "messages: this model has no chat template; use /v1/completions, or start "
            "the server with --chat-template",
            "messages",
        )
    try:
        if chat and service.spell is not None:
            return [_spelled(service, service.spell, request)]
        return encode_prompts(service.model, list(request.prompts))
    except ValueError as error:
        raise invalid(str(error), "messages" if chat else "prompt") from error


def _spelled(service: Service, spell: Spell, request: Request) -> list[int]:
    """Returns the tokens of a conversation; raises ValueError for unknown ids."""
    with encoding("messages"):
        ids = spell(request.messages, request.turn)
    num_tokens = service.model.config.num_tokens
    check_text_ids("messages", service.reader.tokenizer, ids, num_tokens)
    return ids


def check_name(service: Service, name: str) -> None:
    """Raises ApiError (404) for the name of another model."""
    if name != service.name:
        raise ApiError(
            404,
            f"The model `{name}` does not exist; this server has `{service.name}`.",
            param="model",
            code="model_not_found",
        )


def asked_of(
    service: Service, request: Request, prompts: Sequence[Sequence[int]]
) -> list[Asked]:
    """Returns what the device is asked for, text by text; nothing for `max_tokens` 0.

    Raises:
      ApiError: more than the context or the queue has room for, or what this model or
        server has not.
    """
    sizes, chat = service.engine.batch.sizes, request.kind == "chat"
    if len(prompts) * request.n > service.engine.most:
        name = "n" if request.n > 1 else "prompt"
        raise invalid(f"{name}: at most {service.engine.most} texts a request", name)
    if (request.top_logprobs or 0) > sizes.top_logprobs:
        name = "top_logprobs" if chat else "logprobs"
        raise invalid(f"{name}: at most {sizes.top_logprobs} here", name)
    if request.stops and service.reader.pieces is None:
        problem = "stop: wants a byte-level or sentencepiece tokenizer"
        raise invalid(problem, "stop")
    seed = secrets.randbelow(2**32)
    asked: list[Asked] = []
    for ids in prompts:
        new = _room(service, request, len(ids))
        sampling = request.sampling(seed)
        if request.max_tokens == 0:
            continue
        for sample in range(request.n):
            greedy = sampling.temperature == 0
            asked.append(
                Asked(
                    ids=ids,
                    max_new_tokens=new,
                    sampling=sampling,
                    sample=0 if greedy else sample,
                    seed_high=0 if greedy else request.seed_high,
                    ignore_eos=request.ignore_eos,
                    logprobs=request.top_logprobs is not None,
                )
            )
    return asked


def _room(service: Service, request: Request, prompt: int) -> int:
    """Most new tokens after so many of a prompt."""
    if prompt == 0:
        raise invalid("messages: they spell no token at all", "messages")
    left = service.context - prompt
    new = left if request.max_tokens is None else request.max_tokens
    if new > left or left < 1:
        where = "messages" if request.kind == "chat" else "prompt"
        made = max(new, 1)
        raise invalid(
            f"This model's maximum context length is {service.context} tokens. "
            f"However, you requested {prompt + made} tokens ({prompt} in the {where}, "
            f"{made} in the completion). Please reduce the length of the {where} or "
            "completion.",
            where,
            "context_length_exceeded",
        )
    return new


class Exchange:
    """One request's texts while they are made."""

    def __init__(
        self,
        service: Service,
        request: Request,
        prompts: Sequence[Sequence[int]],
        asked: Sequence[Asked],
    ) -> None:
        self.service = service
        texts = len(prompts) * request.n
        self.answer = empty_answer(request, sum(map(len, prompts)), texts)
        self._queue: asyncio.Queue[tuple[int, Piece | Failed]] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        reader, top = service.reader, request.top_logprobs or 0
        decoders = [continuation(reader.tokenizer, ids) for ids in prompts]
        self.jobs = []
        for i, one in enumerate(asked):  # prompt by prompt, n texts each
            writer = Writer(reader, request.stops, top, decoders[i // request.n])
            self.jobs.append(Job(one, writer, self._teller(i)))
        if request.max_tokens == 0:
            for i in range(texts):
                self._queue.put_nowait((i, Piece("", 0, (), "length")))

    def _teller(self, index: int) -> Callable[[Piece | Failed], None]:
        def tell(news: Piece | Failed) -> None:
            try:
                self._loop.call_soon_threadsafe(self._queue.put_nowait, (index, news))
            except RuntimeError:  # the loop is closed: nobody is there any more
                return

        return tell

    def submit(self) -> None:
        """Queue the texts; raises ApiError if the queue is full or the engine ended."""
        try:
            self.service.engine.submit(self.jobs)
        except QueueFull:
            raise ApiError(
                429,
                "The server is busy, and its queue is full; please retry later.",
                code="queue_full",
                headers={"Retry-After": str(RETRY_S)},
            ) from None
        except Closed as error:
            raise ApiError(503, str(error), code="unavailable") from None

    def cancel(self) -> None:
        """Nobody wants what is not finished."""
        self.service.engine.cancel(self.jobs)

    def observe_queue(self) -> None:
        """How long the first text waited for a row, if it got one."""
        began = [job.began for job in self.jobs if job.began is not None]
        if began:
            waited = min(began) - self.jobs[0].queued
            self.service.metrics.queue_seconds.observe(waited)

    async def pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        """As they come, until every text has ended; `answer` has them.

        Raises:
          ApiError: the engine failed.
        """
        while not self.answer.finished:
            index, news = await self._queue.get()
            if isinstance(news, Failed):
                raise ApiError(500, news.reason, code="engine_error")
            self.answer.add(index, news)
            yield index, news
