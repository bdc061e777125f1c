"""The text layer against the full decode, a naive search and Transformers' own templates."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from runtime.files.errors import OutriderError
from runtime.text.literal import LiteralTokenizer
from runtime.text.tokenizer import REPLACEMENT, Detokenizer, StopStrings, Tokenizer

CORPUS = [
    "The road ahead is long, and the draft rides ahead of the target.",
    "Straße, façade, naïve café; ещё один пример текста.",
    "猫は窓の外を見ている。今天天气很好。",
    "Good 👍🏽, family 👩‍👩‍👧‍👦, flag 🏴󠁧󠁢󠁳󠁣󠁴󠁿 and 😀😀.",
    "def f(x):\n    return x + 1\n\n",
]
UNSEEN = "Τίποτα δεν είναι འདི་ 𝔘𝔫𝔦 🦊🧭 龘\n\n done"  # mostly not in the corpus: many bytes
SPECIAL = ["<s>", "</s>", "<pad>"]


def byte_level() -> tokenizers.Tokenizer:
    model = tokenizers.Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options = {"special_tokens": SPECIAL, "show_progress": False}
    trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, **options)
    model.train_from_iterator(CORPUS, trainer)
    model.add_tokens(["<tool>", "ünlü"])  # not special; the second is no byte-level spelling
    return model


def sentencepiece() -> tokenizers.Tokenizer:
    """As in Llama 2: U+2581 for spaces, a token for every byte, a leading space that is dropped."""
    trained = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=100, special_tokens=["<unk>", *SPECIAL])
    trained.train_from_iterator([CORPUS[0], CORPUS[4].replace("\n", "")], trainer)
    learned = json.loads(trained.to_str())["model"]
    names = ["<unk>", *SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    names += [name for name in learned["vocab"] if name not in names]
    learned = models.BPE(
        vocab={name: i for i, name in enumerate(names)},
        merges=[tuple(merge) for merge in learned["merges"]],
        unk_token="<unk>", fuse_unk=True, byte_fallback=True,
    )  # fmt: skip
    model = tokenizers.Tokenizer(learned)
    model.add_special_tokens(["<unk>", *SPECIAL])
    spaces = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    model.normalizer = normalizers.Sequence(spaces)
    pieces = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    model.decoder = decoders.Sequence([*pieces, decoders.Strip(" ", 1, 0)])
    template = {"single": "<s> $A", "special_tokens": [("<s>", 1)]}
    model.post_processor = processors.TemplateProcessing(**template)
    return model


def word_piece() -> tokenizers.Tokenizer:
    model = tokenizers.Tokenizer(models.WordPiece(unk_token="<unk>"))
    model.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    model.decoder = decoders.WordPiece()
    options = {"special_tokens": ["<unk>", *SPECIAL], "show_progress": False}
    model.train_from_iterator(CORPUS, trainers.WordPieceTrainer(vocab_size=250, **options))
    return model


FAMILIES = {f.__name__: f for f in (byte_level, sentencepiece, word_piece)}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("tokenizers")
    paths = {name: folder / name / "tokenizer.json" for name in FAMILIES}
    for name, path in paths.items():
        path.parent.mkdir()
        FAMILIES[name]().save(str(path))
    return paths


@pytest.fixture(params=FAMILIES)
def tokenizer(request: pytest.FixtureRequest, files: dict[str, Path]) -> Tokenizer:
    return Tokenizer(files[request.param])


def random_ids(tokenizer: Tokenizer, rng: random.Random) -> list[int]:
    """Real text cut anywhere, noise over a padded vocabulary, or a few tokens of split characters
    in random order."""
    kind, size = rng.randrange(3), len(tokenizer.vocabulary())
    if kind == 0:
        ids = tokenizer.encode(rng.choice([*CORPUS, UNSEEN]) + UNSEEN)
        start = rng.randrange(len(ids))
        return ids[start : start + rng.randrange(60)]
    length = rng.randrange(40)
    if kind == 1:
        return [rng.randrange(size + 3) for _ in range(length)]
    characters = "😀é龘\n"
    few = sorted({*tokenizer.encode(characters), 0, rng.randrange(size)})
    return [rng.choice(few) for _ in range(length)]


def stream(detokenizer: Detokenizer, ids: Sequence[int]) -> list[str]:
    return [*(detokenizer.push(i) for i in ids), detokenizer.flush()]


def assert_streams(tokenizer: Tokenizer, ids: list[int]) -> None:
    pieces = stream(Detokenizer(tokenizer), ids)
    assert "".join(pieces) == tokenizer.decode(ids), ids
    # Text that has been shown is final, and no more is held back than one character may need.
    shown = ""
    for n, piece in enumerate(pieces[:-1], start=1):
        shown += piece
        so_far = tokenizer.decode(ids[:n])
        assert so_far.startswith(shown), ids
        assert len(so_far) - len(shown) <= 3, ids
        assert set(so_far[len(shown) :]) <= {REPLACEMENT}, ids


# Pieces of a stream


def test_random_streams_equal_the_full_decode(tokenizer: Tokenizer) -> None:
    rng = random.Random(0)
    for _ in range(500):
        assert_streams(tokenizer, random_ids(tokenizer, rng))


def test_the_prompt_decides_on_the_leading_space(tokenizer: Tokenizer) -> None:
    rng = random.Random(1)
    for _ in range(300):
        prompt = tokenizer.encode(rng.choice(CORPUS))
        ids = random_ids(tokenizer, rng)
        text = "".join(stream(Detokenizer(tokenizer, prompt), ids))
        assert tokenizer.decode(prompt) + text == tokenizer.decode([*prompt, *ids])


@pytest.mark.parametrize(("name", "bad"), [("byte_level", "ÿ"), ("sentencepiece", "<0xFF>")])
def test_invalid_bytes_are_released_at_once(files: dict[str, Path], name: str, bad: str) -> None:
    """The DecodeStream of `tokenizers` waits for a valid character or raises. A newline before the
    invalid byte is not taken back, as Transformers does: by then it could be half of a stop
    string."""
    tokenizer = Tokenizer(files[name])
    model = tokenizers.Tokenizer.from_file(str(files[name]))
    token = model.token_to_id(bad)
    assert stream(Detokenizer(tokenizer), [token] * 50) == [REPLACEMENT] * 50 + [""]
    theirs = decoders.DecodeStream(skip_special_tokens=True)
    assert {theirs.step(model, token) for _ in range(50)} == {None}  # if this fails: use theirs
    newline = model.token_to_id("Ċ" if name == "byte_level" else "<0x0A>")
    assert stream(Detokenizer(tokenizer), [newline, token]) == ["\n", REPLACEMENT, ""]


def test_a_token_is_decided_by_the_newest_ones(
    files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: decoding all ids at every token makes streaming quadratic in the length."""
    tokenizer, longest = Tokenizer(files["byte_level"]), 0
    real = Tokenizer.join

    def watched(self: Tokenizer, pieces: Sequence[str]) -> str:
        nonlocal longest
        longest = max(longest, len(pieces))
        return real(self, pieces)

    monkeypatch.setattr(Tokenizer, "join", watched)
    detokenizer = Detokenizer(tokenizer)
    for i in tokenizer.encode(UNSEEN * 20):
        detokenizer.push(i)
    assert 0 < longest <= Detokenizer._WINDOW


