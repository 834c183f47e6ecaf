"""The cost of a run, estimated or measured on this machine, and the schedule that fits a time budget."""
