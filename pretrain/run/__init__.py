"""A training run, from the command to the last step. Read the modules in this order:

`command` (the command line), `api` (the functions that it calls), `launch` (where the run trains), `preflight` (checks
and records at the start); then on each worker `session` (processes, device, precision), `train` (corpus, model, engine,
with `continuation` of a checkpoint), `run` (restore, track, finish; `warmup_step` tests the largest batch first) and
`loop` (steps, by `task`, `plan`, `forward_backward` and `progress`; it watches for `spikes` and `stragglers`).
"""
