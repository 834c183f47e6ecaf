"""Several runs at once: seeds, grids and all of GLUE, through Ray Tune (cluster/workers/trials/launch.py)."""
