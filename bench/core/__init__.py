"""Building blocks shared by all suites.

| module | contents |
|---|---|
| `clock` | timing on a shared machine; the order of compared runs |
| `machine` | description of the machine, its memory bandwidth, the memory of a process |
| `prompts` | the prompts of all benchmarks |
| `pair` | checkpoints with a given shape and acceptance rate, and bundles of them |
| `record`, `runs` | the rounds of a text; texts decoded in several ways, and their speedups |
| `costs` | costs of draft steps and verifications; predictions of Theorem 3.8; bytes read |
| `fit` | quartiles, ratio estimates, exponents |
| `table`, `command` | output: tables, the command line and its line of JSON |
| `cache` | cache of things that are built once, such as bundles |
"""
