"""The data that a model trains on: how much of it is padding."""

from ortlab.data.density import Density, DensityRow

__all__ = ["Density", "DensityRow"]
