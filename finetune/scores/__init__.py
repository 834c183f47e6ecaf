"""What a pretrained encoder is worth: the command `evaluate-pretrained`, and its three parts as functions."""
