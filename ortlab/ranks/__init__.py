"""Processes that train together: what each measured, as a record, and how a notebook starts and ends them."""
