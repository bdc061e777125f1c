"""What every suite is made of, each concept once.

| module | concept |
|---|---|
| `clock` | timing on a machine that is not ours alone; the order of runs that are compared |
| `machine` | what the machine is, how fast it reads memory, how much of that a process holds |
| `prompts` | the texts that everything is measured on |
| `pair` | checkpoints of a wanted shape and acceptance, and bundles of them |
| `record`, `runs` | every round of a text; texts decoded in several ways, and what that gains |
| `costs` | draft steps, verifications and acceptance; what Theorem 3.8 makes of them; bytes |
| `fit` | quartiles, ratio estimates, exponents |
| `table`, `plot`, `command` | how figures are told: tables, plots, the last line of JSON |
| `kept` | what is made once, such as a bundle |
"""
