"""What a trace does with a model: what it bakes in, what it would lose, and what it must leave as it was."""
