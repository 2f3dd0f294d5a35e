"""How a job becomes micro-batches: encoding, packing, known answers, the planner's tasks."""
