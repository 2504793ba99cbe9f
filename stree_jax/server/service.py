"""Turns requests of the protocol into jobs of the engine, and collects their pieces."""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from stree_jax.constraints.rows import vocabulary_of
from stree_jax.constraints.token_tables import TokenTables
from stree_jax.convert.tokenizers.tokenizer import check_text_ids, encoding
from stree_jax.generation.arguments import encode_prompts
from stree_jax.models import Model
from stree_jax.sampling.continuation import continuation
from stree_jax.sampling.stop_strings import searched_bytes, token_bytes
from stree_jax.server.answers import Timings, empty_answer
from stree_jax.server.chat_format import ChatFormat
from stree_jax.server.chat_requests import check_tools, in_reasoning, splitter_of
from stree_jax.server.constraints import constraint_of
from stree_jax.server.engine import Closed, Engine, Failed, Job, QueueFull
from stree_jax.server.errors import ApiError, invalid
from stree_jax.server.marks import showing
from stree_jax.server.metrics import Metrics
from stree_jax.server.prefixes import common_length
from stree_jax.server.protocol import Request, Turn
from stree_jax.server.rows import TextRequest
from stree_jax.server.texts import Piece, Reader, Writer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Spell = Callable[[Sequence[dict[str, Any]], Turn], list[int]]
NO_TOKENIZER = "this model has no tokenizer.json, so it cannot read text"
RETRY_S = 1  # value of Retry-After, in seconds, if the queue is full


@dataclass(frozen=True)
class Limits:
    """Limits of a request.

    Attributes:
      body_bytes: maximum bytes of its JSON.
      timeout_s: maximum seconds until the last byte of its answer is sent.
    """

    body_bytes: int = 1 << 20
    timeout_s: float = 600.0


@dataclass(frozen=True)
class Service:
    """The objects that answer requests.

    Attributes:
      engine: the engine.
      model: the target model.
      name: name of the model for clients.
      reader: converts tokens to text.
      metrics: the metrics.
      limits: limits of requests.
      spell: returns the tokens of a conversation, up to the answer. None if the model
        has no chat template.
      keys: accepted API keys. If empty, requests need no key.
      created: time of the start, in seconds since 1970.
      form: what the chat template supports.
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
    form: ChatFormat = ChatFormat()

    def prepare(self) -> None:
        """Makes the tokenizers that chats need, which takes a second if the vocabulary
        is large."""
        for calls in (False, True):
            self.tokenizer(calls)

    def tokenizer(self, calls: bool) -> "Tokenizer":
        """Returns the tokenizer that decodes the answers of chats.

        Args:
          calls: True if the answer may have tool calls.
        """
        return showing(self.reader.tokenizer, self.form.marks(calls))

    @property
    def context(self) -> int:
        """Maximum number of tokens of a prompt and its answer together."""
        return self.engine.batch.sizes.context


def reader_of(model: Model) -> Reader:
    """Returns the reader of a model's tokens; raises ValueError if the model has no
    tokenizer."""
    if model.tokenizer is None:
        raise ValueError(NO_TOKENIZER)
    try:
        pieces = token_bytes(model.tokenizer)
    except ValueError:  # without the bytes of tokens only stop strings are unsupported
        return Reader(model.tokenizer)
    return Reader(model.tokenizer, pieces, searched_bytes(model.tokenizer, pieces))


@dataclass(frozen=True)
class Prompt:
    """An encoded prompt.

    Attributes:
      ids: its tokens.
      shared: number of its tokens, from the first one on, that other conversations may
        begin with, too, such as a system prompt.
      constraint: automaton that the answers follow, or None.
    """

    ids: list[int]
    shared: int = 0
    constraint: TokenTables | None = None


def encoded_prompts(service: Service, request: Request) -> list[Prompt]:
    """Encodes the prompts of a request. It may take long, and does not use the device.

    Raises:
      ApiError: a text is invalid, an id is outside the vocabulary, or there is no chat
        template.
    """
    chat = request.kind == "chat"
    if chat and service.spell is None:
        raise invalid(
            "messages: this model has no chat template; use /v1/completions, or start "
            "the server with --chat-template",
            "messages",
        )
    check_tools(service.form, request)
    try:
        if chat and service.spell is not None:
            prompts = [_conversation(service, service.spell, request)]
        else:
            texts = encode_prompts(service.model, list(request.prompts))
            prompts = [Prompt(ids) for ids in texts]
    except ValueError as error:
        raise invalid(str(error), "messages" if chat else "prompt") from error
    tables = _tables(service, request, prompts[0])
    return [replace(prompt, constraint=tables) for prompt in prompts]


def _tables(service: Service, request: Request, prompt: Prompt) -> TokenTables | None:
    """Returns the automaton of a request's constraint, or None if it has none."""
    tokenizer = service.reader.tokenizer
    added = tokenizer.get_added_tokens_decoder().values()
    special = frozenset(token.content for token in added if token.special)
    opened = in_reasoning(service.form, tokenizer, request, prompt.ids)

    def is_token(text: str) -> bool:
        return tokenizer.token_to_id(text) is not None

    constraint = constraint_of(request, service.form, opened, special, is_token)
    if constraint is None:
        return None
    try:
        vocabulary = vocabulary_of(service.model, constraint.name)
        return vocabulary.tables(constraint)
    except ValueError as error:
        raise invalid(str(error), constraint.name) from error


