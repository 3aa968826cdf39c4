"""What is kept for the backward pass, and which plans recompute it instead.

- `saved_activations`: what a forward keeps; `measured`: what a step needed; `device_snapshot`: the blocks of a GPU
- `plan`: the plans of a model, and a choice of them; `plan_reading`: made from what ORT reports
- `recompute`: where plans act, and what they cost; `trace`: a profiled step, and when each of its buffers lives
- `saved_plans`, `dialects`: files and logs since 2022, with their tables; `insight`: that of 1.19.2
- `formulas`: ORT's arithmetic over dimensions; `symbolic_sizes`: another batch
"""

from ortlab.memory.plan import MemoryPlan, PlanRow
from ortlab.memory.saved_plans import SavedPlan, SavedPlans, read_saved

__all__ = ["MemoryPlan", "PlanRow", "SavedPlan", "SavedPlans", "read_saved"]
