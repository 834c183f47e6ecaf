"""Pictures of attention: what each head of a model attends to, on one page and over the steps of a run."""
