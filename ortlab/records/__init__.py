"""What was measured and found: runs, comparisons, messages. Pure data, read from and written to JSON."""
