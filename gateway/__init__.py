"""The inference gateway: a URL per rollout, spoken in three dialects, answered by a policy.

`python3 -m gateway serve` starts it, before an inference server, whose calls it records as the server saw them, or with
the scripted policies `oracle` and `nop`, which smoke-test harnesses, sandboxes and tasks with everything real but the
model. `export` and `explain` read what was recorded. The gateway knows nothing of sandboxes, sessions or grading.

A recorded call: server (routes) → recording → attempts (whose it is) → dialects, conversion, prompt (what the engine
gets) → calls (its life) → engine (and streaming, in live mode) → store → delivery. Beside them: probe (with agreement
and hangup), weights, control, labels.
"""
