"""A text as it comes, until there is enough: python examples/stream.py build/demo "import os"."""

import sys

import outrider

folder, prompt = sys.argv[1:3]
with outrider.load(folder) as engine:
    print(prompt, end="")
    with engine.stream(prompt, max_new_tokens=200) as stream:
        for event in stream:
            print(event.text, end="", flush=True)
            if stream.text.count("\n") >= 5:
                break  # the slot is free after the `with` block; `stream.close()` does the same
    print()
    try:
        engine.generate(prompt, gamma=99)
    except outrider.OutriderError as error:
        print(f"{error.kind}: {error.cause}\n{error.remedy}")
