"""The kinds of task: each turns labelled files into windows for the model, and logits into predictions and scores."""
