"""The session as a C or C++ program uses it: headers that compile anywhere, an example that runs,
bundles refused with a two-line error, and no fault under sanitizers."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import threading
from collections.abc import Sequence
from ctypes import byref
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
from commands import CHECKOUT
from native_session import I64, U64, Config, Failure, NativeSession, P, c_options, library, refused
from samplers import instructions

from bench.core.machine import resident_memory
from plugins.tools.build import PLUGINS_FOLDER, BuildError, build_fuzz, find_compiler
from runtime import load
from runtime.cmake import folder, onnxruntime
from runtime.files.errors import OutriderError
from runtime.files.generation import TextRules
from runtime.files.graphs import EncoderFacts, StateFacts
from runtime.files.library import find_library
from runtime.files.manifest import Manifest, read_bundle
from runtime.files.records import write_json
from runtime.sampling.kernel import ABI_VERSION

WARNINGS = ["-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Werror"]
# ONNX Runtime is not instrumented, which looks like a race to a sanitizer.
SUPPRESSED = "race:libonnxruntime.so\ndeadlock:libonnxruntime.so\n"
SANITIZERS = {"address,undefined": [], "thread": ["-DOUTRIDER_LOGITS_PER_THREAD=1"]}


def copied(bundle: Path, place: Path) -> Path:
    return Path(shutil.copytree(bundle, place))


def with_broken(role: str, bundle: Path, place: Path) -> Path:
    """A copy of the bundle whose model of this role returns NaN."""
    weights = copied(bundle, place) / role / "weights.bin"
    weights.write_bytes(b"\xff" * weights.stat().st_size)
    return place


def run(program: Path, *words: object, **options: object) -> subprocess.CompletedProcess[str]:
    command = [str(program), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, **options)


def test_headers_are_c(tmp_path: Path) -> None:
    source = tmp_path / "c.c"
    source.write_text(
        '#include "outrider_session.h"\n'
        "int main(void) { outrider_options o; outrider_default_options(&o); return o.gamma; }\n"
    )
    compiler = [*find_compiler(), "-x", "c", "-std=c99", "-fsyntax-only", *WARNINGS]
    subprocess.run([*compiler, f"-I{PLUGINS_FOLDER / 'include'}", source], check=True)


def compiled(compiler: Sequence[str], source: Path, place: Path) -> Path:
    """Compile a program that links the session's library."""
    found, program = find_library(), place / source.stem
    assert found is not None
    subprocess.run(
        [*compiler, "-std=c++17", *WARNINGS, f"-I{PLUGINS_FOLDER / 'include'}", source, found,
         f"-Wl,-rpath,{found.parent}", "-o", program],
        check=True,
    )  # fmt: skip
    return program


@pytest.mark.parametrize("compiler", ["g++", "clang++"])
def test_the_example(
    compiler: str, llama_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not installed")
    program = compiled([compiler], CHECKOUT / "examples" / "embed.cpp", tmp_path)
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("ORT_DISABLE_TELEMETRY", raising=False)
    done = run(program, llama_bundle, onnxruntime(), 5, 6, 7)
    assert done.returncode == 0, done.stderr
    assert not [*home.iterdir()], "ONNX Runtime's telemetry"
    with load(llama_bundle, verify=False) as engine:
        options = {"max_new_tokens": 48, "temperature": 0.8, "seed": 3, "verify": "coupled"}
        expected = engine.generate([5, 6, 7], **options).token_ids
    assert [int(word) for word in done.stdout.splitlines()[0].split()] == expected
    for words, status in (((tmp_path, onnxruntime(), 5), 7), ((llama_bundle, "x", 5), 8),
                          ((llama_bundle, onnxruntime(), 10**9), 9)):  # fmt: skip
        done = run(program, *words)
        assert done.returncode == status and done.stderr.startswith("error: "), done
        assert done.stderr.count("\n") == 1


def test_streams(llama_bundle: Path, tmp_path: Path) -> None:
    """The error that ends a sequence, or the exception that a callback throws, is raised after the
    last token. A stream keeps its session alive, and releases its slot when closed."""
    bundle = with_broken("draft", llama_bundle, tmp_path / "bundle")
    program = compiled(find_compiler(), Path(__file__).with_name("streams.cpp"), tmp_path)
    done = run(program, bundle, onnxruntime())
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "broken: 1 tokens, failure 10", "broken, again: 0 tokens, finish 6",
        "the stream was closed or moved from. Take another one with Session::stream.",
        "2 slots, 0 moved away", "other: 4 tokens, finish 3",
        "throwing: 3 tokens, its own", "throwing, again: 0 tokens, finish 2",
        "moved: 0 tokens, finish 2",
    ]  # fmt: skip


