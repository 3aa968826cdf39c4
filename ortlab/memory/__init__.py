"""What is kept for the backward pass, and which plans recompute it instead."""

from ortlab.memory.plan import MemoryPlan, PlanRow
from ortlab.memory.saved_plans import SavedPlan, SavedPlans, read_saved

__all__ = ["MemoryPlan", "PlanRow", "SavedPlan", "SavedPlans", "read_saved"]
