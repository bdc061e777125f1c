"""The toy model of TensorRT's stand-in (tests/standins/native) in Python, bundles that hold it, and
the compilation of the stand-ins and engine that opening one needs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
from commands import TENSORRT
from fakes import Context, FakeEngine, IdleFake, Model, character_tokenizer, make_manifest
from native_session import MAX_GAMMA

from plugins.tools import build_tensorrt
from plugins.tools.build import FLAGS, WARNINGS, find_compiler
from runtime.backends.engine import Logits
from runtime.decoder import Decoder
from runtime.files.graphs import file_facts
from runtime.files.library import find_library
from runtime.files.manifest import CHUNK, EngineFacts, Manifest, Profile
from runtime.files.records import write_json
from runtime.round import HostRounds
from runtime.sampling.native import RoundSampler
from runtime.text.engine import TextEngine
from runtime.text.tokenizer import Tokenizer

STANDINS = Path(__file__).parents[1] / "standins" / "native"
WORD = 2**64 - 1
LAYERS, HEADS, WIDTH = 2, 2, 64  # make a slot's rows a multiple of 256 bytes
SEED, NOISE = 11, 96  # noise: on the draft's logits, relative to the target's, in 1/256


def _mix(x: int) -> int:
    """splitmix64's finaliser."""
    x = (x + 0x9E3779B97F4A7C15) & WORD
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & WORD
    return x ^ (x >> 31)


def toy(vocab_size: int, noise: int = 0) -> Model:
    """nvinfer.cpp's model: logits that depend on all tokens before and are exact in float32."""

    def part(hash_: int) -> Logits:
        bits = [_mix((hash_ + v) & WORD) >> 40 for v in range(vocab_size)]
        return (np.array(bits, np.float32) - np.float32(2**23)) * np.float32(2.0**-21)

    @cache
    def model(context: Context) -> Logits:
        state = SEED
        for token in context:
            state = _mix(state ^ token)
        return part(state) + np.float32(noise / 256) * part(_mix(state))

    return model


def make_bundle(
    folder: Path, *, slots: int, max_len: int = 160, vocab_size: int = 32, draft: bool = True,
    target: str = "sm90", **odd: object,
) -> Manifest:  # fmt: skip
    """odd: extra fields of the target's plan, with which nvinfer.cpp misbehaves."""
    manifest = make_manifest(
        draft=draft, slots=slots, vocab_size=vocab_size, max_len=max_len, max_gamma=MAX_GAMMA
    )
    shapes, chunk = [[HEADS, WIDTH]] * LAYERS, min(CHUNK, manifest.pair.capacity)
    profiles = [
        Profile("decode", [1, slots, slots], [1, 2, MAX_GAMMA + 1], [1, 2, MAX_GAMMA + 1], None),
        Profile("prefill", [1, 1, slots], [1, chunk, chunk], [1, 1, 1], 3000),
    ]
    for role, noise, more in (("target", 0, odd), ("draft", NOISE, {})):
        plan = {
            "seed": SEED, "noise": noise, "vocab": vocab_size, "layers": LAYERS, "heads": HEADS,
            "width": WIDTH, "capacity": manifest.pair.capacity,
            "profiles": " ".join(
                f"{sizes[0]}-{sizes[-1]}"
                for profile in profiles
                for sizes in (profile.slots, profile.tokens, profile.outputs)
            ),
            **more,
        }  # fmt: skip
        (folder / role).mkdir(parents=True)
        text = "".join(f"{name} {value}\n" for name, value in plan.items())
        (folder / role / "engine.plan").write_text(text)
    (folder / "tokenizer").mkdir()
    character_tokenizer().save(str(folder / "tokenizer" / "tokenizer.json"))
    tokenizer = {"tokenizer.json": file_facts(folder / "tokenizer" / "tokenizer.json")}
    models = {
        role: replace(facts, dtype="float16", key_shapes=shapes, value_shapes=shapes)
        for role, facts in manifest.pair.models()
    }
    pair = replace(
        manifest.pair, **models, tokenizer=replace(manifest.pair.tokenizer, files=tokenizer)
    )
    names = ["tokenizer/tokenizer.json", *(f"{role}/engine.plan" for role in models)]
    manifest = replace(
        manifest, backend="tensorrt", pair=pair,
        files={name: file_facts(folder / name) for name in names},
        engines={role: EngineFacts(role, "engine.plan", [target], profiles) for role in models},
    )  # fmt: skip
    write_json(folder / "manifest.json", "manifest", manifest)
    return manifest


