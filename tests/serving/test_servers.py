"""The servers of examples/, started as a user does (Ray's with real replicas) and called with
OpenAI's own client.

`make test-serve` installs the dependencies into a separate environment and runs this.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from shutil import copytree, rmtree
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import outrider
import pytest
from commands import CHECKOUT

pytest.importorskip("ray.serve", reason="Ray Serve is not installed: see make test-serve")
yaml = pytest.importorskip("yaml")
openai = pytest.importorskip("openai", reason="openai is not installed: see make test-serve")

pytestmark = pytest.mark.slow
BUNDLE = CHECKOUT / os.environ.get("ENGINES", "build/demo")
QUEUE, SLOTS = 20, 2  # Ray runs one replica per slot
LONG = {"max_tokens": 1500, "temperature": 0, "extra_body": {"ignore_eos": True}}
REPLICA = b"ray::ServeReplica:default:Replica"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled pair, beside a chat template, which its checkpoint does not have."""
    folder = tmp_path_factory.mktemp("bundles") / "demo"
    copytree(BUNDLE, folder)
    template_of(folder).write_text(
        "{% for m in messages %}# {{ m.role }}: {{ m.content }}\n{% endfor %}"
    )
    return folder


def template_of(bundle: Path) -> Path:
    return bundle.with_suffix(".jinja")


@pytest.fixture(scope="module")
def engine(bundle: Path) -> outrider.TextEngine:
    return outrider.load(bundle, threads=1, chat_template=template_of(bundle))


class Server:
    """A server with two slots. mark: a variable in the environment of all its processes."""

    def __init__(self, kind: str, bundle: Path, folder: str):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url, self.mark = f"http://127.0.0.1:{port}/v1", f"OUTRIDER_SERVER={port}"
        name, value = self.mark.split("=")
        self.process = subprocess.Popen(
            {"local": _local, "ray": _ray}[kind](bundle, folder, port),
            cwd=CHECKOUT,
            env={**os.environ, name: value, "RAY_TMPDIR": folder, "RAY_SERVE_LOG_TO_STDERR": "0"},
        )

    def replicas(self) -> set[int]:
        """Process ids."""
        return {pid for pid in self._processes() if _read(pid, "cmdline").startswith(REPLICA)}

    def _processes(self) -> set[int]:
        numbers = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
        return {pid for pid in numbers if self.mark.encode() in _read(pid, "environ").split(b"\0")}

    def close(self) -> None:
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(60)
        finally:
            for pid in self._processes():  # any that outlive the server
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def _local(bundle: Path, folder: str, port: int) -> list[Any]:
    given = {"engines": bundle, "slots": SLOTS, "queue": QUEUE, "threads": 1, "port": port}
    given["chat-template"] = template_of(bundle)
    words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    return [sys.executable, "-m", "examples.server", *words]


def _ray(bundle: Path, folder: str, port: int) -> list[Any]:
    given = yaml.safe_load((CHECKOUT / "examples" / "ray_serve.yaml").read_text())
    given["http_options"]["port"], (app,) = port, given["applications"]
    app["args"] |= {
        "bundle": str(bundle),
        "chat_template": str(template_of(bundle)),
        "queue": QUEUE,
    }
    app["deployments"][0]["autoscaling_config"]["min_replicas"] = SLOTS
    config = Path(folder) / "serve.yaml"
    config.write_text(yaml.safe_dump(given))
    return [Path(sys.executable).with_name("serve"), "run", config]


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:  # the process has ended, or belongs to another user
        return b""


def wait_until(condition: Callable[[], bool]) -> None:
    for _ in range(480):
        if condition():
            return
        time.sleep(0.25)
    raise AssertionError("not within 120 seconds")


@pytest.fixture(scope="module", params=["local", "ray"])
def server(request: pytest.FixtureRequest, bundle: Path) -> Iterator[Server]:
    folder = tempfile.mkdtemp(prefix="ray")  # a short path, since it holds sockets
    server = Server(request.param, bundle, folder)
    try:
        client = openai.OpenAI(base_url=server.url, api_key="any", max_retries=0)

        def ready() -> bool:
            assert server.process.poll() is None
            try:
                return [model.id for model in client.models.list().data] == ["demo"]
            except (openai.APIConnectionError, openai.InternalServerError, openai.NotFoundError):
                return False

        wait_until(ready)
        yield server
    finally:
        server.close()
        rmtree(folder, ignore_errors=True)


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url, api_key="any", max_retries=0)


