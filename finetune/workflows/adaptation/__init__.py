"""The command `adapt`: continues pretraining on the user's text, from raw files to a model and a comparison."""
