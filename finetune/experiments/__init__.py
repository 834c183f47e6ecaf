"""Fine-tuning several models in one command: seeds, folds, grids, configs; on Ray Tune (cluster/workers/trials.py)."""