# The tokenizer


def test_decode_equals_the_library(tokenizer: Tokenizer) -> None:
    model = tokenizer._model
    rng = random.Random(2)
    for _ in range(1000):
        ids = random_ids(tokenizer, rng)
        for skip in (True, False):
            expected = model.decode(ids, skip_special_tokens=skip)
            if tokenizer._byte_fallback and REPLACEMENT in expected:
                continue  # the documented exception
            assert tokenizer.decode(ids, skip_special_tokens=skip) == expected


def test_what_encoding_adds(files: dict[str, Path]) -> None:
    tokenizer = Tokenizer(files["sentencepiece"])
    bare = tokenizer.encode("the road", add_special_tokens=False)
    assert tokenizer.encode("the road") == [1, *bare]
    assert tokenizer.decode([1, *bare], skip_special_tokens=False).startswith("<s>")


def test_padding_and_truncation_of_the_training_run_are_off(tmp_path: Path) -> None:
    model = byte_level()
    expected = model.encode(CORPUS[0]).ids
    model.enable_truncation(4)
    model.enable_padding(length=99)
    model.save(str(tmp_path / "tokenizer.json"))
    assert len(model.encode(CORPUS[0]).ids) == 99
    assert Tokenizer(tmp_path / "tokenizer.json").encode(CORPUS[0]) == expected


