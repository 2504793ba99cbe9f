"""The HTTP endpoints of the server: an ASGI application for a `Service`."""

import asyncio
import hmac
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from stree_jax.server import anthropic_answers, anthropic_fields
from stree_jax.server.answers import Answer, ChatWriter, event
from stree_jax.server.errors import ApiError, invalid
from stree_jax.server.metrics import Watch
from stree_jax.server.protocol import Request, parse
from stree_jax.server.response_fields import parse_response, renamed
from stree_jax.server.responses import ResponseWriter
from stree_jax.server.service import (
    Exchange,
    Service,
    check_name,
    encoded_prompts,
    text_requests,
)
from stree_jax.server.tokenizing import detokenized, tokenized

MAX_DIGITS = 400  # maximum digits of an integer; the largest float64 has 309
CLIENT_CLOSED = 499  # status for clients that have disconnected, which do not read it
MESSAGES = "/v1/messages"
Conversion = Callable[[Service, dict[str, Any]], dict[str, Any]]
Writer = ChatWriter | ResponseWriter | anthropic_answers.MessageWriter


def make_app(service: Service) -> Starlette:
    """Returns the application with the endpoints for completions, chat, responses,
    messages, tokens, models, health and metrics."""

    async def completions(http: HTTPRequest) -> Response:
        return await _answered(service, http, COMPLETIONS)

    async def chat(http: HTTPRequest) -> Response:
        return await _answered(service, http, CHATS)

    async def responses(http: HTTPRequest) -> Response:
        return await _answered(service, http, RESPONSES)

    async def messages(http: HTTPRequest) -> Response:
        return await _answered(service, http, ANTHROPIC)

    async def converted(http: HTTPRequest, convert: Conversion) -> Response:
        _check_key(service, http)
        body = await _body(service, http)
        return JSONResponse(await asyncio.to_thread(convert, service, body))

    async def count_tokens(http: HTTPRequest) -> Response:
        return await converted(http, anthropic_answers.counted)

    async def tokenize(http: HTTPRequest) -> Response:
        return await converted(http, tokenized)

    async def detokenize(http: HTTPRequest) -> Response:
        return await converted(http, detokenized)

    async def embeddings(http: HTTPRequest) -> Response:
        _check_key(service, http)
        problem = "this server generates text; it does not support embeddings"
        raise ApiError(404, f"{http.url.path}: {problem}.", code="unsupported_endpoint")

    async def models(http: HTTPRequest) -> Response:
        _check_key(service, http)
        return JSONResponse({"object": "list", "data": [_model(service)]})

    async def one_model(http: HTTPRequest) -> Response:
        _check_key(service, http)
        check_name(service, http.path_params["name"])
        return JSONResponse(_model(service))

    async def health(http: HTTPRequest) -> Response:
        dead = service.engine.dead
        status = {"status": "ok"} if dead is None else {"status": "dead", "why": dead}
        return JSONResponse(status, 200 if dead is None else 503)

    async def metrics(http: HTTPRequest) -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")

    return Starlette(
        routes=[
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/v1/responses", responses, methods=["POST"]),
            Route(MESSAGES, messages, methods=["POST"]),
            Route(f"{MESSAGES}/count_tokens", count_tokens, methods=["POST"]),
            Route("/tokenize", tokenize, methods=["POST"]),
            Route("/detokenize", detokenize, methods=["POST"]),
            Route("/v1/embeddings", embeddings, methods=["POST"]),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", one_model),
            Route("/health", health),
            Route("/metrics", metrics),
        ],
        exception_handlers={
            ApiError: _error_response,
            HTTPException: _no_such_path,
            Exception: _broken,
        },
    )


async def _error_response(http: HTTPRequest, error: Exception) -> Response:
    """Returns the response for an `ApiError`."""
    assert isinstance(error, ApiError)
    anthropic = http.url.path.startswith(MESSAGES)
    body = anthropic_answers.error_body(error) if anthropic else error.body()
    return JSONResponse(body, error.status, error.headers)


async def _no_such_path(http: HTTPRequest, error: Exception) -> Response:
    """Returns errors 404 and 405 in the protocol's format, and the allowed methods for
    OPTIONS."""
    assert isinstance(error, HTTPException)
    if http.method == "OPTIONS" and error.status_code == 405:
        return Response(status_code=204, headers=error.headers)
    message = f"{error.detail}: {http.method} {http.url.path}"
    found = ApiError(error.status_code, message, headers=dict(error.headers or {}))
    return await _error_response(http, found)


