"""Kinds of tasks: each turns labeled files into windows for the model, and logits into predictions and scores."""