def _conversation(service: Service, spell: Spell, request: Request) -> Prompt:
    """Encodes a conversation; raises ValueError for unknown ids."""
    with encoding("messages"):
        ids = spell(request.messages, request.turn)
    num_tokens = service.model.config.num_tokens
    check_text_ids("messages", service.reader.tokenizer, ids, num_tokens)
    return Prompt(ids, _shared_tokens(spell, request, ids))


def _shared_tokens(spell: Spell, request: Request, ids: list[int]) -> int:
    """Returns the number of tokens of a conversation before its first message that is
    not a system message. They are found by encoding another conversation with the same
    system messages."""
    system = [m["role"] in ("system", "developer") for m in request.messages]
    if all(system):
        return 0
    first = request.messages[system.index(False)]
    letter = "b" if first["content"].lstrip().startswith("a") else "a"
    other = {"role": first["role"], "content": letter}
    try:
        ids_of_other = spell(
            (*request.messages[: system.index(False)], other),
            replace(request.turn, begins=True, continues=False),
        )
    except ValueError:  # the template does not take such a conversation
        return 0
    return common_length(np.asarray(ids), np.asarray(ids_of_other))


def check_name(service: Service, name: str) -> None:
    """Raises ApiError (404) for the name of another model."""
    if name != service.name:
        raise ApiError(
            404,
            f"The model `{name}` does not exist; this server has `{service.name}`.",
            param="model",
            code="model_not_found",
        )


def text_requests(
    service: Service, request: Request, prompts: Sequence[Prompt], owner: int = 0
) -> list[TextRequest]:
    """Returns the requests for single texts: n for each prompt, or an empty list if
    `max_tokens` is 0.

    Args:
      service: the server.
      request: the request.
      prompts: its encoded prompts.
      owner: number of its API key.

    Raises:
      ApiError: the request exceeds the context or the queue, or the model does not
        support it.
    """
    sizes, chat = service.engine.batch.sizes, request.kind == "chat"
    if len(prompts) * request.n > service.engine.max_waiting:
        name = "n" if request.n > 1 else "prompt"
        most = service.engine.max_waiting
        raise invalid(f"{name}: at most {most} texts per request", name)
    if (request.top_logprobs or 0) > sizes.top_logprobs:
        name = "top_logprobs" if chat else "logprobs"
        raise invalid(f"{name}: at most {sizes.top_logprobs} on this server", name)
    if request.stops and service.reader.pieces is None:
        problem = "stop: needs a byte-level or sentencepiece tokenizer"
        raise invalid(problem, "stop")
    _check_ids(service, request)
    seed = secrets.randbelow(2**32)
    texts: list[TextRequest] = []
    for prompt in prompts:
        new = _max_new_tokens(service, request, len(prompt.ids))
        sampling = request.sampling(seed)
        if request.max_tokens == 0:
            continue
        for sample in range(request.n):
            greedy = sampling.temperature == 0
            texts.append(
                TextRequest(
                    ids=prompt.ids,
                    max_new_tokens=new,
                    sampling=sampling,
                    sample=0 if greedy else sample,
                    seed_high=0 if greedy else request.seed_high,
                    ignore_eos=request.ignore_eos,
                    min_new_tokens=min(request.min_tokens, new),
                    stop_ids=request.stop_ids,
                    logprobs=request.top_logprobs is not None,
                    shared=prompt.shared,
                    constraint=prompt.constraint,
                    owner=owner,
                    private=request.private,
                )
            )
    return texts


def _check_ids(service: Service, request: Request) -> None:
    """Raises ApiError if a field has tokens that the model does not have."""
    V = service.model.config.num_tokens
    biased = [token for token, _ in request.logits["logit_bias"]]
    for name, ids in (("logit_bias", biased), ("stop_token_ids", request.stop_ids)):
        for token in ids:
            if not 0 <= token < V:
                problem = f"{name}: want token ids in 0..{V - 1}, got {token}"
                raise invalid(problem, name)


