"""Processes that train together, started from a notebook: ipyparallel engines in one `torch.distributed` group."""

from ortlab.cluster.cluster import Cluster, latest

__all__ = ["Cluster", "latest"]
