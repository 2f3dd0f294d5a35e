"""From a job to messages with micro-batches: settings, files, planning, the queue, commands."""