def run_with_client(
    server: Server, work: Callable[[openai.AsyncOpenAI], Awaitable[Any]], retries: int = 0
) -> Any:
    """Run this coroutine function on a new client, and return its result."""

    async def run() -> Any:
        url, most = server.url, retries
        async with openai.AsyncOpenAI(base_url=url, api_key="any", max_retries=most) as client:
            return await work(client)

    return asyncio.run(run())


SAMPLED = {"temperature": 0.8, "seed": 7, "max_tokens": 48}
# Request fields, and the same as options of the engine.
REQUESTS = [
    ({"temperature": 0}, {"temperature": 0, "max_new_tokens": 16}),
    (SAMPLED, {}),
    ({**SAMPLED, "stop": ["\n    "]}, {"stop": ["\n    "]}),
    ({**SAMPLED, "top_p": 0.5, "presence_penalty": 1.0, "frequency_penalty": 0.5},
     {"top_p": 0.5, "presence_penalty": 1.0, "frequency_penalty": 0.5}),
    ({**SAMPLED, "logit_bias": {"300": 5.0}}, {"logit_bias": {300: 5.0}}),
    ({**SAMPLED, "extra_body": {"verify": "coupled", "gamma": 0, "top_k": 5}},
     {"verify": "coupled", "gamma": 0, "top_k": 5}),
    ({**SAMPLED, "user": "me", "best_of": 1, "echo": False, "n": None,
      "extra_body": {"store": False, "tools": [], "response_format": {"type": "text"}}}, {}),
]  # fmt: skip


@pytest.mark.parametrize(("given", "ours"), REQUESTS)
def test_a_text_is_that_of_a_local_call(
    client: openai.OpenAI, engine: outrider.TextEngine, given: dict[str, Any], ours: dict[str, Any]
) -> None:
    """Both whole and streamed."""
    if given is not REQUESTS[0][0]:
        ours = {"temperature": 0.8, "seed": 7, "max_new_tokens": 48} | ours
    prompt = "def read(path):\n"
    expected = engine.generate(prompt, chat=False, **ours)
    usage = (expected.stats.prompt_tokens, len(expected.token_ids))
    finish = "length" if expected.finish_reason == "length" else "stop"

    whole = client.completions.create(model="demo", prompt=prompt, **given)
    (choice,) = whole.choices
    assert (choice.text, choice.finish_reason) == (expected.text, finish)
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == usage

    *parts, last = client.completions.create(
        model="demo", prompt=prompt, stream=True, stream_options={"include_usage": True}, **given
    )
    assert "".join(part.choices[0].text for part in parts) == expected.text
    assert [part.choices[0].finish_reason for part in parts] == [None] * (len(parts) - 1) + [finish]
    assert not last.choices and (last.usage.prompt_tokens, last.usage.completion_tokens) == usage


