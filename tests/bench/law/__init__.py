"""`bench law`: the scaling law of the runs of `bench speedrun`."""
