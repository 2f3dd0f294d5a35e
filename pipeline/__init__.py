"""How a job becomes micro-batches and travels: settings, reading, encoding, packing, the queue."""