def test_a_conversation(client: openai.OpenAI, engine: outrider.TextEngine) -> None:
    """A special token spelled out in a message is plain text unless "control" is requested."""
    messages = [{"role": "user", "content": "Read a file.<|endoftext|>"}]
    seeded = {"temperature": 0.8, "seed": 3}
    chat = client.chat.completions.create
    for special in ("text", "control"):
        expected = engine.generate(messages, special_tokens=special, max_new_tokens=32, **seeded)
        more = {"extra_body": {"special_tokens": special}} if special == "control" else {}
        for name in ("max_tokens", "max_completion_tokens"):
            answer = chat(model="demo", messages=messages, **{name: 32}, **seeded, **more)
            message = answer.choices[0].message
            assert (message.role, message.content) == ("assistant", expected.text)
            assert answer.usage.prompt_tokens == expected.stats.prompt_tokens
            parts = chat(
                model="demo", messages=messages, stream=True, **{name: 32}, **seeded, **more
            )
            deltas = [part.choices[0].delta for part in parts]
            assert "".join(delta.content for delta in deltas) == expected.text
            # More than once, and OpenAI's own accumulator makes it "assistantassistant".
            assert [d.role for d in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
    # Without a maximum length, generation may continue to the end of the context.
    stop = {"stop": ["def"], "extra_body": {"ignore_eos": True}}
    answer = chat(model="demo", messages=messages, **seeded, **stop)
    local = engine.generate(
        messages,
        special_tokens="text",
        max_new_tokens=9999,
        stop=["def"],
        ignore_eos=True,
        **seeded,
    )
    assert answer.choices[0].message.content == local.text


def test_choices_and_log_probabilities(client: openai.OpenAI, engine: outrider.TextEngine) -> None:
    prompts, seeded = ["import os\n", "class A"], {"temperature": 0.8, "seed": 5}
    locally = [
        engine.generate(
            prompt, chat=False, max_new_tokens=8, temperature=0.8, seed=5 + n, logprobs=2
        )
        for prompt in prompts
        for n in range(2)
    ]
    answer = client.completions.create(
        model="demo", prompt=prompts, n=2, max_tokens=8, logprobs=2, **seeded
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    for choice, expected in zip(answer.choices, locally, strict=True):
        assert choice.text == expected.text
        assert choice.logprobs.token_logprobs == expected.logprobs
        assert "".join(choice.logprobs.tokens) == expected.text
    assert answer.usage.completion_tokens == 32
    assert answer.usage.prompt_tokens == sum(r.stats.prompt_tokens for r in locally[::2])
    texts = [""] * 4
    *parts, last = client.completions.create(
        model="demo", prompt=prompts, n=2, max_tokens=8, stream=True,
        stream_options={"include_usage": True}, **seeded,
    )  # fmt: skip
    for part in parts:
        texts[part.choices[0].index] += part.choices[0].text
    assert texts == [expected.text for expected in locally]
    assert last.usage == answer.usage

    # Parts of characters all have the text U+FFFD; under it was the least probable alternative.
    emoji = {"model": "demo", "prompt": "\N{GRINNING FACE}" * 4, "max_tokens": 4, "temperature": 0}
    logprobs = client.completions.create(logprobs=5, **emoji).choices[0].logprobs
    assert "\N{REPLACEMENT CHARACTER}" in logprobs.tokens
    tops = zip(logprobs.tokens, logprobs.top_logprobs, strict=True)
    assert [top[token] for token, top in tops] == logprobs.token_logprobs

    last = {"model": "demo", "prompt": "x", "max_tokens": 8, "seed": 2**64 - 1}
    _, after = client.completions.create(n=2, **last).choices  # there is no seed 2**64
    first = engine.generate("x", chat=False, max_new_tokens=8, temperature=1, seed=0)
    assert after.text == first.text

    messages = [{"role": "user", "content": "x"}]
    expected = engine.generate(messages, max_new_tokens=8, logprobs=2, **seeded)
    options = {"max_tokens": 8, "logprobs": True, "top_logprobs": 2, **seeded}
    (choice,) = client.chat.completions.create(model="demo", messages=messages, **options).choices
    content = choice.logprobs.content
    assert [token.logprob for token in content] == expected.logprobs
    assert [[t.logprob for t in token.top_logprobs] for token in content] == [
        [logprob for _, logprob in token.alternatives] for token in expected.tokens
    ]


REFUSED = [
    ({"model": "gpt"}, 404, "model"),
    ({"extra_body": {"tools": [{}]}}, 400, "option"),
    ({"extra_body": {"best_of": 3}}, 400, "option"),
    ({"temperature": -1}, 400, "option"),
    ({"temperature": 10**400}, 400, "option"),
    ({"top_p": "much"}, 400, "option"),
    ({"n": 0}, 400, "option"),
    ({"n": 10**9}, 400, "option"),
    ({"logit_bias": {"4096": 1}}, 400, "option"),
    ({"max_tokens": 0}, 400, "option"),
    ({"seed": "a", "n": 2}, 400, "option"),
    ({"stream_options": {"include_usage": True}}, 400, "option"),
    ({"extra_body": {"gamma": 99}}, 400, "option"),
    ({"extra_body": {"max_new_tokens": 5}}, 400, "option"),
    ({"extra_body": {"chat": True}}, 400, "option"),
    ({"prompt": []}, 400, "prompt"),
    ({"prompt": [4096]}, 400, "prompt"),
    ({"prompt": "x " * 3000}, 400, "prompt"),
    ({"prompt": ["x", "x " * 3000]}, 400, "prompt"),  # the first was generated before
]


@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_done_is_refused(client: openai.OpenAI, stream: bool) -> None:
    for given, status, kind in REFUSED:
        if stream and "stream_options" in given:
            continue
        with pytest.raises(openai.APIStatusError) as raised:
            client.completions.create(**{"model": "demo", "prompt": "x", "stream": stream, **given})
        assert raised.value.status_code == status, given
        assert raised.value.body["code"] == kind, given
        assert raised.value.body["type"] == "invalid_request_error" and raised.value.body["message"]

    assert client.models.retrieve("demo").id == "demo"
    with pytest.raises(openai.NotFoundError, match="gpt is not here"):
        client.models.retrieve("gpt")
    with pytest.raises(openai.BadRequestError, match="the prompt is empty"):
        client.chat.completions.create(model="demo", messages=[], stream=stream)
    with pytest.raises(openai.NotFoundError) as no_route:
        client.embeddings.create(model="demo", input="x")
    assert no_route.value.body["code"] == "route"


@pytest.mark.parametrize(
    ("path", "sent", "message"),
    [
        ("completions", '{"model": ', "option: the body is not JSON: Expecting value (character "
         "10). Send one JSON object, with the header Content-Type: application/json."),
        ("completions", "[1]", "option: the body is not a JSON object. Send one JSON object, with"),
        ("completions", "[" * 10**5, "route: There was an error parsing the body. Send one JSON"),
        ("completions", r'{"model": "\ud800", "prompt": "x"}', r"model: \ud800 is not here. Use"),
        ("completions", {}, "option: prompt is missing. Add it."),
        ("completions", {"prompt": 5},
         "option: prompt=5 is not valid. prompt must be a text, a list of token ids, or a list of"),
        ("completions", {"prompt": "x", "n": 0},
         "option: n=0 is not valid. n must be greater than or equal to 1."),
        ("completions", {"prompt": "x", "max_tokens": True},
         "option: max_tokens=True is not valid. max_tokens must be a valid integer."),
        ("completions", {"prompt": "x", "max_tokens": 0},
         "option: max_tokens=0 is out of range. max_tokens must be 1 or more."),
        ("completions", {"prompt": "x", "min_new_tokens": 50}, "option: min_new_tokens=50 exceeds "
         "max_tokens=16. Choose 0 <= min_new_tokens <= max_tokens."),
        ("completions", {"prompt": "x", "logprobs": 9999}, "option: logprobs=9999 is out of"),
        ("completions", {"prompt": "x", "processors": []}, "option: processors is not supported"),
        ("completions", {"prompt": "x", "max_token": 5},
         "option: there is no field 'max_token'. Use max_tokens."),
        ("completions", {"prompt": "x", "streams": True}, "option: there is no field 'streams'. "
         "Use stream."),
        ("chat/completions", {"max_tokens": 5, "max_completion_tokens": 0},
         "option: max_completion_tokens=0 is out of range. max_completion_tokens must be"),
        ("chat/completions", {"max_tokens": 0}, "option: max_tokens=0 is out of range. max_tokens"),
        ("chat/completions", {"logprobs": True, "top_logprobs": 9999},
         "option: top_logprobs=9999 is out of range."),
        ("chat/completions", {"top_logprobs": 2}, "option: top_logprobs without logprobs. Set"),
        ("chat/completions", {"messages": [{}]}, "prompt: message 0 has no role. Send {"),
        ("chat/completions", {"messages": ["hi", 5]}, "option: messages.0='hi' is not valid."),
        ("nothing", {}, "route: Not Found. Use /v1/chat/completions, /v1/completions, /v1/models"),
    ],
)  # fmt: skip
def test_an_error_names_the_fields_that_were_sent(
    server: Server, path: str, sent: Any, message: str
) -> None:
    if isinstance(sent, dict):
        chat = {"messages": [{"role": "user", "content": "x"}]} if "chat" in path else {}
        sent = json.dumps({"model": "demo", **chat, **sent})
    request = Request(f"{server.url}/{path}", sent.encode(), {"Content-Type": "application/json"})
    with pytest.raises(HTTPError) as refused:
        urlopen(request)
    assert json.load(refused.value)["error"]["message"].startswith(message)


def test_a_checkpoint_without_a_chat_template() -> None:
    from examples.openai.api import from_engine  # needs FastAPI

    async def ask() -> None:
        request = ([{"role": "user", "content": "x"}], outrider.Options())
        with outrider.load(BUNDLE) as engine, ThreadPoolExecutor() as threads:
            await anext(from_engine(engine, BUNDLE, threads, [request], False, None))

    with pytest.raises(outrider.OutriderError, match=r"no chat template\. Use /v1/completions"):
        asyncio.run(ask())


PERSON = {
    "type": "object",
    "properties": {
        "name": {"enum": ["a", "b"]},
        "ages": {"type": "array", "maxItems": 2, "items": {"type": "integer", "minimum": 0}},
    },
    "required": ["name", "ages"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},  # so that it ends
}


def test_json_that_follows_a_schema(client: openai.OpenAI) -> None:
    """Of a model that writes no JSON by itself; each of several choices has a state of its own."""

    def ask(form: Any, **more: Any) -> list[str]:
        messages = [{"role": "user", "content": "A person"}]
        answer = client.chat.completions.create(
            model="demo", messages=messages, seed=1, response_format=form, **more
        )
        return [choice.message.content for choice in answer.choices]

    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
    for draft in "ngram", "model":
        texts = ask(form, n=4, extra_body={"draft": draft, "gamma": 3})
        for text in texts:
            found = json.loads(text)
            assert found.keys() == {"name", "ages"} and found["name"] in ("a", "b")
            assert len(found["ages"]) <= 2 and all(type(age) is int for age in found["ages"])
        assert len({*texts}) > 1
    assert ask({"type": "json_object"}, max_tokens=1)[0] == "{"
    for schema, message in (({"type": "objekt"}, "cannot be followed: Invalid type: objekt"),
                            (5, "response_format={'type': 'json_schema'")):  # fmt: skip
        form["json_schema"]["schema"] = schema
        with pytest.raises(openai.BadRequestError, match=message):
            ask(form)


def test_health(server: Server) -> None:
    assert urlopen(server.url.replace("/v1", "/health")).status == 200


async def start_long_request(client: openai.AsyncOpenAI) -> AsyncIterator[Any]:
    """The stream of a long request that occupies a slot."""
    stream = await client.completions.create(model="demo", prompt="if ", stream=True, **LONG)
    await anext(stream)
    return stream


async def read_to_end(stream: Any) -> str | None:
    finish = None
    async for part in stream:
        finish = part.choices[0].finish_reason
    return finish


@pytest.mark.parametrize("leaves", [True, False])
def test_who_leaves_makes_room(server: Server, leaves: bool) -> None:
    """Both slots are taken, and one request waits. It runs as soon as a client closes its stream,
    when the other text has hardly begun, or, in the control, when one of the long texts ends."""

    async def work(client: openai.AsyncOpenAI) -> tuple[int, int]:
        first, second = await start_long_request(client), await start_long_request(client)
        received = received_before = 0

        async def wait() -> None:
            nonlocal received_before
            await client.completions.create(model="demo", prompt="x", max_tokens=1)
            received_before = received

        async def read() -> None:
            nonlocal received
            async for _ in first:
                received += 1

        working = [wait(), read()]
        if leaves:
            await second.close()
        else:
            working.append(read_to_end(second))
        await asyncio.gather(*working)
        return received_before, received

    before, total = run_with_client(server, work)
    assert (before < total / 2) == leaves, (before, total)


def test_who_leaves_before_anything_was_said(server: Server) -> None:
    """Two requests without streaming are cancelled, one in its slot and one in the queue."""

    async def work(client: openai.AsyncOpenAI) -> list[str]:
        other = await start_long_request(client)
        create = client.completions.create
        both = [asyncio.create_task(create(model="demo", prompt="x", **LONG)) for _ in range(2)]
        ended = asyncio.create_task(read_to_end(other))
        await asyncio.sleep(0.5)  # until one has the other slot; otherwise the test shows nothing
        for task in both:
            task.cancel()
        await create(model="demo", prompt="x", max_tokens=1)
        assert not ended.done()
        return await ended

    assert run_with_client(server, work) == "length"


def test_more_than_may_wait_are_told_so(server: Server, engine: outrider.TextEngine) -> None:
    async def work(client: openai.AsyncOpenAI) -> list[Any]:
        slots = [await start_long_request(client) for _ in range(SLOTS)]
        many = [
            asyncio.create_task(
                client.completions.create(
                    model="demo", prompt="import ", max_tokens=2, temperature=0.8, seed=seed, n=3
                )
            )
            for seed in range(QUEUE + 100)
        ]

        def refused() -> int:
            return sum(task.done() and task.exception() is not None for task in many)

        # If the long requests end meanwhile, others are answered, and fewer refused.
        while refused() < 40 and not all(task.done() for task in many):
            await asyncio.sleep(0.1)
        for stream in slots:
            await stream.close()
        return await asyncio.gather(*many, return_exceptions=True)

    answers = run_with_client(server, work)
    refused = [answer for answer in answers if isinstance(answer, Exception)]
    assert len(refused) >= 40
    assert all(isinstance(error, openai.RateLimitError) for error in refused), refused
    assert {error.body["code"] for error in refused} == {"busy"}
    given = {n: a.choices[0].text for n, a in enumerate(answers) if a not in refused}
    assert all(len(answer.choices) == 3 for answer in answers if answer not in refused)
    assert given == local_texts(engine, ["import "] * len(answers), 2, given)


@pytest.mark.parametrize("server", ["local"], indirect=True)
def test_responses_of_many_choices_do_not_keep_each_other_out(server: Server) -> None:
    """More of them than there are threads, and long ones that hold slots. Fault: those that waited
    between two choices took all threads, and the ones with the slots could not go on."""

    async def work(client: openai.AsyncOpenAI) -> None:
        async def ask(number: int) -> None:
            given = {"prompt": list("abcdefghij") * 2, "max_tokens": 1}
            if number % 8 == 0:
                given = {"prompt": "if ", "max_tokens": 60, "extra_body": {"ignore_eos": True}}
            for _ in range(2):
                while True:
                    with suppress(openai.RateLimitError):
                        await client.completions.create(model="demo", **given)
                        break
                    await asyncio.sleep(0.02)

        async with asyncio.timeout(90):
            await asyncio.gather(*map(ask, range(2 * (QUEUE + SLOTS))))

    run_with_client(server, work)


def test_no_choice_is_refused_after_another() -> None:
    """Fault: each choice joined the engine's queue anew, and could find it full."""
    from examples.openai.api import limited  # needs FastAPI

    second = asyncio.Event()

    async def choices(*requests: Any) -> AsyncGenerator[Any]:
        for request in requests:
            yield request
            await second.wait()

    async def work() -> None:
        generate = limited(choices, 2)
        first, other = generate(1, 2), generate(3)
        assert [await anext(first), await anext(other)] == [1, 3]
        with pytest.raises(outrider.OutriderError, match="busy: 2 requests are running"):
            await anext(generate(4))
        await other.aclose()
        second.set()
        assert await anext(generate(4)) == 4
        assert [part async for part in first] == [2]

    asyncio.run(work())


def test_who_does_not_read_keeps_nobody_waiting() -> None:
    """Fault: a response held its slots while its client read nothing."""
    from examples.openai.api import from_engine  # needs FastAPI

    async def work() -> None:
        with outrider.load(BUNDLE, slots=1) as engine, ThreadPoolExecutor(2) as threads:
            ask = partial(from_engine, engine, BUNDLE, threads, stream=True, schema=None)
            long = outrider.Options(max_new_tokens=400, ignore_eos=True, chat=False)
            slow = ask([("import", long)] * 3)
            await anext(slow)
            async with asyncio.timeout(120):
                assert [part async for part in ask([("class", long)])]
            assert len([part async for part in slow]) > 9

    asyncio.run(work())


def local_texts(
    engine: outrider.TextEngine, prompts: list[str], most: int, seeds: Any
) -> dict[int, str]:
    options = {"chat": False, "max_new_tokens": most, "temperature": 0.8}
    return {n: engine.generate(prompts[n], seed=n, **options).text for n in seeds}


@pytest.mark.parametrize("server", ["ray"], indirect=True)
def test_a_replica_that_dies(server: Server, engine: outrider.TextEngine) -> None:
    """The dead replica's stream ends with an error, not as if it were complete; queued requests and
    clients that retry get the right output; and a new replica starts."""
    before = server.replicas()
    assert len(before) == SLOTS

    async def work(client: openai.AsyncOpenAI) -> tuple[list[Any], list[str]]:
        slots = [await start_long_request(client) for _ in range(SLOTS)]
        many = [
            asyncio.create_task(
                client.completions.create(
                    model="demo", prompt="import ", max_tokens=8, temperature=0.8, seed=seed
                )
            )
            for seed in range(10)
        ]
        os.kill(min(before), signal.SIGKILL)
        ends = await asyncio.gather(*map(read_to_end, slots), return_exceptions=True)
        return ends, [answer.choices[0].text for answer in await asyncio.gather(*many)]

    ends, given = run_with_client(server, work, retries=5)
    (broken,) = [end for end in ends if end != "length"]
    assert isinstance(broken, openai.APIError) and broken.body["code"] == "replica", broken
    assert dict(enumerate(given)) == local_texts(engine, ["import "] * 10, 8, range(10))
    wait_until(lambda: len(server.replicas()) == SLOTS)
    assert min(before) not in server.replicas()
