"""Commands made of others: each stage is a command that a user would type, run through the same command line."""