def test_memory_that_is_lacking_changes_no_text(llama_bundle: Path, tmp_path: Path) -> None:
    """Each of the library's own allocations fails once, in every call of requests of all kinds."""
    program = compiled(find_compiler(), Path(__file__).with_name("memory.cpp"), tmp_path)
    broken = with_broken("target", llama_bundle, tmp_path / "bundle")
    done = run(program, llama_bundle, onnxruntime(), broken)
    assert done.returncode == 0, done.stdout + done.stderr
    failures = [int(line.split()[0]) for line in done.stdout.splitlines()]
    assert len(failures) == 4 and min(failures) > 50, done.stdout


def test_cmake_takes_the_folder_that_it_is_told(tmp_path: Path) -> None:
    """A folder that is given takes effect even if the build folder was configured with another."""
    if shutil.which("cmake") is None:
        pytest.skip("cmake is not installed")
    found, other = find_library(), tmp_path / "site-packages" / "outrider"
    assert found is not None

    def write(version: int | str) -> None:
        (tmp_path / "CMakeLists.txt").write_text(
            "cmake_minimum_required(VERSION 3.16)\n"
            "project(none NONE)\n"
            f"find_package(outrider {version} REQUIRED)\n"
            "get_target_property(place outrider::outrider IMPORTED_LOCATION)\n"
            "message(STATUS ${place})\n"
        )

    write("")
    shutil.copytree(folder(), other / "cmake")

    def configured(place: Path) -> subprocess.CompletedProcess[str]:
        words = ("-S", tmp_path, "-B", tmp_path / "build", f"-Doutrider_DIR={place}")
        return run(Path("cmake"), *words)

    assert found.name in configured(folder()).stdout
    assert "liboutrider.so is missing" in configured(other / "cmake").stderr
    shutil.copy(found, other)
    shutil.copytree(PLUGINS_FOLDER / "include", other / "include")
    write(ABI_VERSION)
    assert f"-- {other / found.name}\n" in configured(other / "cmake").stdout
    write(ABI_VERSION + 1)
    assert f"version: {ABI_VERSION}" in configured(other / "cmake").stderr
    words = ("-S", CHECKOUT / "examples", "-B", tmp_path / "embed", f"-Doutrider_DIR={folder()}")
    examples = run(Path("cmake"), *words)  # Fault: they asked for an outdated version
    assert examples.returncode == 0, examples.stderr


def test_hashes_without_the_processors_instructions_for_them(llama_bundle: Path) -> None:
    """The plain loops have no other test, since the processors that run the tests all have
    instructions for the hashes."""
    with instructions("plain") as there:
        assert there
        NativeSession(llama_bundle).close()


