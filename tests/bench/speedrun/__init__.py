"""`bench speedrun`: quality of a config after training on fixed text with a fixed number of FLOPs."""
