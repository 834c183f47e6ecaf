"""Checks of this machine or of a cluster: what it has, what a run would lack, and what to do about it."""
