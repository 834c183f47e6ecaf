"""`bench speedrun`: what a config learns from a fixed text with a fixed number of FLOPs."""
