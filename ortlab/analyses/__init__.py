"""What can be read off a lab's build and its last step: graphs, plans, what is kept for backward, times, memory.

Each function takes the lab's bench, builds or runs beside it what is not there, and leaves it as it was.
"""
