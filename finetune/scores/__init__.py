"""Evaluation of pretrained encoders: the command `evaluate-pretrained`, and its parts as functions."""
