"""Several runs at once: seeds, grids and several configs, through Ray Tune (cluster/workers/trials.py)."""
