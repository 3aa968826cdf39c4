"""`Lab`: one model under experiment, and what can be asked of it."""
