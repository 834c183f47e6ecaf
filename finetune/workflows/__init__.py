"""Commands composed of others: each stage calls the function of a command that the user could run separately."""
