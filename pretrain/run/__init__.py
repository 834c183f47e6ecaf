"""A training run, from the command to the last step. Read the modules in this order:

`command` (the command line), `api` (the functions that it calls), `launch` (starts it, here or through Ray),
`preflight` (checks and records at the start); then on each worker `session` (process group, device, precision), `train`
(corpus, model, engine; `continuation` of a checkpoint), `run` (restore, track, finish; `warmup_step` tests the largest
batch) and `loop` (steps, with `task`, `plan`, `forward_backward`, `progress`; watches for `spikes`, `stragglers`).
"""