def _max_new_tokens(service: Service, request: Request, prompt: int) -> int:
    """Returns the maximum number of new tokens after a prompt of `prompt` tokens, which
    the context limits."""
    if prompt == 0:
        raise invalid("messages: the chat template gives an empty text", "messages")
    left = service.context - prompt
    if left < 1:
        where = "messages" if request.kind == "chat" else "prompt"
        raise invalid(
            f"This model's maximum context length is {service.context} tokens. "
            f"However, your {where} resulted in {prompt} tokens, and the answer needs "
            f"at least 1. Please reduce the length of the {where}.",
            where,
            "context_length_exceeded",
        )
    return left if request.max_tokens is None else min(request.max_tokens, left)


def _text_of(
    reader: Reader, request: Request, prompts: Sequence[Prompt], index: int
) -> str:
    """Returns the text of a prompt of completions."""
    given = request.prompts[index]
    if isinstance(given, str):
        return given
    ids = prompts[index].ids
    return reader.tokenizer.decode(ids, skip_special_tokens=False)


class Exchange:
    """The texts of one request while they are generated."""

    def __init__(
        self,
        service: Service,
        request: Request,
        prompts: Sequence[Prompt],
        texts: Sequence[TextRequest],
    ) -> None:
        """Makes the jobs; call `submit` to queue them.

        Args:
          service: the service.
          request: the request.
          prompts: result of `encoded_prompts`.
          texts: result of `text_requests`.
        """
        self.service = service
        count = len(prompts) * request.n
        tokens = sum(len(prompt.ids) for prompt in prompts)
        splitter = None
        if request.kind == "chat":
            ids = prompts[0].ids
            splitter = splitter_of(service.form, service.reader.tokenizer, request, ids)
        self.answer = empty_answer(request, tokens, count, splitter)
        self._queue: asyncio.Queue[tuple[int, Piece | Failed]] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        reader, top = service.reader, request.top_logprobs or 0
        tokenizer = reader.tokenizer
        if splitter is not None:
            tokenizer = service.tokenizer(splitter.schemas is not None)
        decoders = [continuation(tokenizer, p.ids) for p in prompts]
        self.jobs = []
        for i, one in enumerate(texts):  # prompt by prompt, n texts each
            after, least = decoders[i // request.n], one.min_new_tokens
            args = reader, request.stops, top, after, least, request.origins
            writer = Writer(*args)
            self.jobs.append(Job(one, writer, self._sender(i)))
        if request.echo:
            for i in range(count):
                text = _text_of(reader, request, prompts, i // request.n)
                self._queue.put_nowait((i, Piece(text, 0, (), None)))
        if request.max_tokens == 0:
            for i in range(count):
                self._queue.put_nowait((i, Piece("", 0, (), "length")))

    def _sender(self, index: int) -> Callable[[Piece | Failed], None]:
        """Returns a function for the engine's thread that queues a piece of a text."""

        def send(piece: Piece | Failed) -> None:
            try:
                self._loop.call_soon_threadsafe(self._queue.put_nowait, (index, piece))
            except RuntimeError:  # the loop is closed: the server is stopping
                return

        return send

    def submit(self) -> None:
        """Queues the texts; raises ApiError if the queue is full or the engine has
        stopped."""
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
        """Cancels texts that are not finished."""
        self.service.engine.cancel(self.jobs)

    def observe(self) -> None:
        """Adds the time that the first text waited for a row to the metrics, and the
        times of prefill and decoding if the answer is finished."""
        metrics, times = self.service.metrics, self.answer.timings
        began = [job.began for job in self.jobs if job.began is not None]
        if began:
            metrics.queue_seconds.observe(min(began) - self.jobs[0].queued)
        if times is not None:
            metrics.prefill_seconds.observe(times.prefill_s)
            metrics.decode_seconds.observe(times.decode_s)

    async def pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        """Yields (index of the text, piece) until all texts are finished. The pieces
        are also added to `answer`.

        Raises:
          ApiError: the engine failed.
        """
        while not self.answer.finished:
            index, piece = await self._queue.get()
            if isinstance(piece, Failed):
                raise ApiError(500, piece.reason, code="engine_error")
            self.answer.add(index, piece)
            if self.answer.finished and self.jobs:
                self.answer.timings = self._timings()
            yield index, piece

    def _timings(self) -> Timings:
        """Returns the token counts and times of the finished request. A prompt with
        several answers counts once in the usage, so only the cached tokens of its first
        answer count."""
        return Timings(
            cached=sum(job.cached for job in self.jobs[:: self.answer.request.n]),
            prefill_s=sum(job.prefilled - (job.began or 0.0) for job in self.jobs),
            decode_s=max(job.ended - job.prefilled for job in self.jobs),
            calls=sum(job.calls for job in self.jobs),
        )
