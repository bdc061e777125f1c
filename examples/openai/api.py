"""OpenAI's routes as a FastAPI application, for an engine or for Ray's replicas."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from concurrent.futures import Executor
from contextlib import aclosing, closing
from pathlib import Path
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, StreamingResponse
from outrider import BatchStream, Event, OutriderError, TextEngine

from .answers import Answer, Part, with_logprobs
from .grammar import constrained
from .requests import REFUSED, Chat, Completion, Requests, refusal

# Generates the requests and yields the parts of the response: one of each request, or if it is
# streamed one per round. The last argument is the JSON schema that the texts must follow.
Generate = Callable[[Requests, bool, str | None], AsyncGenerator[Part]]


def api(name: str, generate: Generate) -> FastAPI:
    """The application that serves one model under this name."""
    http = FastAPI()
    for kind in REFUSED:
        http.exception_handler(kind)(lambda _, error: JSONResponse(*refusal(error)))

    @http.get("/health")
    async def health() -> Any:
        return {"status": "ok"}

    @http.get("/v1/models")
    @http.get("/v1/models/")
    async def models() -> Any:
        return {"object": "list", "data": [await model(name)]}

    @http.get("/v1/models/{asked:path}")
    async def model(asked: str) -> Any:
        if asked != name:
            raise OutriderError("model", f"{asked} is not here", f"Use {name}")
        return {"id": name, "object": "model", "created": 0, "owned_by": "outrider"}

    @http.post("/v1/completions")
    async def complete(body: Completion, request: Request) -> Any:
        return await answer(body, request)

    @http.post("/v1/chat/completions")
    async def chat(body: Chat, request: Request) -> Any:
        return await answer(body, request)

    async def answer(body: Completion | Chat, request: Request) -> Any:
        await model(body.model)
        answer = Answer(body)
        parts = generate(body.requests(), body.stream, body.response_format)
        with body.own_names():
            if not body.stream:
                return answer.whole(await _unless_gone(request, _all(parts)))
            first = await _unless_gone(request, anext(parts))  # a refusal still sets the status
        return StreamingResponse(answer.events(first, parts), media_type="text/event-stream")

    return http


async def from_engine(
    engine: TextEngine,
    bundle: Path,
    threads: Executor,
    requests: Requests,
    stream: bool,
    schema: str | None,
) -> AsyncGenerator[Part]:
    """Generate the requests together, as slots are free for them: one may wait for its slot, the
    others take only those that nobody waits for. Closing or cancelling this frees the slots after
    the current round.

    bundle: the engine's folder. threads: at least as many as there are responses, each of which
    may block one: with fewer, those that wait for slots could keep out the one that has them.
    """
    # Completions set chat=False.
    if engine.tokenizer.chat_template is None and any(x.chat is None for _, x in requests):
        remedy = "Use /v1/completions, or start the server with a chat template"
        raise OutriderError("prompt", "this checkpoint has no chat template", remedy)
    if schema is not None:
        work = threads.submit(constrained, engine, bundle, requests, schema)
        requests = await asyncio.wrap_future(work)
    # All prompts are checked before the first one runs, in threads: there may be many. Requests
    # with the same prompt differ only in their seeds.
    for request in {id(prompt): (prompt, options) for prompt, options in requests}.values():
        await asyncio.wrap_future(threads.submit(engine.request, *request))
    async with aclosing(_read_ahead(engine.stream_batch(requests), threads)) as events:
        async for index, event in events:
            result = event.result
            if result is not None and result.error is not None:
                raise result.error
            wanted = event if stream else result
            if wanted is not None:
                yield index, event, with_logprobs(wanted.tokens, engine.tokenizer)


async def _read_ahead(events: BatchStream, threads: Executor) -> AsyncGenerator[tuple[int, Event]]:
    """The events, which go on whether or not these are read: a slow client holds no slot."""
    found: asyncio.Queue[Any] = asyncio.Queue()

    async def advance() -> None:
        try:
            while item := await asyncio.wrap_future(threads.submit(next, events, None)):
                found.put_nowait(item)
        except Exception as error:  # noqa: BLE001 - raised where the events are read
            found.put_nowait(error)
        found.put_nowait(None)

    with closing(events):
        advancing = asyncio.create_task(advance())
        try:
            while item := await found.get():
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            advancing.cancel()


def limited(generate: Generate, most: int) -> Generate:
    """`generate` for this many responses at a time; further ones are refused as "busy". An engine's
    queue would admit more: choices that wait between others have neither a slot nor a place."""
    running = 0

    async def parts(*work: Any) -> AsyncGenerator[Part]:
        nonlocal running
        if running >= most:
            cause = f"{most} requests are running or waiting already"
            raise OutriderError("busy", cause, "Try again later")
        running += 1
        try:
            async with aclosing(generate(*work)) as found:
                async for part in found:
                    yield part
        finally:
            running -= 1

    return parts


async def _all(parts: AsyncIterator[Part]) -> list[Part]:
    return [part async for part in parts]


async def _unless_gone(request: Request, work: Coroutine[Any, Any, Any]) -> Any:
    """Await the work, but cancel it if the client disconnects, which frees its slot or its place in
    the queue."""

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, gone = asyncio.create_task(work), asyncio.create_task(disconnected())
    try:
        await asyncio.wait([working, gone], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise HTTPException(499, "the client disconnected")  # as nginx: nobody reads it
        return working.result()
    finally:
        working.cancel()
        gone.cancel()
