"""The story of a run. Read it in this order:

`command` what a user typed; `api` what it calls; `launch` where the run trains; `preflight` what is checked and
recorded before; then on each worker `session` (processes, device, precision), `train` (corpus, model, engine, with
`continuation` of a checkpoint), `run` (restore, track, finish; `warmup_step` tries the largest batch first) and `loop`
(steps, by `task`, `plan`, `forward_backward` and `progress`; `spikes` and `stragglers` are watched there).
"""
