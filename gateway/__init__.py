"""The inference gateway: a URL per rollout, spoken in three dialects, answered by a policy.

`python3 -m gateway serve` starts it. So far the policies are the scripted ones, `oracle` and `nop`:
they smoke-test harnesses, sandboxes and tasks with everything real but the model. The gateway
knows nothing of sandboxes, sessions or grading.
"""
