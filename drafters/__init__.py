"""What a drafter is: every proposer, the frozen target it serves, its files on disk."""
