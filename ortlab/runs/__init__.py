"""Running steps: wrap a model, take a snapshot, record, measure, put back."""
