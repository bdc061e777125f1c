"""One text, and what it took: python examples/generate.py build/demo "def read_lines(path):"."""

import sys

import outrider

folder, prompt = sys.argv[1:3]
with outrider.load(folder) as engine:
    result = engine.generate(prompt, max_new_tokens=48, temperature=0.8, seed=7)

print(prompt + result.text)
print(f"finished by {result.finish_reason} after {len(result.token_ids)} tokens")
print(f"{result.stats.mean_acceptance_length:.2f} tokens came from each look of the target")
