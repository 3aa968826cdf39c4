"""What is kept for the backward pass, and which plans recompute it instead."""

from ortlab.memory.plan import MemoryPlan, PlanRow

__all__ = ["MemoryPlan", "PlanRow"]
