"""A bundle behind Ray Serve, with the interface that OpenAI's clients speak.

    serve run examples.ray_serve:app bundle=build/demo slots=2 replicas=2

The extra `serve` has what it needs; examples/ray_serve.yaml has autoscaling, GPUs and ports.
"""

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import outrider
import ray
from fastapi.responses import StreamingResponse
from outrider import OutriderError
from pydantic import BaseModel
from ray import serve

from .openai_answers import Answer, Part, spelled
from .openai_requests import Chat, Completion, Requests, http


@serve.deployment(request_router_config={"max_backoff_s": 0.025})  # until it looks for a slot again
class Replica:
    def __init__(self, bundle: Path, slots: int):
        cpus = ray.get_runtime_context().get_assigned_resources().get("CPU", 1)
        self.engine = outrider.load(bundle, slots=slots, threads=int(cpus))
        self.pool = ThreadPoolExecutor(slots)  # a thread for each request that Serve sends

    async def parts(self, requests: Requests, stream: bool) -> AsyncIterator[Part | OutriderError]:
        """One after another from a slot, which is free once Serve cancels this: a client left."""
        try:
            for index, (prompt, options) in enumerate(requests):
                with closing(self.engine.stream(prompt, options)) as events:
                    while events.result is None:
                        event = await asyncio.wrap_future(self.pool.submit(next, events))
                        said = event if stream else event.result
                        if said is not None:
                            yield index, event, spelled(said.tokens, self.engine.tokenizer)
        except OutriderError as error:  # as a value: Ray would wrap it
            yield error


@serve.deployment(max_ongoing_requests=100_000, ray_actor_options={"num_cpus": 0})
@serve.ingress(http)
class Api:
    def __init__(self, replicas: Any, name: str):
        self.replicas, self.name = replicas.options(stream=True), name

    @http.get("/v1/models")
    async def models(self) -> Any:
        return {"object": "list", "data": [await self.model(self.name)]}

    @http.get("/v1/models/{name}")
    async def model(self, name: str) -> Any:
        self.refuse_other(name)
        return {"id": self.name, "object": "model", "created": 0, "owned_by": "outrider"}

    @http.post("/v1/completions")
    async def complete(self, body: Completion) -> Any:
        return await self.answer(body)

    @http.post("/v1/chat/completions")
    async def chat(self, body: Chat) -> Any:
        return await self.answer(body)

    async def answer(self, body: Completion | Chat) -> Any:
        self.refuse_other(body.model)
        answer, parts = Answer(body), self.parts(body.requests(), body.stream)
        first = await anext(parts)  # what is refused has a status
        if body.stream:
            return StreamingResponse(answer.events(first, parts), media_type="text/event-stream")
        return answer.whole([first, *[part async for part in parts]])

    def refuse_other(self, model: str) -> None:
        if model != self.name:
            raise OutriderError("model", f"{model} is not here", f"Use {self.name}")

    async def parts(self, *request: Any) -> AsyncIterator[Part]:
        answer = self.replicas.parts.remote(*request)
        try:
            async for part in answer:
                if isinstance(part, OutriderError):
                    raise part
                yield part
        except serve.exceptions.BackPressureError:  # Serve would answer it, with a 503
            raise OutriderError("busy", "too many requests wait already", "Try again") from None
        except (asyncio.CancelledError, GeneratorExit):
            answer.cancel()  # Serve does so by itself only for a request that waits for it
            raise


class Arguments(BaseModel, extra="forbid"):
    bundle: Path
    slots: int = 1  # requests of a replica at once
    queue: int = 64  # requests that wait for one, in order; who comes then is told so (429)
    replicas: int = 1


def app(args: Arguments) -> serve.Application:
    limits = {"max_ongoing_requests": args.slots, "max_queued_requests": args.queue}
    replicas = Replica.options(num_replicas=args.replicas, **limits)
    bundle = args.bundle.resolve()
    return Api.bind(replicas.bind(bundle, args.slots), bundle.name)
