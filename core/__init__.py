"""An Agents API for one machine: sessions of real agent CLIs in sandboxes whose only way out is one door.

`server` (routes) → `sessions` (life cycle) → `harnesses/*` (one file per CLI) → `sandbox/*` (starts processes), with
`egress` (the door to the model), `artifacts` and `store` below. It knows nothing of tasks or rewards.
"""
