"""A bundle behind one process that OpenAI's clients can call.

    python -m pip install -e '.[server]'
    python -m examples.server --engines build/demo --slots 2

    curl localhost:8000/v1/completions -d '{"model": "demo", "prompt": "def read(path):"}' \
        -H 'Content-Type: application/json'

Requests beyond the slots wait in a queue; one that finds it full is answered with status 429. A
client that disconnects frees its slot. A field that OpenAI's reference does not have is an option
of the engine, such as "gamma": 8.
"""

import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import outrider


def main() -> None:
    parser = ArgumentParser(
        prog="python -m examples.server",
        description=__doc__,
        formatter_class=RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--engines", type=Path, required=True, metavar="DIR", help="the bundle")
    add("--slots", type=int, metavar="N", help="requests at a time (default: the bundle's)")
    add("--queue", type=int, default=64, metavar="N", help="requests that may wait (default: 64)")
    add("--threads", type=int, default=0, metavar="N", help="of the engine (default: its choice)")
    add("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    add("--port", type=int, default=8000, help="default: 8000")
    add("--name", help="of the model, for clients (default: the bundle's folder)")
    args = parser.parse_args()
    name = args.name or args.engines.resolve().name
    try:  # here, so that --help needs neither
        import uvicorn

        from .openai.api import api, from_engine
    except ImportError as error:
        sys.exit(f"error: {error}. Install it: python -m pip install -e '.[server]'")
    try:
        engine = outrider.load(
            args.engines, slots=args.slots, threads=args.threads, queue=args.queue
        )
    except outrider.OutriderError as error:
        sys.exit(f"error: {error}")
    with engine, ThreadPoolExecutor(len(engine.decoder.slots) + args.queue) as threads:
        generate = partial(from_engine, engine, threads)
        # On Ctrl-C, answers have a few seconds to end.
        uvicorn.run(
            api(name, generate), host=args.host, port=args.port, timeout_graceful_shutdown=5
        )


if __name__ == "__main__":
    main()
