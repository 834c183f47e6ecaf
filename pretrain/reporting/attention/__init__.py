"""Pictures of attention: the targets of each head of a model, on one page and over a training."""
