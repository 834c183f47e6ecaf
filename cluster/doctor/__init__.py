"""What this machine or cluster has, what a run would lack, and what to do about it."""