def test_what_the_tokenizer_refuses(files: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    for path in (tmp_path / "tokenizer.json", tmp_path / "absent.json"):
        with pytest.raises(OutriderError, match=r"^bundle: .*cannot read the tokenizer"):
            Tokenizer(path)
    with pytest.raises(OutriderError, match=r"^prompt: .*character 2 is a lone surrogate"):
        Tokenizer(files["byte_level"]).encode("ab\udcff")


def naive_stop(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Find the first end of any stop string, longest first, by trying every position."""
    for end in range(len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end - len(stop)], stop
    return text, None


def run_stops(stops: list[str], pieces: list[str]) -> tuple[str, str | None, int]:
    finder, shown = StopStrings(stops), ""
    for n, piece in enumerate(pieces, start=1):
        text, matched = finder.push(piece)
        shown += text
        if matched is not None:
            assert finder.push("more") == ("", matched)
            assert finder.flush() == ""
            return shown, matched, n
        # Only what could become a stop string is held back.
        held = "".join(pieces[:n])[len(shown) :]
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)
    return shown + finder.flush(), None, len(pieces)


def cut(text: str, rng: random.Random) -> list[str]:
    pieces = []
    while text:
        n = rng.randrange(0, 5)
        pieces.append(text[:n])
        text = text[n:]
    return pieces


# Stop strings


def test_random_streams_equal_the_naive_search() -> None:
    rng = random.Random(3)
    matches = 0
    for _ in range(6000):
        stops = [
            "".join(rng.choices("ab\n", k=rng.randint(1, 4))) for _ in range(rng.randint(0, 3))
        ]
        text = "".join(rng.choices("abc\n", k=rng.randrange(16)))
        pieces = cut(text, rng)
        shown, matched, used = run_stops(stops, pieces)
        assert (shown, matched) == naive_stop(text, stops), (stops, pieces)
        if matched is not None:  # found with the piece that completes it, not later
            matches += 1
            assert naive_stop("".join(pieces[: used - 1]), stops)[1] is None
    assert 1000 < matches < 5000


CHATML = """{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}"""

LLAMA = """{{ bos_token }}{% if messages[0].role == 'system' %}
{% set system = messages[0].content | trim %}
{% set messages = messages[1:] %}
{% endif %}
{% for message in messages %}
  {% if (message.role == 'user') != (loop.index0 % 2 == 0) %}
    {{ raise_exception('Roles must alternate user and assistant.') }}
  {% endif %}
  {% if message.role == 'user' %}
[INST] {% if system is defined and loop.first %}<<SYS>>{{ system }}<</SYS>>{% endif %}
{{ message.content }} [/INST]
  {% else %}
{% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}
  {% endif %}
{% endfor %}"""

LOOPS = """{% set ns = namespace(last='none', count=0) %}
{% for message in messages %}
{% if message.role == 'skip' %}{% continue %}{% endif %}
{% if message.role == 'end' %}{% break %}{% endif %}
{% set ns.count = ns.count + 1 %}
{% set ns.last = message.role %}
{{ ns.count }}: {{ message | tojson }} {{ dict(a='<&>', **message) | tojson(indent=2) }}
{% endfor %}
{{ ns.last }} {{ tools is none }} {{ documents is none }} {{ undefined_name }}
{{ dict.fromkeys(['k'], 1) }} {{ strftime_now('%Y') }} {{ pad_token is defined }}"""

REASONING = """{% for m in messages %}
{% for key, value in m.items() %}{{ key }}={{ value }};{% endfor %}
{% if m.content is defined %}{{ m.content[::-1] }}{% endif %}

{% endfor %}"""

# As in templates of vision models, which read only parts: plain text would vanish.
PARTS = """{% for m in messages %}{{ m.role }}:
{% for part in m.content | selectattr('type', 'equalto', 'text') %}{{ part.text }};{% endfor %}
{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"""

BOTH = """{% for m in messages %}{{ m.role }}:
{% if m.content is string %}{{ m.content }}{% else %}
{% for part in m.content %}{{ part.text }};{% endfor %}
{% endif %}{% endfor %}"""

TALK: list[dict[str, Any]] = [
    {"role": "system", "content": ' Be <brief> & "kind". '},
    {"role": "user", "content": "Hi 👋\n\nthere"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "a < b && c > d 'é'"},
]
TOOLS: list[dict[str, Any]] = [
    {"role": "skip", "content": "x"},
    {"role": "user", "content": [{"type": "text", "text": "é"}], "n": 1.5, "flag": True},
    {"role": "assistant", "content": None, "thinking": "hm", "calls": [{"name": "f", "arg": None}]},
    {"role": "end", "content": "x"},
    {"role": "user", "content": "never"},
]
SPECIAL_TEXTS = {"bos_token": "<s>", "eos_token": "</s>"}


# Chat templates


@pytest.mark.parametrize("template", [CHATML, LLAMA, LOOPS, REASONING])
@pytest.mark.parametrize("messages", [TALK[1:], TALK, TOOLS])
def test_templates_equal_transformers(
    files: dict[str, Path], template: str, messages: list[dict[str, Any]]
) -> None:
    transformers = pytest.importorskip("transformers")
    path = files["byte_level"]
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(path), **SPECIAL_TEXTS)
    ours = Tokenizer(path, chat_template=template, special_tokens=SPECIAL_TEXTS)
    theirs.chat_template = template
    if messages is TOOLS and template in (CHATML, LLAMA):  # a list or None as the content
        with pytest.raises(Exception):  # noqa: B017  (theirs may be of any type)
            theirs.apply_chat_template(messages, tokenize=False)
        with pytest.raises(OutriderError, match="the chat template refused the messages"):
            ours.render_chat(messages)
        return
    given = messages
    if messages is TOOLS and template is REASONING:  # it reads only text, so we pass text
        given = [{**m, "content": "é"} if isinstance(m["content"], list) else m for m in messages]
    expected = theirs.apply_chat_template(given, tokenize=False, add_generation_prompt=True)
    assert ours.render_chat(messages) == expected
    assert messages[-1]["role"] in expected or len(expected) > 40  # it did render something


@pytest.mark.parametrize("who", ["all", "user", "system first"])
def test_text_is_passed_as_a_part_to_templates_that_read_only_parts(
    files: dict[str, Path], who: str
) -> None:
    transformers = pytest.importorskip("transformers")
    path, template = files["byte_level"], PARTS
    if who == "user":
        others = "{% for m in messages if m.role != 'user' %}{{ m.content }}{% endfor %}"
        template = others + PARTS.replace("in messages %}", "in messages if m.role == 'user' %}")
    if who == "system first":
        refused = "{% if messages[0].role != 'system' %}{{ raise_exception('no') }}{% endif %}"
        template = refused + PARTS
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(path), **SPECIAL_TEXTS)
    ours = Tokenizer(path, chat_template=template, special_tokens=SPECIAL_TEXTS)
    whole = [
        {**turn, "content": [{"type": "text", "text": turn["content"]}]}
        if turn["role"] == "user" or who != "user"
        else turn
        for turn in TALK
    ]
    expected, lost = (
        theirs.apply_chat_template(
            talk, chat_template=template, tokenize=False, add_generation_prompt=True
        )
        for talk in (whole, TALK)
    )
    assert ours.render_chat(TALK) == ours.render_chat(whole) == expected
    assert "there" in expected and "there" not in lost  # the control: plain text vanishes


@pytest.mark.parametrize("template", [CHATML, LLAMA, PARTS, BOTH])
def test_parts_are_passed_as_text_to_templates_that_read_only_text(
    files: dict[str, Path], template: str
) -> None:
    """Faults: a refusal, or the repr of a list in the prompt. Controls: templates that read
    parts."""
    ours = Tokenizer(files["byte_level"], chat_template=template, special_tokens=SPECIAL_TEXTS)
    parts = [{"type": "text", "text": text} for text in ("a", "b")]
    talk = [*TALK[:3], {"role": "user", "content": parts}]
    whole = "a\nb" if template in (CHATML, LLAMA) else "a;b;"
    rendered = ours.render_chat(talk)
    assert whole in rendered and "{" not in rendered
    if template in (CHATML, LLAMA):
        assert rendered == ours.render_chat([*TALK[:3], {"role": "user", "content": "a\nb"}])


@pytest.mark.parametrize("template", [PARTS, CHATML])
def test_a_picture_in_a_message_is_refused(files: dict[str, Path], template: str) -> None:
    ours = Tokenizer(files["byte_level"], chat_template=template, special_tokens=SPECIAL_TEXTS)
    for kind in ("image", "image_url", "input_audio", "file"):
        with pytest.raises(OutriderError, match=f"a part of type '{kind}'"):
            ours.render_chat([{"role": "user", "content": [{"type": kind}]}])


def test_a_message_without_text_is_refused(files: dict[str, Path]) -> None:
    """Fault: the model was asked nothing, or about the number as text. An assistant's message may
    have tool calls instead."""
    ours = Tokenizer(files["byte_level"], chat_template=CHATML, special_tokens=SPECIAL_TEXTS)
    for message, cause in (
        ({"contents": "x"}, "has no content"),
        ({"content": None}, "has no content"),
        ({"content": 5}, "has the content 5"),
    ):
        with pytest.raises(OutriderError, match=f"message 1 {cause}"):
            ours.render_chat([TALK[0], {"role": "user", **message}])


@pytest.mark.parametrize(
    ("template", "messages", "cause"),
    [
        (None, TALK, "no chat template"),
        (CHATML, [], "the conversation is empty"),
        (LLAMA, TALK[2:], "Roles must alternate user and assistant[.] Change"),
        (CHATML, TOOLS, "refused the messages"),
        ("{% for %}", TALK, "refused the messages"),
        ("{{ messages.append(1) }}", TALK, "refused the messages"),
        ("{{ ''.__class__.__mro__ }}", TALK, "refused the messages"),
        ("{% set ns = namespace() %}{% set ns.__class__ = 1 %}", TALK, "__class__"),
        ("{{ namespace(_a=1) }}", TALK, "_a"),
        ("{{ dict.update(messages[0], a=1) }}", TALK, "refused the messages"),
        ("{{ 1 | tojson(cls=1) }}", TALK, "tojson has no option 'cls'"),
    ],
)
def test_what_a_template_refuses(
    files: dict[str, Path], template: str | None, messages: list[Any], cause: str
) -> None:
    tokenizer = Tokenizer(files["byte_level"], chat_template=template)
    with pytest.raises(OutriderError, match=cause) as error:
        tokenizer.render_chat(messages)
    assert error.value.kind == "prompt"
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("special", ["control", "text"])
def test_nested_messages_are_refused(files: dict[str, Path], special: str) -> None:
    """Fault: with "text", a RecursionError."""
    tokenizer = Tokenizer(files["byte_level"], chat_template=CHATML)
    content: list[Any] = []
    for _ in range(5000):
        content = [content]
    with pytest.raises(OutriderError, match="prompt: "):
        tokenizer.encode_chat([{"role": "user", "content": content}], special_tokens=special)


def test_templates_see_no_live_objects(files: dict[str, Path]) -> None:
    tokenizer = Tokenizer(files["byte_level"], chat_template="{{ messages[0].content }}")
    assert tokenizer.render_chat([{"content": Path("/secret")}]) == "<PosixPath>"


# Special tokens as text


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece"])
def test_a_user_cannot_end_his_turn(files: dict[str, Path], name: str) -> None:
    """Fault: a special token in a user's message acts as if the template had written it."""
    tokenizer = Tokenizer(files[name], chat_template=LLAMA, special_tokens=SPECIAL_TEXTS)
    end = tokenizer.special_id("</s>")
    bad = [{"role": "user", "content": "the</s>road"}]
    talk = [*bad, {"role": "assistant", "content": "Hello"}, *bad]
    assert tokenizer.encode_chat(talk).count(end) == 3  # the control: as Transformers
    ids = tokenizer.encode_chat(talk, special_tokens="text")
    assert ids.count(end) == 1  # the template's own
    shown = tokenizer.decode(ids, skip_special_tokens=False)
    assert shown.count("</s>") == 3 and "\ufdd2" not in shown
    assert end not in tokenizer.encode("the</s>road", special_tokens="text")
    assert end in tokenizer.encode("the</s>road")


def test_what_the_model_itself_knows_does_not_control() -> None:
    """Fault: a special token that is also a piece of the model, as in T5, acts as a control token.
    One of a single character remains a piece."""
    vocabulary = ["<unk>", "</s>", *"</s>", "</", "s>", "a", "!"]
    scored = [(piece, 0.0 if piece == "</s>" else -1.0) for piece in vocabulary]
    model = tokenizers.Tokenizer(models.Unigram(scored, unk_id=0))
    model.add_special_tokens(["<unk>", "</s>", "!"])
    literal = LiteralTokenizer(model)
    model.encode_special_tokens = True
    assert model.encode("a</s>").ids == [8, 1]  # the control
    assert literal.encode("a</s>?!") == [8, 6, 7, 0, 9]
    assert literal.encode_rendered(literal.break_special_tokens("</s>") + "</s>") == [6, 7, 1]


def test_a_character_that_is_special_is_spelled(files: dict[str, Path]) -> None:
    """Fault: as text, the character was dropped if no other token spells it."""
    model = tokenizers.Tokenizer.from_file(str(files["byte_level"]))
    model.add_special_tokens(["!"])
    assert model.decode(LiteralTokenizer(model).encode("a! b"), False) == "a! b"


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece"])
def test_other_texts_are_the_same(files: dict[str, Path], name: str) -> None:
    tokenizer = Tokenizer(files[name], chat_template=LLAMA, special_tokens=SPECIAL_TEXTS)
    both = [tokenizer.encode_chat(TALK, special_tokens=how) for how in ("control", "text")]
    assert both[0] == both[1]
    for text in CORPUS:
        assert tokenizer.encode(text, special_tokens="text") == tokenizer.encode(text)


@pytest.mark.parametrize(
    ("template", "content"),
    [
        ("{% for c in messages[0].content %}{{ c }}{% endfor %}", ["a<", "/", "s>"]),
        ("{% for c in messages[0].content %}{{ c | trim }}{% endfor %}", ["a</ ", "\ns>"]),
        ("{{ messages[0].content }}s>", "a</"),
        ("a<{{ messages[0].content }}", "/s>"),
        ("{{ messages[0].content | tojson }}", {"</s>": 1}),
    ],
)
def test_what_a_template_puts_together(files: dict[str, Path], template: str, content: Any) -> None:
    """Fault: two harmless parts that the template joins to a special token act as one."""
    tokenizer = Tokenizer(files["byte_level"], chat_template=template)
    end = tokenizer.special_id("</s>")
    talk = [{"role": "tool", "content": content}]
    assert tokenizer.encode_chat(talk).count(end) == 1  # the control
    ids = tokenizer.encode_chat(talk, special_tokens="text")
    assert end not in ids and "</s>" in tokenizer.decode(ids)


def test_a_special_token_of_one_character(files: dict[str, Path]) -> None:
    """Fault: it cannot be split, and the attempt never ended."""
    model = tokenizers.Tokenizer.from_file(str(files["byte_level"]))
    model.add_special_tokens(["\N{BULLET}"])
    literal, bullet = LiteralTokenizer(model), model.token_to_id("\N{BULLET}")
    ids = literal.encode_rendered("\N{BULLET}" + literal.break_special_tokens("a \N{BULLET} b"))
    assert ids.count(bullet) == 1 and ids[0] == bullet
    assert model.decode(ids, skip_special_tokens=False).count("\N{BULLET}") == 2


def test_the_marks_cannot_be_written(files: dict[str, Path]) -> None:
    tokenizer = Tokenizer(files["byte_level"], chat_template=CHATML)
    with pytest.raises(OutriderError, match=r"noncharacter U\+FDD0"):
        tokenizer.encode("\ufdd0</s>\ufdd1", special_tokens="text")
    with pytest.raises(OutriderError, match=r"noncharacter U\+FDD2"):
        tokenizer.encode_chat([{"content": "<\ufdd2/s>"}], special_tokens="text")
