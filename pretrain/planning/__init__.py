"""What a run costs, by arithmetic or timed here, and which run to choose for a budget."""
