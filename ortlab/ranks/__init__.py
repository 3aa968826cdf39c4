"""What processes that train together have measured: a ledger of each rank, and all of them side by side."""
