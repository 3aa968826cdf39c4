"""The batch hunter: samples per second over batch size and recompute plans, under a limit of memory."""