def test_damaged_bundles(llama_bundle: Path, tmp_path: Path) -> None:
    bundle = copied(llama_bundle, tmp_path / "bundle")
    manifest = (bundle / "manifest.json").read_text()

    for text, words in (
        ("", "truncated"), (manifest[:-20], "truncated"), ("[" * 100_000, "nested"),
        (manifest.replace('"slots": 1', '"slots": 2'), "checksum"), ("{}", "not a manifest"),
        (manifest.replace('"schema": ', '"schema": 9'), "schema"),
    ):  # fmt: skip
        (bundle / "manifest.json").write_text(text)
        refused(bundle, "bundle", words)
    # The checksum agrees with Python's for any characters in a name.
    odd = replace(read_bundle(llama_bundle, verify=False), name='"\\/\x01\x7f é \U0001f600 \ud800')
    write_json(bundle / "manifest.json", "manifest", odd)
    NativeSession(bundle).close()
    pair, target = odd.pair, odd.pair.target

    def of_pair(**facts: object) -> Manifest:
        return replace(odd, pair=replace(pair, **facts))

    def of_target(**facts: object) -> Manifest:
        return of_pair(target=replace(target, **facts))

    encoder_decoder = replace(target, encoder=EncoderFacts([[1, 1]], [[1, 1]]))
    too_few = StateFacts([[1, 4]], pair.max_gamma + 3, 3)  # one row fewer than a round needs
    unlisted = {name: file for name, file in odd.files.items() if name != "target/weights.bin"}
    for edited, kind, words in (
        (replace(odd, backend="aotinductor"), "backend", "aotinductor"),
        (replace(odd, slots=0), "bundle", "slots: 0 is not from 1 to"),
        (replace(odd, files=unlisted), "bundle", "contradicts itself about its files"),
        (of_pair(rules=TextRules(5, no_repeat_ngram_size=3)), "backend",
         "generation config asks for min_length, no_repeat_ngram_size"),
        (of_pair(max_len=pair.capacity - 1), "bundle", "about its sizes"),
        (of_pair(capacity=pair.capacity + 1), "bundle", "about its sizes"),
        (of_pair(vocab_size=target.vocab_size + 1), "bundle", "about its vocabulary"),
        (of_target(vocab_size=(1 << 30) + 1), "bundle", "vocab_size: 1073741825 is not from 1 to"),
        (of_pair(rules=TextRules(5), target=encoder_decoder), "backend", "encoder-decoder"),
        (of_target(key_shapes=[], value_shapes=[]), "bundle", "about its caches"),
        (of_target(value_shapes=target.value_shapes[1:]), "bundle", "about its caches"),
        (of_target(states=too_few), "bundle", "about its states"),
        (of_pair(draft=replace(pair.draft, key_shapes=[])), "bundle", "about its caches"),
    ):  # fmt: skip
        write_json(bundle / "manifest.json", "manifest", edited)
        refused(bundle, kind, words)
    (bundle / "manifest.json").write_text(manifest)
    for name in ("tokenizer/tokenizer.json", "target/weights.bin"):
        content = (bundle / name).read_bytes()
        (bundle / name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        refused(bundle, "bundle", "hash differs")
        (bundle / name).write_bytes(content[:-1])
        refused(bundle, "bundle", "truncated or replaced", unverified=1)
        (bundle / name).unlink()
        refused(bundle, "bundle", "is missing")
        (bundle / name).write_bytes(content)
    NativeSession(bundle).close()
    # A failure is a line of UTF-8.
    refused(tmp_path / "a\nb\x7f\x85", "bundle", re.escape("a b?? cannot be read"))
    for name in (b"\xff\xc3\xa9\xc3", b"\xc0\xa9\xc3\xa9\xed\xa0\x80\xc3\xa9\xf4\x90\x80\x80"):
        refused(tmp_path / os.fsdecode(name), "bundle", r"\?é\?+")


REPLACING_LIBRARY = """
#include <dlfcn.h>
#include <stdio.h>
__attribute__((constructor)) static void replace() { rename(NEW, MANIFEST); }
#ifdef REAL
extern "C" const void* OrtGetApiBase() {
  return ((const void* (*)())dlsym(dlopen(REAL, RTLD_NOW), "OrtGetApiBase"))();
}
#endif
"""


@pytest.mark.parametrize("opened", [False, True])
@pytest.mark.parametrize("replaced", [False, True])
def test_a_bundle_that_is_replaced_while_it_is_opened(
    llama_bundle: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    replaced: bool,
    opened: bool,
) -> None:
    """The library that a session loads replaces the manifest, as another process's build does."""
    bundle = copied(llama_bundle, tmp_path / "bundle")
    manifest, new = bundle / "manifest.json", tmp_path / "new.json"
    if replaced:
        shutil.copyfile(manifest, new)
    paths = {"NEW": new, "MANIFEST": manifest} | ({"REAL": onnxruntime()} if opened else {})
    source, replacing = tmp_path / "replacing.cpp", tmp_path / "replacing.so"
    source.write_text(REPLACING_LIBRARY)
    defined = [f'-D{name}="{path}"' for name, path in paths.items()]
    compiler = [*find_compiler(), "-shared", "-fPIC"]
    subprocess.run([*compiler, *defined, source, "-o", replacing, "-ldl"], check=True)
    monkeypatch.setattr("native_session.onnxruntime", lambda: replacing)
    if opened and not replaced:
        NativeSession(bundle).close()
    elif replaced:
        refused(bundle, "bundle", "was replaced while it was being opened")
    else:
        refused(bundle, "backend", "is not ONNX Runtime")


def test_an_empty_path_is_none(llama_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = str(llama_bundle).encode()
    config, session = Config(abi_version=ABI_VERSION, folder=folder, onnxruntime=b""), P()
    for path, status in ((str(onnxruntime()), 0), ("/nowhere", 8)):
        monkeypatch.setenv("OUTRIDER_ONNXRUNTIME", path)
        assert library().outrider_open(byref(config), byref(session), None) == status
        library().outrider_close(session)


def test_a_length_that_no_sum_can_hold(llama_bundle: Path) -> None:
    """Fault: the remedy named a negative MAX_LEN."""
    options, failure, number = c_options(max_new_tokens=100)[0], Failure(), U64()
    with NativeSession(llama_bundle) as session:
        status = library().outrider_admit(
            session._session, (I64 * 1)(5), I64(2**63 - 1), byref(options), byref(number),
            byref(failure),
        )  # fmt: skip
    assert status == 9 and b"MAX_LEN=9223372036854775907," in failure.remedy


@pytest.mark.parametrize("how", ["admit", "begin"])
def test_broken_logits(llama_bundle: Path, tmp_path: Path, how: str) -> None:
    bundle = with_broken("target", llama_bundle, tmp_path / "bundle")
    with NativeSession(bundle, unverified=1) as session:
        for _ in range(2):  # the slot is free again
            with pytest.raises(OutriderError, match=r"^numeric: .*target, slot 0, position 3: NaN"):
                session.generate([5, 6, 7], how=how)


def test_slots_are_finite(llama_bundle: Path) -> None:
    with NativeSession(llama_bundle, slots=2) as session:
        requests = [session.admit([5, 6], max_new_tokens=9) for _ in range(2)]
        with pytest.raises(OutriderError, match=r"^busy: .*all 2 slots are in use"):
            session.admit([5, 6])
        session.release(requests[0])
        assert session.generate([5, 6], max_new_tokens=3, ignore_eos=True)
        with pytest.raises(OutriderError, match="there is no request"):
            session.take(requests[0])


def test_any_thread_cancels(llama_bundle: Path) -> None:
    with NativeSession(llama_bundle, slots=2) as session:
        first, second = (
            session.admit([5, token], max_new_tokens=100, ignore_eos=True) for token in (6, 7)
        )
        session.round()
        canceller = threading.Thread(target=session.cancel, args=(first,))
        canceller.start()
        canceller.join()
        session.round()
        ended = {number: session.take(number)[1] for number in (first, second)}
        assert ended == {first: "cancelled", second: None}


def test_a_number_that_was_not_given_out_cancels_nothing(llama_bundle: Path) -> None:
    """Fault: the number was kept, and cancelled the request that got it later."""
    with NativeSession(llama_bundle) as session:
        for number in range(100):
            session.cancel(number)
        request = session.admit([5, 6], max_new_tokens=100, ignore_eos=True)
        session.round()
        assert request < 100 and session.take(request)[1] is None
        session.cancel(request)
        session.round()
        assert session.take(request)[1] == "cancelled"


def test_a_callback_ends_a_text(llama_bundle: Path) -> None:
    seen: list[int] = []

    def stop(_: object, token: int) -> int:
        seen.append(token)
        return len(seen) == 5

    with NativeSession(llama_bundle) as session:
        request = session.admit([5, 6], stop=stop, max_new_tokens=50, ignore_eos=True)
        assert [token.id for token in session.tokens(request)] == seen and len(seen) == 5


def fuzz(
    sanitizer: str, bundle: Path, folder: Path, count: int
) -> subprocess.CompletedProcess[str]:
    (folder / "manifests").mkdir()
    for name in ("target", "draft", "tokenizer"):
        (folder / "manifests" / name).symlink_to(bundle / name)
    (folder / "suppressed").write_text(SUPPRESSED)
    flags = [f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all", "-O1", "-g"]
    try:
        program = build_fuzz(
            CHECKOUT / "build" / "lib", extra=[*flags, *SANITIZERS[sanitizer]], session=True
        )
    except BuildError as error:
        pytest.skip(f"no sanitizer here: {error}")
    options = {"TSAN_OPTIONS": f"suppressions={folder / 'suppressed'}"}
    return run(program, bundle, onnxruntime(), folder / "manifests", count, env=options)


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_hostile_use_under_sanitizers(sanitizer: str, llama_bundle: Path, tmp_path: Path) -> None:
    done = fuzz(sanitizer, llama_bundle, tmp_path, 300)
    assert done.returncode == 0, done.stderr[-3000:]
    tokens, refused, cancelled, opened, tried = map(int, re.findall(r"\d+", done.stdout))
    assert tokens > 500 and 20 < refused < 200 and cancelled > 50 and 5 < opened < tried / 2


@pytest.mark.slow
def test_ten_thousand_requests_need_no_more_memory(llama_bundle: Path) -> None:
    def generate(session: NativeSession, numbers: Sequence[int]) -> None:
        for number in numbers:
            session.generate(
                [5, number % 200, number % 7], max_new_tokens=4, temperature=1.0, seed=number,
                draft=("model", "ngram", "chain")[number % 3], logprobs=number % 2,
            )  # fmt: skip

    with NativeSession(llama_bundle, threads=1, slots=2) as session:
        generate(session, range(1000))
        before = resident_memory()[0]
        generate(session, range(10_000))
        assert resident_memory()[0] - before < 1 << 20


@pytest.mark.slow
def test_all_kinds_of_company_need_no_more_memory(llama_bundle: Path) -> None:
    """Fault: a call was cached for every combination of first slot, last slot and width."""
    slots = 32

    def generate(session: NativeSession, gamma: int) -> None:
        for ends in combinations(range(slots), 2):
            made = [
                session.admit(
                    [5, 6], max_new_tokens=40 if slot in ends else 1, gamma=gamma, draft="chain",
                    ignore_eos=True,
                )
                for slot in range(slots)
            ]  # fmt: skip
            for _ in range(4):
                session.round()
            for number in made:
                session.release(number)

    with NativeSession(llama_bundle, threads=1, slots=slots, no_reuse=1) as session:
        generate(session, 8)
        generate(session, 7)  # from here on, as many calls as may be kept
        before = resident_memory()[0]
        generate(session, 6)
        generate(session, 5)
        assert resident_memory()[0] - before < 1 << 21


def test_what_cannot_be_opened(llama_bundle: Path) -> None:
    """Refused before anything is loaded: a program compiled for another version, invalid numbers of
    slots and threads, and corpus ids that do not exist."""
    for config, kind, words in (
        ({"abi_version": 1}, "option", "compiled for version 1"),
        ({"slots": -1}, "option", "slots=-1"), ({"slots": 10**6}, "option", "slots=1000000"),
        ({"threads": 10**6}, "option", "threads="),
        ({"corpus": [1, 10**6]}, "option", "the corpus has the token id 1000000"),
    ):  # fmt: skip
        refused(llama_bundle, kind, words, **config)
