"""A bundle behind Ray Serve: the interface of examples/server.py, with replicas.

    serve run examples.ray_serve:app bundle=build/demo slots=2 replicas=2

The extra `ray` has what it needs; examples/ray_serve.yaml has autoscaling, GPUs and ports.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import outrider
import ray
from fastapi import FastAPI
from outrider import OutriderError
from pydantic import BaseModel
from ray import serve

from .openai.answers import Part
from .openai.api import api, from_engine


@serve.deployment(request_router_config={"max_backoff_s": 0.025})  # longest wait for a free slot
class Replica:
    def __init__(self, bundle: Path, slots: int, chat_template: Path | None):
        cpus = ray.get_runtime_context().get_assigned_resources().get("CPU", 1)
        self.engine = outrider.load(
            bundle, slots=slots, threads=int(cpus), chat_template=chat_template, timeout=None
        )
        threads = ThreadPoolExecutor(slots)  # one per concurrent request
        self.generate = partial(from_engine, self.engine, bundle, threads)

    async def parts(self, *work: Any) -> AsyncIterator[Part | OutriderError]:
        """Serve cancels this when the client disconnects. work: arguments of a `Generate`."""
        try:
            async for part in self.generate(*work):
                yield part
        except OutriderError as error:  # yielded, not raised: Ray would wrap it
            yield error


@serve.deployment(max_ongoing_requests=100_000, ray_actor_options={"num_cpus": 0})
@serve.ingress()
class Api:
    def __init__(self, replicas: Any, name: str):
        self.replicas, self.name = replicas.options(stream=True), name

    def __serve_build_asgi_app__(self) -> FastAPI:
        return api(self.name, self.parts)

    async def parts(self, *work: Any) -> AsyncGenerator[Part]:
        answer = self.replicas.parts.remote(*work)
        try:
            async for part in answer:
                if isinstance(part, OutriderError):
                    raise part
                yield part
        except serve.exceptions.BackPressureError:  # Serve would answer with a 503
            raise OutriderError("busy", "too many requests wait already", "Try again") from None
        except ray.exceptions.RayError:
            raise OutriderError("replica", "the replica failed or died", "Try again") from None
        except (asyncio.CancelledError, GeneratorExit):
            answer.cancel()  # Serve does this only for a request that it is waiting for
            raise


class Arguments(BaseModel, extra="forbid"):
    bundle: Path
    chat_template: Path | None = None  # Jinja file that replaces the checkpoint's
    slots: int = 1  # concurrent requests per replica
    queue: int = 64  # requests that may wait for a slot; further ones are answered with 429
    replicas: int = 1


def app(args: Arguments) -> serve.Application:
    limits = {"max_ongoing_requests": args.slots, "max_queued_requests": args.queue}
    replicas = Replica.options(num_replicas=args.replicas, **limits)
    bundle, template = args.bundle.resolve(), args.chat_template and args.chat_template.resolve()
    return Api.bind(replicas.bind(bundle, args.slots, template), bundle.name)
