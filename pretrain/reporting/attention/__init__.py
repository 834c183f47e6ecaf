"""Pictures of attention: what each head of a model attends to, on one page and over a training."""
