"""The self-test: what holds on this machine, in under ten minutes, as one JSON file and one readable report."""