def python_engine(folder: Path, manifest: Manifest, slots: int) -> TextEngine:
    """The same model under Python's rounds."""
    pair = manifest.pair

    def engine(noise: int, buffers: int) -> FakeEngine:
        return IdleFake(
            toy(pair.vocab_size, noise), vocab_size=pair.vocab_size, slots=slots, order=None,
            capacity=pair.capacity, chunk=min(CHUNK, pair.capacity), buffers=buffers,
        )  # fmt: skip

    draft = engine(NOISE, MAX_GAMMA) if pair.draft else None
    sampler, inner = (RoundSampler(pair.vocab_size, MAX_GAMMA, slots) for _ in range(2))
    decoder = Decoder(
        HostRounds(engine(0, 1), draft, sampler, inner if draft else None),
        vocab_size=pair.vocab_size, max_len=pair.max_len, max_gamma=MAX_GAMMA,
        draft_max_len=pair.draft.max_len if pair.draft else None,
    )  # fmt: skip
    tokenizer = Tokenizer(
        folder / "tokenizer" / "tokenizer.json", chat_template=None,
        special_tokens=pair.tokenizer.special_tokens,
    )  # fmt: skip
    return TextEngine(manifest, tokenizer, decoder, {})


# Compilation


def _stubs(headers: Path) -> str:
    """C++ classes in which every function of apiv's interfaces aborts, for any TensorRT version."""
    text = re.sub(r"//.*", "", (headers / "NvInferImpl.h").read_text())
    classes = []
    for name in ("Runtime", "CudaEngine", "ExecutionContext"):
        found = re.search(rf"class V{name} : public VRoot\n\{{(.*?)\n\}};", text, re.DOTALL)
        assert found is not None, name
        body = re.sub(r"(TRT_\w+|virtual) ", "", found[1])
        body = body.replace(" = 0;", ' override { missing("a stub"); }')
        classes.append(f"class Stub{name} : public apiv::V{name} {{{body}\n}};\n")
    return (
        "#pragma GCC system_header\n#include <cstdio>\n#include <cstdlib>\n"
        "namespace {\n[[noreturn]] inline void missing(const char* what) {\n"
        '  std::fprintf(stderr, "TensorRT stand-in: %s is missing\\n", what);\n'
        "  std::abort();\n}\n}\nnamespace nvinfer1 {\n" + "".join(classes) + "}\n"
    )


def compile_standins(folder: Path) -> Mapping[str, str]:
    """Compile the stand-ins for the driver and TensorRT into `folder`, and the engine beside a copy
    of liboutrider. Returns the environment in which a process finds them; STANDINS is the
    folder."""
    headers, cuda = build_tensorrt.tensorrt_headers(TENSORRT), build_tensorrt.cuda_headers()
    (folder / "stubs.h").write_text(_stubs(headers))
    version = (headers / "NvInferVersion.h").read_text()
    major = re.search(r"define TRT_MAJOR_ENTERPRISE (\d+)", version)
    assert major is not None
    driver = folder / "libcuda.so.1"
    for source, made, more in (
        ("cuda", driver, []), ("nvinfer", folder / f"libnvinfer.so.{major[1]}", [driver])
    ):  # fmt: skip
        command = [
            *find_compiler(), *FLAGS, "-O1", *WARNINGS, "-Werror", "-shared", f"-I{folder}",
            f"-isystem{headers}", f"-isystem{cuda}", f"-Wl,-soname,{made.name}",
            STANDINS / f"{source}.cpp", *more, "-o", made,
        ]  # fmt: skip
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
        assert done.returncode == 0 and not done.stderr, done.stderr
    build_tensorrt.build_engine(TENSORRT, folder)
    library = find_library()
    assert library is not None
    shutil.copy(library, folder)
    return {**os.environ, "LD_LIBRARY_PATH": str(folder), "STANDINS": str(folder)}
