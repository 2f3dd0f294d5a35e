"""All around the engine: settings, files, tables, tasks, schedules, planning, queue, commands."""
