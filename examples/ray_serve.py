"""A bundle behind Ray Serve: replicas, autoscaling, and the interface that OpenAI's clients speak.

    pip install -c constraints.txt -e '.[cpu,serve]'
    python -m examples.ray_serve build/demo --slots 2 --replicas 2

Requests wait in order until a replica has a free slot. Where `--queue` of them wait already, one is
told so (429). What OpenAI has no name for is an option under its name in `outrider.Options`.
"""

import argparse
import asyncio
import sys
from collections import deque
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, closing
from itertools import product
from pathlib import Path
from typing import Any

import outrider
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from outrider import OutriderError
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import BackPressureError

from .openai_api import Body, Chat, Completion, Part, events, refusal, whole

app = FastAPI()
for _kind in (OutriderError, RequestValidationError):
    app.exception_handler(_kind)(lambda _, error: JSONResponse(*refusal(error)))


class Replica:
    """An engine, with a thread for each request that Serve sends it."""

    def __init__(self, bundle: str, slots: int, threads: int):
        self.engine = outrider.load(bundle, slots=slots, threads=threads)
        self.pool = ThreadPoolExecutor(slots)

    async def parts(
        self, prompts: Sequence[Any], options: dict[str, Any], n: int, stream: bool
    ) -> AsyncIterator[Part | OutriderError]:
        """What each round, or all of them, added to a choice; or what went wrong. Choices come one
        after another from a slot, which is free once Serve cancels this: when the client leaves."""
        advance = next if stream else _last
        try:
            for index, (prompt, nth) in enumerate(product(prompts, range(n))):
                seed = {"seed": options["seed"] + nth} if nth and "seed" in options else {}
                with closing(self.engine.stream(prompt, **options | seed)) as texts:
                    while texts.result is None:
                        event = await asyncio.wrap_future(self.pool.submit(advance, texts))
                        said = event if stream else event.result
                        tokens = [self.spelled(token) for token in said.tokens]
                        yield Part.of(index, nth, said.text, tokens, event.result)
        except OutriderError as error:  # as a value: Ray would wrap it
            yield error

    def spelled(self, token: Any) -> list[tuple[str, float | None]]:
        """Its text and log-probability, and those of its alternatives."""
        decode, both = self.engine.tokenizer.decode, (token.id, token.logprob)
        named = (both, *token.alternatives)
        return [(decode([i], skip_special_tokens=False), logprob) for i, logprob in named]


def _last(texts: Any) -> Any:
    return deque(texts, maxlen=1).pop()


class Events(StreamingResponse):
    media_type = "text/event-stream"

    def __init__(self, said: AsyncIterator[str], parts: AsyncIterator[Part]):
        super().__init__(said)
        self.parts = parts

    async def __call__(self, *connection: Any) -> None:
        async with aclosing(self.parts):  # also where the client has left before the first event
            await super().__call__(*connection)


@serve.ingress(app)
class Api:
    def __init__(self, replicas: Any, name: str):
        self.replicas, self.name = replicas.options(stream=True), name

    @app.get("/v1/models")
    async def models(self) -> Any:
        model = {"id": self.name, "object": "model", "created": 0, "owned_by": "outrider"}
        return {"object": "list", "data": [model]}

    @app.post("/v1/completions")
    async def complete(self, body: Completion) -> Any:
        return await self.answer(body)

    @app.post("/v1/chat/completions")
    async def chat(self, body: Chat) -> Any:
        return await self.answer(body)

    async def answer(self, body: Completion | Chat) -> Any:
        if body.model != self.name:
            raise OutriderError("model", f"{body.model} is not here", f"Use {self.name}")
        parts = self.parts(body, *body.request())
        first = await anext(parts)  # what is refused has a status
        if body.stream:
            return Events(events(body, first, parts), parts)
        return whole(body, [first, *[part async for part in parts]])

    async def parts(self, body: Body, *request: Any) -> AsyncIterator[Part]:
        answer = self.replicas.parts.remote(*request, body.n, body.stream)
        try:
            async for part in answer:
                if isinstance(part, OutriderError):
                    raise part
                yield part
        except (asyncio.CancelledError, GeneratorExit):
            answer.cancel()  # Serve does so by itself only for a request that waits for it
            raise
        except BackPressureError:
            raise OutriderError(
                "busy", "too many requests wait already", "Try again later"
            ) from None
        except RayError:
            raise OutriderError("replica", "the replica has failed or died", "Try again") from None


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--name", help="of the model; the bundle's folder unless given")
    parser.add_argument("--slots", type=int, default=1, help="requests of a replica at once")
    parser.add_argument("--queue", type=int, default=64, help="requests that wait")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--most-replicas", type=int, help="scale up to these under load")
    parser.add_argument("--cpus", type=int, default=1, help="of a replica, and its threads")
    parser.add_argument("--gpus", type=float, default=0, help="of a replica")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    args = parser.parse_args(argv)
    scale = {"num_replicas": args.replicas}
    if args.most_replicas:
        most = {"min_replicas": args.replicas, "max_replicas": args.most_replicas}
        scale = {"autoscaling_config": {**most, "target_ongoing_requests": args.slots}}
    replicas = serve.deployment(Replica, **scale).options(
        max_ongoing_requests=args.slots,
        max_queued_requests=args.queue,
        ray_actor_options={"num_cpus": args.cpus, "num_gpus": args.gpus},
        request_router_config=RequestRouterConfig(max_backoff_s=0.025),  # until a slot is free
    )
    api = serve.deployment(Api, max_ongoing_requests=100_000, ray_actor_options={"num_cpus": 0})
    bundle = args.bundle.resolve()
    bound = replicas.bind(str(bundle), args.slots, args.cpus)
    serve.start(http_options={"host": args.host, "port": args.port})
    serve.run(api.bind(bound, args.name or bundle.name), blocking=True)


if __name__ == "__main__":
    main(sys.argv[1:])