async def _broken(http: HTTPRequest, error: Exception) -> Response:
    """Returns the response for a bug in the server. The log has the details."""
    return await _error_response(http, ApiError(500, "The server had an error."))


def _check_key(service: Service, http: HTTPRequest) -> int:
    """Returns the number of the request's API key; 0 if the server has no keys. The
    comparison takes constant time, so its duration reveals nothing.

    Raises:
      ApiError: 401, the server has API keys and the request has none of them.
    """
    if not service.keys:
        return 0
    scheme, _, credentials = http.headers.get("authorization", "").partition(" ")
    bearer = credentials.strip() if scheme.lower() == "bearer" else ""
    key = (http.headers.get("x-api-key") or bearer).encode()  # Anthropic's, OpenAI's
    matches = [hmac.compare_digest(key, known) for known in service.keys]
    if not any(matches):
        raise ApiError(
            401,
            "Incorrect API key provided.",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
    return matches.index(True)


def _model(service: Service) -> dict[str, Any]:
    """Returns the description of the model in the protocol's format."""
    return {
        "id": service.name,
        "object": "model",
        "created": service.created,
        "owned_by": "stree-jax",
        "max_model_len": service.context,
    }


async def _body(service: Service, http: HTTPRequest) -> Any:
    """Returns the JSON body of a request.

    Raises:
      ApiError: the body is too long, takes too long to arrive, or is not JSON.
    """
    encoding = http.headers.get("content-encoding", "identity")
    if encoding.strip().lower() not in ("", "identity"):
        raise ApiError(415, f"Content-Encoding {encoding}: send uncompressed JSON.")
    limit, data = service.limits.body_bytes, bytearray()
    too_long = ApiError(413, f"The request's body is longer than {limit} bytes.")
    length = http.headers.get("content-length", "")
    if length.isdecimal() and int(length) > limit:
        raise too_long
    try:
        async with asyncio.timeout(service.limits.timeout_s):
            async for part in http.stream():
                data += part
                if len(data) > limit:
                    raise too_long
    except TimeoutError:
        raise ApiError(408, "The request's body did not arrive in time.") from None
    try:
        return json.loads(
            data,
            object_pairs_hook=_object,
            parse_int=_integer,
            parse_constant=_not_a_number,
        )
    except (ValueError, RecursionError) as error:
        problem = "We could not parse the JSON body of your request"
        raise invalid(f"{problem}: {error}") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns a JSON object. Raises ValueError if it has a field twice, because only
    one of them could be used."""
    found = dict(pairs)
    if len(found) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        double = counts.most_common(1)[0][0]
        raise ValueError(f"{double[:40]!a} occurs more than once")
    return found


def _integer(digits: str) -> int:
    """Parses an integer of JSON; raises ValueError if it is too long."""
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a number has more than {MAX_DIGITS} digits")
    return int(digits)


def _not_a_number(name: str) -> None:
    """Raises ValueError for NaN and infinities, which are not JSON."""
    raise ValueError(f"{name} is not JSON")


@dataclass(frozen=True)
class Format:
    """The format of an endpoint for text.

    Attributes:
      read: returns the request for a JSON body.
      written: returns the writer of an answer, also from the body of its request.
      renamed: returns an error that has the format's names of fields.
      failed: returns the event of an error in a stream.
    """

    read: Callable[[Any], Request]
    written: Callable[[Answer, Any], Writer] = lambda answer, body: ChatWriter(answer)
    renamed: Callable[[ApiError], ApiError] = lambda error: error
    failed: Callable[[ApiError], bytes] = lambda error: event(error.body())


COMPLETIONS = Format(partial(parse, "completion"))
CHATS = Format(partial(parse, "chat"))
RESPONSES = Format(parse_response, ResponseWriter, renamed)
ANTHROPIC = Format(
    anthropic_fields.parse_message,
    lambda answer, body: anthropic_answers.MessageWriter(answer),
    anthropic_fields.renamed,
    anthropic_answers.failed,
)


async def _answered(service: Service, http: HTTPRequest, format_: Format) -> Response:
    """Returns the response to a request for text, which may be a stream. Counts the
    request in the metrics."""
    watch = Watch(service.metrics)
    try:
        owner = _check_key(service, http)
        body = await _body(service, http)
        request = format_.read(body)
        try:
            exchange = await _submitted(service, request, owner)
        except ApiError as error:
            raise format_.renamed(error) from None
    except ApiError as error:
        watch.end(_outcome(error))
        raise
    except ClientDisconnect:
        watch.end("cancelled")
        return Response(status_code=CLIENT_CLOSED)
    service.metrics.prompt_tokens.inc(exchange.answer.prompt_tokens)
    writer = format_.written(exchange.answer, body)
    if request.stream:
        return EventStream(exchange, watch, writer, format_.failed)
    return await _whole(exchange, watch, writer, http.receive)


async def _submitted(service: Service, request: Request, owner: int) -> Exchange:
    """Queues a request; raises ApiError if that is not possible."""
    check_name(service, request.model or service.name)
    request = replace(request, model=service.name)
    prompts = await asyncio.to_thread(encoded_prompts, service, request)
    texts = text_requests(service, request, prompts, owner)
    exchange = Exchange(service, request, prompts, texts)
    exchange.submit()
    return exchange


def _outcome(error: ApiError) -> str:
    """Returns the label of an error in the metrics."""
    if error.status == 429:
        return "rejected"
    return "refused" if error.status < 500 else "error"


async def _whole(
    exchange: Exchange, watch: Watch, writer: Writer, receive: Receive
) -> Response:
    """Waits for the complete answer and returns it.

    Raises:
      ApiError: the answer took too long, or the engine failed.
    """

    async def collect() -> None:
        async for _, piece in exchange.pieces():
            watch.piece(piece.tokens)

    outcome = "error"
    try:
        if not await _while_connected(collect(), receive, exchange.service):
            outcome = "cancelled"
            return Response(status_code=CLIENT_CLOSED)
        outcome = "ok"
        return JSONResponse(writer.whole())
    except TimeoutError:
        outcome = "timeout"
        raise _too_late(exchange.service) from None
    finally:
        exchange.cancel()
        exchange.observe()
        watch.end(outcome)


class EventStream(Response):
    """An answer as server-sent events. A slow reader does not block other requests: its
    unsent events are buffered, and their number and the time are limited."""

    media_type = "text/event-stream"

    def __init__(
        self,
        exchange: Exchange,
        watch: Watch,
        writer: Writer,
        failed: Callable[[ApiError], bytes],
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]
        self.exchange, self.watch, self.writer = exchange, watch, writer
        self.failed = failed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def sent() -> None:
            async for part in self._parts():
                await send({"type": "http.response.body", "body": part} | MORE)
            await send({"type": "http.response.body", "body": b""})

        outcome = "error"
        try:
            start = {"type": "http.response.start", "status": self.status_code}
            await send(start | {"headers": self.raw_headers})
            service = self.exchange.service
            complete = await _while_connected(sent(), receive, service)
            outcome = "ok" if complete else "cancelled"
        except TimeoutError:
            outcome = "timeout"
            await self._fail(send, _too_late(self.exchange.service))
        except ApiError as error:
            await self._fail(send, error)
        except OSError:  # the connection is gone
            outcome = "cancelled"
        finally:
            self.exchange.cancel()
            self.exchange.observe()
            self.watch.end(outcome)

    async def _parts(self) -> AsyncIterator[bytes]:
        for part in self.writer.opening():
            yield part
        async for index, piece in self.exchange.pieces():
            self.watch.piece(piece.tokens)
            for part in self.writer.chunks(index, piece):
                yield part
        for part in self.writer.closing():
            yield part

    async def _fail(self, send: Send, error: ApiError) -> None:
        """Sends an error as the last event, because the HTTP status has been sent
        already. Gives up if the client does not read it."""
        last = {"type": "http.response.body", "body": self.failed(error)}
        try:
            async with asyncio.timeout(ERROR_EVENT_S):
                await send(last)
        except (TimeoutError, OSError):
            return


MORE = {"more_body": True}
ERROR_EVENT_S = 5.0  # seconds that a client has to read the error event


async def _while_connected(work: Any, receive: Receive, service: Service) -> bool:
    """Runs a coroutine until it is done or the client disconnects.

    Returns:
      False if the client disconnected first; the coroutine is then cancelled.

    Raises:
      TimeoutError: it took too long.
      ApiError: raised by the coroutine.
    """
    doing = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(receive))
    both = {doing, leaving}
    try:
        async with asyncio.timeout(service.limits.timeout_s):
            done, _ = await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if doing in done:
            doing.result()
        return doing in done
    finally:
        for task in both:
            task.cancel()
        await asyncio.gather(*both, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    """Waits until the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _too_late(service: Service) -> ApiError:
    """Returns the error for an answer that took too long."""
    seconds = f"{service.limits.timeout_s:g}"
    return ApiError(504, f"No answer within {seconds} seconds.", code="timeout")
