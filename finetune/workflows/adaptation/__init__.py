"""The command `adapt`: a checkpoint continued on one's own text, from raw files to a model and what it gained."""
