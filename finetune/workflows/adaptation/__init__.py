"""The command `adapt`: continues a checkpoint on the user's text, from raw files to a model and its gains."""
