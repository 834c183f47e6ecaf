"""The recommendation for a budget: a scaling law, how fast a machine trains each size, and what that comes to."""
