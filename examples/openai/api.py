"""The routes that OpenAI's clients call, over whatever generates: an engine or Ray's replicas."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Executor
from contextlib import closing
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, StreamingResponse
from outrider import OutriderError, TextEngine

from .answers import Answer, Part, spelled
from .requests import REFUSED, Chat, Completion, Requests, refusal

# The parts of the answers to these requests, of which each round adds one if they are streamed.
Generate = Callable[[Requests, bool], AsyncIterator[Part]]


def api(name: str, generate: Generate) -> FastAPI:
    """The application of one model, which clients call by this name."""
    http = FastAPI()
    for kind in REFUSED:
        http.exception_handler(kind)(lambda _, error: JSONResponse(*refusal(error)))

    @http.get("/v1/models")
    async def models() -> Any:
        return {"object": "list", "data": [await model(name)]}

    @http.get("/v1/models/{asked}")
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
        answer, parts = Answer(body), generate(body.requests(), body.stream)
        if body.stream:
            first = await _unless_gone(request, anext(parts))  # a refusal still sets the status
            return StreamingResponse(answer.events(first, parts), media_type="text/event-stream")
        return answer.whole(await _unless_gone(request, _all(parts)))

    return http


async def from_engine(
    engine: TextEngine, threads: Executor, requests: Requests, stream: bool
) -> AsyncIterator[Part]:
    """One request after another. Closing or cancelling this frees the slot after the round.

    threads: as many as requests may hold or await a slot, for each blocks one.
    """
    for index, (prompt, options) in enumerate(requests):
        with closing(engine.stream(prompt, options)) as events:
            while events.result is None:
                event = await asyncio.wrap_future(threads.submit(next, events))
                told = event if stream else event.result
                if told is not None:
                    yield index, event, spelled(told.tokens, engine.tokenizer)


async def _all(parts: AsyncIterator[Part]) -> list[Part]:
    return [part async for part in parts]


async def _unless_gone(request: Request, work: Coroutine[Any, Any, Any]) -> Any:
    """Its result. Cancels it when the client disconnects, which frees its slot or place in line."""

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    tasks = working, _ = [asyncio.create_task(each) for each in (work, disconnected())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise HTTPException(499, "the client disconnected")  # nginx's status; nobody reads it
        return working.result()
    finally:
        for task in tasks:
            task.cancel()
