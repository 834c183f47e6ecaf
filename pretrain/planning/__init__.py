"""The cost of a run, by arithmetic or measured here, and the run that fits a budget."""
