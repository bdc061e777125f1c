r"""A bundle behind one process that OpenAI's clients can call.

    python -m pip install -c constraints.txt -e '.[server]'
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
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Timer
from typing import Any

GRACE = 5.0  # seconds that open responses have to end after Ctrl-C or SIGTERM


def main() -> None:
    parser = ArgumentParser(
        prog="python -m examples.server",
        description=__doc__,
        formatter_class=RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--engines", type=Path, required=True, metavar="DIR", help="bundle")
    add("--slots", type=int, metavar="N", help="concurrent requests (default: the bundle's)")
    add("--queue", type=int, default=64, metavar="N", help="requests that may wait (default: 64)")
    add("--threads", type=int, default=0, metavar="N", help="CPU threads (default: 0, automatic)")
    add("--chat-template", type=Path, metavar="FILE", help="replaces the checkpoint's (Jinja)")
    add("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    add("--port", type=int, default=8000, help="port to listen on (default: 8000)")
    add("--name", help="name of the model for clients (default: that of the bundle's folder)")
    args = parser.parse_args()
    if not 0 < args.port < 1 << 16:
        parser.error("--port must be from 1 to 65535")
    if args.queue < 0:
        parser.error("--queue must be 0 or more")
    try:  # imported here, so that --help needs none of them
        import outrider
        import uvicorn

        from .openai.api import api, from_engine, limited
    except ImportError as error:
        sys.exit(f"error: {error}. Install it: python -m pip install -e '.[server]'")
    try:
        engine = outrider.load(
            args.engines,
            slots=args.slots,
            threads=args.threads,
            chat_template=args.chat_template,
            # `limited` counts responses, and a client that has waited too long disconnects.
            queue=sys.maxsize,
            timeout=None,
        )
    except outrider.OutriderError as error:
        sys.exit(f"error: {error}")

    class Server(uvicorn.Server):
        def handle_exit(self, *signal: Any) -> None:
            super().handle_exit(*signal)
            timer = Timer(GRACE, engine.close)  # ends open responses with an error
            timer.daemon = True
            timer.start()

    name = args.name or args.engines.resolve().name
    most = len(engine.decoder.slots) + args.queue
    with engine, ThreadPoolExecutor(most) as threads:
        app = api(name, limited(partial(from_engine, engine, args.engines, threads), most))
        server = Server(uvicorn.Config(app, host=args.host, port=args.port))
        with suppress(KeyboardInterrupt):  # which it raises again after a clean shutdown
            server.run()
    sys.exit(0 if server.started else 3)  # as uvicorn.run


if __name__ == "__main__":
    main()
