"""Checks this machine or a cluster: what it has, what a run would lack, and what to do about it."""
